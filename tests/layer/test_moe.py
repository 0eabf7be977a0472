"""Experts, Router and MoE: against plain PyTorch, and against a module of Transformers whose state dict MoE takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from derivatives import check_no_second_derivative
from experts_problem import exact
from helpers import assert_same, saved_tensors, sqnr_db
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Experts, MoE, Recipe, Router, _torch, experts, reference
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.matmul.float32 import float32_mm
from moe_fp8_ext.quantization.cost import MANY_ROWS

E, D, F, TOP_K = 8, 64, 48, 3


def router(device: str = "cpu", experts: int = E, top_k: int = TOP_K, **options: object) -> Router:
    torch.manual_seed(0)
    made = Router(experts, D, top_k, **options).to(device)
    with torch.no_grad():
        made.weight.normal_()
        if made.e_score_correction_bias is not None:
            made.e_score_correction_bias.normal_(std=0.3)
    return made


def tokens(device: str = "cpu", t: int = 50) -> Tensor:
    return torch.randn(t, D, generator=torch.Generator().manual_seed(1)).to(device)


def plain_choice(choice: Tensor, groups: int, top_groups: int, top_k: int) -> list[list[int]]:
    """Chooses experts with Python lists, token by token."""
    chosen = []
    for row in choice.tolist():
        size = len(row) // groups
        best = sorted(range(groups), key=lambda g: -sum(sorted(row[g * size : (g + 1) * size])[-2:]))[:top_groups]
        allowed = [e for e in range(len(row)) if e // size in best]
        chosen.append(sorted(allowed, key=lambda e: -row[e])[:top_k])
    return chosen


def plain_scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "sqrtsoftplus":
        return softplus(logits).sqrt()
    return logits.softmax(1) if scoring == "softmax" else logits.sigmoid()


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3), (2, 2)])
@pytest.mark.parametrize("bias_rate", [0.0, 0.01])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_choice_and_scores(scoring, normalize, bias_rate, groups, device):
    num_groups, top_groups = groups
    options = dict(scoring=scoring, normalize=normalize, bias_rate=bias_rate, scaling_factor=2.5)
    made, x = router(device, num_groups=num_groups, top_groups=top_groups, **options), tokens(device)
    ids, scores, loss = made(x)
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32 and loss.item() == 0
    logits = x.double() @ made.weight.double().t()
    want = logits.exp() / logits.exp().sum(1, keepdim=True) if scoring == "softmax" else 1 / (1 + (-logits).exp())
    choice = want if bias_rate == 0 else want + made.e_score_correction_bias.double()
    assert ids.tolist() == plain_choice(choice, num_groups, top_groups, TOP_K)
    of_chosen = torch.stack([want[t][chosen] for t, chosen in enumerate(ids)])
    if normalize:
        of_chosen = of_chosen / of_chosen.sum(1, keepdim=True)
    # Logits are below 40, where float32 steps by 2^-18 = 4e-6. That is the relative error of exponentials and their
    # sums.
    torch.testing.assert_close(scores.double(), 2.5 * of_chosen, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_losses_and_their_gradients(scoring, device):
    made, x = router(device, scoring=scoring, balance_loss=0.3, z_loss=0.01), tokens(device).requires_grad_()
    ids, scores, loss = made(x)
    grads = torch.autograd.grad(loss + scores.square().sum(), (x, made.weight))
    wide, weight = x.detach().double().requires_grad_(), made.weight.detach().double().requires_grad_()
    logits = wide @ weight.t()
    of_experts = plain_scores(logits, scoring)
    share = one_hot(ids, E).double().mean((0, 1))
    probability = (of_experts / of_experts.sum(1, keepdim=True)).mean(0)
    want = 0.3 * E * (share * probability).sum() + 0.01 * logits.logsumexp(1).square().mean()
    # As above: each term is a mean of exponentials or of squared logarithms of their sums. None of them cancels.
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    chosen = of_experts.gather(1, ids)
    of_scores = (chosen / chosen.sum(1, keepdim=True)).square().sum()
    # Terms are within 1e-5 each, as above. Their sums cancel to a tenth, or to less than 0.1.
    for got, exact_grad in zip(grads, torch.autograd.grad(want + of_scores, (wide, weight)), strict=True):
        torch.testing.assert_close(got.double(), exact_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_losses_whatever_the_default_dtype_is(default, device):
    made, x = router(device, balance_loss=0.3, z_loss=0.01), tokens(device)
    want = made(x).loss.detach()
    torch.set_default_dtype(default)
    try:
        assert_same(made(x).loss.detach(), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_balanced_router_has_balance_loss_one(device):
    made = router(device, balance_loss=1.0)
    nn.init.zeros_(made.weight)
    assert made(tokens(device)).loss.item() == pytest.approx(1)


def test_bias_moves_towards_balance(device):
    made, x = router(device, bias_rate=0.25), tokens(device)
    before = made.e_score_correction_bias.clone()
    counts = sum(one_hot(made(x + i).topk_ids, E).sum((0, 1)) for i in range(2))
    made.eval()
    made(x)
    assert_same(made.tokens_per_expert, counts)
    made.update_bias()
    mean = 2 * len(x) * TOP_K / E
    want = before + 0.25 * torch.tensor([(mean > n) - (mean < n) for n in counts.tolist()], device=device)
    assert_same(made.e_score_correction_bias, want)
    assert not made.tokens_per_expert.any()
    assert "tokens_per_expert" not in made.state_dict() and "e_score_correction_bias" in made.state_dict()


def test_bias_balances():
    """All tokens prefer the same experts. Updates of the bias move them until experts have about equal shares."""
    made = router(bias_rate=0.005, scoring="sigmoid")
    x = (tokens(t=400) + 0.3 * made.weight[:2].sum(0).detach()) / D**0.5
    nn.init.zeros_(made.e_score_correction_bias)

    def most() -> float:
        return one_hot(made(x).topk_ids, E).sum((0, 1)).max().item() / (len(x) * TOP_K / E)

    first = most()
    for _ in range(200):
        made(x)
        made.update_bias()
    # The values are 2.6 and 1.05 on a CPU. A bias that does not move keeps the first value, and one that moves the
    # wrong way raises it.
    assert first > 2 and most() < 1.2


def test_no_tokens(device):
    made = router(device, balance_loss=1.0, z_loss=1.0, bias_rate=0.1, num_groups=2)
    ids, scores, loss = made(tokens(device)[:0])
    assert ids.shape == scores.shape == (0, TOP_K) and loss.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float32_whatever_the_tokens_are(dtype, device):
    """Logits and gradients have float32 accuracy, also under autocast. Backward keeps tokens in their own dtype."""
    made, x = router(device).to(dtype), tokens(device).to(dtype).requires_grad_()
    wide, weight = x.detach().float(), made.weight.detach().float()
    logits = float32_mm(x.detach(), made.weight.detach().t())
    # Two sums of D products in any order each have D roundings of 2^-24 of the sum of magnitudes.
    assert ((logits - wide @ weight.t()).abs() <= 2 * D * 2**-24 * (wide.abs() @ weight.abs().t())).all()
    with torch.autocast(device, torch.bfloat16):
        with saved_tensors() as saved:
            ids, scores, _ = made(x)
        got = torch.autograd.grad(scores.square().sum(), (x, made.weight))
    assert_same((ids, scores.detach()), reference.choose_experts(logits, TOP_K)[:2])
    all_of_them = torch.arange(TOP_K, device=device).expand_as(ids)
    of_chosen = reference.choose_experts_backward(2 * scores.detach(), logits.gather(1, ids), all_of_them)
    dlogits = torch.zeros_like(logits).scatter(1, ids, of_chosen)
    exact_grads = dlogits @ weight, dlogits.t() @ wide
    if device == "cpu" or dtype == torch.float32:
        assert_same(got, [t.to(dtype) for t in exact_grads])
    else:
        # Each value is rounded to bfloat16, by half a unit of its 8 bits: at most 2^-8 of it. The float32 gradient of
        # the logits is multiplied as two parts in bfloat16. Each part leaves half a unit of its 8 bits to the next, so
        # at most 2^-16 of each product is left out. The rounding hides it, unless the products of a sum cancel to less
        # than 2^-8 of their magnitudes. Sums in float32 have at most 50 terms, and 50 * 2^-24 < 2^-18.
        sizes = dlogits.abs() @ weight.abs(), dlogits.abs().t() @ wide.abs()
        for g, exact, size in zip(got, exact_grads, sizes, strict=True):
            assert ((g.float() - exact).abs() <= 2**-8 * exact.abs() + (2**-16 + 2**-17) * size).all()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert storages[x.untyped_storage().data_ptr()] == x.nbytes
    assert 4 * x.numel() not in storages.values() or dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scoring="tanh"), "scoring must be 'softmax', 'sigmoid' or 'sqrtsoftplus', got 'tanh'"),
        (dict(group_score="mean"), "group_score must be 'top2_sum' or 'max', got 'mean'"),
        (
            dict(experts=1025),
            "num_experts must be from 1 to 1024, got 1025; sizes are given as Router.num_experts, hidden_size, top_k.",
        ),
        (dict(experts=0), "num_experts must be from 1 to 1024, got 0"),
        (dict(top_k=2.0), "top_k must be an int, got float"),
        (dict(num_groups=3), "num_groups must divide the 8 experts, got 3"),
        (dict(num_groups=0), "num_groups must divide the 8 experts, got 0"),
        (dict(num_groups=4, top_groups=5), "top_groups must be from 1 to 4, got 5"),
        (dict(num_groups=4), "top_k must be from 1 to the 2 experts of a choice, got 3"),
        (dict(normalize="no"), "normalize must be a bool, got str"),
        (dict(scaling_factor="2"), "scaling_factor must be a finite number, got '2'"),
        (dict(bias_rate=float("nan")), "bias_rate must be a finite number, got nan"),
        (dict(balance_loss=None), "balance_loss must be a finite number, got None"),
        (dict(z_loss=float("inf")), "z_loss must be a finite number, got inf"),
        (dict(dtype=torch.int8), "dtype must be bfloat16, float16 or float32, got torch.int8"),
    ],
)
def test_errors(options, message):
    with pytest.raises(RuntimeError, match=f"^Router: {message}$"):
        router(**options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x must be a tensor, got NoneType"),
        (torch.zeros(2, 3, D), "x must have 2 dimensions, got 3"),
        (torch.zeros(3, D + 1), f"x must have size {D} in dimension 1, got {D + 1}"),
        (torch.zeros(3, D, dtype=torch.float64), "x must be bfloat16, float16 or float32, got torch.float64"),
        (torch.zeros(3, D, device="meta"), "x must be on the device of weight, cpu, got meta"),
    ],
)
def test_errors_of_tokens(x, message):
    with pytest.raises(RuntimeError, match=f"^Router: {message}$"):
        router()(x)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0, D, F), {}, "num_experts must be from 1 to 1024, got 0"),
        ((1025, D, F), {}, "num_experts must be from 1 to 1024, got 1025"),
        ((E, 0, F), {}, "hidden_size must be at least 1, got 0"),
        ((E, D, 0), {}, "intermediate_size must be at least 1, got 0"),
        ((E, 2.0, F), {}, "hidden_size must be an int, got float"),
        (("8", D, F), {}, "num_experts must be an int, got str"),
        ((E, D, F), dict(keep="no"), "keep must be 'fp8' or 'bf16', got 'no'"),
        ((E, D, F), dict(interleaved=1), "interleaved must be a bool, got int"),
        ((E, D, F), dict(bias=None), "bias must be a bool, got NoneType"),
        ((E, D, F), dict(main_grad="yes"), "main_grad must be a bool, got str"),
        ((E, D, F), dict(ep=2), "ep must be an ExpertParallel, got int"),
        ((True, D, F), {}, "num_experts must be an int, got bool"),
        ((E, D, F), dict(dtype=torch.float8_e4m3fn), "dtype must be bfloat16, .* got torch.float8_e4m3fn"),
    ],
)
def test_errors_of_experts(args, options, message):
    with pytest.raises(RuntimeError, match=f"^Experts: {message}$"):
        Experts(*args, **options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "a tensor, got NoneType"),
        ([1.0], "a tensor, got list"),
        (torch.ones(3, D).to_sparse(), "a dense tensor, got torch.sparse_coo"),
    ],
)
def test_errors_of_tokens_of_a_layer(x, message):
    with pytest.raises(RuntimeError, match=f"^MoE: x must be {message}$"):
        MoE(Router(E, D, TOP_K), Experts(E, D, 8))(x)


@pytest.mark.parametrize("chosen", [E - 1, E + 1])
def test_a_router_and_experts_that_do_not_fit(chosen):
    text = f"^MoE: experts must be as many as router chooses among, {chosen}, got {E}$"
    with pytest.raises(RuntimeError, match=text):
        MoE(router(experts=chosen), Experts(E, D, F))


@pytest.mark.parametrize("arg", ["router", "experts", "shared_experts"])
def test_what_is_no_module(arg):
    modules = dict(router=router(), experts=Experts(E, D, F)) | {arg: len}
    with pytest.raises(TypeError, match=f"^MoE: {arg} must be a torch.nn.Module, got builtin_function_or_method$"):
        MoE(**modules)


def test_modules_that_cannot_be_meant():
    made, swapped = Experts(E, D, F), r"; modules are given as MoE\(router, experts\)"
    contained = "; call its modules in the forward of another one"
    for modules, text in (
        ((made, router()), f"router must be a Router, or a module that returns a Routing, got Experts{swapped}"),
        ((nn.Linear(D, E), made), "router must be a Router, or a module that returns a Routing, got Linear"),
        ((MoE(router(), made), made), "router must be a Router, or a module that returns a Routing, got MoE"),
        ((nn.Sequential(router()), router()), f"experts must be a module such as Experts, got Router{swapped}"),
        ((router(), nn.Linear(D, D)), "experts must be a module such as Experts, got Linear"),
        ((router(), nn.ModuleList([made])), f"experts must be a module with a forward, got ModuleList{contained}"),
        ((nn.ModuleDict(), made), "router must be a module with a forward, got ModuleDict"),
        ((router(), made, nn.ModuleList()), "shared_experts must be a module with a forward, got ModuleList"),
    ):
        with pytest.raises(TypeError, match=f"^MoE: {text}$"):
            MoE(*modules)
    x = tokens()
    assert_same(MoE(nn.Sequential(router()), made)(x)[0], MoE(router(), made)(x)[0])
    assigned, called = nn.Module(), type("Called", (nn.Module,), {"__call__": lambda self, *call: made(*call)})()
    assigned.forward = made.forward
    for experts_alike in (assigned, called):
        assert_same(MoE(router(), experts_alike)(x)[0], MoE(router(), made)(x)[0])
    layer = MoE(nn.Sequential(nn.Linear(D, E)), made)
    with pytest.raises(RuntimeError, match=r"^MoE: router must return a Routing \(topk_ids, .*\), got Tensor$"):
        layer(x)


@pytest.mark.parametrize("has_ep", [False, True])
def test_errors_of_shared_experts(has_ep, request):
    """A wrong shape would broadcast, or raise an error that names no argument."""
    ep = None
    if has_ep:
        request.getfixturevalue("world_of_one")
        ep = ExpertParallel(dist.group.WORLD, E, TOP_K)

    layer, x = MoE(router(), Experts(E, D, F, ep=ep), nn.Identity()), tokens().view(2, 25, D)
    for forward, text in (
        (lambda x: x[..., :1], r"the shape of x, \[2, 25, 64\], got \[2, 25, 1\]"),
        (lambda x: x[:1], r"the shape of x, \[2, 25, 64\], got \[1, 25, 64\]"),
        (lambda x: (x, None), "a tensor, got tuple"),
        (lambda x: x.long(), "floating-point numbers as x, torch.float32, got torch.int64"),
        (lambda x: x.to("meta"), "a tensor on the device of x, cpu, got meta"),
    ):
        layer.shared_experts.forward = forward
        with pytest.raises(RuntimeError, match=f"^MoE: shared_experts must return {text}$"):
            layer(x)
    if has_ep:
        routing = layer.gate(x.view(50, D))
        with pytest.raises(RuntimeError, match=r"^ExpertParallel: shared_experts must return .*, got \[50, 1\]$"):
            layer.experts(x.view(50, D), *routing[:2], shared_experts=lambda x: x[:, :1])


@pytest.mark.parametrize("has_ep", [False, True])
def test_errors_of_the_output_of_experts(has_ep):
    """Another shape of the same size would be reshaped silently."""
    layer, x = MoE(router(), nn.Identity()), tokens().view(2, 25, D)
    layer.experts.ep = ExpertParallel.__new__(ExpertParallel) if has_ep else None
    if has_ep:
        layer.experts.ep.errors_on_all_ranks = nullcontext
    cause = "; the output seems to be transposed"
    for forward, text in (
        (lambda x, *_: x.t().contiguous(), rf"the shape of x, \[50, 64\], got \[64, 50\]{cause}"),
        (lambda x, *_: x[:, :1], r"the shape of x, \[50, 64\], got \[50, 1\]"),
        (lambda x, *_: x.view(2, 25, D), r"the shape of x, \[50, 64\], got \[2, 25, 64\]"),
        (lambda x, *_: None, "a tensor, got NoneType"),
        (lambda x, *_: (x, None), "a tensor, got tuple"),
        (lambda x, *_: x.long(), "floating-point numbers as x, torch.float32, got torch.int64"),
        (lambda x, *_: x.to("meta"), "a tensor on the device of x, cpu, got meta"),
    ):
        layer.experts.forward = forward
        with pytest.raises(RuntimeError, match=f"^MoE: experts must return {text}$"):
            layer(x)
    layer.experts.forward = lambda x, *_: x.t().contiguous().t()
    assert_same(layer(x)[0], x)


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy", reason="torch runs without it")
    made = router(scaling_factor=numpy.float32(2.5), balance_loss=numpy.float64(0.1), z_loss=1)
    assert made(tokens()).topk_scores.sum(1).allclose(torch.tensor(2.5))


def test_buffers_after_to_empty():
    """Buffers do not keep the contents of uninitialized memory."""
    made = Router(E, D, TOP_K, device="meta", bias_rate=0.1).to_empty(device="cpu")
    for buffer in made.buffers():
        buffer.fill_(7)
    made.reset_parameters()
    assert len(list(made.buffers())) == 2 and not any(buffer.any() for buffer in made.buffers())


@pytest.mark.parametrize("assign", [False, True])
def test_counts_after_loading(assign, device):
    """State dicts hold no counts. Counts begin at zero, for modules on the meta device and in used memory."""
    saved, made = (Router(E, D, TOP_K, bias_rate=0.1, device=place) for place in (device, "meta"))
    if not assign:
        made = made.to_empty(device=device)
        made.tokens_per_expert.fill_(-7)
    made.load_state_dict({name: x.clone() for name, x in saved.state_dict().items()}, assign=assign)
    saved.tokens_per_expert += 5
    saved.load_state_dict({}, strict=False)  # the state dict has no counts
    saved.tokens_per_expert -= 5
    for one in (saved, made):
        one(tokens(device))
        assert one.tokens_per_expert.sum() == TOP_K * len(tokens(device))
        one.update_bias()
    assert made.e_score_correction_bias.any() and made.e_score_correction_bias.equal(saved.e_score_correction_bias)


def test_counts_on_the_meta_device():
    made = Router(E, D, TOP_K, bias_rate=0.1)
    made.tokens_per_expert = made.tokens_per_expert.to("meta")
    with pytest.raises(RuntimeError, match="^Router: tokens_per_expert must be on the device of x, cpu, got meta$"):
        made(tokens())


def test_a_router_without_a_bias_has_none_to_move():
    with pytest.raises(
        RuntimeError, match="^Router: the constructor's bias_rate must not be 0 for update_bias, got 0$"
    ):
        router().update_bias()


def shared(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(D, F), nn.SiLU(), nn.Linear(F, D)).to(device)


def layer_of(device: str, dtype: torch.dtype = torch.bfloat16, **options: object) -> MoE:
    torch.manual_seed(0)
    made = Experts(E, D, F, device=device, dtype=dtype, **options)
    return MoE(router(device, balance_loss=0.1), made, shared(device).to(dtype))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_layer(activation, bias, device):
    """The output is the sum of the parts' outputs, in bfloat16. test_experts.py derives its noise."""
    layer, x = layer_of(device, activation=activation, bias=bias, recipe="bf16"), tokens(device).bfloat16()
    out, loss = layer(x.view(2, 25, D))
    ids, scores, want_loss = layer.gate(x)
    state, up = {n: t.double() for n, t in layer.experts.state_dict().items()}, layer.experts.up
    biases = dict(b_gate_up=state[f"{up}_bias"], b_down=state["down_proj_bias"]) if bias else {}
    weights = state[up], state["down_proj"]
    want = exact(x.double(), ids, scores.double(), *weights, activation=activation, **biases)
    want = want + layer.shared_experts.double()(x.double())
    assert out.shape == (2, 25, D) and sqnr_db(out.view(-1, D), want) > 40
    assert_same(loss.detach(), want_loss.detach())


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_layer_is_the_function(recipe, device):
    layer, x = layer_of(device, recipe=recipe, keep="bf16"), tokens(device).bfloat16()
    layer.shared_experts = None
    ids, scores, _ = layer.gate(x)
    weights = layer.experts.gate_up_proj, layer.experts.down_proj
    assert_same(layer(x)[0].detach(), experts(x, ids, scores, *weights, recipe=recipe, keep="bf16").detach())


def test_layer_trains(device):
    """Every parameter has a gradient, and one step reduces the loss."""
    layer, x = layer_of(device, torch.float32), tokens(device)
    target = torch.randn_like(x)
    optimizer, losses = torch.optim.SGD(layer.parameters(), 0.5), []
    for _ in range(10):
        out, balance = layer(x)
        loss = (out - target).square().mean() + balance
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    # The ratio is 0.91 on a CPU. It is 1 or more if weights do not move, or move away.
    assert losses[-1] < 0.97 * losses[0]


def test_layer_compiles(device):
    layer, x = layer_of(device), tokens(device).bfloat16()
    layer.gate = router(device, bias_rate=0.1, num_groups=4, top_groups=2, z_loss=0.1)

    def results(fn: nn.Module) -> tuple[Tensor, ...]:
        out, loss = fn(x)
        grads = torch.autograd.grad((out, loss), tuple(layer.parameters()), (x, torch.ones_like(loss)))
        return out.detach(), loss.detach(), *grads

    want = results(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for got, plain in zip(results(compiled), want, strict=True):
        assert sqnr_db(got, plain) > 40


def test_autocast_within_a_graph(device):
    """A model may enter torch.autocast in its own forward."""
    layer, x = layer_of(device), tokens(device)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            return layer(x)

    def results(fn: Callable) -> tuple[Tensor, ...]:
        out, loss = fn(x)
        return out.detach(), *torch.autograd.grad(out, tuple(layer.parameters()), torch.ones_like(out))

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for got, plain in zip(results(compiled), results(forward), strict=True):
        assert got.dtype == plain.dtype and sqnr_db(got, plain) > 40


def test_compiles_where_nothing_has_a_gradient():
    made, x = router(num_groups=4, top_groups=2), tokens("cpu")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(x)[:2], made(x)[:2])


def test_a_checkpoint_compiles():
    """In a graph the router counts choices once, because the recomputed forward is part of the graph."""
    layer, x = layer_of("cpu"), tokens("cpu").bfloat16()
    layer.gate = router(bias_rate=0.1)
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    out, _ = compiled(x)
    out.float().sum().backward()
    assert layer.gate.tokens_per_expert.sum() == len(x) * TOP_K


def test_has_no_second_derivative():
    made, x = router(), tokens("cpu").requires_grad_()
    check_no_second_derivative(made(x).topk_scores, x, made.weight)


def test_meta_tensors():
    layer = layer_of("meta", bias=True)
    out, loss = layer(torch.empty(2, 5, D, dtype=torch.bfloat16, device="meta"))
    (out.sum() + loss).backward()
    assert out.is_meta and out.shape == (2, 5, D) and all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dict(activation, bias):
    up, rows = ("gate_up_proj", 2 * F) if activation == "swiglu" else ("up_proj", F)
    shapes = {up: (E, rows, D), "down_proj": (E, D, F)}
    if bias:
        shapes |= {f"{up}_bias": (E, rows), "down_proj_bias": (E, D)}
    state = Experts(E, D, F, activation=activation, bias=bias).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == shapes
    for name, t in state.items():  # biases too, by the inputs of their weight
        inputs = F if name.startswith("down_proj") else D
        assert 0.9 * inputs**-0.5 < t.abs().max() <= inputs**-0.5, name


def test_takes_the_state_of_a_layer_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    sizes = dict(hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=TOP_K)
    config = transformers.DeepseekV3Config(**sizes, n_group=4, topk_group=2, experts_implementation="eager")
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3MoE(config)
    for p in theirs.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    nn.init.normal_(theirs.gate.e_score_correction_bias, std=0.1)
    gate = Router(
        **dict(num_experts=E, hidden_size=D, top_k=TOP_K, scoring="sigmoid", num_groups=4, top_groups=2),
        **dict(normalize=config.norm_topk_prob, scaling_factor=config.routed_scaling_factor, bias_rate=1e-3),
    )
    mine = MoE(gate, Experts(E, D, F, recipe="bf16"), deepseek.DeepseekV3MLP(config, intermediate_size=F))
    mine.load_state_dict(theirs.state_dict())
    x = tokens(t=50).view(2, 25, D)
    assert sqnr_db(mine(x)[0], theirs(x)) > 40


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_export_of_training(recipe):
    """With strict, the graph has what backward reads: tokens along groups, with blocks for any sizes."""
    model, tokens = MoE(Router(16, 32, 3), Experts(16, 32, 16, recipe=recipe)), torch.export.Dim("tokens", min=2)
    program = torch.export.export(model, (torch.randn(35, 32),), dynamic_shapes=({0: tokens},), strict=True)
    x = torch.randn(50, 32)
    assert_same(program.module()(x)[0].detach(), model(x)[0].detach())


@pytest.mark.parametrize("recipe", ["rowwise", "auto"])
@pytest.mark.parametrize("strict", [True, False])
def test_export_with_any_number_of_tokens(strict, recipe):
    """A layer in a batch of sequences: no size becomes a constant. Without strict, "auto" is the recipe of many rows;
    with it, the recipe of the whole range, which is one here."""
    torch.manual_seed(0)
    model = MoE(Router(4, 32, 2), Experts(4, 32, 16, recipe=recipe)).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 35, 32),), dynamic_shapes=({1: tokens},), strict=strict)
        if not strict:
            model.experts.options["recipe"] = Recipe(recipe).for_layer(MANY_ROWS, 32, 16, 4, True, backward=False)
        for count in (3, 35, 100):
            x = torch.randn(2, count, 32)
            assert_same(program.module()(x)[0], model(x)[0])


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("recipe", "blockwise", r"call moe_fp8_ext.convert_\(module, recipe\)"),
        *((name, "silu", "construct another module") for name in ("activation", "keep")),
        *((name, True, "construct another module") for name in ("interleaved", "main_grad", "delay_wgrad")),
        *((name, 9, "construct another module") for name in ("num_experts", "hidden_size", "intermediate_size")),
        ("lora_rank", 9, "construct another module"),
    ],
)
def test_arguments_of_the_constructor_are_read_only(name, value, instead):
    """Forward would not see an assigned value."""
    options = dict(recipe=Recipe("mxfp8"), activation="geglu", keep="bf16", lora_rank=2)
    sizes = dict(num_experts=E, hidden_size=D, intermediate_size=F)
    made = Experts(**sizes, **options)
    before = getattr(made, name)
    assert before == {**options, **sizes}.get(name, False)
    with pytest.raises(AttributeError, match=f"^Experts: {name} must not be assigned, got {value!r}; {instead}$"):
        setattr(made, name, value)
    assert getattr(made, name) == before


def test_the_router_of_a_layer_is_its_gate():
    layer = MoE(router(), Experts(E, D, F))
    with pytest.raises(AttributeError, match="^MoE: router must not be assigned; the attribute of the router is gate$"):
        layer.router = router()
    layer.gate = router(top_k=1)
    assert layer.gate(tokens()).topk_ids.shape[1] == 1 and not hasattr(layer, "router")


@pytest.mark.skipif(_torch.ONLY_PUBLIC, reason="casts are overridden by a private name of torch")
@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_casts_keep_the_bias_in_float32(cast, device):
    """bfloat16 has steps of 2^-9 from 0.5 on, so steps of 1e-3 would move nothing."""
    made = router(device, bias_rate=1e-3)
    before = made.e_score_correction_bias.clone()
    layer = cast(nn.Sequential(made))
    assert made.weight.dtype != torch.float32
    assert_same(made.e_score_correction_bias, before)
    for _ in range(100):
        made.tokens_per_expert[0] = 9
        made.update_bias()
    # Each of the 100 sums of numbers below 4 rounds by 2^-23 at most, and the step itself by less.
    assert made.e_score_correction_bias[0].item() == pytest.approx(before[0].item() - 0.1, abs=100 * 2**-22)
    meta = layer.to("meta")[0].bfloat16()
    assert meta.e_score_correction_bias.dtype == torch.float32 and meta.e_score_correction_bias.is_meta
    state = {n: t.bfloat16() for n, t in router(device, bias_rate=1e-3).state_dict().items()}
    made.load_state_dict(state, assign=True)
    assert made.weight.dtype == torch.bfloat16 and made.tokens_per_expert.device == made.weight.device
    assert_same(made.e_score_correction_bias, state["e_score_correction_bias"].float())


@pytest.mark.parametrize("shape", [(D,), (50, D), (2, 25, D), (0, D)])
@pytest.mark.parametrize("shared", [False, True])
def test_no_output_is_a_view(shape, shared, device):
    """If a caller writes to an output that is a view, autograd replaces the node that hooks of modules belong to."""
    layer = MoE(router(device), Experts(E, D, F, device=device), nn.Linear(D, D, device=device) if shared else None)
    x = torch.randn(shape, device=device)
    out, loss = layer(x)
    routing = layer.gate(x.reshape(-1, D))
    assert out.shape == x.shape
    for t in (out, loss, *routing, layer.experts(x.reshape(-1, D), routing.topk_ids, routing.topk_scores)):
        assert not t._is_view()

"""Padding tokens and given choices: `mask`, `topk_ids` and `topk_scores` of Router and MoE."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, check_compiled
from torch import Tensor, nn

from moe_fp8_ext import Experts, MoE, Router

E, D, F, TOP_K, T = 8, 64, 48, 3, 40
IDS = torch.arange(TOP_K).repeat(T, 1)


def router(device: str = "cpu", top_k: int = TOP_K, **options: object) -> Router:
    torch.manual_seed(0)
    made = Router(E, D, top_k, **options).to(device)
    nn.init.normal_(made.weight)
    return made


def tokens(device: str) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask of the real ones; the padding ones are all alike, so a few experts get them all."""
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.arange(T, device=device) % 3 > 0
    x[~mask] = x[0].clone()
    return x, mask


def test_bias_steps_are_those_of_real_tokens(device):
    """By hand: of the real tokens two choose expert 0, one each 1 and 2, none 3. Four padding tokens choose 3."""
    made = Router(4, 4, 1, bias_rate=1.0).to(device)
    nn.init.eye_(made.weight)
    x = torch.eye(4, device=device)[[0, 3, 0, 3, 1, 3, 2, 3]]
    made(x)
    made.update_bias()
    assert made.e_score_correction_bias.tolist() == [0, 1, 1, -1]
    made.reset_parameters()
    nn.init.eye_(made.weight)
    made(x, mask=torch.tensor([True, False] * 4, device=device))
    assert made.tokens_per_expert.tolist() == [2, 1, 1, 0]
    made.update_bias()
    assert made.e_score_correction_bias.tolist() == [-1, 0, 0, 1]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_real_tokens_are_routed_as_if_alone(scoring, normalize, device):
    """Choice, scores, counts and gradients of real tokens are as in a call without padding; padding has none."""
    options = dict(scoring=scoring, normalize=normalize, balance_loss=0.3, z_loss=0.01, bias_rate=0.1)
    made, alone = router(device, **options), router(device, **options)
    x, mask = tokens(device)
    real = x[mask].clone().requires_grad_()
    x.requires_grad_()
    ids, scores, loss = made(x, mask)
    want = alone(real)
    assert_same((ids[mask], scores[mask]), (want.topk_ids, want.topk_scores))
    assert (ids[~mask] == -1).all() and not scores[~mask].any()
    assert_same(made.tokens_per_expert, alone.tokens_per_expert)
    # Sums over tokens have another order, with zeros between: at most 40 roundings of 2^-24 of positive terms.
    torch.testing.assert_close(loss, want.loss, rtol=40 * 2**-24, atol=0)
    (loss + scores.square().sum()).backward()
    (want.loss + want.topk_scores.square().sum()).backward()
    assert not x.grad[~mask].any()
    # As in test_moe.py: terms are within 1e-5 each, and may cancel.
    torch.testing.assert_close(x.grad[mask], real.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.weight.grad, alone.weight.grad, rtol=1e-4, atol=1e-6)


def test_only_padding(device):
    made, (x, mask) = router(device, balance_loss=0.3, z_loss=0.01, bias_rate=0.1), tokens(device)
    ids, scores, loss = made(x.requires_grad_(), torch.zeros_like(mask))
    (loss + scores.sum()).backward()
    assert (ids == -1).all() and loss.item() == 0 and not made.tokens_per_expert.any()
    assert not x.grad.any() and not made.weight.grad.any()


@pytest.mark.parametrize("normalize", [True, False])
def test_replay_gives_the_same_bytes(normalize, device):
    """The ids of one call give the scores, loss and gradients of that call, though the bias has moved on."""
    options = dict(scoring="sigmoid", normalize=normalize, balance_loss=0.1, bias_rate=0.5)
    made, (x, _), results = router(device, **options), tokens(device), []
    for given in (None, "ids"):
        made.weight.grad = None
        if given:
            made.e_score_correction_bias.normal_()
            assert not torch.equal(made(x).topk_ids, results[0][0])
        ids, scores, loss = made(x, topk_ids=results[0][0] if given else None)
        (loss + scores.square().sum()).backward()
        results.append((ids, scores.detach(), loss.detach(), made.weight.grad))
    assert_same(results[1], results[0])


def test_given_scores_are_used_as_they_are(device):
    """Then scores have no gradient in the router, and losses still have one."""
    made, (x, mask) = router(device, balance_loss=0.3), tokens(device)
    ids, given = torch.randint(E, (T, TOP_K), device=device), torch.rand(T, TOP_K, device=device).requires_grad_()
    got = made(x, mask, ids, given)
    assert_same((got.topk_ids[mask], got.topk_scores[mask]), (ids[mask], given[mask]))
    assert (got.topk_ids[~mask] == -1).all() and not got.topk_scores[~mask].any()
    got.topk_scores.sum().backward()
    assert_same(given.grad, mask[:, None].expand(T, TOP_K).float())
    assert made.weight.grad is None or not made.weight.grad.any()
    made(x, mask, ids, given).loss.backward()
    assert made.weight.grad.any()


def test_given_scores_are_float32(device):
    made, (x, _) = router(device), tokens(device)
    given = torch.rand(T, TOP_K, device=device).bfloat16().requires_grad_()
    got = made(x, topk_ids=torch.zeros(T, TOP_K, device=device).long(), topk_scores=given).topk_scores
    assert_same(got, given.float())
    got.sum().backward()
    assert_same(given.grad, torch.ones_like(given))


def test_hash_layer(device):
    """A table of experts by token id takes the place of the choice; its scores are learned."""
    made, (x, _) = router(device, scoring="sqrtsoftplus"), tokens(device)
    table = torch.stack([torch.arange(TOP_K) + i for i in range(5)]).to(device)
    ids, scores, _ = made(x, topk_ids=table[torch.arange(T, device=device) % 5])
    want = nn.functional.softplus(x.double() @ made.weight.double().t()).sqrt().gather(1, ids)
    # As in test_moe.py: the relative error of logits below 40 is a step of float32 there, 4e-6.
    torch.testing.assert_close(scores.double(), want / want.sum(1, keepdim=True), rtol=1e-5, atol=0)
    scores.square().sum().backward()
    assert made.weight.grad.any()


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_layer(recipe, device):
    """Outputs and gradients of real tokens are the bytes of a layer that never saw padding, in every recipe."""
    torch.manual_seed(0)
    made = Experts(E, D, F, recipe=recipe, device=device)
    layer = MoE(router(device, balance_loss=0.1), made, nn.Linear(D, D).to(device))
    x, mask = tokens(device)
    x[~mask] *= 100
    shaped = x.view(2, T // 2, D).requires_grad_()
    out, _ = layer(shaped, mask=mask.view(2, -1))
    out.view(T, D)[mask].square().sum().backward()
    grads = [p.grad for p in layer.experts.parameters()]
    layer.zero_grad()
    want, _ = layer(x[mask])
    want.square().sum().backward()
    padding = layer.shared_experts(x[~mask])
    assert_same(out.view(T, D)[mask].detach(), want.detach())
    torch.testing.assert_close(out.view(T, D)[~mask], padding)
    assert_same(grads, [p.grad for p in layer.experts.parameters()])
    replayed, _ = layer(shaped, topk_ids=layer.gate(x, mask).topk_ids.view(2, -1, TOP_K))
    assert_same(replayed.detach(), out.detach())


def test_compiled():
    made, (x, mask) = router(balance_loss=0.1, bias_rate=0.1), tokens("cpu")
    args = x, mask, torch.rand(T, E).topk(TOP_K).indices
    assert_same(torch.compile(made, backend="eager", fullgraph=True)(*args), made(*args))


def given(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a layer: tokens, a mask, and given ids and scores."""
    ids = torch.rand(tokens, E).topk(TOP_K).indices
    return torch.randn(tokens, D), torch.rand(tokens) > 0.3, ids, torch.rand(tokens, TOP_K)


@pytest.mark.parametrize("names", [["mask"], ["topk_ids"], ["mask", "topk_ids", "topk_scores"]], ids=" ".join)
@pytest.mark.parametrize("layer", [router(balance_loss=0.1), MoE(router(), Experts(E, D, F))], ids=["Router", "MoE"])
def test_compiled_for_any_number_of_tokens(layer, names):
    """A size that a check writes into its text would become a constant of the graph."""
    calls = []
    for count in (T, 33, 70):
        x, *more = given(count)
        calls.append(
            [x, *[t for name, t in zip(("mask", "topk_ids", "topk_scores"), more, strict=True) if name in names]]
        )
    check_compiled(lambda x, *t: layer(x, **dict(zip(names, t, strict=True))), calls, "cpu", range(1 + len(names)))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_any_number_of_tokens(strict):
    layer, dims = MoE(router(), Experts(E, D, F, recipe="blockwise")).eval(), {0: torch.export.Dim("tokens", min=2)}
    with torch.no_grad():
        program = torch.export.export(layer, given(T), dynamic_shapes=[dims] * 4, strict=strict)
        for count in (3, 70):
            args = given(count)
            assert_same(program.module()(*args), layer(*args))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(mask=torch.ones(T - 1).bool()), "mask must have size 40 in dimension 0, got 39"),
        (dict(mask=torch.ones(T).long()), "mask must be torch.bool, got torch.int64 .an attention_mask of 0 and 1: .*"),
        (dict(mask=[True] * T), "mask must be a tensor, got list"),
        (dict(mask=torch.ones(T, device="meta").bool()), "mask must be on the device of x, cpu, got meta"),
        (dict(topk_ids=torch.zeros(T, TOP_K)), "topk_ids must be torch.int32 or torch.int64, got torch.float32"),
        (dict(topk_ids=torch.zeros(T, 2).long()), "topk_ids must have size 3 in dimension 1, got 2"),
        (dict(topk_ids=torch.full((T, TOP_K), E)), f"topk_ids must be -1 or from 0 to {E - 1}, got {E} in slot 0"),
        (dict(topk_ids=torch.full((T, TOP_K), -2)), f"topk_ids must be -1 or from 0 to {E - 1}, got -2 in slot 0"),
        (
            dict(topk_ids=torch.tensor([[4, -1, -1], [3, 5, 3]]).repeat(T // 2, 1)),
            "topk_ids .* 3 twice in token 1; .*",
        ),
        (
            dict(topk_ids=IDS.clamp(min=1)),
            "topk_ids must have .* one slot of a token at most, got expert 1 twice in token 0; .*",
        ),
        (dict(topk_scores=torch.zeros(T, TOP_K)), "topk_scores must be None without topk_ids, got a tensor"),
        (
            dict(topk_ids=IDS, topk_scores=torch.zeros(T, TOP_K).long()),
            "topk_scores must be bfloat16, float16 or float32, got torch.int64",
        ),
        (
            dict(topk_ids=IDS, topk_scores=torch.zeros(T, TOP_K, device="meta")),
            "topk_scores must be on the device of x, cpu, got meta",
        ),
    ],
)
def test_errors(given, message):
    with pytest.raises(RuntimeError, match=f"^Router: {message}$"):
        router()(torch.zeros(T, D), **given)


def test_given_ids_of_padding_may_be_any():
    mask, made = torch.arange(T) % 5 > 0, router()
    ids = made(torch.zeros(T, D), mask).topk_ids
    assert (ids[~mask] == -1).all()
    garbage = torch.where(mask[:, None], ids, 10**6)
    assert torch.equal(made(torch.zeros(T, D), mask, topk_ids=garbage).topk_ids, ids)


def test_given_scores_may_repeat_an_expert():
    given = dict(topk_ids=torch.full((T, TOP_K), 2), topk_scores=torch.rand(T, TOP_K))
    assert torch.equal(router()(torch.zeros(T, D), **given).topk_scores, given["topk_scores"])


def test_errors_of_a_layer():
    layer = MoE(router(), Experts(E, D, F))
    text = r"^MoE: mask must have shape \[2, 20\], got \[40\]$"
    with pytest.raises(RuntimeError, match=text):
        layer(torch.zeros(2, 20, D), torch.ones(T).bool())
    with pytest.raises(RuntimeError, match="^MoE: mask must be a tensor, got list$"):
        layer(torch.zeros(T, D), [True] * T)
    text = r"^MoE: topk_ids must have shape \[2, 20, top_k\], got \[40, 3\]$"
    with pytest.raises(RuntimeError, match=text):
        layer(torch.zeros(2, 20, D), topk_ids=torch.zeros(T, TOP_K).long())


def fused_and_dense(device: str, recipe: str, num_shared: int = 2) -> tuple[MoE, MoE]:
    """The same layer twice: shared experts among the experts, and as a dense layer whose width is their sum."""
    torch.manual_seed(0)
    gate, options = router(device), dict(recipe=recipe, device=device, dtype=torch.bfloat16)
    fused = MoE(gate, Experts(E + num_shared, D, F, **options), num_fused_shared=num_shared)
    state = {name: t.detach() for name, t in fused.experts.named_parameters()}
    routed, shared = Experts(E, D, F, **options), Experts(1, D, num_shared * F, **options)
    routed.load_state_dict({name: t[:E] for name, t in state.items()})
    gates, ups = state["gate_up_proj"][E:].chunk(2, 1)
    joined = torch.cat([gates.flatten(0, 1), ups.flatten(0, 1)])[None]
    down = state["down_proj"][E:].transpose(0, 1).flatten(1)[None]
    shared.load_state_dict(dict(gate_up_proj=joined, down_proj=down))

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = shared

        def forward(self, x: Tensor) -> Tensor:
            x = x.reshape(-1, D)
            return shared(x, x.new_zeros(len(x), 1).long(), x.new_ones(len(x), 1).float())

    return fused, MoE(gate, routed, Dense())


@pytest.mark.parametrize("masked", [False, True])
def test_fused_shared_experts(masked, device):
    """They compute what a dense layer computes, but for roundings to bfloat16."""
    fused, dense = fused_and_dense(device, "bf16")
    x, mask = tokens(device)
    x = x.bfloat16()
    given = dict(mask=mask) if masked else {}
    got, want = (layer(x, **given)[0].float() for layer in (fused, dense))
    if masked:
        assert not got[~mask].any() and want[~mask].any()
        got, want = got[mask], want[mask]
    # Each result has some 6 roundings to bfloat16, of 2^-8 at most and 2^-8 / sqrt(3) in the root mean square: two
    # products, an activation, a sum over slots and a sum of two outputs, beside the scores'.
    assert (got - want).norm() <= (2 * 6 / 3) ** 0.5 * 2**-8 * want.norm()
    (got.square().sum()).backward()
    assert all(p.grad[-2:].flatten(1).any(1).all() for p in fused.experts.parameters())


def test_errors_of_fused_shared_experts():
    text = "^MoE: experts must be as many as router chooses among, 8, got 6 and 2 fused ones$"
    with pytest.raises(RuntimeError, match=text):
        MoE(router(), Experts(E, D, F), num_fused_shared=2)
    with pytest.raises(RuntimeError, match="^MoE: num_fused_shared must be at least 0, got -1$"):
        MoE(router(), Experts(E, D, F), num_fused_shared=-1)
    with pytest.raises(RuntimeError, match="^MoE: experts must be an Experts with num_fused_shared, got Identity$"):
        MoE(router(), nn.Identity(), num_fused_shared=1)

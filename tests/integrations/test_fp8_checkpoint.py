"""FP8 checkpoints of Transformers: loaded, trained through, and refused."""

from __future__ import annotations

import collections
import math
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import experts_problem
import pytest
import torch
from experts_problem import Layer, run_exact
from fp8_checkpoints import (
    EXPERTS,
    LINEAR,
    TOP_K,
    VOCABULARY,
    D,
    E,
    F,
    as_with_gpu,
    config,
    load,
    load_dequantized,
    loss,
    write,
    write_mxfp4,
)
from helpers import assert_same_tensor, blocks, saved_tensors, short, sqnr_db
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import transformers

import moe_fp8_ext
from moe_fp8_ext import Quantized, Recipe, convert_, revert_
from moe_fp8_ext.integrations.fp8_checkpoint import master_weights_
from moe_fp8_ext.integrations.transformers import register
from moe_fp8_ext.quantization import cost

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
OURS = "moe_fp8_blockwise"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Checkpoints by whether their scales are E8M0."""
    return {e8m0: write(tmp_path_factory.mktemp("fp8"), e8m0=e8m0) for e8m0 in (False, True)}


def experts_of(model: nn.Module, layer: int = 0) -> nn.Module:
    return model.model.layers[layer].mlp.experts


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.train().zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Ops(TorchDispatchMode):
    """Counts ops, and lists ops that make weights of another dtype, or FP8 weights of weights in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.casts = collections.Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        given = [x for x in args if isinstance(x, Tensor)]
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        dtypes = {x.dtype for x in (*given, *made) if x.numel() >= E * D * F}  # of tensors as large as a weight
        if torch.float8_e4m3fn in dtypes and len(dtypes) > 1:
            self.casts.append(str(func))
        return out


@pytest.mark.parametrize("e8m0", [False, True], ids=["float32", "e8m0"])
@pytest.mark.parametrize("implementation", ["moe_fp8", OURS])
def test_multiplies_the_bytes(folders, e8m0, implementation):
    """No weight is cast: neither dequantized nor quantized. No scale is rounded. The parameters stay as loaded."""
    model = load(folders[e8m0], implementation)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Ops() as ops:
        found = gradients(model)
    assert not ops.casts
    assert ops.counts["scaled_grouped_mm"] == 2 * 4  # of 2 layers: 2 forward, 2 for gradients of tokens
    frozen = {name for name in before if ".experts." in name}
    assert {before[name].dtype for name in frozen} == {
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu if e8m0 else torch.float32,
    }
    assert found.keys() == before.keys() - frozen
    for name, p in model.named_parameters():
        assert p.requires_grad == (name not in frozen)
        assert_same_tensor(p.detach(), before[name], name)


def test_refuses_gradients_of_frozen_experts(folders):
    """The gradients would stay None without an error."""
    model = load(folders[False], OURS)
    model.requires_grad_(True)
    text = (
        r"^moe_fp8: gate_up_proj must not ask for a gradient, .*, got requires_grad=True; call requires_grad_\(False\)"
    )
    with pytest.raises(RuntimeError, match=text):
        loss(model)
    with torch.no_grad():
        loss(model)
    for i in range(len(EXPERTS)):
        experts_of(model, i).requires_grad_(False)
    assert gradients(model)


def test_keeps_no_copy(folders):
    """Of weights, backward keeps the parameters themselves."""
    model = load(folders[False], OURS)
    with saved_tensors() as kept:
        loss(model)
    weights = {t.data_ptr() for t in kept if t.dtype == torch.float8_e4m3fn and t.dim() == 3}
    of_experts = {p.data_ptr() for p in model.parameters() if p.dtype == torch.float8_e4m3fn}
    assert weights == of_experts and len(weights) == 2 * len(EXPERTS)


def test_quantized_while_loading(tmp_path):
    """Transformers makes the same modules of a BF16 checkpoint."""
    plain = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path)
    how = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head", *LINEAR])
    model = load(tmp_path, OURS, quantization_config=how)
    with Ops() as ops:
        gradients(model)
    assert not ops.casts and not any(p.requires_grad for p in experts_of(model).parameters())
    w, _ = dequantized(experts_of(model))
    # A cast to E4M3 rounds by 2^-4 at most.
    assert (w - experts_of(plain).gate_up_proj.detach().double()).norm() <= 2**-4 * w.norm()


def dequantized(experts: nn.Module) -> tuple[Tensor, Tensor]:
    """The weights in float64. A product of an FP8 value and a scale has 4 + 24 bits, so it is exact."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        q, scale = getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach().double()
        rows, columns = q.shape[1:]
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :columns]
        found.append(q.double() * scale)
    return tuple(found)


# The units of experts_problem.py without weights, which are compared as they are stored.
#   out      x through silu(g) u, a's own cast                                 2.07 + 1
#   dx       dy; h through dh (x's unit and its own); dh's own cast            1 + 1.23 + 1.28 + 1
#   dscores  dy, and a of h as kept                                            1 + 2.07 + 2.45
NOISE = {"out": 2.07 + 1, "x": 2 + 1.23 + 1.28, "scores": 1 + 2.07 + 2.45}


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, experts, scores, and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(200, E, generator=g).topk(TOP_K).indices
    x, grad = (torch.randn(200, D, generator=g).bfloat16() for _ in range(2))
    return x, ids, torch.rand(200, TOP_K, generator=g), grad


def of_experts(experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """The output of experts and the gradients of tokens and scores."""
    x, ids, scores, grad = problem()
    x.requires_grad_()
    scores.requires_grad_()
    out = experts(x, ids, scores)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad}


def exact(experts: nn.Module, activation: str = "swiglu") -> dict[str, Tensor]:
    x, ids, scores, grad = problem()
    return run_exact(Layer(x, ids, scores, *dequantized(experts), grad), activation=activation)


def min_db(name: str, noise: float) -> float:
    spread = experts_problem.SPREAD_DB if name == "scores" else experts_problem.SPREAD_OF_MANY_DB
    return -10 * math.log10(noise * experts_problem.OF_OPERAND) - spread


@pytest.fixture
def strong(folders: dict[bool, Path]) -> nn.Module:
    """Experts whose weights keep the variance of their input, as the units above assume."""
    experts = experts_of(load(folders[False], OURS))
    for name, terms in (("gate_up_proj", D), ("down_proj", F)):
        w = torch.randn(getattr(experts, name).shape, generator=torch.Generator().manual_seed(2)) * terms**-0.5
        first, _ = moe_fp8_ext.quantize_weight(w.bfloat16(), "blockwise")
        getattr(experts, name).copy_(first.q)
        getattr(experts, f"{name}_scale_inv").copy_(first.scale)
    return experts


def test_layer_against_float64(strong):
    got, want = of_experts(strong), exact(strong)
    for name, noise in NOISE.items():
        assert sqnr_db(got[name], want[name]) >= min_db(name, noise), name


def test_scales_are_exact(folders):
    """Weights that are powers of two times FP8 values are quantized to the same operands again: equal bits."""
    experts = experts_of(load(folders[True], OURS))
    got = of_experts(experts)
    pairs = [moe_fp8_ext.quantize_weight(w.float(), "blockwise", rounding="pow2") for w in dequantized(experts)]
    want = of_experts(lambda x, ids, scores: moe_fp8_ext.experts(x, ids, scores, *pairs, recipe="blockwise"))
    for name in want:
        assert_same_tensor(got[name], want[name], name)


def test_gate_of_gpt_oss(strong):
    """It is a gate that `experts` has. Its halves are not interleaved here."""
    strong.swiglu_alpha, strong.limit, strong.swiglu_limit = 1.702, 7.0, 7.0
    got, want = of_experts(strong)["out"], exact(strong, "swiglu_oai")["out"]
    assert sqnr_db(got, want) >= min_db("out", NOISE["out"] + 0.14)  # as experts_problem.py says of other activations


def test_gate_with_a_limit(strong, monkeypatch):
    """One operation, as DeepSeek-V4 has it."""
    strong.limit = limit = 1.0
    monkeypatch.setitem(experts_problem.GATED, "limited", lambda g, u: strong._apply_gate(torch.cat([g, u], -1)))
    # The unit of x through both factors, of a normal g and u: only values below the limit pass an error on.
    g = torch.randn(10**5, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    (slope,) = torch.autograd.grad(nn.functional.silu(g.clamp(max=limit)).sum(), g)
    a, u = nn.functional.silu(g.clamp(max=limit)).square().mean(), g.clamp(-limit, limit).square().mean()
    of_x = slope.square().mean() / a + (g.abs() < limit).double().mean() / u
    got, want = of_experts(strong)["out"], exact(strong, "limited")["out"]
    assert sqnr_db(got, want) >= min_db("out", of_x.item() + 1)


# Backward of a layer passes five casts: of x, h, a, of the output's gradient and of dh. An error of a cast is at most
# 2^-4, and 2^-4 / sqrt(3) in the root mean square. Both layers add theirs.
MODEL_TOLERANCE = (2 * 5 / 3) ** 0.5 * 2**-4


def test_model_against_float64(folders):
    """Gradients of everything but the experts, with a rest in float32."""
    model = load(folders[False], OURS, dtype=torch.float32)
    want = load_dequantized(folders[False], experts_implementation="eager").double()
    for i in range(len(EXPERTS)):
        for name, w in zip(("gate_up_proj", "down_proj"), dequantized(experts_of(model, i)), strict=True):
            getattr(experts_of(want, i), name).data = w
    got, want = gradients(model), gradients(want)
    assert got.keys() == {name for name in want if ".experts." not in name}
    for name in got:
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert 0 < error <= MODEL_TOLERANCE, f"{name}: {error:.3f}"


def test_gradient_checkpointing(folders):
    model = load(folders[False], OURS)
    want = gradients(model)
    model.gradient_checkpointing_enable()
    got = gradients(model)
    assert got.keys() == want.keys()
    for name in want:
        assert_same_tensor(got[name], want[name], name)


def test_generates(folders):
    """Without a cast of a weight, and the tokens that the whole sequence gives."""
    model = load(folders[True], OURS)
    prompt = torch.randint(3, VOCABULARY, (1, 5))
    with Ops() as ops:
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=VOCABULARY)
    assert not ops.casts and ops.counts["scaled_grouped_mm"] == 6 * 4
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens[:, :-1]).logits[:, 4:].argmax(-1), tokens[:, 5:])


def test_auto_never_takes_bf16_for_weights_in_fp8(folders, monkeypatch):
    """Also in eval mode without gradients, where "auto" would take BF16 if that were faster."""
    costs = cost.COSTS["layer forward"]
    free = costs["bf16"]._replace(weight_bytes=0, row_bytes=0, fixed_us=0, host_us=0)
    monkeypatch.setitem(cost.COSTS, "layer forward", {**costs, "bf16": free})
    recipe, call = moe_fp8_ext.Recipe("auto", "blockwise"), problem()[:3]
    experts = experts_of(load(folders[False], OURS)).eval()
    register(recipe)
    with torch.no_grad():
        want = experts(*call)
        experts.config._experts_implementation = "moe_fp8"
        assert recipe.for_layer(8, 128, 128, 4, True, backward=False).name == "bf16"
        assert torch.equal(experts(*call), want)


def test_compiles(folders):
    torch._dynamo.reset()
    experts, call = experts_of(load(folders[False], OURS)), problem()[:3]
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert_same_tensor(compiled(*call), experts(*call), "out")


# What cannot be multiplied: entries of the config or of quantization_config, an implementation, and the error.
DEQUANTIZE = r"load the model with quantization_config=FineGrainedFP8Config\(dequantize=True\)"
REFUSED = {
    "a recipe": ({}, {}, "moe_fp8_rowwise", r'"blockwise" for an FP8 checkpoint.*got "rowwise"; choose "moe_fp8_block'),
    "auto": ({}, {}, "moe_fp8_auto", r'got "auto"; choose "moe_fp8_blockwise"'),
    "one scale": ({}, dict(weight_block_size=None), OURS, rf"got one scale for a whole weight; {DEQUANTIZE}"),
    "small blocks": ({}, dict(weight_block_size=[1, 32]), OURS, rf"128 x 128.*got blocks of 1 x 32; {DEQUANTIZE}"),
    "static": ({}, dict(activation_scheme="static"), OURS, rf'got activation_scheme="static"; {DEQUANTIZE}'),
    "fp4": (dict(expert_dtype="fp4"), dict(expert_dtype="fp4"), OURS, rf"float8_e4m3fn.*got int8; {DEQUANTIZE}"),
    "F": (dict(moe_intermediate_size=96), {}, OURS, rf"multiple of 128 in an FP8 checkpoint, got 96; {DEQUANTIZE}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_while_loading(what, tmp_path):
    sizes, quantization, implementation, error = REFUSED[what]
    folder = write(tmp_path, quantization=quantization, **sizes)
    with pytest.raises(RuntimeError, match=error):
        load(folder, implementation)
    load(folder, "eager", ignore_mismatched_sizes=True)  # other implementations load it as before


def test_missing_scales(tmp_path):
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = write(tmp_path, keep=lambda name: name != f"{lost}_scale_inv")
    with pytest.raises(RuntimeError, match=f"got none for {lost}; download it again"):
        load(folder, OURS)


def test_refused_in_the_first_forward(folders):
    """Transformers asks no implementation before it sets it."""
    model = load(folders[False], "eager")
    model.set_experts_implementation("moe_fp8_rowwise")
    with pytest.raises(RuntimeError, match='choose "moe_fp8_blockwise"'):
        loss(model)
    model.set_experts_implementation(OURS)
    assert loss(model).isfinite()


def test_convert(folders):
    want = gradients(load(folders[False], OURS))
    model = load(folders[False], "eager")
    with pytest.raises(ValueError, match=r'not converted: moe_fp8: the recipe must be "blockwise" for an FP8 checkp'):
        convert_(model)
    report = convert_(model, "blockwise")
    assert report.converted == tuple((name, "FP8 checkpoint", Recipe("blockwise")) for name in EXPERTS)
    assert "FP8 checkpoint" in str(report) and not report.left
    got = gradients(model)
    for name in want:
        assert_same_tensor(got[name], want[name], name)
    revert_(model)
    assert "forward" not in vars(experts_of(model))


def test_dequantized_e8m0_is_rounded_once(folders):
    """Without a GPU Transformers dequantizes. Scales that are powers of two ask for the rounding "pow2"."""

    def loaded(implementation: str, folder: Path = folders[True]) -> tuple[nn.Module, list[str]]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UserWarning)
            model = load_dequantized(folder, dtype=torch.bfloat16, experts_implementation=implementation)
        return model, [str(w.message) for w in found if "moe_fp8" in str(w.message)]

    bytes_of = experts_of(load(folders[True], OURS)).gate_up_proj.detach()
    model, (text,) = loaded(OURS)
    assert 'Recipe("blockwise", rounding="pow2") gives the bytes' in text
    w = experts_of(model).gate_up_proj.detach()
    for rounding, is_same in (("pow2", True), ("exact", False)):
        q = moe_fp8_ext.quantize_weight(w, "blockwise", rounding=rounding)[0].q
        assert torch.equal(q.float(), bytes_of.float()) == is_same
    with pytest.warns(UserWarning, match="a second time"):
        convert_(model, "blockwise")
    once = Recipe("blockwise", rounding="pow2")
    register(once)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        convert_(model, once)
    assert not loaded("moe_fp8")[1] and not loaded("moe_fp8_rowwise")[1] and not loaded(OURS, folders[False])[1]


# Master weights


class Memory(TorchDispatchMode):
    """Measures the most bytes that tensors of ops and given tensors have at one time."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages, self.peak = {}, 0
        for t in tensors:
            self.add(t)

    def add(self, t: Tensor) -> None:
        if t.device.type == "cpu":
            ref = StorageWeakRef(t.untyped_storage())
            self.storages[ref.cdata] = ref, t.untyped_storage().nbytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.add(t)
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return out


def size(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_master_weights(tmp_path, dtype):
    """It is what Transformers dequantizes while loading; a saved model too. Memory has one weight more at most."""
    folder = write(tmp_path / "fp8", linear=("q_proj",))
    model = load(folder, OURS, dtype=dtype)
    before = size(model)
    with Memory(model.parameters()) as memory:
        master_weights_(model)
    of_weight = E * 2 * F * D * dtype.itemsize  # of gate_up_proj
    assert memory.peak <= size(model) + of_weight < size(model) + before
    options = dict(dtype=dtype, experts_implementation=OURS)
    want = load_dequantized(folder, **options)
    assert str(model) == str(want)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    for (name, p), (_, other), (_, of_saved) in zip(*(m.named_parameters() for m in (model, want, saved)), strict=True):
        if dtype == torch.bfloat16 or name.endswith(("q_proj.weight", "gate_up_proj", "down_proj")):
            assert_same_tensor(p.detach(), other.detach(), name)
            assert_same_tensor(p.detach(), of_saved.detach(), name)
        assert p.requires_grad
    got, want = (gradients(m.to(dtype)) for m in (model, want))  # 5.23.0 leaves weights that are not FP8 in BF16
    assert got.keys() == want.keys() and f"{EXPERTS[0]}.down_proj" in got
    for name in want:
        assert_same_tensor(got[name], want[name], name)


def test_master_weights_of_a_part(tmp_path):
    """Linear layers in BF16 and experts in FP8: no kernel for linear layers in FP8 is needed."""
    folder = write(tmp_path, linear=("q_proj", "o_proj"), e8m0=True)
    model = load(folder, OURS)
    master_weights_(model, filter=lambda name, _: ".experts" not in name)
    assert {type(module).__name__ for module in model.modules() if "FP8" in type(module).__name__} == {"FP8Experts"}
    assert model.config.quantization_config is not None
    assert gradients(model)["model.layers.0.self_attn.q_proj.weight"].abs().sum() > 0
    with pytest.warns(UserWarning, match="a second time"):
        master_weights_(model)
    assert not hasattr(model.config, "quantization_config")
    with pytest.raises(RuntimeError, match="master_weights_: model must have FP8 weights to replace, got none"):
        master_weights_(model)


def test_a_cast_loses_scales(folders):
    """Transformers forbids `half` and `float` of such a model, but not `bfloat16`, nor any cast of what wraps it."""
    model = load(folders[False], OURS)
    nn.Sequential(model).bfloat16()
    text = "must be float8_e4m3fn beside {}_scale_inv, got {}bfloat16; a cast such as model.bfloat16()"
    with pytest.raises(RuntimeError, match=re.escape(text.format("gate_up_proj", "torch."))):
        model(input_ids=torch.zeros(1, 3).long())
    (first, *_) = moe_fp8_ext.fp8_report(model).others
    assert text.format("gate_up_proj", "torch.") in first.why
    with pytest.raises(RuntimeError, match=re.escape(text.format("model.layers.0.mlp.experts.gate_up_proj", ""))):
        moe_fp8_ext.fp8_state(model)


def test_master_weights_refuse(folders):
    """Nothing has changed then."""
    model = load(folders[False], OURS)
    experts_of(model, 1).down_proj_scale_inv = nn.Parameter(torch.ones(E, 1, 1), requires_grad=False)
    before = str(model)
    error = (
        rf"1.mlp.experts.down_proj must .* blocks of 128 x 128, got float8_e4m3fn with scales \[4, 1, 1\]; {DEQUANTIZE}"
    )
    with pytest.raises(RuntimeError, match=error):
        master_weights_(model)
    assert str(model) == before
    with pytest.raises(TypeError, match="master_weights_: model must be a torch.nn.Module, got str"):
        master_weights_("model")
    with pytest.raises(RuntimeError, match="model must be what from_pretrained returned, got Sequential"):
        master_weights_(nn.Sequential(model))
    model, text = load(folders[False], OURS), "dtype must be bfloat16, float16 or float32, got "
    before = str(model)
    for dtype in (torch.float8_e4m3fn, "float32"):
        with pytest.raises(RuntimeError, match=f"^master_weights_: {text}{dtype!r}$"):
            master_weights_(model, dtype)
    with pytest.raises(TypeError, match="^master_weights_: filter must be callable, got str$"):
        master_weights_(model, filter="experts")
    assert str(model) == before


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer in FP8 computes, without the kernels for it."""
    if layer.weight.element_size() > 1:
        return nn.functional.linear(x, layer.weight)
    weight = Quantized(layer.weight[None].detach(), layer.weight_scale_inv[None].detach().float(), "blockwise")
    return nn.functional.linear(x, weight.dequantize()[0])


def test_documents(tmp_path, capsys, monkeypatch):
    """The blocks of the page, in order, on a machine that Transformers takes for one with a GPU."""
    monkeypatch.setattr("transformers.integrations.finegrained_fp8.FP8Linear.forward", linear)
    folder = write(tmp_path / "fp8", e8m0=True, linear=("q_proj", "o_proj"))
    paths = dict(path=folder, gpt_oss=write_mxfp4(tmp_path / "mxfp4"))
    tokens = torch.randint(3, VOCABULARY, (2, 16))
    names = dict(moe_fp8_ext=moe_fp8_ext, torch=torch, device={"": "cpu"}, tokens=tokens, **paths)
    found = []
    with as_with_gpu():
        for block in blocks("docs/fp8-checkpoints.md"):
            exec(block, names)
            found.append(names["model"])
            assert loss(found[-1]).requires_grad
    (report,) = blocks("docs/fp8-checkpoints.md", None, "text")
    assert report in capsys.readouterr().out
    kinds = [type(experts_of(model)).__name__ for model in found]
    stock = "Qwen3MoeExperts"
    assert kinds == ["FP8Experts", "FP8Experts", stock, stock, "FP8Experts", "GptOssExperts"]
    assert [experts_of(model).down_proj.dtype.itemsize for model in found] == [1, 1, 2, 4, 1, 1]

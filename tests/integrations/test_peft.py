"""LoRA adapters of PEFT on experts: taken as factors, they compute what PEFT computes by W + B A."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import fp8_checkpoints
import pytest
import torch
from helpers import ROOT, blocks, sqnr_db
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import (
    LAYOUTS,
    SIZES,
    assert_close,
    assert_same,
    calls,
    experts_of,
    gradients,
    tiny_model,
    transformers,
)

import moe_fp8_ext
from moe_fp8_ext import Recipe, convert_, revert_
from moe_fp8_ext.integrations import peft as integration
from moe_fp8_ext.integrations import transformers as of_transformers

peft = pytest.importorskip("peft", reason="peft is not installed")
# PEFT warns where it adds an adapter to a module that has one, and where it leaves a parametrization behind.
_OF_PEFT = "ignore:Already found a `peft_config`", "ignore:Could not find any LoRA parametrization"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", *_OF_PEFT)

# Older versions of PEFT give a parametrization B A alone, a model one adapter on parameters, and load no adapter of
# every model with the newest Transformers.
OLD = not hasattr(peft.tuners.lora.layer, "_LoraFactorsProxy")
new = pytest.mark.skipif(OLD, reason=f"PEFT {peft.__version__} has fewer abilities")
RANK = 4
EXPERTS_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(autouse=True)
def warns_again(registered: None) -> None:
    integration._warn_of_merged.cache_clear()


class Layer(nn.Module):
    """Experts within a module, because PEFT wraps no parameter of the outermost module."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *call: Tensor) -> Tensor:
        return self.experts(*call)


def lora_config(names: list[str] = EXPERTS_PARAMETERS, **options: object) -> object:
    return peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=names, **options)


def drawn(model: nn.Module, seed: int = 1) -> nn.Module:
    """Draws factors so that B A has a quarter of the weight's size: neither is then lost in the other's roundings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                # The terms of a product: K of A x, r of B (A x). Scaling is 2.
                terms = p.shape[1] if "lora_A" in name else 64 * RANK
                p.copy_(torch.randn(p.shape, generator=generator) * terms**-0.5)
    return model


def layer(name: str = "qwen3_moe", implementation: str = "grouped_mm", **options: object) -> Layer:
    """Frozen experts with adapters on both weights."""
    torch.manual_seed(0)
    experts = experts_of(name)
    experts.config._experts_implementation = implementation
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    config = lora_config([f"experts.{up}", "experts.down_proj"], **options)
    return drawn(peft.inject_adapter_in_model(config, Layer(experts)))


def converted(name: str = "qwen3_moe", recipe: str = "bf16", **options: object) -> Layer:
    made = layer(name, "eager", **options)
    convert_(made, recipe)
    return made


def results(model: Layer, x: Tensor, ids: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    model.zero_grad()
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    out = model(x, ids, scores)
    out.backward(torch.linspace(-1, 1, out.numel()).cos().view(out.shape).to(out.dtype))
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) >= 4 and not [name for name in trained if "lora_" not in name]
    return dict(out=out.detach(), x=x.grad, scores=scores.grad, **trained)


# As in test_transformers.py: 38 roundings to bfloat16 without adapters. With one, a product adds four of its own: A x,
# its scaling, B (A x) and the sum. There are two products, forward and backward. PEFT rounds as often: B, A, B A and
# the sum with W, and the gradients of these. Each rounding has a relative error of at most 2^-8 / sqrt(3) in the root
# mean square, and the errors of both results add up in squares.
ROUNDINGS = 38 + 2 * 4 * 2
BF16 = (2 * ROUNDINGS / 3) ** 0.5 * 2**-8
# In fp8, a gradient depends on 2 products of forward and 2 of backward with two operands each, and on h, which is kept
# in fp8. Each operand is rounded by at most 2^-4 / sqrt(3).
FP8 = (9 / 3) ** 0.5 * 2**-4 + BF16


WAYS = {
    "implementation": lambda name: layer(name, "moe_fp8_bf16"),
    "convert_": lambda name: converted(name),
}


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Records which projections of each call of `experts` have an adapter."""
    called = []

    def spy(*args: object, lora_gate_up: object = None, lora_down: object = None, **kwargs: object) -> Tensor:
        called.append((lora_gate_up is not None, lora_down is not None))
        return experts(*args, lora_gate_up=lora_gate_up, lora_down=lora_down, **kwargs)

    experts = of_transformers.experts
    monkeypatch.setattr(of_transformers, "experts", spy)
    return called


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_factors_are_what_peft_computes(name: str, way: str, adapters: list[tuple[bool, bool]]) -> None:
    """Every layout: transposed weights, biases, gates that alternate, no gate, and code of the model in between."""
    call = calls()
    assert_close(results(WAYS[way](name), *call), results(layer(name), *call), BF16)
    has_factors = way == "convert_" or not OLD
    assert adapters == ([] if name == "muse_spark_text" else [(has_factors, has_factors)])


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recipes(name: str, recipe: str) -> None:
    call = calls()
    got, want = results(converted(name, recipe), *call), results(layer(name), *call)
    assert_close(got, want, FP8)
    assert sqnr_db(got["out"], want["out"]) < 40  # products in bfloat16 have some 45 dB


@pytest.mark.parametrize("rslora", [False, True])
def test_float32_adapters(rslora: bool) -> None:
    """Adapters are float32 over experts in bfloat16, as `get_peft_model` makes them, with any scaling."""
    call, stock, ours = calls(), layer(use_rslora=rslora), converted(use_rslora=rslora)
    for model in (stock, ours):
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    got = results(ours, *call)
    assert_close(got, results(stock, *call), BF16)
    assert {value.dtype for name, value in got.items() if "lora_" in name} == {torch.float32}


def test_autocast() -> None:
    """Experts and adapters in float32, as `Trainer` trains with bf16=True. PEFT's product follows no autocast."""
    x, ids, scores = calls()
    stock, ours = layer(implementation="eager").float(), converted().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = results(ours, x.float(), ids, scores)
        want = results(stock, x.float(), ids, scores)
    assert_close(got, want, BF16)


def test_expert_parallelism(world_of_one: None) -> None:
    """The forward that a plan of Transformers sets takes factors from PEFT's parametrization."""
    mesh, call, ours = init_device_mesh("cpu", (1,)), calls(), layer()
    experts = ours.experts.get_base_layer()
    experts.forward = of_transformers._ExpertParallelForward(Recipe("rowwise"), experts, mesh, mesh)
    assert_close(results(ours, *call), results(layer(), *call), FP8)


class LargeResults(TorchDispatchMode):
    """Counts the ops that make a tensor of at least so many elements in 16 or 32 bits. Views make none."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.names = elements, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        makes_none = func.is_view or func is torch.ops.aten.set_.source_Tensor
        tensors = [] if makes_none else [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        for t in tensors:
            if t.dtype.itemsize > 1 and t.numel() >= self.elements:
                self.names.append(func.__name__)
        return out


@new
def test_nothing_has_the_size_of_a_weight() -> None:
    """`convert_` computes no W + B A and no gradient of that size. With the implementation alone, PEFT computes each
    W + B A once, to check its parametrization."""
    counts = {}
    for way, model in dict(
        stock=layer(), implementation=layer(implementation="moe_fp8"), convert_=converted(recipe="rowwise")
    ).items():
        smallest = min(p.numel() for p in model.parameters() if p.dim() == 3)
        with LargeResults(smallest) as large:
            results(model, *calls())
        counts[way] = large.names
    assert counts["convert_"] == []
    assert counts["implementation"] == ["baddbmm.default"] * 2
    assert counts["stock"].count("baddbmm.default") == 4 and len(counts["stock"]) > 4


# ---- accelerate ------------------------------------------------------------------------------------------------------


def placed(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def adapted(model: nn.Module) -> nn.Module:
    return drawn(peft.get_peft_model(model, lora_config()))


def convert(model: nn.Module) -> nn.Module:
    convert_(model, "blockwise")
    return model


@pytest.mark.parametrize(
    "steps",
    [
        (adapted, placed, convert),
        (adapted, convert, placed),
        (placed, adapted, convert),
        (placed, convert, adapted, convert),
        (convert, placed, adapted),
    ],
    ids=lambda steps: " ".join(step.__name__ for step in steps),
)
def test_placed_models(steps: tuple[Callable[[nn.Module], nn.Module], ...]) -> None:
    """PEFT, accelerate and `convert_` in any order."""
    want, model = gradients(converted_model("blockwise")), tiny_model("qwen3_moe", "eager")
    for step in steps:
        model = step(model)
    got = gradients(model)
    if steps[-1] is adapted:  # factors that PEFT has rounded to bfloat16 come from its parametrization
        for name in want:
            assert sqnr_db(got[name], want[name]) > 20, name
    else:
        assert_same(got, want)


# ---- FP8 checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_checkpoints.write(tmp_path_factory.mktemp("fp8"))


def layer_of(model: nn.Module) -> Layer:
    """The experts of a model's first layer, with adapters in float32."""
    experts = model.model.layers[0].mlp.experts.requires_grad_(False)
    made = drawn(peft.inject_adapter_in_model(lora_config(), Layer(experts)))
    for p in made.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return drawn(made)


def fp8_models(folder: Path) -> tuple[nn.Module, nn.Module]:
    """A model with its experts dequantized, and with them in FP8."""
    return fp8_checkpoints.load_dequantized(folder, dtype=torch.bfloat16), fp8_checkpoints.load(folder)


def mxfp4_models(folder: Path) -> tuple[nn.Module, nn.Module]:
    """The same of GPT-OSS, which is published in MXFP4. PEFT sees transposed weights in the first alone."""
    fp8_checkpoints.write_mxfp4(folder)
    options = dict(dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True))
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    mxfp4 = importlib.import_module("moe_fp8_ext.integrations.mxfp4")
    return stock, mxfp4.load_mxfp4(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("models", [fp8_models, mxfp4_models])
def test_fp8_checkpoints(
    models: Callable[[Path], tuple[nn.Module, nn.Module]],
    fp8_folder: Path,
    tmp_path: Path,
    adapters: list[tuple[bool, bool]],
) -> None:
    """Against the dequantized weights with PEFT's own product."""
    stock, ours = map(layer_of, models(fp8_folder if models is fp8_models else tmp_path))
    experts = ours.experts.get_base_layer()
    assert experts.down_proj.dtype == torch.float8_e4m3fn
    convert_(ours, "blockwise")
    weights = [p.clone() for p in ours.parameters() if not p.requires_grad]
    _, ids, scores = calls()
    call = torch.randn(len(ids), experts.down_proj.shape[1]).bfloat16(), ids % fp8_checkpoints.E, scores
    assert_close(results(ours, *call), results(stock, *call), FP8)
    assert adapters == [(True, True)]
    assert all(map(torch.equal, weights, (p for p in ours.parameters() if not p.requires_grad)))
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        each(ours, lambda module: module.merge())


def test_fp8_checkpoints_without_convert_are_refused(fp8_folder: Path) -> None:
    """PEFT adds B A to FP8 values without their scales."""
    model = layer_of(fp8_checkpoints.load(fp8_folder, "moe_fp8_blockwise"))
    x = torch.randn(2, fp8_checkpoints.D).bfloat16()
    with pytest.raises(RuntimeError, match=r"adapters of gate_up_proj in FP8 must be handed over .*convert_\(model"):
        model(x, torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2))


# ---- Several adapters, merging, files --------------------------------------------------------------------------------


def model_with_adapters(implementation: str = "grouped_mm", name: str = "qwen3_moe") -> nn.Module:
    return drawn(peft.get_peft_model(tiny_model(name, implementation), lora_config()))


def converted_model(recipe: str = "bf16", name: str = "qwen3_moe") -> nn.Module:
    model = model_with_adapters("eager", name)
    convert_(model, recipe)
    return model


def two_adapters(model: Layer) -> Layer:
    peft.inject_adapter_in_model(lora_config(), model, "second")
    return drawn(model)


def each(model: nn.Module, do: Callable[[nn.Module], None]) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            do(module)


STATES = {
    "default": lambda module: module.set_adapter("default"),
    "second": lambda module: module.set_adapter("second"),
    "both": lambda module: module.set_adapter(["default", "second"]),
    "no adapter": lambda module: module.enable_adapters(False),
}


@new
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_active_adapters(name: str, state: str, adapters: list[tuple[bool, bool]]) -> None:
    call, models = calls(), [two_adapters(made) for made in (layer(name), converted(name))]
    for model in models:
        each(model, STATES[state])
    want, got = ([model(*call).detach() for model in models] for _ in range(2))
    assert_close(dict(out=got[1]), dict(out=want[0]), BF16)
    if state == "no adapter":
        assert adapters == [(False, False)] * 2
        return
    want, got = (results(model, *call) for model in models)
    assert_close(got, want, BF16)
    assert len(got) == 3 + (8 if state == "both" else 4) and adapters == [(True, True)] * 3


def test_merge_and_unmerge(adapters: list[tuple[bool, bool]]) -> None:
    call, ours = calls(), converted()
    want = ours(*call).detach()
    each(ours, lambda module: module.merge())
    assert_close(dict(out=ours(*call).detach()), dict(out=want), BF16)
    each(ours, lambda module: module.unmerge())
    assert_close(dict(out=ours(*call).detach()), dict(out=want), BF16)
    assert adapters == [(True, True), (False, False), (True, True)]


@new
def test_several_adapters_without_convert_fall_back_once() -> None:
    """PEFT then gives B A alone, not its factors."""
    call, stock, ours = calls(), two_adapters(layer()), two_adapters(layer(implementation="moe_fp8_bf16"))
    for model in (stock, ours):
        each(model, STATES["both"])
    with pytest.warns(UserWarning, match="by _LoraParameterProxy are computed as PEFT does, by W") as record:
        assert_close(results(ours, *call), results(stock, *call), BF16)
        ours(*call)
    assert len(record) == 1


def test_another_parametrization_below_the_adapter() -> None:
    """What PEFT adds to what another parametrization computed is computed so."""
    call, models = calls(), [layer(), layer(implementation="moe_fp8_bf16")]
    for model in models:
        base = model.experts.get_base_layer()
        nn.utils.parametrize.register_parametrization(base, "down_proj", Half())
    with pytest.warns(UserWarning, match="by several parametrizations are computed as PEFT does"):
        got = models[1](*call)
    assert_close(dict(out=got.detach()), dict(out=models[0](*call).detach()), BF16)


@new
def test_ranks_that_experts_do_not_take(monkeypatch: pytest.MonkeyPatch, adapters: list[tuple[bool, bool]]) -> None:
    """`experts` has a largest rank, here set to one that two adapters together exceed, and then that one does."""
    monkeypatch.setattr(integration, "MAX_RANK", 2 * RANK - 1)
    call, stock, ours = calls(), two_adapters(layer()), two_adapters(converted())
    for state in ("default", "both"):
        for model in (stock, ours):
            each(model, STATES[state])
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            assert_close(results(ours, *call), results(stock, *call), BF16)
        assert any("computed as PEFT does" in str(w.message) for w in record) == (state == "both")
    monkeypatch.setattr(integration, "MAX_RANK", RANK - 1)
    integration._warn_of_merged.cache_clear()
    for model in (stock, ours):
        each(model, STATES["default"])
    with pytest.warns(UserWarning, match="by _LoraFactorsProxy are computed as PEFT does"):
        assert_close(results(ours, *call), results(stock, *call), BF16)
    assert adapters == [(True, True), (False, False), (False, False)]


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


@new
def test_files_are_those_of_peft(tmp_path: Path) -> None:
    """An adapter that we trained loads without this package, and another way round."""
    stock, ours = model_with_adapters(), converted_model()
    for model, folder in ((stock, "stock"), (ours, "ours")):
        model.save_pretrained(tmp_path / folder)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes()
    loaded = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe", "eager"), tmp_path / "stock", is_trainable=True)
    convert_(loaded, "bf16")
    assert_same(gradients(loaded), gradients(ours))


def test_unloaded_models_stay_converted() -> None:
    model, stock = converted_model(), model_with_adapters()
    merged = stock.merge_and_unload()
    unloaded = model.merge_and_unload()
    merged.set_experts_implementation("moe_fp8_bf16")
    assert_same(gradients(unloaded.requires_grad_()), gradients(merged.requires_grad_()))
    revert_(unloaded)
    assert not any("forward" in vars(module) for module in unloaded.modules())


def test_revert() -> None:
    model, stock = converted_model(), gradients(model_with_adapters("eager"))
    revert_(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(gradients(model), stock)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    ours, call = converted(), calls()
    want = results(ours, *call)
    other = copied(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert_same(results(other, *call), want)


def test_gradient_checkpointing() -> None:
    model = converted_model("blockwise")
    want = gradients(model)
    model.gradient_checkpointing_enable()
    assert_same(gradients(model), want)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_between_forward_and_backward(way: str) -> None:
    """To torch, a parametrization of PEFT writes the weight that backward of the first call reads."""
    model, call = WAYS[way]("qwen3_moe"), calls()
    want = results(model, *call)

    @torch.no_grad()
    def between(*_: object) -> None:
        model(*call)

    model.register_full_backward_pre_hook(between)
    assert_same(results(model, *call), want)


def test_threads_that_call_the_same_experts() -> None:
    """Each call takes its own adapters, also if the other call's were handed over in between."""
    model, call = converted(), calls()
    with torch.no_grad():
        want = model(*call)
    both = threading.Barrier(2, timeout=60)
    experts = next(module for module in model.modules() if hasattr(module, "has_gate"))

    def wait(*_: object) -> None:
        both.wait()

    def run(_: int) -> Tensor:
        with torch.no_grad():
            return model(*call)

    experts.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(got, want) for got in pool.map(run, range(2)))
    assert not vars(experts)[integration._HANDED]


def test_compiles() -> None:
    """In one graph, which a parametrization of PEFT prevents."""
    torch._dynamo.reset()
    ours, call = converted(), calls()
    with torch.no_grad():
        want = ours(*call)
        assert torch.equal(torch.compile(ours, fullgraph=True, backend="aot_eager")(*call), want)


def test_a_graph_may_end_before_experts() -> None:
    """Adapters that a graph hands over are taken by an eager forward."""
    torch._dynamo.reset()
    ours, call = converted(), calls()
    experts = next(module for module in ours.modules() if "is_transposed" in vars(module))
    with torch.no_grad():
        want = ours(*call)
        experts.forward = torch.compiler.disable(experts.forward)
        assert torch.equal(torch.compile(ours, backend="aot_eager")(*call), want)
    assert not vars(experts)[integration._HANDED]


@pytest.mark.parametrize("where", ["experts", "inner wrapper"])
def test_a_graph_may_begin_behind_a_wrapper(where: str) -> None:
    """Adapters that an eager forward hands over are taken by a graph, also after adapters have changed."""
    torch._dynamo.reset()
    ours, call = converted(), calls()
    experts = next(module for module in ours.modules() if "is_transposed" in vars(module))
    want = results(ours, *call)
    (experts if where == "experts" else ours.experts.base_layer).compile(backend="eager")
    assert_same(results(ours, *call), want)
    drawn(ours, seed=2)
    assert not torch.equal(ours(*call), want["out"])
    assert not vars(experts)[integration._HANDED]


# ---- Mistakes --------------------------------------------------------------------------------------------------------


def dropout() -> None:
    layer(lora_dropout=0.1)


def fp8_without_convert() -> None:
    model = layer(implementation="moe_fp8_blockwise")
    experts = model.experts.get_base_layer()
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with model.experts.base_layer._activate_lora(["default"]):
        integration.weight(experts, "gate_up_proj")


def another_forward() -> None:
    """Another forward in place of the converted one must not lose the adapter."""
    model = converted()
    experts = model.experts.get_base_layer()
    experts.forward = type(experts).forward.__get__(experts)
    try:
        model(*calls())
    finally:
        assert not vars(experts)[integration._HANDED]


def merged_in_fp8() -> None:
    with TemporaryDirectory() as folder:
        model = fp8_checkpoints.load(fp8_checkpoints.write(Path(folder), vocab_size=SIZES["vocab_size"]))
    model = peft.get_peft_model(model, lora_config())
    convert_(model, "blockwise")
    model.merge_adapter()


def test_a_refused_merge_changes_nothing(tmp_path: Path) -> None:
    """PEFT merges one module after another. Here it would merge attention of the first layer before it fails."""
    model = fp8_checkpoints.load(fp8_checkpoints.write(tmp_path, vocab_size=SIZES["vocab_size"]))
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj"], target_parameters=EXPERTS_PARAMETERS)
    model = drawn(peft.get_peft_model(model, config))
    convert_(model, "blockwise")
    assert [module for module in model.modules() if "_check_merge_allowed" in vars(module)] == [model.base_model]
    before = gradients(model)
    for merge in (model.merge_adapter, model.merge_and_unload, copy.deepcopy(model).merge_adapter):
        with pytest.raises(RuntimeError, match="load the checkpoint dequantized to merge, or call export_fp8"):
            merge()
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert_same(gradients(model), before)
    revert_(model)
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        model.merge_adapter()


def several_without_convert() -> None:
    model = two_adapters(layer(implementation="moe_fp8_bf16"))
    each(model, STATES["both"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(*calls())


def forward_of_a_plan() -> None:
    model = layer()
    experts = model.experts.get_base_layer()
    experts.forward = lambda *call: type(experts).forward(experts, *call)
    convert_(model)


def offloaded() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    gradients(accelerate.cpu_offload(converted_model(), execution_device="cpu"))


def adapters_in_fp8() -> None:
    with TemporaryDirectory() as folder:
        model = fp8_checkpoints.load(fp8_checkpoints.write(Path(folder), vocab_size=SIZES["vocab_size"]))
    gradients(convert(peft.inject_adapter_in_model(lora_config(), model)))


MISTAKES = {
    "lora.ParamWrapper does not work with lora_dropout != 0": dropout,
    "adapters of gate_up_proj in FP8 must be handed over as factors": fp8_without_convert,
    "must take the adapter of gate_up_proj, got a forward that is not moe_fp8_ext's": another_forward,
    "adapters must not be merged into weights in FP8": merged_in_fp8,
    "are computed as PEFT does, by W + B A": several_without_convert,
    "forward must be its class's own, got another that the module itself has": forward_of_a_plan,
    "A of lora_gate_up must be on the device of x": offloaded,
    "A of lora_gate_up must be bfloat16, float16 or float32, got torch.float8_e4m3fn": adapters_in_fp8,
}


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[new] if raises is several_without_convert else []) for text, raises in MISTAKES.items()],
)
def test_mistakes(text: str) -> None:
    with pytest.raises((RuntimeError, ValueError, UserWarning), match=re.escape(text)):
        MISTAKES[text]()


def test_mistakes_of_the_page() -> None:
    page = (ROOT / "docs" / "finetuning.md").read_text().split("\n## Mistakes\n")[1]
    assert re.findall(r"^\| `([^`]+)`", page, re.M) == list(MISTAKES)


def test_experts_that_are_not_converted_keep_their_wrappers() -> None:
    model = model_with_adapters("eager")
    convert_(model, "bf16", lambda name, _: ".0." in name)
    hooked = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(hooked) == 3 and all(".0." in name for name in hooked)
    gradients(model)


# ---- docs/finetuning.md ----------------------------------------------------------------------------------------------


def test_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the blocks of the page in order. test_sft_trainer and test_fp8_checkpoint_over_ranks.py run the others."""
    tiny_model("qwen3_moe", "eager").save_pretrained(tmp_path)
    names: dict[str, object] = dict(path=tmp_path, torch=torch, prompt=dict(input_ids=torch.arange(3, 9)[None]))
    others = [block for section in ("Several GPUs", "TRL") for block in blocks("docs/finetuning.md", section)]
    start, training, attention, evaluation = (b for b in blocks("docs/finetuning.md") if b not in others)
    exec(start, names)
    assert "'blockwise'" in capsys.readouterr().out
    model = names["model"]
    trained = gradients(model)
    assert len(trained) == 2 * 2 * (4 + 2)  # A and B of 4 weights of attention and 2 of experts, in 2 layers
    parameters, products = [p for p in model.parameters() if p.requires_grad], []
    tokens = torch.arange(3, 9)[None]
    names |= dict(
        optimizer=torch.optim.AdamW(parameters), device="cpu", batches=[dict(input_ids=tokens, labels=tokens)]
    )
    factors = [factor for name, factor in model.named_modules() if name.endswith("_proj.lora_A.default")]
    hooks = [factor.register_forward_hook(lambda *call: products.append((call[1][0], call[2]))) for factor in factors]
    exec(training, names)
    assert len(products) == 2 * 4 and {t.dtype for call in products for t in call} == {torch.bfloat16}
    assert {p.dtype for p in parameters} == {torch.float32}
    for hook in hooks:
        hook.remove()
    exec(evaluation, names)
    assert names["tokens"].shape == (1, 6 + 8)
    exec(attention, names)
    other = peft.get_peft_model(tiny_model("qwen3_moe", "eager"), names["config"])
    convert_(other, "blockwise")
    assert gradients(other).keys() == {name for name in trained if "experts" not in name}
    assert model is not other


# ---- Trainers --------------------------------------------------------------------------------------------------------

STEPS = 6


def examples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, SIZES["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(1))
    return [dict(input_ids=row, labels=row) for row in tokens]


def trainer(model: nn.Module, folder: Path, **options: object) -> object:
    arguments = transformers.TrainingArguments(
        **dict(output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=3e-2),
        **dict(lr_scheduler_type="constant", use_cpu=True, logging_steps=1, report_to="none", disable_tqdm=True),
        **dict(save_steps=STEPS // 2, **options),
    )
    return transformers.Trainer(model, arguments, train_dataset=examples())


def losses(trainer: object) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@new
@pytest.mark.parametrize(("name", "bf16"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_trainer(name: str, bf16: bool, tmp_path: Path) -> None:
    """Trains as with PEFT's own product, and resumes from its checkpoint to the same losses."""
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    stock = trainer(model_with_adapters(name=name), tmp_path / "stock", save_strategy="no", bf16=bf16)
    stock.train()
    ours = trainer(converted_model("blockwise", name), tmp_path / "ours", bf16=bf16)
    ours.train()
    assert losses(stock)[-1] < 0.9 * losses(stock)[0]
    assert losses(ours) == pytest.approx(losses(stock), rel=0.02) and losses(ours) != losses(stock)
    resumed = trainer(converted_model("blockwise", name), tmp_path / "ours", bf16=bf16)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{STEPS // 2}"))
    assert losses(resumed) == losses(ours)
    assert_same(dict(resumed.model.named_parameters()), dict(ours.model.named_parameters()))


def test_sft_trainer(tmp_path: Path) -> None:
    """TRL's trainer, with gradient checkpointing. TRL and datasets are large, so the `test` extra leaves them out."""
    trl, datasets, pyarrow = (pytest.importorskip(name) for name in ("trl", "datasets", "pyarrow"))
    tokenizers = pytest.importorskip("tokenizers")
    (block,) = blocks("docs/finetuning.md", "TRL")
    words = tokenizers.models.WordLevel({str(i): i for i in range(SIZES["vocab_size"])}, unk_token="0")
    special = dict(eos_token="2", pad_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **special)
    rows = pyarrow.table({"input_ids": [row["input_ids"].tolist() for row in examples()]})
    found = {}
    for way, package in dict(stock=SimpleNamespace(convert_=lambda *args: None), ours=moe_fp8_ext).items():
        args = trl.SFTConfig(
            **dict(output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.3),
            **dict(lr_scheduler_type="constant", use_cpu=True, logging_steps=1, report_to="none", disable_tqdm=True),
            **dict(bf16=False, save_strategy="no", dataset_kwargs=dict(skip_prepare_dataset=True)),
            gradient_checkpointing=True,
        )
        # Without a fingerprint, datasets would hash the table, which not every version of dill and pyarrow can do.
        dataset = datasets.Dataset(rows, fingerprint="rows of ids")
        names = dict(trl=trl, moe_fp8_ext=package, args=args, dataset=dataset, tokenizer=tokenizer)
        names |= dict(model=tiny_model("qwen3_moe", "grouped_mm"), config=lora_config())
        exec(block, names)
        found[way] = losses(names["trainer"])
    assert found["stock"][-1] < 0.9 * found["stock"][0]
    assert found["ours"] == pytest.approx(found["stock"], rel=0.02) and found["ours"] != found["stock"]

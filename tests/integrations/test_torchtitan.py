"""The override for torchtitan, on torchtitan's models and on stand-ins for the models of its main branch."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ROOT, assert_same, blocks, full
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from moe_fp8_ext import Recipe, convert_, fp8_report, grouped_mm, revert_


def titan(name: str) -> ModuleType:
    reason = "pip install -e .[torchtitan], beside a torch newer than 2.11"
    return pytest.importorskip(f"torchtitan.{name}", reason=reason, exc_type=ImportError)


config, overrides, protocols = titan("config"), titan("config.override"), titan("protocols.module")
moe, linear, attention = titan("models.common.moe"), titan("models.common.linear"), titan("models.common.attention")
spmd_types, checker = pytest.importorskip("spmd_types"), pytest.importorskip("spmd_types.checker")
MODELS = {
    "deepseek_v3": (titan("models.deepseek_v3"), "debugmodel"),
    "qwen3": (titan("models.qwen3"), "debugmodel_moe"),
    "gpt_oss": (titan("models.gpt_oss"), "debugmodel"),
}
TRAINED = ("deepseek_v3", "qwen3")
WHOLE = "deepseek_v3"  # the model whose losses are computed at full size; the other takes a CPU two minutes
MODULE = "moe_fp8_ext.integrations.torchtitan"
OVERRIDE = f"{MODULE}.moe_fp8"
pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, SEQUENCES, LENGTH = 6, 2, 32


@config.override(target=attention.FlexAttention.Config)
def causal_attention(_: object) -> object:
    """FlexAttention has no backward on a CPU."""
    return attention.ScaledDotProductAttention.Config()


@dataclass(kw_only=True, slots=True)
class Root(config.Configurable.Config):
    """The part of a Trainer.Config that overrides see."""

    model_spec: object


def apply(root: Root, *imports: object) -> Root:
    overrides.apply_overrides(overrides.OverrideConfig(imports=list(imports)), root)
    return root


def debug_model(name: str, whole: bool = False) -> Root:
    """A debug model. Without `whole` it has two layers and smaller experts, because bfloat16 is slow on a CPU."""
    module, flavor = MODELS[name]
    if name == "gpt_oss" and torch.cuda.is_available():
        pytest.importorskip("flash_attn_interface", reason="torchtitan imports it for gpt_oss on a Hopper GPU")
    root = Root(model_spec=module.model_registry(flavor))
    if whole:
        return root
    root.model_spec.model.layers = root.model_spec.model.layers[:2]
    for experts in experts_of(root):
        experts.hidden_dim = 64
    return root


def experts_of(root: Root) -> list:
    return [experts for _, experts, _, _ in root.traverse(moe.GroupedExperts.Config)]


def build(root: Root) -> nn.Module:
    torch.manual_seed(0)
    model = apply(root, f"{__name__}.causal_attention").model_spec.model.build()
    model.init_states()
    return model


def routed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, moe.MoE)]


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.randint(2048, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    logits = model(tokens[:, :-1], torch.arange(LENGTH).expand(SEQUENCES, -1))
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def losses(name: str, recipe: str | None) -> list[float]:
    """Trains a model and returns its losses. If recipe is None, the experts are torchtitan's own."""
    root = debug_model(name, whole=name == WHOLE)
    model = build(root if recipe is None else apply(root, (OVERRIDE, {"recipe": recipe})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_losses(name, recipe):
    ours, stock = losses(name, recipe), losses(name, None)
    assert stock[-1] < 0.7 * stock[0]
    torch.testing.assert_close(ours, stock, rtol=0.01, atol=0)
    if recipe == "rowwise":
        assert ours != losses(name, "bf16")


def test_bench(monkeypatch):
    """Runs the bench on the debug model; on a GPU it measures a larger one."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    result = importlib.import_module("titan").measure(12, torch.device("cpu"))
    stock, ours = (run["losses"] for run in result["runs"])
    torch.testing.assert_close(ours, stock, rtol=0.01, atol=0)
    assert ours != stock and stock[-1] < 0.8 * stock[0]
    text = re.sub(r"\s+", " ", importlib.import_module("tables").titan_text(result))
    assert f"| {ours[0]:.4f} | " in text and "Nothing is compiled" in text
    assert "| recipe | step | products of experts |" in text
    assert ["casts to FP8" in run["us"] for run in result["runs"]] == [False, True]


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_reach_every_expert(name):
    model = build(apply(debug_model(name), OVERRIDE))
    for layer in routed(model):
        layer.router._debug_force_load_balance = True
    loss_of(model).backward()
    for layer in routed(model):
        assert layer.tokens_per_expert_E.min() > 0
        for weight in layer.routed_experts.inner_experts.parameters():
            assert weight.grad.dtype == torch.float32 and weight.grad.isfinite().all()
            assert weight.grad.flatten(1).any(1).all()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_torchtitan(name):
    stock, ours = build(debug_model(name)).state_dict(), build(apply(debug_model(name), OVERRIDE)).state_dict()
    assert list(ours) == list(stock)
    for key, value in stock.items():
        assert torch.equal(ours[key], value), key


def test_biases_of_gpt_oss():
    """The code of a subclass around its grouped matmul stays."""
    x, counts = torch.randn(50, 256), torch.tensor([22, 0, 17, 5, 0, 3, 1, 2])
    outs = []
    for root in (debug_model("gpt_oss"), apply(debug_model("gpt_oss"), (OVERRIDE, {"recipe": "bf16"}))):
        experts = routed(build(root))[0].routed_experts.inner_experts
        for bias in (experts.mlp1_bias_EG, experts.mlp2_bias_ED):
            nn.init.normal_(bias, generator=torch.Generator().manual_seed(2))
        outs.append(experts(x, counts))
    torch.testing.assert_close(*outs)


def recipes(root: Root) -> set[str | Recipe]:
    return {experts.recipe for experts in experts_of(root)}


def test_documented_commands():
    found = []
    (commands,) = blocks("docs/torchtitan.md", None, "bash")
    for command in commands.replace("\\\n", " ").splitlines():
        given = shlex.split(command.split("--override.imports")[1])
        root = apply(debug_model("qwen3"), *overrides.parse_cli_imports(given))
        found.append(routed(build(root))[0].routed_experts.inner_experts.recipe)
    assert found == [Recipe("rowwise"), Recipe("blockwise")]


def test_documented_python():
    given = SimpleNamespace(override=overrides.OverrideConfig())
    block, _ = blocks("docs/torchtitan.md")
    exec(block, {"config": given})
    root = apply(debug_model("qwen3"), *given.override.imports)
    assert recipes(root) == {Recipe("rowwise", wgrad_high_precision=True)}


def test_unknown_recipe():
    root = debug_model("qwen3")
    before = experts_of(root)
    with pytest.raises(ValueError, match=r"recipe must be .*'rowwise'.*, got 'fp7'"):
        apply(root, (OVERRIDE, {"recipe": "fp7"}))
    assert experts_of(root) == before


def test_applied_again():
    """Applied to its own result, as torchtitan's own overrides may be, it keeps the class, and the last recipe counts.
    Pickles keep the class too."""
    root = apply(debug_model("qwen3"), (OVERRIDE, {"recipe": "blockwise"}))
    first = {type(experts) for experts in experts_of(root)}
    assert len(first) == 1
    assert repr(pickle.loads(pickle.dumps(experts_of(root)))) == repr(experts_of(root))
    apply(root, OVERRIDE)
    assert {type(experts) for experts in experts_of(root)} == first and recipes(root) == {"rowwise"}


def test_only_the_config_that_it_was_applied_to():
    apply(debug_model("qwen3"), OVERRIDE)
    assert {type(experts) for experts in experts_of(debug_model("qwen3"))} == {moe.GroupedExperts.Config}


def test_compiles_in_one_graph():
    experts = routed(build(apply(debug_model("qwen3"), OVERRIDE)))[0].routed_experts.inner_experts
    x, counts = torch.randn(128, 256), torch.arange(64) % 3
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, counts), experts(x, counts))


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_passes_the_check_of_shardings(recipe, world_of_one):
    """Runs with the check that torchtitan's debug.spmd_typechecking turns on."""
    experts = experts_of(apply(debug_model("qwen3"), (OVERRIDE, {"recipe": recipe})))[0].build()
    tokens, offs = torch.randn(64, 256, dtype=torch.bfloat16), torch.arange(64, dtype=torch.int32)
    weights = experts.w1_EFD.bfloat16().transpose(-2, -1)
    with checker.typecheck(strict_mode="strict"):
        for x in (tokens, weights, offs):
            spmd_types.assert_type(x, {dist.group.WORLD: spmd_types.V})
        out = experts._grouped_mm(A=tokens, B_t=weights, offs=offs)
        assert spmd_types.has_local_type(out)


@pytest.mark.parametrize(
    ("module", "converter", "text"),
    [
        ("float8", "_get_float8_grouped_experts_cls", r"w\d_\w+ must be a Parameter, got a \w+Tensor"),
        ("mx", "_get_mxfp8_grouped_experts_cls", "must be GroupedExperts's, got MXFP8GroupedExperts's"),
    ],
)
def test_a_converter_was_first(module, converter, text):
    """One of torchtitan's converters wraps the weights, and the other replaces the method."""
    pytest.importorskip("torchao")
    converted = getattr(titan(f"components.quantization.{module}"), converter)(moe.GroupedExperts)
    root = Root(model_spec=Layers(layers=[converted.Config(dim=32, hidden_dim=32, num_experts=2)]))
    leave_out = "leave out the converter or override that brought it"
    with pytest.raises(ValueError, match=f"convert_: .*got none\n.*\n.*{text}: {leave_out}"):
        convert_(root.model_spec.layers[0].build())
    with pytest.raises(TypeError, match=f"{text}: {leave_out}"):
        apply(root, OVERRIDE).model_spec.layers[0].build()


def test_beside_another_override():
    root, other = debug_model("qwen3"), "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    with pytest.raises(ValueError, match="both claim node"):
        apply(root, OVERRIDE, other)


# Built models


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return [full(p.grad) for p in model.parameters()]


@functools.cache
def of_override(name: str, recipe: str | None) -> list[Tensor]:
    root = debug_model(name)
    return gradients(build(root if recipe is None else apply(root, (OVERRIDE, {"recipe": recipe}))))


def check_gradients(model: nn.Module, name: str, recipe: str | None) -> None:
    assert_same(gradients(model), of_override(name, recipe))


@pytest.mark.parametrize("name", TRAINED)
def test_convert(name):
    """`convert_` equals the override, also when called twice, and `revert_` restores the model."""
    model = build(debug_model(name))
    before = [dict(vars(module)) for module in model.modules()]
    for recipe in ("blockwise", "rowwise"):
        report = convert_(model, recipe)
        names = [module for module, _ in model.named_modules() if module.endswith("inner_experts")]
        assert names and report == (tuple((module, "torchtitan", Recipe(recipe)) for module in names), ())
        check_gradients(model, name, recipe)
    revert_(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    check_gradients(model, name, None)


def test_convert_after_the_override():
    model = build(apply(debug_model("qwen3"), OVERRIDE))
    convert_(model, "blockwise")
    check_gradients(model, "qwen3", "blockwise")
    revert_(model)
    check_gradients(model, "qwen3", "rowwise")


def shard(model: nn.Module) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in routed(model):
        fully_shard(layer.routed_experts.inner_experts, mesh=mesh)
    fully_shard(model, mesh=mesh)


def distribute(model: nn.Module) -> None:
    """Changes parameters and forwards as plans of expert parallelism do."""
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in routed(model):
        experts = layer.routed_experts.inner_experts
        for name, p in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        experts.forward = functools.partial(experts.forward)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("parallelize", [shard, distribute])
def test_convert_and_parallelize(parallelize, last, world_of_one):
    model, steps = build(debug_model("qwen3")), (functools.partial(convert_, recipe="blockwise"), parallelize)
    for step in reversed(steps) if last else steps:
        step(model)
    check_gradients(model, "qwen3", "blockwise")
    revert_(model)
    check_gradients(model, "qwen3", None)


def test_converted_compiles():
    experts = routed(build(debug_model("qwen3")))[0].routed_experts.inner_experts
    x, counts = torch.randn(128, 256), torch.arange(64) % 3
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    stock = compiled(x, counts)
    convert_(experts, "blockwise")
    assert torch.equal(compiled(x, counts), experts(x, counts)) and not torch.equal(experts(x, counts), stock)
    copied = copy.deepcopy(experts)
    assert torch.equal(copied(x, counts), experts(x, counts))


# torchtitan's main branch


@dataclass(kw_only=True, slots=True)
class Layers(config.Configurable.Config):
    layers: list


class StandIn(protocols.Module):
    """A module with float32 weights [E, out, in], and a method `_grouped_mm` for them."""

    @dataclass(kw_only=True, slots=True)
    class Config(protocols.Module.Config):
        group_size: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.group_size, 48, 32))


def stand_in(method: Callable | None) -> type:
    class GroupedLinear(StandIn):
        @dataclass(kw_only=True, slots=True)
        class Config(StandIn.Config):
            pass

    if method is not None:
        GroupedLinear._grouped_mm = method
    return GroupedLinear


def of_experts(self, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(A, weight_EOI.bfloat16().transpose(-2, -1), offs=offs)


def of_grouped_linear(self, *, input_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    return torch._grouped_mm(input_RI, weight_EOI.bfloat16().transpose(-2, -1), offs=offsets_E)


def of_stacked(self, *, input_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Computes as `of_grouped_linear`. It is a second function, because the classes must not share a method."""
    return torch._grouped_mm(input_RI, weight_EOI.bfloat16().transpose(-2, -1), offs=offsets_E)


class Stacked(protocols.Module):
    """`GroupedLinear` as of September 2026, without its regions of torch's remat: weights keep an axis of projections,
    and `_grouped_mm` gets a view without it."""

    @dataclass(kw_only=True, slots=True)
    class Config(protocols.Module.Config):
        group_size: int
        num_linears: int = 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        stacked = () if config.num_linears == 1 else (config.num_linears,)
        self.weight = nn.Parameter(torch.randn(config.group_size, *stacked, 48, 32))

    def forward(self, input_RI: Tensor, offsets_E: Tensor) -> Tensor:
        weight, shape = self.weight.flatten(1, -2), self.weight.shape[1:-1]
        out = self._grouped_mm(input_RI=input_RI, weight_EOI=weight, offsets_E=offsets_E)
        return out.reshape(*out.shape[:-1], *shape)

    _grouped_mm = of_stacked


def fourth(self, *, rows: Tensor, weight: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.fixture
def newer(monkeypatch):
    """Replaces torchtitan's class, as if the override had not been imported before."""

    def put(module: ModuleType, name: str, owner: type) -> Root:
        monkeypatch.setattr(module, name, owner, raising=False)
        return Root(model_spec=Layers(layers=[owner.Config(group_size=3), owner.Config(group_size=3)]))

    monkeypatch.setattr(overrides, "_REGISTRY", {})
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return put


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [(moe, "GroupedExperts", of_experts), (linear, "GroupedLinear", of_grouped_linear)],
)
def test_newer_signatures(newer, module, name, method):
    root = apply(newer(module, name, stand_in(method)), OVERRIDE)
    experts = root.model_spec.layers[1].build()
    x, offs = torch.randn(40, 32, dtype=torch.bfloat16), torch.tensor([11, 11, 40], dtype=torch.int32)
    names = list(method.__annotations__)[:3]
    out = experts._grouped_mm(**dict(zip(names, (x, experts.weight, offs), strict=True)))
    assert torch.equal(out, grouped_mm(x, experts.weight.bfloat16().transpose(-2, -1), offs))
    built = newer(module, name, stand_in(method)).model_spec.layers[1].build()
    built.load_state_dict(experts.state_dict())
    assert [row.recipe for row in fp8_report(experts).running] == [Recipe("rowwise")]
    assert [why for _, why in fp8_report(built).others] == ["no override of this package, and not converted"]
    assert [kind for _, kind, _ in convert_(built).converted] == ["torchtitan"]
    assert [row.kind for row in fp8_report(built).running] == ["torchtitan"]
    assert torch.equal(built._grouped_mm(**dict(zip(names, (x, built.weight, offs), strict=True))), out)
    out.sum().backward()
    assert experts.weight.grad.dtype == torch.float32
    assert experts.weight.grad.flatten(1).any(1).tolist() == [True, False, True]
    stock = method(experts, **dict(zip(names, (x, experts.weight, offs), strict=True)))
    assert (out - stock).norm() < 0.06 * stock.norm()


@pytest.fixture
def transforms(monkeypatch) -> ModuleType:
    """A stand-in for torchtitan.config.transform of its main branch."""
    module = ModuleType("torchtitan.config.transform")

    class ModelConfigTransform(ABC):
        @abstractmethod
        def transform(self, model: object, *, context: object = None) -> object: ...

    def apply_transforms(config: Root, transforms: list[ModelConfigTransform]) -> Root:
        config = copy.deepcopy(config)
        for transform in transforms:
            config.model_spec = transform.transform(config.model_spec, context=None)
        return config

    module.ModelConfigTransform, module.apply_transforms = ModelConfigTransform, apply_transforms
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("num_linears", [1, 2])
@pytest.mark.parametrize("by_transform", [False, True])
def test_stacked_projections(by_transform, num_linears, newer, transforms):
    """The newest `GroupedLinear`, by the override and by the transform. A config with fields that this package does not
    know keeps them."""
    root = newer(linear, "GroupedLinear", Stacked)
    model = Layers(layers=[Stacked.Config(group_size=3, num_linears=num_linears)])
    if by_transform:
        transform = importlib.import_module(MODULE).MoeFp8Transform(recipe="blockwise")
        assert isinstance(transform, transforms.ModelConfigTransform)
        assert transform.transform(model, context=object()) is model
    else:
        root.model_spec = model
        apply(root, (OVERRIDE, {"recipe": "blockwise"}))
    built = model.layers[0].build()
    x, offs = torch.randn(40, 32, dtype=torch.bfloat16), torch.tensor([11, 11, 40], dtype=torch.int32)
    out, weight = built(x, offs), built.weight.bfloat16().flatten(1, -2)
    shape = (40, 48) if num_linears == 1 else (40, 2, 48)
    assert torch.equal(out, grouped_mm(x, weight.mT, offs, recipe="blockwise").view(shape))
    out.sum().backward()
    assert built.weight.grad.shape == built.weight.shape and built.weight.grad.flatten(1).any(1).sum() == 2


def test_documented_transform(newer, transforms):
    newer(linear, "GroupedLinear", Stacked)
    given = {"config": Root(model_spec=Layers(layers=[Stacked.Config(group_size=3)]))}
    _, block = blocks("docs/torchtitan.md")
    exec(block, given)
    assert given["config"].model_spec.layers[0].recipe == "rowwise"


def test_transform_of_a_root(newer, transforms):
    newer(linear, "GroupedLinear", Stacked)
    titan = importlib.import_module(MODULE)
    changed = titan.MoeFp8Transform().transform(Stacked.Config(group_size=3))
    assert type(changed.build()).__name__ == "MoeFp8Stacked"
    with pytest.raises(ValueError, match=r"recipe must be .*'rowwise'.*, got 'fp7'"):
        titan.MoeFp8Transform(recipe="fp7").transform(Stacked.Config(group_size=3))


def test_lora_around_the_transform(newer, transforms):
    """An adapter of torchtitan wraps `_grouped_mm` by a mixin. Around our class it adds to our product; below it, it
    would be lost, so that raises."""
    newer(linear, "GroupedLinear", Stacked)
    titan = importlib.import_module(MODULE)

    class Mixin:
        def _grouped_mm(self, *, input_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
            return 1 + super()._grouped_mm(input_RI=input_RI, weight_EOI=weight_EOI, offsets_E=offsets_E)

    def wrapped(owner: type) -> type:
        class LoRA(Mixin, owner):
            @dataclass(kw_only=True, slots=True)
            class Config(owner.Config):
                pass

        return LoRA

    ours = type(titan.MoeFp8Transform().transform(Stacked.Config(group_size=3)))
    built = wrapped(ours._owner).Config(group_size=3, recipe="rowwise").build()
    x, offs = torch.randn(40, 32, dtype=torch.bfloat16), torch.tensor([11, 11, 40], dtype=torch.int32)
    assert torch.equal(built(x, offs), 1 + grouped_mm(x, built.weight.bfloat16().mT, offs))
    with pytest.raises(TypeError, match="_grouped_mm must be Stacked's, got Mixin's: leave out"):
        titan.MoeFp8Transform().transform(wrapped(Stacked).Config(group_size=3))


@pytest.mark.parametrize(("method", "got"), [(fourth, r"\(rows, weight\)"), (None, "no such method")])
def test_unknown_signature(newer, method, got):
    root = newer(linear, "GroupedLinear", stand_in(method))
    before = list(root.model_spec.layers)
    known = r"\(A, B_t, offs\) or \(A, weight_EOI, offs\) or \(input_RI, weight_EOI, offsets_E\)"
    with pytest.raises(TypeError, match=f"_grouped_mm of GroupedLinear must take {known}, got {got} with torchtitan"):
        apply(root, OVERRIDE)
    if method is not None:
        with pytest.raises(ValueError, match=f"GroupedLinear must take {known}, got {got} with torchtitan"):
            convert_(root.model_spec.layers[0].build())
    assert all(now is then for now, then in zip(root.model_spec.layers, before, strict=True))


def test_torchtitan_without_overrides(newer, monkeypatch):
    root = newer(linear, "GroupedLinear", stand_in(of_grouped_linear))
    monkeypatch.delattr(config, "override")
    monkeypatch.setitem(sys.modules, "torchtitan.config.override", None)
    with pytest.raises(ImportError, match="torchtitan must have overrides and GroupedExperts, as 0.3.0 has"):
        apply(root, OVERRIDE)

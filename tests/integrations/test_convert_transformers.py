"""convert_ on models of Transformers. It equals `experts_implementation`, and works whatever that is set to."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from helpers import blocks, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers_models import (
    DIM,
    LAYOUTS,
    assert_same,
    calls,
    experts_of,
    gradients,
    results,
    tiny_model,
    transformers,
)

import moe_fp8_ext
from moe_fp8_ext import Recipe, convert_, revert_

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def converted(name: str = "qwen3_moe", recipe: str = "blockwise") -> nn.Module:
    model = tiny_model(name, "eager")
    convert_(model, recipe)
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_is_the_implementation(name):
    """For every layout; and `revert_` restores the module."""
    experts, call = experts_of(name), calls()
    experts.config._experts_implementation = "moe_fp8_blockwise"
    want = results(experts, *call)
    experts.config._experts_implementation = "grouped_mm"
    before, stock = dict(vars(experts)), results(experts, *call)
    report = convert_(experts, "blockwise")
    assert report == ((("", "transformers", Recipe("blockwise")),), ())
    assert_same(results(experts, *call), want)
    revert_(experts)
    assert vars(experts) == before
    assert_same(results(experts, *call), stock)


def test_whatever_the_config_says():
    model = tiny_model("qwen3_moe", "moe_fp8_blockwise")
    want, config = gradients(model), copy.deepcopy(model.config)
    report = convert_(model, "bf16")
    assert [name for name, _, _ in report.converted] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert convert_(model, "blockwise", lambda name, _: "1" in name).left == (
        ("model.layers.0.mlp.experts", "filter said no"),
    )
    assert model.config.to_dict() == config.to_dict()
    model.set_experts_implementation("moe_fp8_bf16")  # the first layer was converted to this too
    mixed = gradients(model)
    convert_(model, "blockwise")
    assert_same(gradients(model), want)
    assert not torch.equal(mixed["model.embed_tokens.weight"], want["model.embed_tokens.weight"])
    revert_(model)
    model.set_experts_implementation("moe_fp8_blockwise")
    assert_same(gradients(model), want)


@pytest.mark.parametrize("name", ["mixtral", "muse_spark_text"])
def test_compiles(name):
    """A compiled module is compiled again after `convert_`: with one call of `experts`, and with the model's code
    between two products."""
    torch._dynamo.reset()
    experts, call = experts_of(name), calls()
    experts.config._experts_implementation = "moe_fp8_rowwise"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    compiled(*call)
    for recipe in ("blockwise", "mxfp8"):
        convert_(experts, recipe)
        assert_same(dict(out=compiled(*call).detach()), dict(out=experts(*call).detach()))
        experts.config._experts_implementation = f"moe_fp8_{recipe}"


def test_gradient_checkpointing():
    model = converted()
    want = gradients(model)
    model.gradient_checkpointing_enable()
    assert_same(gradients(model), want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied):
    """Copies compute with their own parameters, and can be reverted without the original."""
    model = converted()
    want = gradients(model)
    other = copied(model)
    assert_same(gradients(other), want)
    for p in model.parameters():
        nn.init.zeros_(p)
    assert_same(gradients(other), want)
    revert_(other)
    assert not any("forward" in vars(module) for module in other.modules())
    assert any("forward" in vars(module) for module in model.modules())


def test_saved_and_loaded(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    convert_(loaded, "blockwise")
    assert_same(gradients(loaded), gradients(model))


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def convert(model: nn.Module) -> None:
    convert_(model, "blockwise")


@pytest.mark.parametrize("steps", [(shard, convert), (convert, shard)], ids=["shard first", "convert first"])
def test_fsdp(steps):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    want, model = gradients(converted()), tiny_model("qwen3_moe", "eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in steps:
            step(model)
        assert_same({name: full(grad) for name, grad in gradients(model).items()}, want)
        revert_(model)
        assert type(model.model.layers[0].mlp.experts).__name__ == "FSDPQwen3MoeExperts"
        stock = gradients(tiny_model("qwen3_moe", "eager"))
        assert_same({name: full(grad) for name, grad in gradients(model).items()}, stock)
    finally:
        dist.destroy_process_group()


def refused(model: nn.Module) -> str:
    """Returns the reason why nothing in a model is converted, and checks that nothing has changed."""
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match="^convert_: model must have .*, got none\n") as info:
        convert_(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    return str(info.value)


def test_quantized_experts():
    experts = experts_of("mixtral")
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.uint8), requires_grad=False)
    assert "down_proj must be bfloat16, float16 or float32, got torch.uint8" in refused(experts)
    experts.down_proj_packed = experts._parameters.pop("down_proj")
    assert "down_proj must be a tensor, got none" in refused(experts)


def test_subclasses():
    """A subclass is converted only if it has the marked forward."""
    experts, call = experts_of("mixtral"), calls()

    class Same(type(experts)):
        pass

    class Other(type(experts)):
        def forward(self, *call: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(*call)

    convert_(experts, "blockwise")
    want = results(experts, *call)
    fresh = experts_of("mixtral")
    fresh.load_state_dict(experts.state_dict())
    fresh.__class__ = Same
    assert "forward" not in vars(fresh)
    convert_(fresh, "blockwise")
    assert_same(results(fresh, *call), want)
    revert_(fresh)
    fresh.__class__ = Other
    assert "the forward of Other is not known" in refused(fresh)


def test_forward_of_the_module_itself():
    """Plans of expert parallelism set such a forward. They must run after `convert_`: `revert_` would drop it."""
    experts = experts_of("mixtral")
    original = experts.forward
    experts.forward = lambda *call: original(*call)
    assert "forward must be its class's own, got another that the module itself has" in refused(experts)
    del experts.forward
    convert_(experts)
    converted = experts.forward
    experts.forward = lambda *call: converted(*call)
    assert "forward of MixtralExperts must be what convert_ put there, got another" in refused(experts)
    with pytest.raises(RuntimeError, match="forward of MixtralExperts must be what convert_ put there"):
        revert_(experts)
    experts.forward = converted
    revert_(experts)


def test_version_that_is_not_known(monkeypatch):
    experts = experts_of("mixtral")  # the first model that Transformers imports sets the version again
    monkeypatch.setattr("transformers.__version__", "6.1.0")
    assert "5.17.0, 5.23.0 and 5.24.0 are known to work, found 6.1.0" in refused(experts)


def replica(module: nn.Module, device: str) -> nn.Module:
    """Makes a replica as torch.nn.DataParallel does, with weights of zeros."""
    made = module._replicate_for_data_parallel()
    for name, p in module.named_parameters():
        setattr(made, name, torch.zeros_like(p, device=device))
    return made


def test_replicas_of_data_parallel():
    """With the implementation, replicas compute with their weights. A converted forward belongs to one module, and
    raises in a replica."""
    experts, call = experts_of("mixtral"), calls()
    experts.config._experts_implementation = "moe_fp8"
    assert not replica(experts, "cpu")(*call).any()
    convert_(experts)
    with pytest.raises(RuntimeError, match="w_gate_up must be on the device of x, meta, got cpu"):
        replica(experts, "meta")(*(t.to("meta") for t in call))


def test_parameters_that_change_with_the_module():
    """After torch.func or to(), the forward uses the current parameters of the module."""
    experts, call = experts_of("mixtral"), calls()
    convert_(experts, "bf16")
    zeros = {name: torch.zeros_like(p) for name, p in experts.named_parameters()}
    assert not torch.func.functional_call(experts, zeros, call).any()
    experts.to(torch.float32)
    assert results(experts, *call)["down_proj"].dtype == torch.float32


def test_documents(capsys):
    """Runs the blocks of docs/transformers.md, and compares the table that it shows."""
    model = tiny_model("qwen3_moe", "eager")
    (use, recipe), (table,) = (
        blocks("docs/transformers.md", "Convert a model in place"),
        blocks("docs/transformers.md", "Convert a model in place", "text"),
    )
    before = [dict(vars(module)) for module in model.modules()]
    names = dict(moe_fp8_ext=moe_fp8_ext, torch=torch, model=model)
    exec(use, names)
    assert capsys.readouterr().out == table
    assert [dict(vars(module)) for module in model.modules()] == before
    exec(recipe, names)
    mine = Recipe("mxfp8", grad_dtype=torch.float8_e5m2)
    assert [layer.mlp.experts.forward.args[0] for layer in model.model.layers] == [mine, mine]


def test_beside_other_experts():
    model = nn.Sequential(experts_of("mixtral"), moe_fp8_ext.Experts(2, DIM, DIM))
    assert [kind for _, kind, _ in convert_(model).converted] == ["transformers", "moe_fp8_ext"]

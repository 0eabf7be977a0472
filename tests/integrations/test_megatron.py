"""Megatron-Core's GPT with experts of this package, beside its own SequentialMLP, over processes with gloo."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from helpers import ROOT, assert_same, assert_same_tensor, blocks
from processes import NEEDS_GLOO, in_processes
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional

from moe_fp8_ext import Recipe, reuse_weights

if importlib.util.find_spec("megatron") is None:
    pytest.skip("pip install megatron-core==0.16.1", allow_module_level=True)

pytestmark = NEEDS_GLOO
MODULE = "moe_fp8_ext.integrations.megatron"
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory) -> Iterator[None]:
    """A group of this process alone. The modules that need Megatron are imported in here, and not where tests are
    collected: that takes seconds."""
    from megatron_on_cpu import megatron_on_cpu

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def layer_of(experts: object, seed: int = 0, **options: object) -> nn.Module:
    """An MoE layer with the experts of a spec. None stands for SequentialMLP."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron_on_cpu import EXPERTS, config_of

    own = get_moe_module_spec(use_te=False, num_experts=EXPERTS).submodules
    torch.manual_seed(seed)
    submodules = own if experts is None else replace(own, experts=experts)
    return MoELayer(config_of(**options), submodules, layer_number=1)


def tokens(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(16, 2, 64, generator=g).bfloat16() for _ in range(2))


def stacked(experts: nn.Module, linear: str, name: str) -> list[Tensor | None]:
    """A parameter of all experts, and its gradient."""
    of_all = [getattr(getattr(expert, linear), name) for expert in experts.local_experts]
    if of_all[0] is None:
        return [None, None]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in of_all]
    return [torch.stack([p.detach() for p in of_all]), torch.stack(grads)]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


from_gelu = dict(gated_linear_unit=False, activation_func=functional.gelu)
LAYERS = {
    "swiglu": {},
    "biases": dict(add_bias_linear=True),
    "gelu": from_gelu,
    "probs_on_input": dict(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True),
    "allgather": dict(moe_token_dispatcher_type="allgather"),
    "padded": dict(
        moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True, moe_router_load_balancing_type="aux_loss"
    ),
    "probabilities_in_float32": dict(moe_router_dtype="fp32"),
    "fine": dict(moe_grouped_gemm=True, moe_permute_fusion=False, num_moe_experts=4),
}
# A BF16 rounding is at most 2^-9 of a value. Each result is behind at most ten: of h, a, y, their gradients, and of
# sums over slots. Eight bits of E4M3 round by up to 2^-4, by 0.026 in the root mean square. A product has two such
# operands, and gradients of weights are behind two products and a gradient: six roundings, 0.064.
LIMITS = {"bf16": 10 * 2**-9, "rowwise": 0.1, "blockwise": 0.1}


@pytest.mark.parametrize("recipe", LIMITS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_that_of_sequential_mlp(name, recipe):
    from moe_fp8_ext.integrations.megatron import spec

    options = LAYERS[name]
    theirs = layer_of(None, **{k: v for k, v in options.items() if k != "moe_grouped_gemm"})
    ours = layer_of(spec(recipe), **options)
    for expert in theirs.experts.local_experts:  # as over several ranks; alone, 0.16.1 fails where it adds the bias
        expert.linear_fc2.explicit_expert_comm = True
    generator = torch.Generator().manual_seed(3)
    for linear in ("linear_fc1", "linear_fc2"):
        mine = getattr(ours.experts, linear)
        assert_same_tensor(mine.weight.detach(), stacked(theirs.experts, linear, "weight")[0], f"initial {linear}")
        if mine.bias is not None:
            with torch.no_grad():
                mine.bias.copy_(torch.randn(mine.bias.shape, generator=generator))
                for of_expert, bias in zip(theirs.experts.local_experts, mine.bias, strict=True):
                    getattr(of_expert, linear).bias.copy_(bias)
    results = []
    x, grad = tokens()
    for layer in (theirs, ours):
        h = x.clone().requires_grad_()
        out, bias = layer(h)
        assert bias is None
        out.backward(grad)
        results.append(dict(out=out.detach(), x=h.grad, router=layer.router.weight.grad))
    for linear in ("linear_fc1", "linear_fc2"):
        for parameter in ("weight", "bias"):
            results[0][f"{linear}.{parameter}"] = stacked(theirs.experts, linear, parameter)[1]
            mine = getattr(getattr(ours.experts, linear), parameter)
            results[1][f"{linear}.{parameter}"] = None if mine is None else mine.grad
    for what, want in results[0].items():
        if want is not None and want.any():
            assert relative(results[1][what], want) < LIMITS[recipe], what


def test_latent_experts_have_the_latent_width():
    """Megatron's layer around them needs TransformerEngine."""
    from megatron_on_cpu import EXPERTS, config_of

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP

    made = MoeFp8GroupedMLP(EXPERTS, config_of(moe_latent_size=48))
    assert made.linear_fc1.weight.shape == (EXPERTS, 64, 48) and made.linear_fc2.weight.shape == (EXPERTS, 48, 32)
    out, bias = made(torch.randn(9, 48).bfloat16(), torch.tensor([3, 0, 6, 0, 0, 0, 0, 0]), torch.ones(9))
    assert out.shape == (9, 48) and out.any() and bias is None
    empty, _ = made(torch.randn(0, 48).bfloat16(), torch.zeros(EXPERTS, dtype=torch.int64), torch.ones(0))
    assert empty.shape == (0, 48)


def te_names(experts: nn.Module) -> dict[str, Tensor]:
    """The state of a SequentialMLP under the names of TEGroupedMLP."""
    out = {}
    for key, value in experts.state_dict().items():
        _, expert, linear, name = key.split(".")
        out[f"{linear}.{name}{expert}"] = value
    return out


def test_state_dicts_of_all_kinds_load():
    from moe_fp8_ext.integrations.megatron import spec

    theirs = layer_of(None, seed=1, add_bias_linear=True).experts
    ours = [layer_of(spec(), seed=0, add_bias_linear=True).experts for _ in range(3)]
    ours[0].load_state_dict(theirs.state_dict())
    ours[1].load_state_dict(te_names(theirs))
    ours[2].load_state_dict(ours[0].state_dict())
    want = {k: v for k, v in te_names(theirs).items() if "_extra_state" not in k}
    for experts in ours:
        got = experts.state_dict()
        assert sorted(got) == sorted(want)
        assert_same([got[k] for k in want], list(want.values()))
    broken = {k: v for k, v in want.items() if k != "linear_fc1.weight3"}
    with pytest.raises(RuntimeError, match='Missing key.*"linear_fc1.weight"'):
        ours[0].load_state_dict(broken)


def shards(entries: dict[str, object]) -> dict[tuple, tuple]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    found = {}
    for entry in entries.values():
        made = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for shard in made:
            if isinstance(shard, ShardedTensor):
                place = shard.global_shape, shard.local_shape, shard.axis_fragmentations, shard.prepend_axis_num
                found[shard.key, shard.global_offset] = *place, shard.replica_id, shard.data.float().sum().item()
            else:
                assert isinstance(shard, ShardedObject)
                found[shard.key, shard.global_offset] = shard.global_shape, shard.replica_id, shard.data
    return found


def shards_of_layer(experts: object, single: bool, offsets: tuple = (), **options: object) -> dict[tuple, tuple]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": single, "dp_cp_group": group}
    return shards(layer_of(experts, **options).experts.sharded_state_dict("mlp.experts.", offsets, metadata))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_shards_equal_those_of_sequential_mlp(single, bias):
    """Key, offset, shape, replica and sum of every shard, with keys of single experts or with an axis of experts."""
    from moe_fp8_ext.integrations.megatron import spec

    for offsets in ((), ((0, 1, 3),)):
        theirs, ours = (shards_of_layer(e, single, offsets, add_bias_linear=bias) for e in (None, spec()))
        assert theirs == ours
        assert len(theirs) == 8 * (5 + 3 * bias)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_main_gradients_are_the_gradients_of_autograd(overlap, distributed):
    """In recipe "bf16" a product is rounded once before it is added, with a main gradient and without. Two backwards
    of a step add up, and hooks run in both."""
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import convert

    found = []
    for main_grad in (False, True):
        made = Trained(convert(local_spec(), "bf16", main_grad=main_grad), overlap=overlap, distributed=distributed)
        made.ddp.zero_grad_buffer()
        with made.ddp.no_sync():
            made.loss(0).backward()
        made.loss(1).backward()
        made.ddp.finish_grad_sync()
        found.append({name: p.main_grad.clone() for name, p in made.model.named_parameters()})
        for name, p in made.model.named_parameters():
            assert p.grad is None
            assert p.grad_added_to_main_grad == (main_grad and "experts" in name)
            assert p.main_grad.any()
    assert_same(list(found[1].values()), list(found[0].values()))


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_accumulation_fusion_chooses(fused):
    """Megatron's own linear layers ask for APEX with this option, so it is set after they are made."""
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import convert, spec

    made = Trained(convert(local_spec(), "rowwise"))
    for layer in made.model.decoder.layers:
        experts = layer.mlp.experts
        layer.mlp.experts = type(experts)(8, replace(experts.config, gradient_accumulation_fusion=fused))
        assert layer.mlp.experts.adds_to_main_grad == fused
    assert spec(main_grad=False).params["main_grad"] is False


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_delayed_gradients_are_the_same(overlap, main_grad):
    """Two backwards, whose gradients of weights are computed in between and at the end, as Megatron's schedules do.
    Those need a GPU. The option is set behind the back of the config, which asks for them."""
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import convert

    found = []
    for delayed in (False, True):
        spec = convert(local_spec(), "rowwise", main_grad=main_grad)
        made = Trained(spec, overlap=overlap, delayed=delayed)
        experts = [layer.mlp for layer in made.model.decoder.layers]
        made.ddp.zero_grad_buffer()
        with made.ddp.no_sync():
            made.loss(0).backward()
            if delayed:
                assert [mlp.experts.delayed.waiting for mlp in experts] == [1, 1]
                weights = [w for mlp in experts for w in (mlp.experts.linear_fc1.weight, mlp.experts.linear_fc2.weight)]
                assert not any(w.main_grad.any() or w.grad is not None for w in weights)
            for mlp in experts:
                mlp.backward_dw()
        made.loss(1).backward()
        for mlp in experts[::-1]:
            mlp.backward_dw()
        made.ddp.finish_grad_sync()
        found.append([p.main_grad.clone() for p in made.model.parameters()])
        assert all(p.grad is None for p in made.model.parameters())
    assert_same(found[1], found[0])
    made.ddp.module.decoder.layers[0].mlp.experts.hooks_of_ddp.clear()
    text = f"{MODULE}: delay_wgrad_compute must be True in DistributedDataParallelConfig too, got False"
    with pytest.raises(RuntimeError, match=f"^{text}; DDP would wait for gradients that come later$"):
        experts[0].backward_dw()


RECOMPUTE = {
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "moe_act": dict(recompute_granularity="selective", recompute_modules=["moe_act"], moe_grouped_gemm=True),
    "several": dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputing_changes_nothing(name, delayed):
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import convert

    found = []
    for options in ({}, RECOMPUTE[name]):
        made = Trained(convert(local_spec(), "rowwise", main_grad=True), delayed=delayed, **options)
        made.ddp.zero_grad_buffer()
        loss = made.loss(0)
        loss.backward()
        for layer in made.model.decoder.layers:
            waits = re.search(r"delayed=DelayedWgrads\(waiting=1, nbytes=(\d+)\)", str(layer.mlp.experts))
            assert (waits is not None and int(waits[1]) > 0) == delayed
            layer.mlp.backward_dw()
        made.ddp.finish_grad_sync()
        found.append([loss.detach(), *(p.main_grad for p in made.model.parameters())])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", ["bf16", "rowwise", "blockwise", "mxfp8", "auto"])
def test_the_spec_of_the_command_line(name):
    """`--spec MODULE NAME` is read as here, and given to the model."""
    from megatron.core.transformer.spec_utils import import_module
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP, convert

    (command,) = blocks("docs/megatron.md", None, "bash")
    assert shlex.split(command)[-3:] == ["--spec", MODULE, "rowwise"]
    made = Trained(import_module((MODULE, name)), moe_layer_freq=[1, 0])
    moe, dense = made.model.decoder.layers
    assert type(moe.mlp.experts) is MoeFp8GroupedMLP and moe.mlp.experts.options["recipe"].name == name
    assert not hasattr(dense.mlp, "experts")
    assert [layer.layer_number for layer in (moe, dense)] == [1, 2]
    want = Trained(convert(local_spec(), name), num_layers=1)
    assert type(moe) is type(want.model.decoder.layers[0])
    assert moe.mlp.state_dict().keys() == want.model.decoder.layers[0].mlp.state_dict().keys()


def test_blocks_of_the_page():
    """NeMo and Bridge are stand-ins, each with the name that its block imports. They call a function with a config."""
    from megatron_on_cpu import LENGTH, VOCABULARY, config_of, local_spec

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP

    def layer_spec(config, vp_stage=None):
        assert config.transformer_layer_spec
        return local_spec()

    providers = [SimpleNamespace(transformer_layer_spec=layer_spec) for _ in range(2)]
    llm = SimpleNamespace(Qwen3Config30B_A3B=lambda: providers[0])
    bridge = SimpleNamespace(to_megatron_provider=lambda load_weights: providers[1])
    auto_bridge = SimpleNamespace(from_hf_pretrained=lambda name: bridge)
    packages = {
        "nemo": ModuleType("nemo"),
        "nemo.collections": SimpleNamespace(llm=llm),
        "megatron.bridge": SimpleNamespace(AutoBridge=auto_bridge),
    }
    names = dict(config=config_of(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    with patch.dict(sys.modules, packages):
        for block in blocks("docs/megatron.md"):
            exec(block, names)
    made = [layer.mlp.experts for layer in names["model"].decoder.layers] + [names["layer"].experts]
    assert [type(experts) for experts in made] == 3 * [MoeFp8GroupedMLP]
    assert [experts.options["recipe"].name for experts in made] == ["rowwise", "rowwise", "blockwise"]
    for provider in providers:
        assert list(inspect.signature(provider.transformer_layer_spec).parameters) == ["config", "vp_stage"]
        made = provider.transformer_layer_spec(provider, vp_stage=0)
        assert made.submodules.mlp.submodules.experts.module is MoeFp8GroupedMLP


@pytest.mark.skipif(not importlib.util.find_spec("megatron.bridge"), reason="pip install --no-deps megatron-bridge")
def test_a_provider_of_megatron_bridge(monkeypatch):
    """Its package imports TransformerEngine. The module of the provider does not."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron_on_cpu import LENGTH, VOCABULARY, config_of

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP, convert

    (folder,) = importlib.util.find_spec("megatron.bridge").submodule_search_locations
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.utils"):
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[2:]))]
        monkeypatch.setitem(sys.modules, name, package)
    gpt = importlib.import_module("megatron.bridge.models.gpt_provider")
    names = {field.name for field in fields(gpt.GPTModelProvider) if field.init}
    config = {name: value for name, value in vars(config_of(num_layers=1)).items() if name in names}
    provider = gpt.GPTModelProvider(**config, vocab_size=VOCABULARY, seq_length=LENGTH)
    provider.transformer_layer_spec = convert(gpt.local_layer_spec, "blockwise")
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    experts = provider.provide().decoder.layers[0].mlp.experts
    assert type(experts) is MoeFp8GroupedMLP and experts.options["recipe"].name == "blockwise"


def test_convert_copies():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron_on_cpu import config_of, local_spec

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP, convert

    layer = local_spec()
    made = convert(layer, Recipe("blockwise"), keep="bf16")
    assert layer.submodules.mlp.submodules.experts.module is SequentialMLP
    experts = made.submodules.mlp.submodules.experts
    assert experts.module is MoeFp8GroupedMLP
    assert experts.params == {"recipe": Recipe("blockwise"), "keep": "bf16", "main_grad": None}
    assert made.submodules.self_attention == layer.submodules.self_attention
    block = convert(get_gpt_decoder_block_spec(config_of(moe_layer_freq=[0, 1]), False, "RMSNorm"))
    dense, moe = block.layer_specs
    assert moe.submodules.mlp.submodules.experts.module is MoeFp8GroupedMLP
    assert dense == get_gpt_decoder_block_spec(config_of(moe_layer_freq=[0, 1]), False, "RMSNorm").layer_specs[0]
    text = f"{MODULE}: layer_spec must have an MoE layer, whose spec has a MoESubmodules, got a ModuleSpec without one"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}; was it made with num_experts\\?$"):
        convert(get_gpt_layer_local_spec())
    with pytest.raises(ValueError, match="rowise"):
        convert(layer, "rowise")
    with pytest.raises(RuntimeError, match="keep must be 'fp8' or 'bf16', got 'bf8'"):
        convert(layer, keep="bf8")


_ACTIVATION = (
    "config.activation_func must be one of fast_gelu, gelu, quick_gelu, silu, squared_relu as ops.activate defines it, "
    "got {} with gated_linear_unit=True, glu_linear_offset=0.0, clamp={}"
)
_GRAPH = (
    "config.cuda_graph_scope must leave out the experts, because the dispatcher waits for the device, got {}; a "
    "constant capacity is an exception: moe_pad_expert_input_to_capacity, with dispatcher alltoall or hybridep"
)
MISTAKES = [
    (
        dict(fp8="hybrid"),
        "config.fp8 must be None, because these experts quantize by their own recipe, got 'hybrid'; leave out "
        "--fp8-format, or use Megatron's own experts",
    ),
    (
        dict(offload_modules=["moe_act", "core_attn"], fine_grained_activation_offloading=True),
        "config.offload_modules must have no module inside of the experts, got moe_act; what they keep for backward is "
        "in FP8 already",
    ),
    (dict(moe_apply_probs_on_input=True), "config.moe_router_topk must be 1 with moe_apply_probs_on_input, got 2"),
    (
        dict(cuda_graph_impl="local", cuda_graph_scope=[]),
        _GRAPH.format("whole layers with cuda_graph_impl='local'"),
    ),
    (
        dict(cuda_graph_impl="transformer_engine", cuda_graph_scope=[], moe_pad_expert_input_to_capacity=True)
        | dict(moe_token_dispatcher_type="allgather"),
        _GRAPH.format("whole layers with cuda_graph_impl='transformer_engine'"),
    ),
    (
        dict(cuda_graph_impl="local", cuda_graph_scope=[], moe_pad_expert_input_to_capacity=True)
        | dict(delay_wgrad_compute=True),
        "config.delay_wgrad_compute must be False if a CUDA graph holds the experts, got True and whole layers with "
        "cuda_graph_impl='local'; a replay does not run the code that delays",
    ),
    (dict(activation_func=torch.tanh), _ACTIVATION.format("tanh", None)),
    (dict(activation_func=functional.gelu, activation_func_clamp_value=7.0), _ACTIVATION.format("gelu", 7.0)),
]


@pytest.mark.parametrize(("options", "text"), MISTAKES, ids=["-".join(options) for options, _ in MISTAKES])
def test_mistakes(options, text):
    """Set behind the back of the config, which refuses some of them itself without TransformerEngine."""
    from megatron_on_cpu import EXPERTS, config_of

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP

    config = config_of()
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(RuntimeError) as info:
        MoeFp8GroupedMLP(EXPERTS, config)
    assert str(info.value) == f"{MODULE}: {text}"


# Scopes of 0.16.1 by implementation, and whether they hold the experts of a GPT layer.
SCOPES = {
    ("none", "full"): False,
    ("local", "full"): True,
    ("local", "full_iteration"): True,
    ("local", "attn"): True,  # captures the whole layer
    ("local", "moe_router"): False,
    ("transformer_engine", "full"): True,
    ("transformer_engine", "attn"): False,
    ("transformer_engine", "attn,moe_router,moe_preprocess"): False,
}


@pytest.mark.parametrize(("impl", "scope"), SCOPES)
def test_cuda_graphs_that_hold_the_experts_need_a_capacity(impl, scope):
    """Megatron itself refuses the scope "moe" without a capacity. With one, every graph may hold the experts."""
    from megatron_on_cpu import EXPERTS, config_of

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP

    graphs = dict(cuda_graph_impl=impl, cuda_graph_scope=scope)
    capacity = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    padded = dict(**capacity, moe_router_load_balancing_type="aux_loss")
    MoeFp8GroupedMLP(EXPERTS, config_of(**graphs, **padded))
    if SCOPES[impl, scope]:
        with pytest.raises(RuntimeError, match=f"^{MODULE}: config.cuda_graph_scope must leave out the experts, "):
            MoeFp8GroupedMLP(EXPERTS, config_of(**graphs))
    else:
        MoeFp8GroupedMLP(EXPERTS, config_of(**graphs))
    if impl != "none":
        MoeFp8GroupedMLP(EXPERTS, config_of(cuda_graph_impl=impl, cuda_graph_scope="moe", **padded))
    if (impl, scope) == ("local", "attn"):  # in a hybrid model, attention is a separate layer
        MoeFp8GroupedMLP(EXPERTS, config_of(**graphs, is_hybrid_model=True))


def test_ends_of_groups():
    """While a graph is captured, no copy from the host may be in it."""
    from moe_fp8_ext.integrations.megatron import group_ends

    cpu = torch.device("cpu")
    for counts, capturing in (([3, 0, 2], False), ([4, 4, 4], False), ([4, 4, 4], True), ([0, 0], True)):
        got = group_ends(torch.tensor(counts), cpu, capturing)
        assert_same_tensor(got, torch.tensor(counts).cumsum(0).int(), f"{counts}")
    text = f"{MODULE}: tokens_per_expert on the host must be equal for all experts in a CUDA graph, got 0 to 3"
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        group_ends(torch.tensor([3, 0, 2]), cpu, True)


def raising(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


def plant(call: str) -> AbstractContextManager:
    """Makes a call of experts fail."""
    path = {"forward": f"{MODULE}.experts_of_groups", "backward": "moe_fp8_ext.layer.node._backward"}
    return patch(path.get(call, "moe_fp8_ext.DelayedWgrads.backward_dw"), raising)


def note(call: str, rank: int, ranks: int, experts: str, layer: str = "layer 1") -> str:
    text = f"{MODULE}: {call} of experts {experts} of {layer} failed on rank {rank} of {ranks}"
    waits = "the other ranks of its expert parallel group wait for it until the timeout of that group"
    return f"{text}; {waits}\n" if ranks > 1 else f"{text}\n"


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("call", ["forward", "backward", "backward_dw"])
def test_errors_name_layer_and_rank(call):
    """Of the second layer. An error keeps its type and its text."""
    from megatron_on_cpu import Trained, local_spec

    from moe_fp8_ext.integrations.megatron import convert

    made = Trained(convert(local_spec()), delayed=True)
    second = made.model.decoder.layers[1].mlp
    with pytest.raises(RuntimeError, match="planted") as info:
        loss = None if call == "forward" else made.loss(0)
        if call == "backward_dw":
            loss.backward()
        with plant(call):
            if call == "backward_dw":
                second.backward_dw()
            elif call == "backward":
                loss.backward()
            else:
                second(tokens()[0])
    assert note(call, 0, 1, "0 to 7", "layer 2") in text_of(info.value)


def test_main_grad_is_a_bool():
    from moe_fp8_ext.integrations.megatron import spec

    with pytest.raises(RuntimeError, match=f"^{MODULE}: main_grad must be a bool, got str$"):
        spec("rowwise", main_grad="no")


def test_wrong_counts():
    from megatron_on_cpu import EXPERTS, config_of

    from moe_fp8_ext.integrations.megatron import MoeFp8GroupedMLP

    made = MoeFp8GroupedMLP(EXPERTS, config_of())
    with pytest.raises(RuntimeError) as info:
        made(torch.randn(7, 64).bfloat16(), torch.ones(7, dtype=torch.int64), torch.ones(7))
    assert str(info.value) == "experts_of_groups: offs must have size 8 in dimension 0, got 7"
    assert note("forward", 0, 1, "0 to 7", "a layer without a number") in text_of(info.value)


# Several processes


def specs() -> dict[str, object]:
    from megatron_on_cpu import local_spec

    from moe_fp8_ext.integrations.megatron import convert

    of_ours = {name: convert(local_spec(), name, main_grad=True) for name in ("bf16", "rowwise")}
    return {"theirs": local_spec(), **of_ours}


def close(got: list[float], want: list[float]) -> None:
    """Within 1%, which is what the demo allows to every recipe. The losses fall to about a half."""
    assert all(abs(a - b) < 0.01 * b for a, b in zip(got, want, strict=True)), (got, want)


ONE_LAYER = dict(num_layers=1)


def check_four(rank: int, folder: Path) -> None:
    """Four ranks hold two experts each, and save. Then two pairs of ranks hold the same experts."""
    from megatron_on_cpu import Trained, megatron_on_cpu

    losses = {}
    with megatron_on_cpu(expert_parallel=4):
        theirs, made = (Trained(specs()[name], **ONE_LAYER) for name in ("theirs", "rowwise"))
        losses["four"] = made.train(STEPS)
        close(losses["four"], theirs.train(STEPS))
        made.save(folder / "four")
        losses["four"] += made.train(3, first=STEPS)
    with megatron_on_cpu(expert_parallel=2):
        losses["pairs"] = Trained(specs()["rowwise"], **ONE_LAYER).train(2)
    torch.save(losses, folder / "losses")


def check_two(rank: int, folder: Path) -> None:
    """Two ranks hold four experts each. SequentialMLP goes on with the losses of four ranks, and so does from there an
    expert of ours. Then both ranks hold a part of each expert."""
    from megatron_on_cpu import Trained, megatron_on_cpu

    from moe_fp8_ext.integrations.megatron import spec as spec_of_ours

    want = torch.load(folder / "losses")
    with megatron_on_cpu(expert_parallel=2):
        theirs, made = (Trained(specs()[name], **ONE_LAYER) for name in ("theirs", "bf16"))
        for trained in (theirs, made):
            close(trained.train(2), want["pairs"])  # the optimizer now has states to load
        theirs.load(folder / "four")
        close(theirs.train(1, first=STEPS), want["four"][STEPS : STEPS + 1])
        theirs.save(folder / "two")
        made.load(folder / "two")
        close(made.train(2, first=STEPS + 1), want["four"][STEPS + 1 :])
        close(Trained(specs()["rowwise"], moe_token_dispatcher_type="allgather", **ONE_LAYER).train(2), want["pairs"])
    with megatron_on_cpu(expert_tensor_parallel=2):
        losses, *of_ours = (Trained(spec, **ONE_LAYER).train(3) for spec in specs().values())
        for got in of_ours:
            close(got, losses)
        for single in (False, True):
            theirs, ours = (shards_of_layer(experts, single) for experts in (None, spec_of_ours()))
            assert theirs == ours


def test_checkpoints_of_four_ranks_go_on_in_two(tmp_path):
    for name in ("four", "two"):
        (tmp_path / name).mkdir()
    in_processes(4, check_four, tmp_path)
    in_processes(2, check_two, tmp_path)


def check_flex() -> None:
    """DeepEP's dispatcher moves the same rows in the same order. Sums of two slots are the same in any order."""
    from megatron_flex import deepep_by_gloo

    from moe_fp8_ext.integrations.megatron import spec as spec_of_ours

    results = []
    x, grad = tokens(seed=dist.get_rank())
    for dispatcher in ("alltoall", "flex"):
        with deepep_by_gloo():
            layer = layer_of(spec_of_ours(), moe_token_dispatcher_type=dispatcher, moe_router_dtype="fp32")
            assert type(layer.token_dispatcher).__name__.lower() == f"moe{dispatcher}tokendispatcher"
            h = x.clone().requires_grad_()
            out, _ = layer(h)
            out.backward(grad)
        results.append([out.detach(), h.grad, *(p.grad for p in layer.parameters())])
    assert_same(results[1], results[0])


def check_reuse() -> None:
    """A context around all steps, whose parameters are gathered to the same address in forward: one cast of each of the
    two weights for a step of two micro-batches, and the same losses."""
    from megatron_on_cpu import Trained

    quantize = "moe_fp8_ext.quantization.prepare._quantize_weight"
    losses, casts = [], []
    for context in (nullcontext, reuse_weights):
        made = Trained(specs()["rowwise"], **ONE_LAYER)
        with context(), patch(quantize, wraps=torch.ops.moe_fp8.quantize_weight.default) as called:
            losses.append(made.train(3))
        casts.append(called.call_count)
    assert losses[1] == losses[0]
    assert casts == [3 * 2 * 2, 3 * 2]


def check_losses(rank: int) -> None:
    from megatron_on_cpu import Trained, megatron_on_cpu

    with megatron_on_cpu(expert_parallel=2):
        check_flex()
        check_reuse()
        losses = {name: Trained(specs()[name]).train(STEPS, of_all=2) for name in ("theirs", "rowwise")}
    assert losses["theirs"][-1] < 0.6 * losses["theirs"][0]
    close(losses["rowwise"], losses["theirs"])


def test_losses_are_those_of_sequential_mlp():
    in_processes(2, check_losses)


def check_failure(rank: int, uncaught: bool) -> None:
    """Experts of rank 1 fail. The other rank waits for its message, and raises when the time of its group is over."""
    from megatron_on_cpu import Trained, megatron_on_cpu

    from moe_fp8_ext.integrations.megatron import convert

    for call in ("forward",) if uncaught else ("forward", "backward"):
        with megatron_on_cpu(expert_parallel=2, seconds=120 if uncaught else 2):
            made = Trained(convert(specs()["theirs"]), **ONE_LAYER)
            loss = made.loss(0)  # both ranks are there
            with plant(call) if rank == 1 else nullcontext():
                if uncaught:
                    made.loss(0)
                with pytest.raises(RuntimeError) as info:
                    (loss if call == "backward" else made.loss(0)).backward()
            text = text_of(info.value)
            if rank == 1:
                assert "planted" in text and note(call, 1, 2, "4 to 7") in text
            else:
                assert "Timed out waiting 2000ms" in text
            dist.barrier()  # rank 1 is there until rank 0 has raised


def test_a_rank_that_fails():
    in_processes(2, check_failure, False)


def test_a_process_that_fails_ends_the_others():
    """As torchrun does, the launcher ends the other rank, which waits."""
    with pytest.raises(ProcessRaisedException) as info:
        in_processes(2, check_failure, True)
    assert "planted" in str(info.value) and note("forward", 1, 2, "4 to 7") in str(info.value)


@pytest.fixture
def bench(monkeypatch) -> Iterator[object]:
    """The module bench/mcore.py. It gives Megatron permutations, which are taken back."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    with patch.dict(vars(moe_utils)):
        yield importlib.import_module("mcore")


def test_the_bench_needs_a_gpu(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["mcore.py"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--gpus must be from 1 to the 0 GPUs of this machine, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_bench_trains_a_tiny_model(bench, dispatcher):
    from megatron_on_cpu import OnCpu

    batches = bench.batches_of(3, 2, 2, 16, torch.device("cpu"))
    kinds = bench.KINDS if dispatcher == "alltoall" else ("sequential", "rowwise")
    options = dict(dispatcher=dispatcher, on_cpu=OnCpu, profiled=dispatcher == "allgather")
    runs = [bench.measure(kind, batches, bench.TINY, 1, 1, **options) for kind in kinds]
    for run in runs:
        close(run["losses"], runs[0]["losses"])
        assert run["losses"][-1] < run["losses"][0] and run["tokens_per_second"] > 0
    if dispatcher == "alltoall":
        assert runs[2]["losses"] == runs[3]["losses"] != runs[1]["losses"]
    else:  # ops of a CPU, which are profiled in the place of kernels
        casts = [run["profile_ms"].get("casts of weights", 0) for run in runs]
        assert casts[0] == 0 < casts[1] and all(run["ops"][0][2] > 0 for run in runs)
        assert len(bench.profile_table(runs).splitlines()) == 2 + len(bench.WORK) + 2
    assert [line.split()[0] for line in bench.table(runs).splitlines()[2:]] == list(kinds)


def test_permutations_of_the_bench_are_those_of_megatron(bench):
    """The same bytes forward. Gradients and sums of three slots are added in another order."""
    from megatron.core.transformer.moe import moe_utils

    permute = importlib.import_module("mcore_permute")
    g = torch.Generator().manual_seed(0)
    tokens = torch.randn(12, 8, generator=g).requires_grad_()
    ids = torch.rand(12, 5, generator=g).topk(3, dim=1).indices
    chosen = torch.zeros(12, 5, dtype=torch.bool).scatter(1, ids, True)
    probs = torch.rand(12, 5, generator=g).masked_fill(~chosen, 0).requires_grad_()
    sizes, order = torch.tensor([3, 0, 20, 13]), torch.tensor([2, 0, 3, 1])
    found = []
    for fused in (False, True):
        permute.provide()
        rows, of_rows, kept = moe_utils.permute(tokens, chosen, probs, num_out_tokens=36, fused=fused)
        sorted_rows, of_sorted = moe_utils.sort_chunks_by_idxs(rows, sizes, order, probs=of_rows, fused=fused)
        back, _ = moe_utils.sort_chunks_by_idxs(sorted_rows, sizes[order], order.argsort(), fused=fused)
        assert_same_tensor(back.detach(), rows.detach(), "chunks back in order")
        out = moe_utils.unpermute(back * of_rows[:, None], kept, tokens.shape, fused=fused)
        loss = (out * torch.arange(8.0)).sum() + (of_sorted * torch.arange(36.0)).sum()
        found.append(
            (rows.detach(), sorted_rows.detach(), of_sorted.detach(), out, *torch.autograd.grad(loss, [tokens, probs]))
        )
    assert_same(found[1][:3], found[0][:3])
    torch.testing.assert_close(found[1][3:], found[0][3:])


def test_the_bench_tells_kinds_of_work(bench):
    assert bench.work_of("moe_fp8::quantize_weight") == "casts of weights"
    assert bench.work_of("moe_fp8::quantize_both") == "activations and casts of tokens"
    assert bench.work_of("aten::add") == "other"

"""Checks of Megatron's config for the experts of `megatron.py`."""

from __future__ import annotations

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from moe_fp8_ext.integrations.megatron_parameters import Ranks
from moe_fp8_ext.ops.activations import clamped_swiglu
from moe_fp8_ext.ops.checks import require

_HERE = "moe_fp8_ext.integrations.megatron"

# By activation_func, gated_linear_unit, glu_linear_offset and activation_func_clamp_value of a config. "gelu" and
# "geglu" use the tanh approximation, as the fused kernels of Megatron and TransformerEngine do.
_ACTIVATIONS = {
    (functional.silu, True, 0.0, None): "swiglu",
    (functional.gelu, True, 0.0, None): "geglu",
    (fast_gelu, True, 0.0, None): "geglu",
    (functional.silu, False, 0.0, None): "silu",
    (functional.gelu, False, 0.0, None): "gelu",
    (fast_gelu, False, 0.0, None): "gelu",
    (squared_relu, False, 0.0, None): "relu2",
}
_ALPHAS = {functional.silu: 1.0, quick_gelu: 1.702}  # x * sigmoid(alpha * x), of gates that are clamped


def checked(config: TransformerConfig, ranks: Ranks) -> str:
    """Raises for options that these experts do not support. Returns the name of the activation."""
    for name in ("fp8", "fp4"):
        got = getattr(config, name)
        text = f"config.{name} must be None, because these experts quantize by their own recipe, got {got!r}"
        require(not got, f"{_HERE}: {text}; leave out --{name}-format, or use Megatron's own experts")
    modules = set(config.offload_modules or ()) & {"expert_fc1", "moe_act"}
    if config.fine_grained_activation_offloading and modules:
        text = f"config.offload_modules must have no module inside of the experts, got {', '.join(sorted(modules))}"
        require(False, f"{_HERE}: {text}; what they keep for backward is in FP8 already")
    text = "config.moe_router_topk must be 1 with moe_apply_probs_on_input, got "
    require(
        config.moe_router_topk == 1 or not config.moe_apply_probs_on_input, f"{_HERE}: {text}{config.moe_router_topk}"
    )
    _check_graphs(config)
    sizes = config.moe_ffn_hidden_size, ranks.tensors
    text = "config.moe_ffn_hidden_size must be divisible by the size of expert tensor parallelism, got {} and {}"
    require(sizes[0] % sizes[1] == 0, f"{_HERE}: {text.format(*sizes)}")
    gate = bool(config.gated_linear_unit), config.glu_linear_offset, config.activation_func_clamp_value
    activation, (is_gated, offset, limit) = _ACTIVATIONS.get((config.activation_func, *gate)), gate
    if activation is None and is_gated and limit is not None and config.activation_func in _ALPHAS:
        return clamped_swiglu(limit, _ALPHAS[config.activation_func], offset)
    if activation is None:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        got = f"{name} with gated_linear_unit={gate[0]}, glu_linear_offset={gate[1]}, clamp={gate[2]}"
        functions = {function for function, *_ in _ACTIVATIONS} | _ALPHAS.keys()
        names = ", ".join(sorted(function.__name__ for function in functions))
        require(False, f"{_HERE}: config.activation_func must be one of {names} as ops.activate defines it, got {got}")
    return activation


def _check_graphs(config: TransformerConfig) -> None:
    """Refuses CUDA graphs that hold the experts, unless the number of rows of each expert is constant."""
    scopes = {scope.name for scope in config.cuda_graph_scope}
    if not _in_graph(config.cuda_graph_impl, scopes, config.is_hybrid_model):
        return
    got = f"{', '.join(sorted(scopes)) or 'whole layers'} with cuda_graph_impl={config.cuda_graph_impl!r}"
    dispatcher = config.moe_token_dispatcher_type
    if dispatcher == "flex":
        dispatcher = config.moe_flex_dispatcher_backend
    padded, waits = config.moe_pad_expert_input_to_capacity, dispatcher not in ("alltoall", "hybridep")
    text = "config.cuda_graph_scope must leave out the experts, because the dispatcher waits for the device, got"
    instead = (
        "a constant capacity is an exception: moe_pad_expert_input_to_capacity, with dispatcher alltoall or hybridep"
    )
    require(padded and not waits, f"{_HERE}: {text} {got}; {instead}")
    text = "config.delay_wgrad_compute must be False if a CUDA graph holds the experts, got True and"
    require(not config.delay_wgrad_compute, f"{_HERE}: {text} {got}; a replay does not run the code that delays")


def _in_graph(impl: str, scopes: set[str], is_hybrid: bool) -> bool:
    """Whether CUDA graphs of megatron-core 0.16.1 contain the experts.

    The local implementation captures a whole GPT layer for the scope "attn" too. In a hybrid model, attention is a
    separate layer.
    """
    if impl == "none":
        return False
    with_experts = {"moe", "full_iteration"} if impl != "local" or is_hybrid else {"moe", "full_iteration", "attn"}
    return not scopes or bool(scopes & with_experts)

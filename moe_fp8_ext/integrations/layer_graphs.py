"""CUDA graphs of the layers of a Transformers model."""

from __future__ import annotations

import torch
from torch import nn
from torch.random import fork_rng

from moe_fp8_ext.ops.checks import check_module, require
from moe_fp8_ext.training.cuda_graph import Arguments, Recomputed, buffers_of, graphed, unchanged

_OP = "graph_layers_"
_OF_LOSSES = frozenset({"num_items_in_batch"})  # models hand it to their layers, too


def graph_layers_(model: nn.Module, **inputs: object) -> list[nn.Module]:
    """Replaces forward and backward of every layer of a Transformers model by CUDA graphs that compute it again.

        layers = graph_layers_(model.train(), **batch)
        ...                                 train as with gradient checkpointing
        for layer in layers:
            del layer.forward               to undo it

    A layer is captured by `graphed` with `checkpoint=True`, so all rules of `graphed` apply. It replaces gradient
    checkpointing. A batch of another size runs without graphs, with gradient checkpointing. A second call adds graphs
    for batches such as its own. Transformers gives layers no mask if a batch has no padding, so batches with padding
    and without need graphs of their own.

    Call it last: after adapters were added, after `convert_`, and inside the torch.autocast of training, if that is on.
    Delete losses of earlier steps before. A replay does not run Python. It ignores, for example, hooks that you add to
    modules in a layer after the capture.

    Args:
        model: the model in training mode, on one GPU, as training calls it. A model of PEFT may be around it.
        inputs: a batch of training, with all arguments that the model gets in training. The model does not learn from
            its values.

    Returns:
        the layers. An error leaves the forward and the buffers of every layer as they were.

    Raises:
        ImportError: Transformers is missing.
        TypeError: model is no module.
        RuntimeError: model is not in training mode; its gradient checkpointing is on, or one of `output_router_logits`
            and `output_attentions`, which a graph would not return; it caches keys and values; a layer does not run, or
            has a forward that is not its class's own; or `graphed` raises.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # imported here, because it takes long

    check_module(_OP, "model", model)
    require(model.training, f"{_OP}: model must be in training mode, got eval mode; call model.train() first")
    layers = {m: name for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    require(len(layers) > 0, f"{_OP}: model must have layers of Transformers, got {type(model).__name__} without any")
    own = [n for m, n in layers.items() if not isinstance(vars(m).get("forward", None), Recomputed | None)]
    text = "must be its class's own, got another that the module itself has, such as one with hooks of accelerate"
    require(not own, f"{_OP}: forward of {''.join(own[:1])} {text}")
    on = [name for layer, name in layers.items() if layer.gradient_checkpointing]
    text = "because graphs compute layers again themselves; call model.gradient_checkpointing_disable() first"
    require(not on, f"{_OP}: gradient checkpointing must be off, {text}, got it on in {''.join(on[:1])}")
    for option in ("output_router_logits", "output_attentions"):
        of_config = any(getattr(getattr(module, "config", None), option, False) for module in model.modules())
        require(
            not inputs.get(option, of_config),
            f"{_OP}: {option} must be False, because graphs do not return them, got True",
        )
    calls = _first_calls(model, list(layers), inputs)
    for layer, name in layers.items():
        require(layer in calls, f"{_OP}: {name} must run in a call with the given inputs, got no run")
        args, kwargs = calls[layer]
        text = "because every call would write to it, got one; set model.config.use_cache = False"
        require(not any(map(_is_cache, (*args, *kwargs.values()))), f"{_OP}: {name} must get no cache, {text}")
    made = {layer: graphed(layer, *args, checkpoint=True, **kwargs) for layer, (args, kwargs) in calls.items()}
    for layer, function in made.items():
        function.ignored = _OF_LOSSES
        if isinstance(layer.forward, Recomputed):
            function.others = layer.forward, *layer.forward.others
        layer.forward = function
    return list(layers)


def _is_cache(value: object) -> bool:
    from transformers.cache_utils import Cache  # imported here, because it takes long

    return isinstance(value, Cache)


class _AllRan(Exception):
    """Ends a call of a model whose layers have all run."""


def _first_calls(
    model: nn.Module, layers: list[nn.Module], inputs: dict[str, object]
) -> dict[nn.Module, tuple[tuple, dict]]:
    """Returns the arguments of each layer's first call. Layers run without gradients, until the last one is reached."""
    calls: dict[nn.Module, tuple[tuple, dict]] = {}
    forwards = {layer: vars(layer).get("forward") for layer in layers}

    def run(layer: nn.Module, *args: object, **kwargs: object) -> object:
        calls.setdefault(layer, (args, {name: kwargs[name] for name in kwargs.keys() - _OF_LOSSES}))
        if len(calls) == len(layers):
            raise _AllRan
        given = Arguments.of(args, kwargs).tensors
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *layer.parameters()))
        with torch.no_grad():
            out = Arguments.of((type(layer).forward(layer, *args, **kwargs),), {})
        tensors = [x.detach().requires_grad_(needs and x.is_floating_point()) for x in out.tensors]
        return Arguments(tensors, out.rest).call(lambda out: out)

    device = next(model.parameters()).device
    with unchanged(buffers_of(model)), fork_rng([device] if device.type == "cuda" else []):
        try:
            for layer in layers:
                layer.forward = run.__get__(layer)
            model(**inputs)
        except _AllRan:
            pass
        finally:
            for layer, forward in forwards.items():
                del layer.forward
                if forward is not None:
                    layer.forward = forward
    return calls

"""CUDA graphs of the layers of a Transformers model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_fp8_ext.ops.checks import check_module, require
from moe_fp8_ext.training.cuda_graph import graphed

_OP = "graph_layers_"


def graph_layers_(model: nn.Module, **inputs: object) -> list[nn.Module]:
    """Replaces forward and backward of every layer of a Transformers model by CUDA graphs that compute it again.

        model.train()
        layers = graph_layers_(model, input_ids=batch["input_ids"])
        ...                                   train as with gradient checkpointing
        for layer in layers:
            del layer.forward                 to undo it

    A layer is captured by `graphed` with `checkpoint=True`, so all rules of `graphed` apply. It replaces gradient
    checkpointing. A batch with inputs of other sizes runs without graphs, with gradient checkpointing.

    Call it last: after adapters were added, after `convert_`, and inside the torch.autocast of training, if that is on.
    Calls do not see what Python would do differently after the capture, such as new hooks of modules in a layer.

    Args:
        model: a model in training mode, on one GPU. A model of PEFT may be around it.
        inputs: a batch of training, as the model takes it: input_ids, and attention_mask if batches have one.

    Returns:
        the layers. They are captured one by one; an error leaves the model as it was.

    Raises:
        ImportError: Transformers is missing.
        TypeError: model is no module.
        RuntimeError: model is not in training mode; its gradient checkpointing is on, or `output_router_logits`, whose
            logits a graph would not return; a layer does not run once, or returns no tensor; or `graphed` raises.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # imported here, because it takes long

    check_module(_OP, "model", model)
    require(model.training, f"{_OP}: model must be in training mode, got eval mode; call model.train() first")
    layers = {m: name for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    require(len(layers) > 0, f"{_OP}: model must have layers of Transformers, got {type(model).__name__} without any")
    on = [name for layer, name in layers.items() if layer.gradient_checkpointing]
    text = "because graphs compute layers again themselves; call model.gradient_checkpointing_disable() first"
    require(not on, f"{_OP}: gradient checkpointing must be off, {text}, got it on in {''.join(on[:1])}")
    logits = any(getattr(getattr(m, "config", None), "output_router_logits", False) for m in model.modules())
    text = "because graphs return no logits, got True; add a loss that balances experts another way"
    require(not logits, f"{_OP}: output_router_logits of the config must be False, {text}")
    calls = _calls(model, list(layers), inputs)
    for layer, name in layers.items():
        count = len(calls[layer])
        require(count == 1, f"{_OP}: {name} must run once for the given inputs, got {count} calls")
    made = {}
    for layer in layers:
        args, kwargs = calls[layer].pop()
        made[layer] = graphed(layer, *args, checkpoint=True, **kwargs)
    for layer, function in made.items():
        layer.forward = function
    return [*made]


def _calls(model: nn.Module, layers: list[nn.Module], inputs: dict[str, object]) -> dict[nn.Module, list[tuple]]:
    """Returns the arguments of each layer's calls. The model runs with layers that return their first argument."""
    calls: dict[nn.Module, list[tuple]] = {layer: [] for layer in layers}
    forwards = {layer: vars(layer).get("forward") for layer in layers}

    def stand_in(layer: nn.Module, *args: object, **kwargs: object) -> Tensor:
        calls[layer].append((args, kwargs))
        x = args[0] if args else kwargs["hidden_states"]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in layer.parameters())
        return x.detach().requires_grad_(trains or x.requires_grad)

    try:
        for layer in layers:
            layer.forward = stand_in.__get__(layer)
        model.get_decoder()(**inputs, use_cache=False)
    finally:
        for layer, forward in forwards.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward
    return calls

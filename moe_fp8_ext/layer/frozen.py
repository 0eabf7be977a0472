"""A weight of experts that is frozen in FP8, as a module whose buffers are its operands."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moe_fp8_ext.distributed.dtensor import is_dtensor, of_all, part_of_rank
from moe_fp8_ext.ops.checks import dtype_name, fail, has_values
from moe_fp8_ext.quantization.tensor import Pair, Quantized, given


class FrozenWeight(nn.Module):
    """A module that holds a quantized weight [E, N, K]. The weight moves with its parent, and is in its state dict.

        layer.w = FrozenWeight(quantize_weight(w, "blockwise")[0])
        grouped_mm(a, layer.w.operand(), offs, recipe="blockwise")

    No forward pass casts the weight again, in training, in eval and in `generate`. The buffers `q_bytes`, `scale_bytes`
    and so on are uint8, with the bytes of one value along the last dimension. So casts, such as `module.bfloat16()`, do
    not change them. `_extra_state` in a state dict says which format and dtype the bytes have, and `load_state_dict`
    refuses bytes of another format or dtype. In state dicts without it, bytes count as the module's own. Averages of
    these bytes mean nothing: use no `AveragedModel(use_buffers=True)`.

    Attributes:
        q, scale: the operand of products over K.
        q_t, scale_t: the operand of products over N, or None.
        device_mesh: the ranks over which experts are sharded, or None. State dicts then have DTensors, as they have of
            trained weights, so `torch.distributed.checkpoint` saves the experts of all ranks.

    Args:
        weight: a `Quantized` along rows, or the pair of `quantize_weight`.
        of: the DTensor, sharded by expert, whose part of this rank was quantized. None: the weight is whole.

    Raises:
        RuntimeError: weight is not a quantized weight.
    """

    def __init__(self, weight: Quantized | Pair, of: Tensor | None = None) -> None:
        super().__init__()
        self.device_mesh, self._num_experts = (of.device_mesh, of.shape[0]) if is_dtensor(of) else (None, None)
        first = weight[0] if isinstance(weight, (tuple, list)) and weight else weight
        if not isinstance(first, Quantized):
            fail("FrozenWeight", f"weight must be a Quantized or a pair of them, got {type(first).__name__}")
        first, second = given("FrozenWeight", "weight", weight, first.format, weight=True)
        if first.q.dim() != 3:
            fail("FrozenWeight", f"weight must have 3 dimensions, [E, N, K], got {first.q.dim()}")
        self.format, self.dtypes = first.format, {}
        for suffix, part in (("", first), ("_t", second)):
            for name in ("q", "scale"):
                values = None if part is None else getattr(part, name).contiguous()
                self.dtypes[name + suffix] = None if part is None else values.dtype
                stored = None if part is None else values.unsqueeze(-1).view(torch.uint8)
                self.register_buffer(f"{name}{suffix}_bytes", stored)
        self.register_state_dict_post_hook(_shard_state)
        self.register_load_state_dict_pre_hook(_check_state)

    def _values(self, name: str) -> Tensor | None:
        stored = getattr(self, f"{name}_bytes")
        return None if stored is None else stored.view(self.dtypes[name]).squeeze(-1)

    q = property(partial(_values, name="q"))
    scale = property(partial(_values, name="scale"))
    q_t = property(partial(_values, name="q_t"))
    scale_t = property(partial(_values, name="scale_t"))

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]"""
        return self.q.shape

    def operand(self) -> Quantized | Pair:
        """Returns what `experts` and `grouped_mm` take in place of the weight."""
        first = Quantized(self.q, self.scale, self.format)
        if self.dtypes["q_t"] is None:
            return first
        return first, Quantized(self.q_t, self.scale_t, self.format, transposed=True)

    def get_extra_state(self) -> Tensor:
        """Returns format and dtype for the state dict, as bytes of a text: safetensors store tensors only."""
        return torch.tensor(list(self._kind().encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: `_check_state` has compared the state already."""

    def _kind(self) -> str:
        return f"{self.format} in {dtype_name(self.dtypes['q'])}"

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, format={self.format!r}, directions={1 if self.q_t is None else 2}"


def _shard_state(weight: FrozenWeight, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Runs after the state dict of a weight was made. Dimension 0 of every buffer is the experts."""
    if weight.device_mesh is not None:
        for name, _ in weight.named_buffers():
            key = f"{prefix}{name}"
            state_dict[key] = of_all(state_dict[key], weight.device_mesh, weight._num_experts)


def _check_state(weight: FrozenWeight, state_dict: dict[str, object], prefix: str, *more: object) -> None:
    """Runs before a state dict is loaded. Raises if its bytes are not what the weight takes them for.

    Also with strict=False, as for sizes that differ: the module would compute nonsense, or gradients of other weights.
    """
    name = prefix.removesuffix(".") or "the weight"
    if weight.device_mesh is not None:
        for key in [f"{prefix}{buffer}" for buffer, _ in weight.named_buffers()]:
            if is_dtensor(t := state_dict.get(key)):
                state_dict[key] = t.to_local()
            elif t is not None and len(t) == weight._num_experts:  # a whole state dict, as set_model_state_dict loads
                state_dict[key] = part_of_rank(t, weight.device_mesh)
    kind = state_dict.setdefault(f"{prefix}_extra_state", weight.get_extra_state())  # older state dicts have none
    got = bytes(kind.byte().tolist()).decode() if has_values(kind) else weight._kind()
    if got != weight._kind():
        text = f"the state dict must have bytes of format {weight._kind()} for {name}, got {got}"
        fail("FrozenWeight", f"{text}; freeze the module with the recipe of the state dict")
    if f"{prefix}q_bytes" in state_dict and f"{prefix}q_t_bytes" not in state_dict and weight.q_t is not None:
        text = f"the state dict must have both directions of {name}, got one"
        fail("FrozenWeight", f"{text}; call freeze_() without both=True")

"""A weight of experts that is frozen in FP8, as a module whose buffers are its operands."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moe_fp8_ext.ops.checks import fail
from moe_fp8_ext.quantization.tensor import Pair, Quantized, given


class FrozenWeight(nn.Module):
    """A module that holds a quantized weight [E, N, K]. The weight moves with its parent, and is in its state dict.

        layer.w = FrozenWeight(quantize_weight(w, "blockwise")[0])
        grouped_mm(a, layer.w.operand(), offs, recipe="blockwise")

    No forward pass casts the weight again, in training, in eval and in `generate`. The buffers `q_bytes`, `scale_bytes`
    and so on are uint8, with the bytes of one value along the last dimension. So casts, such as `module.bfloat16()`, do
    not change them. Scales of 4 bytes and of 1 byte differ in shape, so `load_state_dict` refuses scales of another
    format.

    Attributes:
        q, scale: the operand of products over K.
        q_t, scale_t: the operand of products over N, or None.

    Args:
        weight: a `Quantized` along rows, or the pair of `quantize_weight`.

    Raises:
        RuntimeError: weight is not a quantized weight.
    """

    def __init__(self, weight: Quantized | Pair) -> None:
        super().__init__()
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

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, format={self.format!r}, directions={1 if self.q_t is None else 2}"

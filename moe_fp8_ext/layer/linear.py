"""One projection of all experts: its weight of whichever kind, its bias, and where its gradients go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.layer.bias import plus_bias
from moe_fp8_ext.matmul.engine import Engine, Groups
from moe_fp8_ext.quantization.prepare import Operand, quantized_weight
from moe_fp8_ext.quantization.tensor import Quantized


class ExpertLinear(NamedTuple):
    """y = x @ w^T + bias for the rows of each expert.

    The weight and the bias are tensors that autograd may ask for a gradient. A quantized weight is a constant of
    autograd; with a main_grad it is trained all the same.
    """

    weight: Tensor | None  # [E, N, K]; None where it is quantized
    bias: Tensor | None  # [E, N]
    quantized: tuple[Quantized | None, Quantized | None] = (None, None)
    main_grad: Tensor | None = None  # shaped as the weight: its gradient is added there, and autograd has none
    needs_weight: bool = False  # whether the weight needs a gradient
    needs_bias: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.quantized[0] is not None

    def operands(self, engine: Engine, dtype: torch.dtype | None, transposed: bool) -> tuple[Operand, Operand]:
        """Of the weight, over K and, if `transposed`, over N. dtype: that of torch.autocast, if it is on."""
        if self.is_quantized:
            return quantized_weight(self.quantized, transposed)
        return engine.weight(self.weight, dtype or self.weight.dtype, transposed)

    def product(self, engine: Engine, x: Operand, w: Operand, groups: Groups, by_index: bool = False) -> Tensor:
        """x @ w^T and the bias, in bfloat16, with the operand w of `operands`."""
        y = engine.product(x, w, groups, by_index)
        return y if self.bias is None else plus_bias(y, self.bias, groups.offs)

    def static(self) -> ExpertLinear:
        """What backward needs beside saved tensors."""
        return self._replace(weight=None, bias=None, quantized=(None, None))

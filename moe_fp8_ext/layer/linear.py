"""One projection of all experts: its weight of any kind, its bias, its adapter, and where its gradients go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.layer.adapter import Adapter
from moe_fp8_ext.layer.bias import added
from moe_fp8_ext.matmul.engine import Engine, Groups
from moe_fp8_ext.quantization.prepare import Operand, operands_of
from moe_fp8_ext.quantization.tensor import Quantized


class ExpertLinear(NamedTuple):
    """y = x @ w^T + bias for the rows of each expert, and what its adapter adds.

    Autograd may ask for gradients of the weight and the bias. For autograd a quantized weight is a constant; with a
    main_grad it is trained nevertheless.
    """

    weight: Tensor | None  # [E, N, K]; None if it is quantized
    bias: Tensor | None  # [E, N]
    quantized: tuple[Quantized, Quantized | None] | None = None
    main_grad: Tensor | None = None  # shaped as the weight: the gradient is added here, not given to autograd
    parameter: Tensor | None = None  # whose attributes tell Megatron's DDP that main_grad has the gradient
    needs_weight: bool = False  # whether the weight needs a gradient
    needs_bias: bool = False
    needs_A: bool = False  # of the adapter
    needs_B: bool = False
    transposed: bool = False  # whether the weight lies as [E, K, N] in memory, and so does its gradient
    delayed: Tensor | None = None  # the weight, if autograd does not see it, because its gradient is computed later
    adapter: Adapter | None = None

    @property
    def values(self) -> Tensor:
        """The weight [E, N, K] as it is stored: in fp8 if it is quantized."""
        return self.weight if self.quantized is None else self.quantized[0].q

    @property
    def has_gradient(self) -> bool:
        """Whether autograd wants the gradient of one of its tensors."""
        return (self.needs_weight and self.delayed is None) or self.needs_bias or self.needs_A or self.needs_B

    def operands(self, engine: Engine, dtype: torch.dtype | None, transposed: bool) -> tuple[Operand, Operand]:
        """Makes the operand of the weight for products over K. Returns it and, if `transposed`, what `second` takes.

        dtype is torch.autocast's if it is on, else None.
        """
        if self.quantized is not None:
            return operands_of(self.quantized, transposed)
        return engine.weight(self.weight, dtype or self.weight.dtype, transposed, frozen=not self.needs_weight)

    def second(self, engine: Engine, kept: Operand, dtype: torch.dtype | None, gradient: Tensor) -> Operand:
        """Makes the operand of the weight for products over N, in backward, from what forward kept."""
        return engine.second_weight(kept, dtype or kept.values.dtype, not self.needs_weight, gradient)

    def product(
        self,
        engine: Engine,
        x: Operand,
        w: Operand,
        groups: Groups,
        by_index: bool = False,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Computes x @ w^T + bias in bfloat16, with an operand w from `operands`. low_rank: as `Engine.product` takes
        it."""
        y = engine.product(x, w, groups, by_index, low_rank)
        return y if self.bias is None else added(y, self.bias, groups.offs)

    def of_forward(
        self, weight: Tensor | None, bias: Tensor | None, A: Tensor | None, B: Tensor | None
    ) -> ExpertLinear:
        """Returns the projection with the tensors that autograd sees, and with its adapter's factors ready."""
        adapter = None if self.adapter is None else self.adapter.ready(A, B)
        return self._replace(weight=self.delayed if weight is None else weight, bias=bias, adapter=adapter)

    def of_backward(self, A: Tensor | None, B: Tensor | None) -> ExpertLinear:
        """Returns the projection with its adapter's factors ready for backward, if it has an adapter."""
        return self if self.adapter is None else self._replace(adapter=self.adapter.ready(A, B, backward=True))

    def static(self) -> ExpertLinear:
        """Returns the projection without the tensors that autograd saves, for backward."""
        adapter = None if self.adapter is None else self.adapter.static()
        if self.weight is self.bias is self.quantized is None and adapter is self.adapter:
            return self
        return self._replace(weight=None, bias=None, quantized=None, adapter=adapter)

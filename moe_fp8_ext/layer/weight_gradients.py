"""The gradients of a layer's weights: computed in backward, or later, when `DelayedWgrads.backward_dw` is called."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.layer.linear import ExpertLinear
from moe_fp8_ext.matmul.engine import Engine, Groups
from moe_fp8_ext.ops.checks import require
from moe_fp8_ext.ops.dispatch import below_autograd
from moe_fp8_ext.quantization.casting import cast
from moe_fp8_ext.quantization.prepare import Operand
from moe_fp8_ext.training import main_grad

UP, DOWN = 0, 1


class WeightGradients:
    """The gradients of one backward. Each chunk of tokens adds to the chunks before it."""

    def __init__(self, engine: Engine, up: ExpertLinear, down: ExpertLinear) -> None:
        self.engine, self.linears = engine, (up, down)
        self.totals = [main_grad.start(linear.main_grad, linear.parameter) for linear in self.linears]

    def add(self, which: int, dy: Operand, a: Operand, groups: Groups) -> None:
        """Adds dy^T @ a of each group, with operands along tokens, to the gradient of the projection UP or DOWN."""
        new = self.engine.wgrad(dy, a, groups, self.totals[which], self.linears[which].transposed)
        if new is not None:
            self.totals[which] = new

    def for_autograd(self) -> list[Tensor | None]:
        return [
            total if linear.main_grad is None else main_grad.finish(linear.main_grad, linear.parameter)
            for linear, total in zip(self.linears, self.totals, strict=True)
        ]


class DelayedWgrads:
    """Keeps the operands of weight gradients in backward, and computes the gradients when `backward_dw` is called.

        delayed = moe_fp8_ext.DelayedWgrads()
        experts(x, topk_ids, topk_scores, w_gate_up, w_down, delay_wgrad=delayed).backward(grad)
        delayed.backward_dw()

    Pass it as `delay_wgrad`, or use `Experts(delay_wgrad=True)`. Gradients have the same bytes as without it. They are
    added to the main_grad of a weight if one was given, otherwise to `.grad` of the weight. Autograd does not see the
    weights. So hooks on them do not run, and a zero-bubble pipeline may run backward for inputs and for weights.

    Attributes:
        waiting: the number of backwards whose gradients are not yet computed.
        nbytes: the memory of their operands: 2 D + 2 F + F bytes for a row in FP8 with a gated activation, plus scales;
            twice that in bfloat16.
    """

    def __init__(self) -> None:
        self._backwards: deque[_DelayedGradients] = deque()

    def __reduce__(self) -> tuple:
        """In a copy, and in what pickle loads, no backward waits: operands belong to the weights of this process."""
        return type(self), ()

    def __repr__(self) -> str:
        return f"DelayedWgrads(waiting={self.waiting}, nbytes={self.nbytes})"

    @property
    def waiting(self) -> int:
        return len(self._backwards)

    @property
    def nbytes(self) -> int:
        tensors = [t for backward in self._backwards for t in backward.tensors()]
        return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())

    def backward_dw(self) -> None:
        """Computes the gradients of the oldest backward that waits.

        Raises:
            RuntimeError: no backward waits. An operand was written, or a weight has lost its memory, as one that
                `fully_shard` gathered. Then nothing is changed.
        """
        require(self.waiting > 0, "DelayedWgrads: backward_dw must follow a backward that waits, got none")
        self._backwards[0].check()
        self._backwards.popleft().compute()

    def of_backward(self, engine: Engine, up: ExpertLinear, down: ExpertLinear) -> _DelayedGradients:
        return _DelayedGradients(engine, up.static(), down.static(), self._backwards)


class _DelayedGradients:
    """What `WeightGradients` does, later."""

    def __init__(
        self, engine: Engine, up: ExpertLinear, down: ExpertLinear, backwards: deque[_DelayedGradients]
    ) -> None:
        self.engine, self.linears, self.backwards = engine, (up, down), backwards
        self.products: list[tuple[int, Operand, Operand, Groups]] = []
        self.states: list[tuple[Tensor, tuple[int, ...]]] = []  # of operands that may be tensors of the caller

    def add(self, which: int, dy: Operand, a: Operand, groups: Groups) -> None:
        self.products.append((which, dy, a, groups))
        if _torch.state_of is not None:
            self.states += [(t, _torch.state_of(t)) for t in (dy.values, a.values)]

    def for_autograd(self) -> list[Tensor | None]:
        self.backwards.append(self)
        return [None, None]

    def tensors(self) -> list[Tensor]:
        return [t for _, dy, a, _ in self.products for t in (*dy, *a) if t is not None]

    def check(self) -> None:
        """Raises if the caller has written to an operand, as autograd does for what it keeps, or if `.grad` would be
        that of a weight which `fully_shard` has freed, and does not look at again."""
        kept = all(_torch.state_of(t) == state for t, state in self.states)
        text = "DelayedWgrads: x and the gradient of the output must not be written before backward_dw, got a write"
        require(kept, f"{text}; FP8 recipes without wgrad_high_precision keep copies")
        for name, linear in zip(("w_gate_up", "w_down"), self.linears, strict=True):
            w = linear.delayed if linear.main_grad is None else None
            freed = w is not None and w.numel() > 0 and w.untyped_storage().nbytes() == 0
            cause = "fully_shard frees weights that it gathers, and needs gradients in backward"
            require(not freed, f"DelayedWgrads: {name} must have its memory until backward_dw, got none; {cause}")

    @torch.no_grad()
    def compute(self) -> None:
        gradients = WeightGradients(self.engine, *self.linears)
        with below_autograd():
            for product in self.products:
                gradients.add(*product)
        for linear, grad in zip(self.linears, gradients.for_autograd(), strict=True):
            if grad is not None and linear.main_grad is None:
                _accumulate(linear.delayed, cast(grad, linear.delayed.dtype))
            elif grad is not None and grad.numel() == linear.parameter.numel():  # else a part of a parameter
                _accumulate(linear.parameter, grad.view(linear.parameter.shape))


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    """Adds to weight.grad as autograd does, with the strides of the weight."""
    if weight.grad is not None:
        weight.grad.add_(grad)
    elif grad.stride() == weight.stride():
        weight.grad = grad
    else:
        weight.grad = torch.empty_like(weight).copy_(grad)

"""Low-rank adapters of a projection: y += scaling * B (A x). Neither W + BA nor a gradient of that size is computed.

Products of a low rank cost what they read and write. With both factors of each expert, an adapter on both projections
and P = T * top_k slots, forward and backward move, in values of 2 bytes (H = w_gate_up.shape[1]), up to the ranks of
this package's kernels and above (`matmul/low_rank.py`):

                                by kernels               above their ranks
    forward     u = A x         x, a row a slot          x in the order of experts, written and read
                                P D                      2 P D + T D
                u = A a         a in FP8, read           a dequantized, then read
                                0.5 P F                  2.5 P F
    backward    v = B dout, dB  dout, twice              dout in the order of experts, read twice
                                2 P D                    3 P D + T D
                dA of down      a, which is in memory
                                P F                      P F
                v = B dh, dB    dh, which is in memory, read twice
                                2 P H                    2 P H
                dA of gate_up   x, a row a slot          x in the order of experts, written and read
                                P D                      2 P D + T D

Where products of the frozen weights add what a factor widens (`adds_to_product`), h, out, da and dx cost no traffic
beside u and v. Elsewhere h and da cost 4 P H and 4 P F, as u B is written and added to h into a new tensor. out and dx
cost 2 P D + 4 T D: u B is written, summed over slots, and added. A factor that all experts share is multiplied by
tokens: with a shared A of gate_up and B of down, no term has P D.

The kernels read a in FP8 where `Factor.multiplies_fp8` says so. With `"mxfp8"`, dropout, or F no multiple of 16, a is
dequantized below these ranks too. With `"bf16"`, it is in bfloat16, and reading it costs P F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.matmul.engine import Engine
from moe_fp8_ext.matmul.low_rank import (
    Factor,
    Rows,
    Slots,
    add_to_rows,
    add_to_tokens,
    adds_to_product,
    dropped,
    kept,
)
from moe_fp8_ext.ops.checks import check_number, fail
from moe_fp8_ext.quantization.prepare import Operand

MAX_RANK = 256


class LoRA(NamedTuple):
    """A low-rank adapter of one projection of all experts: y += scaling * B (A dropout(x)).

    x is the input of the projection. The products of an adapter are in bfloat16. W + BA is never computed.

    Attributes:
        A: [E, r, K], or [r, K] for all experts; rank r from 1 to 256; bfloat16, float16 or float32, of any strides.
        B: [E, N, r], or [N, r] for all experts. Rows have the order of the weight's rows, such as interleaved.
        scaling: a number; PEFT's alpha / r.
        dropout: the probability that an element of A's input is zeroed; the others are multiplied by 1 / (1 - dropout).
            A token of w_gate_up has one mask for all of its experts. Set it to 0 outside of training.
    """

    A: Tensor
    B: Tensor
    scaling: float = 1.0
    dropout: float = 0.0


def check_adapter_numbers(op: str, scaling_name: str, dropout_name: str, scaling: float, dropout: float) -> None:
    if torch.compiler.is_compiling():  # numbers may be symbolic; a graph runs with the numbers that eager calls take
        return
    check_number(op, scaling_name, scaling)
    check_number(op, dropout_name, dropout)
    if not 0 <= dropout < 1:
        fail(op, f"{dropout_name} must be from 0 to less than 1, got {dropout}")


class Adapted(NamedTuple):
    """The tensors of an adapter's forward that backward reads."""

    u: Tensor | None = None  # [P, R]: scaling * A x of every row
    mask: Tensor | None = None  # of dropout, as bits


UNADAPTED = Adapted()


class Adapter(NamedTuple):
    """The adapter of a projection within the layer. Its tensors have the names of `LoRA`.

    Methods come in two kinds. In the up projection they go from tokens to rows, in the down projection from rows
    to tokens; a backward goes the other way.
    """

    A: Factor | None
    B: Factor | None
    scaling: float
    dropout: float
    needs_A: bool
    needs_B: bool

    def ready(self, A: Tensor, B: Tensor, backward: bool = False) -> Adapter:
        """Returns the adapter with the factors that products take: A [.., R, K] and the transpose of B, [.., R, N].

        The scaling is in the factor that narrows: A, and B in backward.
        """
        scaling_A, scaling_B = (1.0, self.scaling) if backward else (self.scaling, 1.0)
        return self._replace(A=Factor(A, scaling_A), B=Factor(B.mT, scaling_B))

    def static(self) -> Adapter:
        """Returns the adapter without the tensors that autograd saves, for backward."""
        return self if self.A is None else self._replace(A=None, B=None)

    # ---- forward ----

    def narrow(self, kind: type[Rows], engine: Engine, x: Operand, offs: Tensor | None, slots: Slots) -> Adapted:
        """Computes scaling * A x.

        x: the `Tokens` of the up projection, or the `Rows` of the down projection, quantized or not.
        offs: as `Engine.values` takes them.
        """
        if not self.dropout:
            return Adapted(self._input(kind, engine, x, offs, slots).narrow(self.A))
        values, mask = dropped(engine.values(x, offs), self.dropout)
        return Adapted(kind(values, slots).narrow(self.A), mask)

    def term(self, engine: Engine, adapted: Adapted) -> tuple[Tensor, Tensor] | None:
        """Returns the low-rank term that the projection's product adds, or None if it cannot."""
        adds = engine.adds_low_rank(adapted.u.device) and adds_to_product(self.B)
        return (adapted.u, self.B.by_column()) if adds else None

    def add_to_h(self, h: Tensor, adapted: Adapted, slots: Slots) -> Tensor:
        """Returns h [P, N] plus the adapter's part."""
        return add_to_rows(h, adapted.u, self.B, slots)

    def add_to_out(self, out: Tensor, adapted: Adapted, slots: Slots, scores: Tensor | None) -> Tensor:
        """Returns out [T, N] plus the adapter's part."""
        return add_to_tokens(out, adapted.u, self.B, slots, scores)

    def kept(self, adapted: Adapted) -> Adapted:
        """Returns what backward reads."""
        return adapted if self.needs_B else Adapted(None, adapted.mask)

    # ---- backward ----

    def gradients(
        self, dy: Rows, adapted: Adapted, needs_input: bool, scores: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradient v [P, R] of scaling * A x without scores, and the gradient of B."""
        v = dB = None
        if needs_input or self.needs_A:
            v = dy.narrow(self.B)
        if self.needs_B:
            dB = dy.outer(adapted.u, self.B, scores).mT
        return v, dB

    def gradient_of_A(
        self,
        kind: type[Rows],
        engine: Engine,
        x: Operand,
        offs: Tensor | None,
        slots: Slots,
        v: Tensor,
        adapted: Adapted,
    ) -> Tensor:
        """x, offs: as in `narrow`, but rows of the down projection are multiplied by scores."""
        if adapted.mask is None:
            return self._input(kind, engine, x, offs, slots).outer(v, self.A)
        return kind(kept(engine.values(x, offs), adapted.mask, self.dropout), slots).outer(v, self.A)

    def gradient_term(self, engine: Engine, v: Tensor, adapted: Adapted) -> tuple[Tensor, Tensor] | None:
        """Returns the low-rank term that the product for the gradient of the input adds, or None if it cannot. Dropout
        masks the term, but not the product."""
        adds = engine.adds_low_rank(v.device) and adapted.mask is None and adds_to_product(self.A)
        return (v, self.A.by_column()) if adds else None

    def add_to_da(self, da: Tensor, v: Tensor, adapted: Adapted, slots: Slots) -> Tensor:
        return add_to_rows(da, v, self.A, slots, adapted.mask, self.dropout)

    def add_to_dx(self, dx: Tensor, v: Tensor, adapted: Adapted, slots: Slots) -> Tensor:
        slots = slots if slots.groups.indices is not None else Slots(slots.groups.in_place)
        return add_to_tokens(dx, v, self.A, slots, None, adapted.mask, self.dropout)

    def _input(self, kind: type[Rows], engine: Engine, x: Operand, offs: Tensor | None, slots: Slots) -> Rows:
        """Returns what A multiplies without dropout: in FP8 where the kernels take it, else in bfloat16."""
        if x.scale is not None and self.A.multiplies_fp8(x.values.dtype, engine.format):
            return kind(x.values, slots, x.scale, engine.format)
        return kind(engine.values(x, offs), slots)

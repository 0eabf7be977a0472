"""Formulas for torch.utils.flop_counter: the floating-point operations of this package's products."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch

from moe_fp8_ext import _torch
from moe_fp8_ext.matmul import bf16, engine, low_rank  # noqa: F401  they register ops

_COUNTER = "torch.utils.flop_counter"
Shape = Sequence[int]


def rows_flops(rows: int, a: Shape, b: Shape) -> int:
    """Returns the operations of a grouped product of rows [M, K] with b [E, K, N]."""
    return 2 * rows * a[1] * b[2]


def tokens_flops(a: Shape, b: Shape, groups: int = 0, align: int = 0) -> int:
    """Returns the operations of a gradient of weights: a [N, P] with b [P, K].

    P includes `align` padding columns for each group, as quantizers add them. Padding does not count.
    """
    return 2 * a[0] * max(a[1] - groups * align, 0) * b[1]


def _scaled(
    a, b, scale_a, scale_b, format, offs, indices=None, top_k=None, align=1, out_dtype=None, use_fast_accum=True,
    rounding=None, out_transposed=False, low_rank_a=None, low_rank_b=None, **_: object
) -> int:  # fmt: skip
    if len(b) == 2:
        return tokens_flops(a, b, offs[0], align)
    rows = a[0] if indices is None else indices[0]
    return rows_flops(rows, a, b) + (0 if low_rank_a is None else rows_flops(rows, low_rank_a, low_rank_b))


def _added(total, a, b, scale_a, scale_b, format, offs, align=1, *_: object, **__: object) -> int:
    return tokens_flops(a, b, offs[0], align)


def _low_rank(u: Shape, x: Shape) -> int:
    """Returns the operations of a factor's product or gradient: between u [P, R] and W columns, the last size of x."""
    return 2 * u[0] * u[1] * x[-1]


def _narrowed(x, *_: object, out_shape, **__: object) -> int:
    return _low_rank(out_shape, x)


def _summed(u, x, *_: object, **__: object) -> int:
    return _low_rank(u, x)


def _widened(y, u, *_: object, **__: object) -> int:
    return _low_rank(u, y)


def grouped_mm_flops(a: Shape, b: Shape, offs: Shape | None = None, *_: object, **__: object) -> int:
    """Returns the operations of `torch._grouped_mm`: of [M, K] with [E, K, N], or of [N, P] with [P, K]."""
    return rows_flops(a[0], a, b) if len(b) == 3 else tokens_flops(a, b)


def count_torch_products() -> dict[object, object]:
    """Returns a custom_mapping for `FlopCounterMode` that counts `torch._grouped_mm`.

    Recipe "bf16" calls `torch._grouped_mm` on a GPU, and torch 2.14 does not count it. `register_formulas` registers
    only ops of this package.
    """
    from torch.utils.flop_counter import flop_registry

    packets = [op.overloadpacket for op in _torch.grouped_mm_ops]
    return {op: grouped_mm_flops for op in packets if op not in flop_registry}


def register_formulas() -> None:
    """Registers the formula of each op that multiplies, unless it has one."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    ours, of_python = torch.ops.moe_fp8, torch.ops.moe_fp8_ext
    formulas = {
        ours.scaled_grouped_mm: _scaled,
        ours.add_scaled_grouped_mm: _added,
        of_python.add_by_bytes: _added,
        ours.narrow_tokens: _narrowed,
        ours.outer_tokens: _summed,
        of_python.add_low_rank: _widened,
        of_python.addmm: _widened,
        of_python.cpu_grouped_mm: grouped_mm_flops,
    }
    for op, formula in formulas.items():
        if op not in flop_registry:
            register_flop_formula(op)(formula)


class _RegistersAfterImport(MetaPathFinder):
    """Registers the formulas when torch.utils.flop_counter is imported.

    That module imports Triton. Importing it here would more than double the time of `import moe_fp8_ext`.
    """

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)  # once, and the next line must find the module itself
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_formulas()

        spec.loader.exec_module = execute_and_register
        return spec


def register_when_imported() -> None:
    """Registers the formulas now if torch.utils.flop_counter is already imported; else on its import."""
    if _COUNTER in sys.modules:
        register_formulas()
    else:
        sys.meta_path.insert(0, _RegistersAfterImport())

"""Ops that are written in Python. `python_op` trusts them, where torch.library.custom_op would look at every call."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from moe_fp8_ext.matmul import bf16, low_rank
from moe_fp8_ext.ops.dispatch import python_op

OFFS = torch.tensor([3, 3, 5], dtype=torch.int32)
ROWS, OUT = torch.randn(6, 16).bfloat16(), torch.randn(6, 24).bfloat16()
FACTORS = torch.randn(3, 16, 24).bfloat16()
COVERED, MASK = torch.tensor([3, 3, 6], dtype=torch.int32), torch.full((6, 3), 170, dtype=torch.uint8)
CALLS = {
    "product": (bf16._cpu_grouped_mm, (ROWS, FACTORS, OFFS)),
    "gradient of weights": (bf16._cpu_grouped_mm, (ROWS.mT, OUT, OFFS)),
    "adapter": (low_rank._add_low_rank, (OUT, ROWS, FACTORS, COVERED, None, 0.0)),
    "adapter with dropout": (low_rank._add_low_rank, (OUT, ROWS, FACTORS, COVERED, MASK, 0.5)),
    "adapter with a shared factor": (low_rank._add_low_rank, (OUT, ROWS, FACTORS[0], COVERED, None, 0.0)),
    "sum": (low_rank._addmm, (OUT, ROWS, FACTORS[0])),
}
TESTS = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"


@pytest.mark.parametrize("name", CALLS)
def test_results_are_new_and_arguments_are_only_read(name):
    op, args = CALLS[name]
    opcheck(op, args, test_utils=TESTS)


def test_an_op_that_breaks_its_promise_is_found():
    @python_op("moe_fp8_ext::test_returns_its_argument", torch.empty_like)
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(Exception, match="alias"):
        opcheck(broken, (ROWS,), test_utils="test_schema")

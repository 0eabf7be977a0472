"""The debug mode that checks the contents of offs, indices, counts and topk_ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_fp8_ext._C import count_validations


@contextmanager
def validate() -> Iterator[None]:
    """Checks the contents of offs, indices, counts and topk_ids in every call inside the block.

        with moe_fp8_ext.validate():
            out = grouped_mm(x, w.mT, offs)

    Each check waits for the device. So a block must not contain the capture of a CUDA graph. A block may contain the
    call of a compiled function: the ops of its graph then check their own arguments, and the error names the op. A
    compiled function cannot contain a block.

    An open block applies to all threads of the process, because autograd runs backward in its own threads.
    MOE_FP8_VALIDATE=1 turns the checks on for the whole run.

    Raises:
        RuntimeError: a compiled function enters the block.

    Source: DESIGN.md section 4.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("validate: the block must be around the call of a compiled function, got one inside it")
    count_validations(1)
    try:
        yield
    finally:
        count_validations(-1)

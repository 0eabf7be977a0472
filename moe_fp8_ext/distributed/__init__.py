"""Experts over the ranks of a process group, and experts as DTensors.

`ExpertParallel` imports torch.distributed, which takes half a second. It is therefore loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_fp8_ext.distributed.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moe_fp8_ext.distributed import expert_parallel

    return getattr(expert_parallel, name)

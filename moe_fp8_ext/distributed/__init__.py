"""Experts that are spread over ranks of torch.distributed. Not imported with `moe_fp8_ext`."""

from moe_fp8_ext.distributed.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]

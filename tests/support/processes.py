"""Tests over several processes, forked from a server that has imported torch, which saves each three seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import NO_SECOND_GPU

NEEDS_GLOO = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
BACKENDS = [pytest.param("gloo", marks=NEEDS_GLOO), pytest.param("nccl", marks=NO_SECOND_GPU)]

_PRELOADED = "pytest", "torch._dynamo.testing", "torch.distributed.fsdp", "torch.distributed.tensor", "moe_fp8_ext"
# Megatron is there in some environments only. The server leaves out what it cannot import.
multiprocessing.set_forkserver_preload([*_PRELOADED, "megatron.core.models.gpt", "megatron.core.optimizer"])


def in_processes(number: int, check: Callable[..., None], *args: object, backend: str = "gloo") -> None:
    """Runs check(rank, *args) in each process of a group, with one thread."""
    with TemporaryDirectory() as folder:
        start(number, _run, number, backend, Path(folder), check, args, on_gpus=backend != "gloo")


def device() -> torch.device:
    """The device of this process: a GPU of its own in a group over NCCL, which is the current one too."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def start(number: int, target: Callable[..., None], *args: object, on_gpus: bool = False) -> None:
    """Runs target(rank, *args) to its end in processes that form no group."""
    start_method = "spawn" if on_gpus else "forkserver"  # a process that has used a GPU cannot be forked
    with patch.dict(os.environ, {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}):  # otherwise fully_shard uses GPUs
        torch.multiprocessing.start_processes(target, args, number, start_method=start_method)


def _run(rank: int, number: int, backend: str, folder: Path, check: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=120)  # a test that hangs fails soon
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", timeout=timeout, rank=rank, world_size=number
    )
    check(rank, *args)
    dist.destroy_process_group()

"""Tests over several processes: a server that has imported torch forks them, where each would take three seconds to."""

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

NEEDS_GLOO = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

_PRELOADED = "pytest", "torch._dynamo.testing", "torch.distributed.fsdp", "torch.distributed.tensor", "moe_fp8_ext"
multiprocessing.set_forkserver_preload([*_PRELOADED])


def in_processes(number: int, check: Callable[..., None], *args: object, backend: str = "gloo") -> None:
    """check(rank, *args) in each process of a group, with one thread."""
    with TemporaryDirectory() as folder:
        start(number, _run, number, backend, Path(folder), check, args, on_gpus=backend != "gloo")


def start(number: int, target: Callable[..., None], *args: object, on_gpus: bool = False) -> None:
    """target(rank, *args) in processes of no group, to their end."""
    how = "spawn" if on_gpus else "forkserver"  # nobody may fork what has used a GPU
    with patch.dict(os.environ, {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}):  # else fully_shard takes GPUs unasked
        torch.multiprocessing.start_processes(target, args, number, start_method=how)


def _run(rank: int, number: int, backend: str, folder: Path, check: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    how = dict(init_method=f"file://{folder}/rendezvous", timeout=timedelta(seconds=120))  # else who waits waits long
    dist.init_process_group(backend, rank=rank, world_size=number, **how)
    check(rank, *args)
    dist.destroy_process_group()

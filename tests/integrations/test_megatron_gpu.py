"""Experts of Megatron-Core in the CUDA graphs that it captures, and a rank that fails over NCCL."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import ROOT
from processes import in_processes

if importlib.util.find_spec("megatron") is None:
    pytest.skip("pip install megatron-core==0.16.1", allow_module_level=True)

STEPS = 6
SECONDS = 20  # the timeout of a group
PADDED = dict(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True, moe_permute_fusion=False)
GRAPHS = {
    "eager": {},
    "whole layers": dict(cuda_graph_impl="local", cuda_graph_scope="full"),
}


def check_graphs(rank: int) -> None:
    """Losses of training. Graphs are captured after the first step, and replayed from then on."""
    sys.path.insert(0, str(ROOT / "bench"))
    import mcore
    from megatron.core import parallel_state
    from megatron.core.transformer.cuda_graphs import create_cudagraphs

    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel()
    sizes = mcore.TINY | dict(hidden_size=256, moe_ffn_hidden_size=256)
    batches = mcore.batches_of(STEPS, 2, 2, 64, torch.device("cuda"))
    losses = {}
    for name, graphs in GRAPHS.items():
        run = mcore.Run("rowwise", sizes, 2, 64, True, config=PADDED | graphs)
        losses[name] = []
        for i, batch in enumerate(batches):
            losses[name].append(run.step(batch)[0].item())
            if graphs and i == 0:
                create_cudagraphs()  # Megatron's schedules do, which `Run` does not use
        layers = run.ddp.module.module.decoder.layers
        assert not graphs or all(layer.cudagraph_manager.cudagraph_runners for layer in layers)
    torch.cuda.set_stream(torch.cuda.default_stream())
    first, *others = losses.values()
    assert first[-1] < first[0]
    for other in others:  # the same kernels; only sums by atomics may differ
        torch.testing.assert_close(torch.tensor(other), torch.tensor(first), rtol=0.01, atol=0.0)


def test_graphs_of_whole_layers_train(gpu):
    in_processes(1, check_graphs, backend="nccl")


def check_failure(rank: int, folder: Path) -> None:
    """Experts of rank 1 fail in the second step. Rank 0 raises when the time of its message is over."""
    sys.path.insert(0, str(ROOT / "bench"))
    import mcore
    from megatron.core import parallel_state

    signal.alarm(6 * SECONDS)  # ends this process if it waits for ever
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, distributed_timeout_minutes=SECONDS / 60)
    run = mcore.Run("rowwise", mcore.TINY, 2, 64, True)
    first, second = mcore.batches_of(2, 2, 2, 64, device)
    assert run.step(first)[0].isfinite()  # both ranks are there
    raised = folder / "raised"
    began = time.monotonic()
    if rank == 1:
        text = "experts 4 to 7 of layer 1 failed on rank 1 of 2; the other ranks"
        planted = patch("moe_fp8_ext.integrations.megatron.experts_of_groups", side_effect=RuntimeError("planted"))
        with planted, pytest.raises(RuntimeError, match="planted") as info:
            run.step(second)
        assert any(text in note for note in info.value.__notes__)
        while not raised.exists():  # this rank is there until the other one has raised
            assert time.monotonic() - began < 4 * SECONDS
            time.sleep(0.1)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)time(d )?-?out"):
            run.step(second)
        assert time.monotonic() - began < 2 * SECONDS
        raised.touch()
    os._exit(0)  # a communicator whose message never came may wait for ever when it is destroyed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA GPU")
def test_a_rank_that_fails_over_two_gpus(tmp_path, monkeypatch):
    """torch's NCCL raises where a rank waits on the host, if this variable is set. Without it, it ends the process."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    in_processes(2, check_failure, tmp_path, backend="nccl")

"""Experts of Megatron-Core in the CUDA graphs that it captures, and a rank that fails over NCCL."""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import NO_SECOND_GPU, ROOT
from processes import in_processes
from torch.multiprocessing import ProcessExitedException

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
    """Experts of rank 1 fail in the second step, and its script goes on. Rank 0 waits for rows of rank 1."""
    sys.path.insert(0, str(ROOT / "bench"))
    import mcore
    from megatron.core import parallel_state

    signal.alarm(6 * SECONDS)  # ends this process if it waits for ever
    device = torch.device("cuda", rank)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, distributed_timeout_minutes=SECONDS / 60)
    run = mcore.Run("rowwise", mcore.TINY, 2, 64, True)
    first, second = mcore.batches_of(2, 2, 2, 64, device)
    assert run.step(first)[0].isfinite()  # both ranks are there
    if rank == 0:
        run.step(second)
        raise AssertionError("the step must wait for rank 1")
    planted = patch("moe_fp8_ext.integrations.megatron.experts_of_groups", side_effect=RuntimeError("planted"))
    with planted, pytest.raises(RuntimeError, match="planted") as info:
        run.step(second)
    (folder / "notes").write_text("\n".join(info.value.__notes__))
    time.sleep(6 * SECONDS)  # until rank 0 has ended, and the launcher ends this process


@NO_SECOND_GPU
def test_a_rank_that_fails_over_two_gpus(tmp_path):
    """The error says where it was raised. When the time of the group is over, torch's watchdog ends the other process,
    and so the launcher ends the first one."""
    with pytest.raises(ProcessExitedException) as info:
        in_processes(2, check_failure, tmp_path, backend="nccl")
    assert (info.value.error_index, info.value.signal_name) == (0, "SIGABRT")
    assert "experts 4 to 7 of layer 1 failed on rank 1 of 2; the other ranks" in (tmp_path / "notes").read_text()

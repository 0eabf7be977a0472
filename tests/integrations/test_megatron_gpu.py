"""Experts of Megatron-Core in the CUDA graphs that it captures."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from helpers import ROOT
from processes import in_processes

if importlib.util.find_spec("megatron") is None:
    pytest.skip("pip install megatron-core==0.16.1", allow_module_level=True)

STEPS = 6
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

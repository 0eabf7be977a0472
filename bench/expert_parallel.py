"""Measures experts over ranks with one GPU each: the cost of exchanging tokens, and a layer compared with torch's own
ops.

NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 bench/expert_parallel.py --out bench/results/expert_parallel.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import run
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.profiler import ProfilerActivity, profile

from moe_fp8_ext import ops
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.distributed.exchange import ExchangedTokens
from moe_fp8_ext.distributed.plan import Agreement
from moe_fp8_ext.matmul.engine import engine_of

TOKENS, D, F, EXPERTS, TOP_K = 16384, 7168, 2048, 64, 8
SECONDS = 1.5  # time to measure a call, all turns together


def sustained_us(calls: dict[str, Callable[[], object]], turns: int = 3) -> dict[str, float]:
    """Calls take turns. A time is the slowest rank's mean in the fastest turn. All ranks make the same number of
    calls."""
    best: dict[str, float] = {}
    for turn in range(turns + 1):  # the first turn warms up
        for name, call in calls.items():
            call()
            count = torch.tensor([max(3, round(SECONDS / turns * 1e6 / best.get(name, 1e5)))], device="cuda")
            dist.broadcast(count, 0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record()
            for _ in range(int(count)):
                call()
            end.record()
            end.synchronize()
            mean = torch.tensor([begin.elapsed_time(end) * 1e3 / int(count)], device="cuda")
            dist.all_reduce(mean, dist.ReduceOp.MAX)
            best[name] = mean.item() if turn < 2 else min(best[name], mean.item())
    return best


def exchange_us(call: Callable[[], object], calls: int = 10) -> float:
    """Time of a call's longest collective kernel, in the run where ranks waited least for each other, on the slowest
    rank."""
    longest = []
    for _ in range(calls):
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        longest.append(max(event.device_time for event in found.events() if "nccl" in event.name.lower()))
    slowest = torch.tensor([min(longest)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def composed(x: Tensor, ids: Tensor, scores: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Computes the layer in BF16 with torch's own ops. A token travels once to each of its experts."""
    ranks, local = dist.get_world_size(), len(w_gate_up)
    permutation = ids.flatten().sort(stable=True).indices
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda").scatter_add(
        0, ids.flatten(), torch.ones_like(ids).flatten()
    )
    of_ranks = torch.empty_like(counts)
    dist.all_to_all_single(of_ranks, counts)
    sizes = torch.stack([counts.view(ranks, local).sum(1), of_ranks.view(ranks, local).sum(1)])
    sent, received = sizes.tolist()
    arrived = all_to_all_single_autograd(x[permutation // TOP_K], received, sent, dist.group.WORLD)
    experts = torch.arange(local, device="cuda").repeat(ranks).repeat_interleave(of_ranks, output_size=sum(received))
    order = experts.sort(stable=True).indices
    offs = of_ranks.view(ranks, local).sum(0).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(arrived[order], w_gate_up.mT, offs=offs).chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down.mT, offs=offs)
    y = y[torch.empty_like(order).scatter(0, order, torch.arange(len(order), device="cuda"))]
    back = all_to_all_single_autograd(y, sent, received, dist.group.WORLD)
    inverse = torch.empty_like(permutation).scatter(0, permutation, torch.arange(len(permutation), device="cuda"))
    return (back[inverse].view(*ids.shape, -1) * scores.to(back.dtype)[..., None]).sum(1)


def measure() -> dict[str, object]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x, grad = (torch.randn(TOKENS, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    scores = torch.rand(TOKENS, TOP_K, device="cuda").softmax(-1).requires_grad_()
    sizes = (EXPERTS // ranks, 2 * F, D), (EXPERTS // ranks, D, F)
    weights = [(torch.randn(size, device="cuda") * size[-1] ** -0.5).bfloat16().requires_grad_() for size in sizes]
    x.requires_grad_()
    leaves = x, scores, *weights

    def parallel(recipe: str, **options: object) -> ExpertParallel:
        return ExpertParallel(dist.group.WORLD, EXPERTS, TOP_K, recipe=recipe, **options)

    def send(ep: ExpertParallel) -> ExchangedTokens:
        exchange = ep._exchange
        return exchange.send(exchange.prepare(x.detach(), ids, scores.detach()), Agreement(0, 1), (True, True))

    def dispatch(ep: ExpertParallel) -> object:
        with torch.no_grad():
            [(tokens, _, groups)] = send(ep).chunks(x, scores)
            if ep.recipe.format is None:
                return engine_of(ep.recipe).tokens(tokens, groups, rows=True)
            # Our products take some of these rows by index. Here all rows are moved, as for BF16.
            return ops.permute_quantized(tokens.values, tokens.scale, ep.recipe.format, groups.indices, groups.top_k)

    def step(layer: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(layer(x, ids, scores, *weights), leaves, grad)

    found: dict[str, object] = {}
    by_recipe = {name: parallel(name) for name in ("bf16", "rowwise", "blockwise")}
    found["dispatch_us"] = sustained_us({name: partial(dispatch, ep) for name, ep in by_recipe.items()})
    sources = {name: send(ep) for name, ep in by_recipe.items()}
    arrived = {name: source.arriving[0].receive() for name, source in sources.items()}
    found["bytes"] = {name: rows.shape[1] for name, rows in arrived.items()}
    route = sources["rowwise"].routes[0]
    rows = arrived["rowwise"].new_empty(sum(route.sent), arrived["rowwise"].shape[1])
    found["exchange_us"] = {
        "in a dispatch": exchange_us(partial(dispatch, by_recipe["rowwise"])),
        "alone": exchange_us(lambda: route.send(rows).wait()),
    }
    static = {name: parallel(name, mode="static", capacity=1.02, overflow="count") for name in ("rowwise", "blockwise")}
    layers = {
        "torch BF16": composed,
        **{f"{name} exact": ep.experts for name, ep in by_recipe.items()},
        **{f"{name} static": ep.experts for name, ep in static.items()},
        "rowwise exact, FP8 gradients": parallel("rowwise", gradients="fp8").experts,
        "rowwise exact, 2 chunks": parallel("rowwise", chunks=2).experts,
        "blockwise exact, 2 chunks": parallel("blockwise", chunks=2).experts,
    }
    found["layer_us"] = sustained_us({name: partial(step, layer) for name, layer in layers.items()})
    for ep in static.values():
        ep.check()  # checks that no token was left out
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the figures")
    args = parser.parse_args()
    # Otherwise kernels that run meanwhile delay the all-to-all, which waits for room on the GPU:
    # docs/expert-parallel.md.
    dist.init_process_group("nccl", pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    torch.cuda.set_device(dist.get_rank())
    result = run.environment(torch.device("cuda")) | {"gpus": dist.get_world_size()} | measure()
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

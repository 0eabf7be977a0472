"""One process of an expert-parallel group in tests: its part of a problem, and its expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from experts_problem import Layer, assert_equal, layer, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_fp8_ext import Experts, Recipe
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.quantization.recipe import get_recipe

EXPERTS, D, F = 8, 128, 96
PER_TOKEN = ("out", "x", "scores", "ids", "grad")


class World:
    """The rank of this process, and the problems and results of all ranks."""

    def __init__(self, rank: int, size: int, device: str, folder: Path) -> None:
        self.rank, self.size, self.device, self.folder = rank, size, device, folder
        self.local = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)

    def parallel(self, top_k: int, recipe: str | Recipe = "rowwise", **options: object) -> ExpertParallel:
        return ExpertParallel(dist.group.WORLD, EXPERTS, top_k, recipe=recipe, **options)

    def whole(self, tokens: list[int], top_k: int, **options: object) -> Layer:
        """The problem of all ranks together; tokens[r] is the number of tokens of rank r."""
        return layer(t=sum(tokens), d=D, f=F, e=EXPERTS, top_k=top_k, **options).at(self.device)

    def part(self, problem: Layer, tokens: list[int]) -> Layer:
        """The part of the problem that this rank holds."""
        weights = ("w_gate_up", "w_down", "b_gate_up", "b_down")
        local = {n: t[self.local] for n in weights if (t := getattr(problem, n)) is not None}
        local |= {n: getattr(problem, n)[self.rows(tokens)] for n in ("x", "ids", "scores", "grad")}
        return replace(problem, **local)

    def rows(self, tokens: list[int]) -> slice:
        """The rows of this rank in a tensor of all ranks."""
        return slice(sum(tokens[: self.rank]), sum(tokens[: self.rank + 1]))

    def wanted(self, problem: Layer, tokens: list[int], **options: object) -> dict[str, Tensor]:
        """The expected results of this rank, bit by bit, computed in one process.

        Each rank's part of a token is bfloat16, and the parts are added in the order of the ranks. Scales are never per
        batch.
        """
        recipe = get_recipe(options.pop("recipe", "rowwise"))
        options["recipe"] = replace(recipe, amax=recipe.amax_of_groups)
        results = run(problem, **options)
        local_experts, parts = EXPERTS // self.size, []
        for rank in range(self.size):
            ids = torch.where(problem.ids // local_experts == rank, problem.ids, -1)
            parts.append(run(replace(problem, ids=ids), **options))
        for name in {"out", "x"} & results.keys():
            total = torch.zeros_like(results[name], dtype=torch.float32)
            for part in parts:
                total += part[name].float()
            results[name] = total.to(results[name].dtype)
        return {n: t[self.rows(tokens) if n in PER_TOKEN else self.local] for n, t in results.items()}

    def raises(self, text: str, call: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match=text):
            call()


def module(world: World, **options: object) -> Experts:
    """Experts of a fixed seed, with biases; their sizes are no multiples of the tiles of kernels."""
    torch.manual_seed(3)
    return Experts(EXPERTS, D, F, bias=True, device=world.device, dtype=torch.bfloat16, **options)


def meshes(world: World, size: int) -> DeviceMesh:
    """A mesh for data parallelism over expert-parallel groups of `size` ranks."""
    sizes = (world.size // size, size)
    return init_device_mesh(torch.device(world.device).type, sizes, mesh_dim_names=("dp", "ep"))


def check_graph(world: World, chunks: int = 1) -> None:
    """A CUDA graph of a call with fixed sizes, replayed with other tokens and another routing."""
    if world.device == "cpu":
        return
    tokens = [48] * world.size
    first, second = (world.part(world.whole(tokens, 3, seed=seed), tokens) for seed in (1, 2))
    second = replace(second, w_gate_up=first.w_gate_up, w_down=first.w_down)
    parallel = world.parallel(3, mode="static", chunks=chunks)
    names = "x", "ids", "scores", "w_gate_up", "w_down", "grad"
    inputs = {n: getattr(first, n).clone() for n in names}
    leaves = [inputs[n].requires_grad_() for n in ("x", "scores", "w_gate_up", "w_down")]

    def call() -> tuple[Tensor, ...]:
        out = parallel.experts(*(inputs[n] for n in names[:-1]))
        return out, *torch.autograd.grad(out, leaves, inputs["grad"])

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for problem in (second, first):
        with torch.no_grad():
            for n in names:
                inputs[n].copy_(getattr(problem, n))
        graph.replay()
        assert_equal(dict(zip(("out", *names[:1], *names[2:5]), outputs, strict=True)), run(problem, parallel.experts))


def process(rank: int, size: int, on_gpus: bool, checks: tuple[Callable, ...], folder: Path) -> None:
    """The body of one process: runs the checks, each with a World of its own."""
    device = f"cuda:{rank}" if on_gpus else "cpu"
    for check in checks:
        check(World(rank, size, device, folder))

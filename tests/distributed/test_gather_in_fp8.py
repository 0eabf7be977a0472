"""gather_in_fp8_ over two processes: the bytes of plain FSDP2 with half the traffic, no kept copies, and errors."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import NO_SECOND_GPU, blocks, saved_tensors
from processes import BACKENDS, NEEDS_GLOO, device, in_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe_fp8_ext
from moe_fp8_ext import _torch
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.distributed.fsdp import GatheredWeight

PROCESSES, EXPERTS, SIZE, TOKENS, LAYERS, STEPS = 2, 4, 128, 48, 2, 2
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFS = 10, 10, 40, TOKENS - 3
SHAPES = (2 * SIZE, SIZE), *[(SIZE, SIZE)] * 3  # shapes of an expert's weights in a layer
VALUES = EXPERTS * sum(map(math.prod, SHAPES))
OTHERS = 2 * (EXPERTS * SIZE + EXPERTS * 3 * SIZE)  # bytes of gate and biases in bfloat16
# Bytes of an expert's scales of all SHAPES, at four bytes or one per scale: per row, per 128 x 128 block, per 32 in a
# row.
SCALES = {"rowwise": EXPERTS * 4 * 5 * SIZE, "blockwise": EXPERTS * 4 * (2 + 3), "mxfp8": EXPERTS * 5 * SIZE * 4}


def ends_of_groups() -> Tensor:
    return torch.tensor(OFFS, dtype=torch.int32, device=device())


class Layer(nn.Module):
    """Uses both ways in which weights of experts are multiplied."""

    def __init__(self, recipe: str, again: str | None) -> None:
        super().__init__()
        self.recipe, self.again = recipe, again
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False)
        self.experts = moe_fp8_ext.Experts(EXPERTS, SIZE, SIZE, bias=True, recipe=recipe)
        self.up = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE) * SIZE**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE) * SIZE**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.again == "inside" else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).float().softmax(-1).topk(2)
        offs = ends_of_groups()
        h = moe_fp8_ext.grouped_mm(x + self.experts(x, ids, scores), self.up.mT, offs, recipe=self.recipe)
        return x + moe_fp8_ext.grouped_mm(nn.functional.silu(h), self.down.mT, offs, recipe=self.recipe)


class Model(nn.Module):
    def __init__(self, recipe: str, again: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.layers = nn.ModuleList([Layer(recipe, again) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again == "around" else layer(x)
        return x


def sharded(
    recipe: str,
    gathers: bool,
    again: str | None = None,
    reshard: bool = True,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
) -> Model:
    model = Model(recipe, again).to(device(), dtype)
    policy = MIXED if dtype == torch.float32 else MixedPrecisionPolicy()
    for layer in model.layers:
        layer.experts.requires_grad_(not frozen)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    if gathers:
        moe_fp8_ext.gather_in_fp8_(model, recipe)
    return model


class Gathered(TorchDispatchMode):
    """Counts the bytes that all processes receive by all-gathers, from FSDP2 and from the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "all" in func._opname and "gather" in func._opname:
            whole = args[0] if func.namespace == "c10d" else out
            self.bytes += whole.numel() * whole.itemsize
        return out


def batch(step: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(PROCESSES * step + rank)
    return torch.randn(TOKENS, SIZE, generator=g).bfloat16().to(device()).requires_grad_()


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(
    model: Model,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    steps: range = range(STEPS),
    micro_batches: int = 1,
    stays: bool = False,
) -> tuple[list[Tensor], int]:
    """Returns results of every step (outputs, gradients of tokens, losses, gradients and their norm), and the bytes
    gathered."""
    optimizer, found = optimizer or adamw(model), []
    with Gathered() as gathered:
        for step in steps:
            for i in range(micro_batches):
                is_last = i == micro_batches - 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last or not stays)
                x = batch(step * micro_batches + i, rank)
                out = model(x)
                loss = out.float().square().mean()
                loss.backward()
                found += [out.detach(), x.grad, loss.detach()]
            found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
    return found, gathered.bytes


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


CASES = {
    "resharded": {},
    "computed again inside": {"again": "inside"},
    "computed again around": {"again": "around"},
    "not resharded": {"reshard": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "frozen": {"frozen": True},
}
# The recipe decides which directions are gathered, and the scales.
CASES_OF = {
    "rowwise": [*CASES],
    "blockwise": ["resharded", "computed again inside", "not resharded"],
    "mxfp8": ["resharded", "computed again around"],
}


def check_training(recipe: str, rank: int, folder: Path) -> None:
    """All results equal plain FSDP2, bit for bit, and the bytes gathered are as expected."""
    fp8, layers = VALUES + SCALES[recipe], STEPS * LAYERS
    assert fp8 / (2 * VALUES) <= (0.5002 if recipe == "blockwise" else 0.516)
    for name in CASES_OF[recipe]:
        how = CASES[name]
        want, of_plain = train(sharded(recipe, False, **how), rank)
        got, of_fp8 = train(sharded(recipe, True, **how), rank)
        assert_equal(got, want)
        gathers, is_for_both = 1 if name == "not resharded" else 2, "again" in name or name == "not resharded"
        of_layers_own = fp8 if is_for_both and recipe != "blockwise" else 0
        assert of_plain == layers * gathers * (2 * VALUES + OTHERS)
        assert of_fp8 == layers * (gathers * (fp8 + OTHERS) + of_layers_own), name


def check_micro_batches(recipe: str, rank: int, folder: Path) -> None:
    """Gradients are not reduced between micro-batches. Weights are resharded or stay, with and without the weight
    cache."""
    for stays in (False, True):
        how = {"micro_batches": 2, "stays": stays}
        want, of_plain = train(sharded(recipe, False, reshard=not stays), rank, **how)
        for context in (contextlib.nullcontext, moe_fp8_ext.reuse_weights):
            with context():
                got, of_fp8 = train(sharded(recipe, True, reshard=not stays), rank, **how)
            assert_equal(got, want)
            # Weights that stay are gathered once a step, in both directions.
            assert of_fp8 / of_plain <= (0.52 if recipe == "blockwise" or not stays else 1.04)


def check_forward(recipe: str, rank: int, folder: Path) -> None:
    model, x = sharded(recipe, True), batch(0, rank)
    want = Model(recipe).to(device(), torch.bfloat16)(x)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x.detach() if mode is torch.inference_mode else x), want), mode


def check_memory(recipe: str, rank: int, folder: Path) -> None:
    """Backward keeps no copy of a weight. FSDP2 and the layer have freed everything that they gathered."""

    def check(again: str | None) -> None:
        model, weights = sharded(recipe, True, again), []

        def note(layer: Layer, _: object) -> None:
            weights.extend(w for w in layer.parameters() if w.dim() == 3)

        def kept() -> list[int]:
            tensors = [t for w in weights for t in (w.gather.values, w.gather.scales, *w.gather.other)]
            return [t.untyped_storage().size() for t in tensors]

        for layer in model.layers:
            layer.register_forward_pre_hook(note)
        with saved_tensors() as saved:
            out = model(batch(0, rank))
        assert len(weights) == LAYERS * len(SHAPES) and set(kept()) == {0}
        assert {type(t) for t in saved if t.dim() == 3} == (set() if again else {GatheredWeight})
        out.sum().backward()
        both = again is not None and recipe != "blockwise"
        assert kept() == [0] * len(weights) * (4 if both else 2)

    check(None)
    check("inside")


def check_resuming(recipe: str, rank: int, folder: Path) -> None:
    """Checkpoints equal the checkpoints of plain FSDP2, and each of the two resumes the other's."""

    def fresh(gathers: bool) -> tuple[Model, torch.optim.Optimizer]:
        model = sharded(recipe, gathers)
        return model, adamw(model)

    for saves, loads in ((True, False), (False, True)):
        model, optimizer = fresh(saves)
        train(model, rank, optimizer)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / str(saves))
        assert all(type(p.to_local()) in (Tensor, nn.Parameter) for p in of_model.values())
        want, _ = train(model, rank, optimizer, range(STEPS, 2 * STEPS))

        model, optimizer = fresh(loads)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / str(saves))
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        got, _ = train(model, rank, optimizer, range(STEPS, 2 * STEPS))
        assert_equal(got, want)


class Product(nn.Module):
    """A grouped_mm with weights [E, K, N]."""

    def __init__(self, experts: int = EXPERTS, recipe: str = "rowwise", mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        w = torch.randn(experts, 64, 96)
        self.w, self.recipe = nn.Parameter(w if mesh is None else distribute_tensor(w, mesh, [Shard(0)])), recipe

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        return moe_fp8_ext.grouped_mm(x, w, offs, recipe=self.recipe)


def check_products(recipe: str, rank: int, folder: Path) -> None:
    """The weight is a parameter, or a DTensor of an expert-parallel mesh of one process."""
    mesh = init_device_mesh(device().type, (PROCESSES, 1), mesh_dim_names=("data", "experts"))
    for of_experts in (None, mesh["experts"]):
        results = []
        for gathers in (False, True):
            model = Product(recipe=recipe, mesh=of_experts).to(device())
            fully_shard(model, mesh=mesh["data"], mp_policy=MIXED, reshard_after_forward=True)
            if gathers:
                moe_fp8_ext.gather_in_fp8_(model, recipe)
            x = batch(0, rank).detach()[:, :64].contiguous().requires_grad_()
            with Gathered() as gathered:
                out = model(x, ends_of_groups())
                out.float().square().mean().backward()
            results.append([out.detach(), x.grad, model.w.grad.to_local(), gathered.bytes])
        (*want, of_plain), (*got, of_fp8) = results
        assert_equal(got, want)
        assert of_fp8 != of_plain


def check_documents(recipe: str, rank: int, folder: Path) -> None:
    """Runs the block of docs/fsdp2.md that gathers in FP8."""
    (block,) = blocks("docs/fsdp2.md", "Gather weights in FP8")
    model = Model("rowwise")
    exec(block, {"model": model, "fully_shard": fully_shard, "moe_fp8_ext": moe_fp8_ext, "policy": MIXED})
    _, bytes = train(model, rank)
    assert bytes == STEPS * LAYERS * 2 * (VALUES + SCALES["rowwise"] + OTHERS)


def check_refused(recipe: str, rank: int, folder: Path) -> None:
    def product(
        experts: int = EXPERTS, gathered: str = "rowwise", called: str = "rowwise", **options: object
    ) -> Product:
        model = fully_shard(Product(experts, called), **{"mp_policy": MIXED} | options)
        moe_fp8_ext.gather_in_fp8_(model, gathered)
        return model

    def refuses(message: str, model: Product | None = None, of: object = None) -> None:
        x, offs = torch.zeros(4, 64, dtype=torch.bfloat16), torch.full((len(model.w),) if model else (), 4).int()
        with pytest.raises(RuntimeError, match=message):
            of() if model is None else model(x, offs)

    gather = moe_fp8_ext.gather_in_fp8_
    for name in ("bf16", "auto"):
        refuses(
            f"recipe must be one that always multiplies in fp8, got '{name}'", of=lambda n=name: gather(Product(), n)
        )
    refuses("w must be sharded by fully_shard, got a Parameter", of=lambda: gather(Product()))
    refuses("module must have parameters of 3 dimensions, got none", of=lambda: gather(nn.Linear(2, 2)))
    refuses("w must be on cpu, got meta", of=lambda: gather(fully_shard(Product().to("meta"))))
    refuses("w .* must be sharded evenly .* got a shard", product(experts=3))
    refuses("w .* must be sharded evenly .* got a shard", product(shard_placement_fn=lambda _: Shard(1)))
    refuses("w must be multiplied as it was gathered, .*'rowwise'.*, got .*'mxfp8'", product(called="mxfp8"))
    exact = moe_fp8_ext.Recipe("rowwise", rounding="exact")
    refuses("w must be multiplied as it was gathered, .*'pow2'.*, got .*'exact'", product(called=exact))
    e5m2 = moe_fp8_ext.Recipe("rowwise", dtype=torch.float8_e5m2)
    refuses("w must be multiplied as it was gathered, .*e5m2.*, got .*e4m3", product(gathered=e5m2))
    refuses("which has copies and no values", product(called="bf16"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = product(mp_policy=MixedPrecisionPolicy())
        refuses("w must be multiplied as it was gathered, float32 in .*, got bfloat16 in .*; give", model)
    with pytest.raises(ValueError, match="^gather_in_fp8_: recipe must be 'bf16', .*, got 'fp8'$"):
        gather(Product(), "fp8")
    late, again = fully_shard(Product(), mp_policy=MIXED), product()
    for model in (late, again):
        model(torch.zeros(4, 64, dtype=torch.bfloat16), torch.full((EXPERTS,), 4).int())
    if not _torch.ONLY_PUBLIC:
        refuses("w must get its hooks before the first forward, got .* after fully_shard", of=lambda: gather(late))
    again.reshard()
    gather(again, "rowwise")  # FSDP2 knows that this weight has hooks
    model = product()
    model.unshard()
    refuses("which has copies and no values", of=lambda: model.w + 1)
    freed = model.w
    model.reshard()
    refuses("w must be gathered where it is multiplied, got what FSDP2 has freed", of=freed.transposed_operand)


CHECKS = check_training, check_forward, check_memory, check_products
CHECKS_OF = {
    "rowwise": (*CHECKS, check_micro_batches, check_resuming),
    "blockwise": (*CHECKS, check_micro_batches),  # the only recipe that gathers both directions at once
    "mxfp8": CHECKS,
}


def run(rank: int, recipe: str, checks: tuple, folder: Path) -> None:
    for check in checks:
        check(recipe, rank, folder)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", CHECKS_OF)
def test_two_processes(recipe, backend, tmp_path):
    in_processes(PROCESSES, run, recipe, CHECKS_OF[recipe], tmp_path, backend=backend)


@NEEDS_GLOO
def test_documents_and_refusals(tmp_path):
    in_processes(PROCESSES, run, "rowwise", (check_documents, check_refused), tmp_path)


@pytest.mark.parametrize("module", [None, [], Product])
def test_what_is_no_module(module):
    text = f"^gather_in_fp8_: module must be a torch.nn.Module, got {type(module).__name__}$"
    with pytest.raises(TypeError, match=text):
        moe_fp8_ext.gather_in_fp8_(module)


def check_alone(rank: int) -> None:
    """With one process, FSDP2 copies where it would gather. The results stay the same."""
    for recipe in SCALES:
        for again in (None, "inside"):
            (want, _), (got, _) = (train(sharded(recipe, gathers, again), rank) for gathers in (False, True))
            assert_equal(got, want)


def check_over_ranks(rank: int, shape: tuple[int, int]) -> None:
    """Two processes have different experts. Each expert is sharded over two, or stays whole."""
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("data", "experts"))
    for recipe in SCALES:
        ep, results = ExpertParallel(mesh["experts"], EXPERTS, 2, recipe=recipe), []
        for gathers in (False, True):
            torch.manual_seed(0)
            router, experts = (
                moe_fp8_ext.Router(EXPERTS, SIZE, 2),
                moe_fp8_ext.Experts(EXPERTS, SIZE, SIZE, ep=ep, recipe=recipe),
            )
            layer = moe_fp8_ext.MoE(router, experts).to(device())
            fully_shard(experts, mesh=mesh["data"])
            experts.set_force_sum_reduction_for_comms(True)  # gloo needs it
            fully_shard(layer)
            if gathers:
                moe_fp8_ext.gather_in_fp8_(layer, recipe)
            x = batch(0, rank).detach().requires_grad_()
            with Gathered() as gathered:
                out, loss = layer(x)
                (out.float().square().mean() + loss).backward()
            grads = [p.grad.full_tensor() for p in layer.parameters()]
            results.append([out.detach(), x.grad, *grads, gathered.bytes])
        (*want, of_plain), (*got, of_fp8) = results
        assert_equal(got, want)
        assert of_fp8 < of_plain or shape[0] == 1


@NEEDS_GLOO
def test_over_ranks():
    in_processes(4, check_over_ranks, (2, 2))


@NO_SECOND_GPU
def test_over_two_gpus():
    in_processes(2, check_over_ranks, (1, 2), backend="nccl")


@NEEDS_GLOO
def test_one_process_alone():
    in_processes(1, check_alone)

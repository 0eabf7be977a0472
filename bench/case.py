"""What a benchmark case is, and what the cases of all op families share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_fp8_ext.quantization import recipe as recipes

TABLE = json.loads((Path(__file__).parent / "shapes.json").read_text())
RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.format == name)  # those in fp8
EVEN, ZIPF, ONE = "even", "zipf", "one"  # what `Shape.groups` may be: `shares` says the sizes


@dataclass(frozen=True)
class Shape:
    """`label` names the row, `dims` are the sizes that `Case.inputs` takes as keywords, `groups` is for `shares`."""

    label: str
    dims: dict[str, int]
    groups: str | None = None

    @property
    def uneven(self) -> bool:
        return is_uneven(self.groups)


@dataclass(frozen=True)
class Target:
    """A bound on one column of the row, such as of_copy >= 0.97. Only of_even is for uneven groups."""

    metric: str
    sense: str
    bound: float

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sense == ">=" else value <= self.bound


Rule = tuple[Callable[[Shape], bool], Target]


@dataclass(frozen=True)
class Case:
    """One op, in one format if it knows several, in one variant if it has any.

    `inputs(device, groups, **dims)` makes the arguments of `call`; the first rule per metric that matches a shape gives
    its target. GEMMs have `flops`. A `baseline` is called with the same arguments.
    `moved` gives the bytes of arguments and results, where not everything is read. All calls are made within `within`.
    """

    op: str
    shapes: Callable[[bool], list[Shape]]
    inputs: Callable[..., tuple[object, ...]]
    call: Callable[..., object]
    rules: tuple[Rule, ...] = ()
    format: str = ""
    variant: str = ""
    flops: Callable[..., int] | None = None
    baseline: Callable[..., object] | None = None
    kept: Callable[..., float] | None = None
    moved: Callable[..., int] | None = None
    within: Callable[[], AbstractContextManager] = nullcontext

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.op, self.format, self.variant)))

    def targets(self, shape: Shape) -> list[Target]:
        first: dict[str, Target] = {}
        for applies, target in self.rules:
            if applies(shape) and shape.uneven == (target.metric == "of_even"):
                first.setdefault(target.metric, target)
        return list(first.values())


Spread = Callable[[Iterable[Shape]], list[Shape]]  # gives shapes their groups


def even_and_uneven(shapes: Iterable[Shape]) -> list[Shape]:
    return [Shape(shape.label, shape.dims, groups) for shape in shapes for groups in (EVEN, ZIPF)]


def skewed(shapes: Iterable[Shape]) -> list[Shape]:
    """From even groups to what a router without a balance loss may come to."""
    kinds = EVEN, "zipf 0.3", "zipf 0.6", ZIPF, "zipf 1.5", ONE
    return [Shape(shape.label, shape.dims, groups) for shape in shapes for groups in kinds]


def is_uneven(groups: str | None) -> bool:
    return groups not in (None, EVEN)


def shares(groups: str, e: int) -> Tensor:
    """What every group has of all tokens: the same, 0.9 of them in one, or as 1 / rank ** p ("zipf p", or p = 1)."""
    ranks = torch.arange(1.0, e + 1, dtype=torch.float64)
    if groups == ONE:
        weights = torch.where(ranks == e // 2 + 1, 9.0 * (e - 1), 1.0)
    else:
        kind, *exponent = groups.split()
        weights = ranks ** -(0.0 if kind == EVEN else float(*exponent or [1]))
    return (weights / weights.sum()).double()


def group_ends(groups: str, m: int, e: int, device: torch.device) -> Tensor:
    """offs of E groups that hold all M rows."""
    ends = (shares(groups, e).cumsum(0) * m).floor().to(torch.int32)
    ends[-1] = m
    return ends.to(device)


def normal(device: torch.device, *size: int, grad: bool = False) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device, requires_grad=grad)


def small_sizes() -> list[tuple[int, int, int]]:
    """The (M, K, E) that are more than a corner case and that the CPU loops still finish in moments."""
    return [(m, k, e) for m, k, e in TABLE["correctness_MKE"] if m >= 300 and k < 1000]


def activations(cpu: bool) -> list[Shape]:
    sizes = [(m, k) for m, k, _ in small_sizes()] if cpu else TABLE["activations_MK"]
    return [Shape(f"[{m}, {k}]", {"m": m, "k": k}) for m, k in sizes]


def grouped_shapes(sizes: Iterable[tuple[int, int, int]], spread: Spread = even_and_uneven) -> list[Shape]:
    return spread(Shape(f"[{m}, {k}] E={e}", {"m": m, "k": k, "e": e}) for m, k, e in sizes)


def exchanged_shapes(cpu: bool) -> list[Shape]:
    """Tokens that came from R ranks for E experts."""
    sizes = [(m, k, 3, e) for m, k, e in small_sizes()] if cpu else [(131072, 7168, 8, 8), (131072, 2048, 8, 64)]
    return even_and_uneven(Shape(f"[{m}, {k}] R={r} E={e}", {"m": m, "k": k, "r": r, "e": e}) for m, k, r, e in sizes)


def is_(label: str) -> Callable[[Shape], bool]:
    return lambda shape: shape.label == label


def always(shape: Shape) -> bool:
    return True


def over_100_mb(shape: Shape) -> bool:
    return shape.dims["m"] * shape.dims["k"] * 2 > 100e6


def of_copy(bound: float) -> Target:
    return Target("of_copy", ">=", bound)


# One eager call of an op with one output and one launch, over an eager torch.relu, which has one of each as well.
HOST: Rule = (always, Target("host_relu", "<=", 1.5))


def commits_of(rows: list[dict], result: dict) -> str:
    """Of rows of a results file, some of which are of later runs than the others."""
    return " and ".join(sorted({(row.get("commit") or result["commit"] or "unknown")[:7] for row in rows}))


def training_rows(result: dict) -> list[dict]:
    """Of a results file: forward and backward of `grouped_mm` as usually called, of the groups that all sizes have."""
    ops, groups = [f"grouped_mm {recipe}" for recipe in RECIPES], (EVEN, ZIPF)
    return [row for row in result["rows"] if row["op"] in ops and row["groups"] in groups and row.get("ratio")]

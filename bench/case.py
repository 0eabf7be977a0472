"""The definition of a benchmark case, and parts that the cases of all op families share."""

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
RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.format == name)  # recipes in fp8
EVEN, ZIPF, ONE = "even", "zipf", "one"  # values of `Shape.groups`: `shares` gives the sizes


@dataclass(frozen=True)
class Shape:
    """`label` names the row. `Case.inputs` takes the sizes in `dims` as keywords. `shares` takes `groups`."""

    label: str
    dims: dict[str, int]
    groups: str | None = None

    @property
    def uneven(self) -> bool:
        return is_uneven(self.groups)


@dataclass(frozen=True)
class Target:
    """A bound on one column of the row, such as of_copy >= 0.97. Rows with uneven groups have only the bound
    of_even."""

    metric: str
    sense: str
    bound: float

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sense == ">=" else value <= self.bound


Rule = tuple[Callable[[Shape], bool], Target]


@dataclass(frozen=True)
class Case:
    """One op, in one format if it has several, in one variant if it has any.

    `inputs(device, groups, **dims)` makes the arguments of `call`. For each metric, the first rule that matches a shape
    gives its target. GEMMs have `flops`. A `baseline` gets the same arguments. If an op does not read or write
    everything, `moved` gives the bytes that it does. All calls are made within the context `within`.
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


Spread = Callable[[Iterable[Shape]], list[Shape]]  # adds groups to shapes


def even_and_uneven(shapes: Iterable[Shape]) -> list[Shape]:
    return [Shape(shape.label, shape.dims, groups) for shape in shapes for groups in (EVEN, ZIPF)]


def skewed(shapes: Iterable[Shape]) -> list[Shape]:
    """Groups from even sizes to sizes that a router without a balance loss may reach."""
    kinds = EVEN, "zipf 0.3", "zipf 0.6", ZIPF, "zipf 1.5", ONE
    return [Shape(shape.label, shape.dims, groups) for shape in shapes for groups in kinds]


def is_uneven(groups: str | None) -> bool:
    return groups not in (None, EVEN)


def shares(groups: str, e: int) -> Tensor:
    """Each group's share of all tokens: equal, 0.9 of them in one group, or 1 / rank ** p ("zipf p", default p = 1)."""
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
    """(M, K, E) of ordinary sizes that the CPU loops still finish in moments."""
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


# Host time of one eager call of an op with one output and one launch, over an eager torch.relu, which has the same.
HOST: Rule = (always, Target("host_relu", "<=", 1.5))


def commits_of(rows: list[dict], result: dict) -> str:
    """The commits of rows of a results file. A later run may have replaced some of the rows."""
    return " and ".join(sorted({(row.get("commit") or result["commit"] or "unknown")[:7] for row in rows}))


def training_rows(result: dict) -> list[dict]:
    """Rows of a results file with forward and backward of `grouped_mm` in its usual form, for the groups that all sizes
    have."""
    ops, groups = [f"grouped_mm {recipe}" for recipe in RECIPES], (EVEN, ZIPF)
    return [row for row in result["rows"] if row["op"] in ops and row["groups"] in groups and row.get("ratio")]

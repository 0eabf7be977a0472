"""What a benchmark case is, and what the cases of all op families share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TABLE = json.loads((Path(__file__).parent / "shapes.json").read_text())


@dataclass(frozen=True)
class Shape:
    """`label` names the row, `dims` are the sizes that `Case.inputs` takes as keywords."""

    label: str
    dims: dict[str, int]


@dataclass(frozen=True)
class Target:
    """A bound on one column of the row, such as of_copy >= 0.97."""

    metric: str
    sense: str
    bound: float

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sense == ">=" else value <= self.bound


Rule = tuple[Callable[[Shape], bool], Target]


@dataclass(frozen=True)
class Case:
    """One op. `inputs(device, layout, **dims)` makes the arguments of `call`; the first rule per metric that matches a
    shape gives its target. GEMMs have `flops`. A `baseline` is called with the same arguments."""

    op: str
    shapes: Callable[[bool], list[Shape]]
    inputs: Callable[..., tuple[Tensor, ...]]
    call: Callable[..., object]
    rules: tuple[Rule, ...] = ()
    flops: Callable[..., int] | None = None
    baseline: Callable[..., object] | None = None
    kept: Callable[..., float] | None = None
    moved: Callable[..., int] | None = None  # bytes, of arguments and results, where not everything is read

    def targets(self, shape: Shape) -> list[Target]:
        first: dict[str, Target] = {}
        for applies, target in self.rules:
            if applies(shape):
                first.setdefault(target.metric, target)
        return list(first.values())


def group_ends(layout: str, m: int, e: int, device: torch.device) -> Tensor:
    """offs of E groups that hold all M rows: even up to rounding, or with sizes that fall as 1/rank."""
    shares = torch.ones(e, dtype=torch.float64) if layout == "uniform" else 1 / torch.arange(1.0, e + 1).double()
    ends = (shares.cumsum(0) / shares.sum() * m).floor().to(torch.int32)
    ends[-1] = m
    return ends.to(device)


def is_(label: str) -> Callable[[Shape], bool]:
    return lambda shape: shape.label == label


def always(shape: Shape) -> bool:
    return True


# One eager call of an op; grouped_mm is several calls and the autograd engine, and has no bound of its own.
HOST: Rule = (always, Target("host_us", "<=", 8))

"""Statistics of training in fp8: how much of each operand underflows or saturates, and the error of products.

`training/watch.py` measures the statistics. This module turns them on, keeps them on the device, and reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.ops.checks import check_int, check_module, has_values, require
from moe_fp8_ext.quantization.prepare import DeferredWeight

_OPERANDS = "tokens", "weights", "gradients"
_COLUMNS = "underflow", "wgrad_underflow", "saturated", "amax", "ratio", "limit", "sqnr"
_TITLES = "operand", "underflow", "in wgrad", "saturated", "amax", "ratio", "limit", "SQNR"
Statistics = Callable[..., dict[str, object]]
_open: list[Stats] = []  # a global, because all threads of a process see it


class Stats:
    """The statistics of a model's experts in the last sampled step. See `stats`.

    Attributes:
        every: steps from one sample to the next.
        steps: steps that have ended.
        sampled: the step that the values belong to; None before the first sample.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every, self.steps = every, 0
        self.sampled: int | None = None
        self._weights = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        ]
        self._sums: dict[str, dict[tuple[str | None, Statistics], Tensor]] = {}
        self._recipes: dict[str, str] = {}
        self._is_new = False  # whether anything was measured since the last `write`

    def start(self) -> Stats:
        """Turns the statistics on, as entering the context does."""
        if self not in _open:
            _open.append(self)
        return self

    def stop(self) -> None:
        """Turns the statistics off. The values stay."""
        if self in _open:
            _open.remove(self)

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> None:
        """Ends a step of training. Steps 0, every, 2 * every, ... are sampled."""
        self.steps += 1

    def to_dict(self) -> dict[str, object]:
        """Reads the device once.

        Returns:
            {"step": the sampled step, "layers": {name of a weight: {"recipe": its name, "tokens_per_expert": [E ints],
            "product_sqnr": a number, "tokens", "weights", "gradients": {statistic: a number}}}}. A number is None if
            all elements of its operand are zero. A statistic that was not measured has no entry.
        """
        numbers = iter(_read([t for sums in self._sums.values() for t in sums.values()]))
        layers: dict[str, dict[str, object]] = {}
        for name, sums in self._sums.items():
            layer = layers[name] = {"recipe": self._recipes[name]}
            for (operand, statistics), found in zip(sums, numbers, strict=False):
                of = layer if operand is None else layer.setdefault(operand, {})
                of.update({key: None if number != number else number for key, number in statistics(*found).items()})
        return {"step": self.sampled, "layers": layers}

    def scalars(self) -> dict[str, float]:
        """Reads the device once, and returns the numbers of `to_dict` by name: "<weight>/<operand>/<statistic>".

        "<weight>/load" stands for tokens_per_expert: their maximum over their mean.
        """
        found: dict[str, float | None] = {}
        for name, layer in self.to_dict()["layers"].items():
            sizes = layer["tokens_per_expert"]
            found[f"{name}/load"] = max(sizes) * len(sizes) / max(sum(sizes), 1)
            found[f"{name}/product_sqnr"] = layer.get("product_sqnr")
            for operand in _OPERANDS:
                found.update({f"{name}/{operand}/{key}": number for key, number in layer.get(operand, {}).items()})
        return {name: number for name, number in found.items() if number is not None}

    def worst(self) -> dict[str, float]:
        """Reads the device once, and returns the worst number of all layers for each statistic.

        The names are "<operand>/<statistic>", "product_sqnr" and "load". The worst `sqnr`, `product_sqnr` and `limit`
        are the smallest. All other statistics are worst at their largest.
        """
        worst: dict[str, float] = {}
        for name, number in self.scalars().items():
            key = name.partition("/")[2]
            choose = min if key.endswith(("sqnr", "limit")) else max
            worst[key] = choose(number, worst.get(key, number))
        return worst

    def write(self, writer: object, step: int) -> None:
        """Calls writer.add_scalar("fp8/<name>", number, step) for all `scalars`, as TensorBoard's SummaryWriter has it.

        Call it in every step. If nothing was measured since the last call, it returns at once and reads nothing.
        """
        if not self._is_new:
            return
        self._is_new = False
        for name, number in self.scalars().items():
            writer.add_scalar(f"fp8/{name}", number, step)

    def __str__(self) -> str:
        table, found = [_TITLES], self.to_dict()
        if not found["layers"]:
            why = "no step was sampled yet, no experts of the model ran eagerly by this package (see fp8_report)"
            why = f"{why}, or their weights were quantized already, as freeze_ and FP8 checkpoints have them"
            return f"fp8 statistics: nothing was measured; {why}"
        for name, layer in found["layers"].items():
            sizes = layer["tokens_per_expert"]
            table.append((f"{name}: {layer['recipe']}, {min(sizes)} to {max(sizes)} tokens an expert",))
            for operand in _OPERANDS:
                if of := layer.get(operand):
                    table.append((f"  {operand}", *(_text(column, of.get(column)) for column in _COLUMNS)))
            if "product_sqnr" in layer:
                table.append(("  product", *"------", _text("sqnr", layer["product_sqnr"])))
        widths = [max(len(row[i]) for row in table if len(row) > 1) for i in range(len(_TITLES))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([f"fp8 statistics of step {found['step']}", *lines])

    def name_of(self, weight: Tensor | None) -> str | None:
        """Returns the name of a parameter of the model, given the parameter or a view of it."""
        if weight is None or not has_values(weight) or weight.numel() == 0:
            return None
        wanted = _identity(weight)
        for name, module, attribute in self._weights:
            parameter = getattr(module, attribute, None)  # looked up in every call, because FSDP2 exchanges it
            if isinstance(parameter, Tensor) and _identity(parameter) == wanted:
                return name
        return None

    def put(self, name: str, recipe: str, operand: str | None, statistics: Statistics, sums: Tensor) -> None:
        """Keeps sums [n] on the device, and a function of n numbers that returns statistics by name. They replace the
        sums that an earlier call kept with this function."""
        if self.sampled != self.steps:
            self._sums, self.sampled = {}, self.steps
        self._is_new, self._recipes[name] = True, recipe
        self._sums.setdefault(name, {})[operand, statistics] = sums


def stats(model: nn.Module, every: int = 100) -> Stats:
    """Measures what fp8 does to the operands of a model's experts, on one step in `every`.

        with moe_fp8_ext.stats(model, every=100) as stats:
            for step, batch in enumerate(loader):
                loss(model(batch)).backward()
                optimizer.step()
                stats.step()
                stats.write(writer, step)  # TensorBoard: reads and writes only after a sampled step
        print(stats)

    Nothing waits for the device until `print`, `to_dict`, `scalars`, `worst` or `write` reads values. The values
    belong to the last micro-batch of the last sampled step. Here, a layer is a parameter [E, N, K] of the model, with
    its name in `model.named_parameters()`. The layer's recipe quantizes these operands:

        tokens      x of the products x @ w^T and gradient^T @ x
        weights     w of x @ w^T
        gradients   the gradient of x @ w^T, of the products gradient @ w and gradient^T @ x

    Let x be an element of an operand along rows, q its fp8 number and s the scale of its block: q * s approximates x.
    Let max be the largest fp8 number. The statistics of the operand are

        underflow         elements with x != 0 and q = 0, as a share of the elements with x != 0
        saturated         elements with |q| = max whose |x| / s is too large to round to max, as a share of the elements
                          with x != 0. Only rounding "floor" of the MX formats saturates. Other scales follow amax
        amax              the largest |x|
        ratio             the largest max * s / |x| with x != 0: the largest number that the block can hold, over |x|
        limit             the ratio at which an element underflows: max over half the smallest fp8 number, 2^18.8 for
                          E4M3 and 2^32.8 for E5M2
        sqnr              10 log10(sum x^2 / sum (x - q * s)^2), in dB
        wgrad_underflow   underflow of the same elements in the operand along tokens, whose scales belong to columns.
                          The gradient of the weight is computed from that operand. Weights have no wgrad_underflow

    and the statistics of the layer are

        tokens_per_expert  rows of each expert
        product_sqnr       10 log10(sum y^2 / sum (y - y8)^2) in dB. y is x @ w^T of sampled rows of one expert. y8 is
                           the product of their fp8 values. Both are multiplied in float32

    The statistics of tokens and gradients come from up to 512 rows, evenly spaced among the rows of all experts. The
    statistics of weights come from 128 rows of the expert with the most tokens. Each sample takes other rows.

    - Under torch.compile, export and other tracers nothing is measured.
    - A CUDA graph that is captured in a sampled step measures in every replay.
    - A forward that a checkpoint recomputes writes the same values again.
    - Recipe "bf16" has tokens_per_expert only. With wgrad_high_precision there is no wgrad_underflow.
    - In `ExpertParallel`, each rank measures its own experts, and only the first of several chunks. Tokens that travel
      in fp8 are measured on their own rank, and have neither wgrad_underflow nor product_sqnr.
    - After `gather_in_fp8_` there are no statistics of weights and products.
    - Of several `stats` that sample a layer in one step, only the one that was started first measures it.

    Args:
        model: the model whose parameters are measured. Other tensors, such as weights that the caller has quantized,
            are not measured.
        every: steps from one sample to the next. The first step is sampled.

    Returns:
        a `Stats`. Enter it as a context, or call its `start` and `stop`.

    Raises:
        TypeError: model is no module.
        RuntimeError: every is not an int of at least 1.

    Source: DESIGN.md section 6.
    """
    check_module("stats", "model", model)
    check_int("stats", "every", every)
    require(every >= 1, f"stats: every must be at least 1, got {every}")
    return Stats(model, int(every))


def sampling() -> list[Stats]:
    """Returns every `Stats` that is on and samples this step."""
    return [stats for stats in _open if stats.steps % stats.every == 0]


def _identity(w: Tensor) -> int:
    """Returns a number that all views of a weight share."""
    if isinstance(w, DeferredWeight):
        return id(w.gather)
    with torch.no_grad():
        return (w.to_local() if is_dtensor(w) else w).data_ptr() or id(w)


def _read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Returns the numbers of tensors [n] by one copy from each device."""
    found: list[list[float]] = [[] for _ in tensors]
    for device in {t.device for t in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device]
        numbers = iter(torch.cat([tensors[i].double() for i in here]).tolist())
        for i in here:
            found[i].extend(itertools.islice(numbers, tensors[i].shape[0]))
    return found


def _text(key: str, number: float | None) -> str:
    if number is None:
        return "-"
    if key in ("ratio", "limit"):
        return f"2^{math.log2(number):.1f}" if number else "0"
    if key == "sqnr":
        return f"{number:.1f} dB"
    return f"{number:.3g}" if key == "amax" else f"{100 * number:.3g}%"

"""A table of GPUs by recipes: how the products of a recipe are computed on a GPU.

It is read from the table of GEMM backends (`_C.gemms()`, all builds). Each cell names the first backend that supports
the GPU and the format. Sizes, operands and totals are such that all backends take them: sizes are multiples of 32, and
outputs and totals are bfloat16. `build_info()` prints the backends of one build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from case import RECIPES, commits_of, training_rows
from tabulate import tabulate

from moe_fp8_ext import _C, Recipe

# GPU: a pattern of its name in results files, its build, its compute capability, how its kernels were tried.
GPUS = {
    "H100, H200 (sm_90a)": ("H[12]00", "cuda", 90, "run"),
    "B200 (sm_100a)": ("B200", "cuda", 100, "compiled"),
    "A100 (sm_80)": ("A100", "cuda", 80, "compiled"),
    "L40S, RTX 40 (sm_89)": ("L40S", "cuda", 89, "compiled"),
    "RTX 50, RTX PRO (sm_120)": ("RTX PRO", "cuda", 120, "compiled"),
    "MI300 (gfx942)": ("MI300", "rocm", 0, "compiled, emulated on a CPU"),
    "MI355 (gfx950)": ("MI355", "rocm", 0, "compiled, emulated on a CPU"),
    "CPU": (None, "cpu", 0, "run"),
}
KINDS = {
    "sm90": "native",
    "sm90_mxfp8": "emulated in BF16",
    "torch_fp8": "native",
    "torch_mxfp8": "native",
    "torch_mxfp8_expanded": "native",
    "torch_bfloat16": "emulated in BF16",
    "mma": "native",
    "cpu": "emulated in float32",
}


@dataclass(frozen=True)
class Entry:
    """A backend. `builds` contain it, `sm` is its range of compute capabilities (None: any GPU), and `optional` says
    that it is an option of torch's build."""

    name: str
    builds: tuple[str, ...]
    formats: tuple[str, ...]
    sm: tuple[int, int] | None
    optional: bool
    rounding: str | None  # of the scales that it takes; None: any

    def takes(self, recipe: str, build: str, sm: int) -> bool:
        in_range = self.sm is None or self.sm[0] <= sm <= self.sm[1]
        return build in self.builds and recipe in self.formats and in_range

    def takes_by_default(self, recipe: str) -> bool:
        return self.rounding in (None, Recipe(recipe).rounding)


def entries() -> list[Entry]:
    """The backends, in the order in which they are tried."""
    found = [
        Entry(
            gemm["name"],
            tuple(build for build in gemm["builds"] if gemm["device"] == "gpu" or build == "cpu"),
            tuple(gemm["formats"]),
            gemm["compute_capability"],
            gemm["optional"],
            gemm["rounding"],
        )
        for gemm in _C.gemms()
    ]
    unknown = [entry.name for entry in found if entry.name not in KINDS]
    if unknown:
        raise ValueError(f"csrc/ops/gemm_backends.cpp has GEMMs that bench/matrix.py has no kind for: {unknown}")
    return found


def cell(table: list[Entry], recipe: str, gpu: str, results: dict[str, dict]) -> str:
    device, build, sm, _ = GPUS[gpu]
    taken = [entry for entry in table if entry.takes(recipe, build, sm)]
    in_16_bits = taken[0].name == "mma" and sm in (80, 100)
    text = "as 16-bit floats" if in_16_bits else KINDS[taken[0].name]
    if taken[0].optional:
        condition = "" if taken[0].takes_by_default(recipe) else f'with rounding="{taken[0].rounding}" '
        text = f"native {condition}if torch was built with it, else {KINDS[taken[1].name]}"
    ratios = [
        row["ratio"]
        for result in results.values()
        for row in training_rows(result)
        if device and re.search(device, result["device"]) and row["op"] == f"grouped_mm {recipe}"
    ]
    if ratios:
        return f"{text}: {min(ratios):.2f} to {max(ratios):.2f} x BF16"
    if text == "native" or in_16_bits:
        return f"{text}, not measured"
    return text if build == "cpu" or text.startswith("native") else f"{text}, slower than BF16"


def is_emulated(recipe: str, device: str) -> bool:
    """Whether a GPU of that name in results files has no FP8 product for a recipe."""
    for pattern, build, sm, _ in GPUS.values():
        if pattern and re.search(pattern, device):
            taken = (entry for entry in entries() if entry.takes(recipe, build, sm))
            first = next(entry for entry in taken if entry.takes_by_default(recipe))
            return KINDS[first.name].startswith("emulated")
    return False


def markdown(results: dict[str, dict]) -> str:
    """The table of docs/gpus.md, with the speeds that `results`, the files of bench/results, have measured."""
    table = entries()
    body = [(gpu, *(cell(table, recipe, gpu, results) for recipe in RECIPES), GPUS[gpu][-1]) for gpu in GPUS]
    text = tabulate(body, ("", *(f'`"{recipe}"`' for recipe in RECIPES), "kernels"), tablefmt="github")
    measured = [(result, rows) for result in results.values() if (rows := training_rows(result))]
    where = " and ".join(f"{result['device']} at {commits_of(rows, result)}" for result, rows in measured)
    return f"{text}\n\nSpeeds: `grouped_mm`, forward and backward, on {where}." if where else text


def forced(results: dict[str, dict]) -> str:
    """The table of docs/gpus.md with forward products of DeepSeek-V3's sizes, if `mma` is forced on a GPU."""
    result = next(result for result in results.values() if result.get("gemm") == "mma")
    rows = [row for row in result["rows"] if "torch BF16" in row["peers"] and re.match(r"dsv3\w* 2Dx3D", row["shape"])]
    in_bf16 = [row["tflops"] * row["us"] / row["peers"]["torch BF16"] for row in rows]
    speeds = {f'`mma`, `"{r}"`': [row["tflops"] for row in rows if row["op"].endswith(r)] for r in RECIPES}
    speeds["torch's BF16, by Hopper's own instructions"] = in_bf16
    body = [(gemm, f"{min(found):.0f} to {max(found):.0f}") for gemm, found in speeds.items() if found]
    where = f"{result['device']} at {commits_of(rows, result)}, torch {result['torch']}"
    return f"{where}:\n\n{tabulate(body, ('GEMM', 'TFLOPS'), tablefmt='github')}"

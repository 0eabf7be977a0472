"""Writes a report on how the kernels run on a GPU: `make report`.

It shows the build and the machine, compares the bytes of every op with the CPU's, compares the bytes of two calls,
and times casts and GEMMs. Each part runs in its own process, so that a part that fails, or that breaks the device, does
not end the others.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

TOOLCHAIN = Path(__file__).resolve().parent
BENCH = TOOLCHAIN.parents[1] / "bench"
sys.path.append(str(BENCH))
import timing  # noqa: E402
from case import EVEN, RECIPES, TABLE, group_ends, normal  # noqa: E402

import moe_fp8_ext as moe  # noqa: E402
from moe_fp8_ext import ops  # noqa: E402
from moe_fp8_ext.quantization.format import FORMATS  # noqa: E402

SECONDS = 300  # the time limit of a part; a kernel that hangs ends with its process
REPEATS = 10
Sizes = tuple[int, int, int, int]  # M, K, N, E
SMALL, LARGE = (4096, 1024, 1536, 8), tuple(TABLE["grouped_gemm_MKNE"]["dsv3_up"])
COMMANDS = (
    ("git", "describe", "--always", "--dirty"),
    ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showdriverversion", "--showproductname"),
)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def machine() -> bool:
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    print(f"torch {torch.__version__} of {toolkit}, Python {platform.python_version()}, {platform.platform()}")
    for command in COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=TOOLCHAIN, timeout=SECONDS)
        except OSError:
            continue  # a tool of another vendor
        print(f"{command[0]}: {done.stdout.strip() or done.stderr.strip()}")
    for i in range(torch.cuda.device_count()):
        print(f"device {i}: {torch.cuda.get_device_properties(i)}")
    info = moe.build_info()
    gemms = info.pop("scaled_grouped_mm")
    print(", ".join(f"{what} {value}" for what, value in info.items()))
    for gemm in gemms:
        sm = gemm["compute_capability"]
        where = f"{gemm['device']}, compute capability {sm[0]} to {sm[1]}" if sm else gemm["device"]
        print(f"GEMM {gemm['name']}: {where}, {', '.join(gemm['formats'])}")
    return True


def same_bytes(recipe: str, device: str = "cuda", sizes: Sizes = SMALL) -> bool:
    """Runs forward and backward twice, of a product and of a layer of experts, and compares the bytes."""
    m, k, n, e = sizes
    x, w = normal(device, m, k, grad=True), normal(device, e, n, k, grad=True)
    offs, down = group_ends(EVEN, m, e, device), normal(device, e, k, n // 2, grad=True)
    scores, ids = torch.rand(m, e, device=device).topk(2)

    def product() -> list[Tensor]:
        out = moe.grouped_mm(x, w.mT, offs, recipe=recipe)
        return [out, *torch.autograd.grad(out.sum(), (x, w))]

    def layer() -> list[Tensor]:
        out = moe.experts(x, ids, scores, w, down, recipe=recipe)
        return [out, *torch.autograd.grad(out.sum(), (x, w, down))]

    same = True
    for call in (product, layer):
        first, second = ([t.contiguous().view(torch.uint8) for t in call()] for _ in range(2))
        is_equal = all(map(torch.equal, first, second))
        print(f"{call.__name__}: {'the same bytes' if is_equal else 'DIFFERENT BYTES'}")
        same &= is_equal
    return same


def speed(format: str, device: str = "cuda", sizes: Sizes = LARGE) -> bool:
    m, k, n, e = sizes
    x, w, offs = normal(device, m, k), normal(device, e, n, k), group_ends(EVEN, m, e, device)
    a, scale_a = ops.quantize_rows(x, format, offs=offs)
    b, scale_b, _, _ = ops.quantize_weight(w, format)
    scale_b = FORMATS[format].transposed_scale(scale_b)
    cast = partial(ops.quantize_both, x, format, offs=offs)
    products = {"fp8": partial(ops.scaled_grouped_mm, a, b.mT, scale_a, scale_b, format, offs)}
    plain = partial(torch._grouped_mm, x, w.mT, offs=offs)
    try:
        plain()
        products["bf16"] = plain
    except RuntimeError as error:
        print(f"torch._grouped_mm: {error}")

    clock = partial(timing.eager_us, repeats=REPEATS, device=torch.device(device))
    copy, us = timing.copy_gbps(torch.device(device), REPEATS), clock({"cast": cast})["cast"]
    gbps = sum(t.nbytes for t in (x, *cast())) / us / 1e3
    print(f"quantize_both [{m}, {k}]: {us:.0f} us, {gbps:.0f} GB/s, {gbps / copy:.2f} of a copy's {copy:.0f}")
    us = clock(products)
    print(f"scaled_grouped_mm [{m}, {k}, {n}, {e}]: {us['fp8']:.0f} us, {2e-6 * m * k * n / us['fp8']:.1f} TFLOPS")
    if "bf16" in us:
        print(f"{us['bf16'] / us['fp8']:.2f} x torch._grouped_mm in BF16, {us['bf16']:.0f} us")
    return True


PARTS: dict[str, Callable[[], bool]] = {
    "machine": machine,
    **{f"same bytes, {recipe}": partial(same_bytes, recipe) for recipe in (*RECIPES, "bf16")},
    **{f"speed, {format}": partial(speed, format) for format in RECIPES},
}


# ---- The report ------------------------------------------------------------------------------------------------------


def run(commands: dict[str, list[str]], seconds: float = SECONDS) -> list[str]:
    """Runs the commands one after another and returns the names of those that failed."""
    failed = []
    for name, command in commands.items():
        print(f"\n== {name}", flush=True)
        try:
            status = subprocess.run(command, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = f"still running after {seconds} seconds"
        if status:
            print(f"FAILED: {f'status {status}' if isinstance(status, int) else status}", flush=True)
            failed.append(name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="run this part alone, in this process")
    part = parser.parse_args().part
    if part:
        return not PARTS[part]()
    parts = {name: [sys.executable, __file__, name] for name in PARTS}
    every = {f"every {op}": [sys.executable, str(TOOLCHAIN / "every_kernel.py"), op] for op in ops.__all__}
    commands = {"machine": parts.pop("machine"), **every, **parts}
    has_gpu = torch.cuda.is_available() and moe.build_info()["backend"] != "cpu"
    failed = run(commands if has_gpu else {"machine": commands["machine"]})
    if not has_gpu:
        print("\nNo kernel was run: torch sees no GPU, or this build has no kernels for GPUs.")
        return 1
    print(f"\n{len(commands)} parts, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

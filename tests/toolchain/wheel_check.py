"""Takes a training step in FP8 with the package as a user has it: installed, without a compiler and without sources.

    cd /tmp && python .../tests/toolchain/wheel_check.py [--gpu]

With --gpu, it fails if the step does not run on a GPU.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

start = time.perf_counter()
import torch  # noqa: E402

imported = time.perf_counter()
import moe_fp8_ext  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "nvcc", "hipcc", "ninja", "cmake")
RECIPES = ("rowwise", "blockwise", "mxfp8")


def steps(recipe: str, device: str, count: int = 3) -> list[float]:
    """Trains an MoE layer to copy its input. Returns the loss before each step."""
    torch.manual_seed(0)
    router = moe_fp8_ext.Router(8, 128, top_k=2, dtype=torch.bfloat16)
    experts = moe_fp8_ext.Experts(8, 128, 128, recipe=recipe, dtype=torch.bfloat16)
    layer = moe_fp8_ext.MoE(router, experts).to(device)
    x = torch.randn(256, 128, device=device).bfloat16()
    optimizer, losses = torch.optim.AdamW(layer.parameters(), lr=1e-2), []
    for _ in range(count):
        y, router_loss = layer(x)
        loss = (y.float() - x.float()).square().mean()
        optimizer.zero_grad()
        (loss + router_loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    seconds = time.perf_counter() - imported
    package, build = Path(moe_fp8_ext.__file__).parent, moe_fp8_ext.build_info()
    device = "cuda" if torch.cuda.is_available() and build["backend"] != "cpu" else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, moe_fp8_ext {moe_fp8_ext.__version__} on {name}"
    )
    print(f"import torch: {imported - start:.1f} s, import moe_fp8_ext: {seconds:.2f} s")
    found = [compiler for compiler in COMPILERS if shutil.which(compiler)]
    problems = [f"{package} is in the source tree"] if package.is_relative_to(ROOT) else []
    problems += [f"compilers on PATH: {', '.join(found)}"] if found else []
    problems += ["the step does not run on a GPU"] if "--gpu" in sys.argv and device == "cpu" else []
    for recipe in RECIPES:
        losses = steps(recipe, device)
        print(
            f"{recipe:10} loss {losses[0]:.3f} -> {losses[-1]:.3f}, {time.perf_counter() - start:.1f} s after the start"
        )
        problems += [] if losses[-1] < losses[0] else [f"{recipe}: the loss does not fall, {losses}"]
    print(*problems or ["wheel_check: all is well"], sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

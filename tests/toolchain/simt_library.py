"""Builds the hipified kernels with the SIMT emulation, as libraries for ctypes that run on a CPU.

A library has all kernels of a ROCm build, or only the GEMM for gfx950 or for Hopper. Run as a script, this builds all
libraries that are not in the cache.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from cache import CSRC, alone, cached, closure, key
from hipified import hipify, kernel_sources

SIMT = Path(__file__).parent / "simt"
RUNTIME = SIMT / "runtime.cpp"  # a program that includes the emulator's headers needs it
SHIMS = (SIMT / "shim.cpp", SIMT / "shim_gemm.cpp")
# Wave size and generation. FP8 instructions are FNUZ on gfx942 and FN on the others. Matrix instructions are NVIDIA's
# on a wave of 32 and MFMA on a wave of 64, with scales on gfx950. For Hopper, only its own GEMM is built.
CHIPS = {
    "gfx1201": (32, "__GFX12__"),
    "gfx942": (64, "__GFX9__"),
    "gfx950": (64, "__GFX9__"),
    "sm_90a": (32, "SIMT_HOPPER"),
}
GEMM_ALONE = ("gfx950", "sm_90a")
CXX = os.environ.get("CXX", "g++").split()
CXX_FLAGS = (
    "-std=c++17 -O1 -g1 -fPIC -pthread -Wall -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing "
    # Without this, two libraries in one process would share static variables.
    "-fno-gnu-unique "
    # This finds bad shifts and indices, and misaligned vector accesses, which x86 allows and a GPU does not. Pointer
    # arithmetic is not checked: kernels form addresses that they do not read. A null pointer faults without a check.
    "-fsanitize=undefined -fno-sanitize=vptr,pointer-overflow,null -fsanitize-undefined-trap-on-error"
).split()
# Kernels are checked, the emulator is not: it runs whenever a thread waits, and checks would slow every test.
RUNTIME_FLAGS = ("-O2", "-fno-sanitize=all")


def compile_cxx(*arguments: str | Path, wave: int) -> None:
    macros = ("MOE_SIMT", f"SIMT_WARP={wave}")
    command = [*CXX, *CXX_FLAGS, *(f"-D{m}" for m in macros), f"-I{SIMT}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 0, "\n".join([*errors[:5], " ".join(command)])


@cache
def compiler() -> str:
    return subprocess.run([*CXX, "--version"], capture_output=True, text=True, check=True).stdout


def key_of(source: Path, chip: str) -> str:
    emulation = [h for h in sorted(SIMT.rglob("*.h")) if h.name != "hopper.h" or chip == "sm_90a"]
    flags = [*CXX_FLAGS, *(RUNTIME_FLAGS if source == RUNTIME else ())]
    return key("simt", compiler(), *flags, chip, *CHIPS[chip], files=[*closure(source, CSRC), *emulation])


def build(chip: str) -> Path:
    """Returns a shared object with the emulator, the shims and a chip's kernels."""
    wave, generation = CHIPS[chip]
    kernels, shims = kernel_sources(CSRC), SHIMS
    if chip in GEMM_ALONE:
        of_hopper = chip == "sm_90a"
        others = ["platform/device.cu", *["scales/dequantize.cu"] * of_hopper]
        folder = CSRC / "gemm" / ("sm90" if of_hopper else "mma")
        kernels, shims = [*sorted(folder.rglob("*.cu")), *(CSRC / other for other in others)], SHIMS[1:]
    own = (*shims, RUNTIME)
    keys = {source: key_of(source, chip) for source in [*kernels, *own]}

    def link(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            tree = Path(tmp) / "csrc"
            hipify(CSRC, tree)
            macros = (f"-D__{chip}__", f"-D{generation}")

            def compile_one(source: Path) -> Path:
                hip = tree / source.relative_to(CSRC).with_suffix(".hip") if source not in own else None
                how = [f"-I{tree}", "-DUSE_ROCM", "-D__HIP__", "-x", "c++", hip] if hip else [f"-I{CSRC}", source]
                how += RUNTIME_FLAGS if source == RUNTIME else ()
                make = lambda place: compile_cxx(*macros, *how, "-c", "-o", place / "object.o", wave=wave)  # noqa: E731
                return cached(keys[source], make) / "object.o"

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, keys))
        compile_cxx("-shared", "-Wl,-Bsymbolic", *objects, "-ldl", "-o", folder / "kernels.so", wave=wave)

    with alone(f"simt-{chip}"):  # one of the test processes builds, and the others use its result
        return cached(key("simt library", *keys.values()), link) / "kernels.so"


if __name__ == "__main__":
    for chip in CHIPS:
        build(chip)

"""Builds the hipified kernels for the CPU, with the SIMT emulation, as libraries for ctypes."""

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
SHIM = SIMT / "shim.cpp"
ARCH_MACROS = {64: ("__gfx942__", "__GFX9__"), 32: ("__gfx1201__", "__GFX12__")}  # fnuz and fn fp8 instructions
CXX = os.environ.get("CXX", "g++").split()
CXX_FLAGS = (
    "-std=c++17 -O1 -g1 -fPIC -pthread -Wall -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing "
    # Two libraries in one process would share static variables.
    "-fno-gnu-unique "
    # Finds the misaligned vector accesses that x86 forgives and a GPU does not, bad shifts and indices. Addresses that
    # nobody reads from may be anything.
    "-fsanitize=undefined -fno-sanitize=vptr,pointer-overflow -fsanitize-undefined-trap-on-error"
).split()


def compile_cxx(*arguments: str | Path, wave: int) -> None:
    macros = ("MOE_SIMT", f"SIMT_WARP={wave}")
    command = [*CXX, *CXX_FLAGS, *(f"-D{m}" for m in macros), f"-I{SIMT}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 0, "\n".join([*errors[:5], " ".join(command)])


@cache
def compiler() -> str:
    return subprocess.run([*CXX, "--version"], capture_output=True, text=True, check=True).stdout


def key_of(source: Path, wave: int) -> str:
    emulation = sorted(SIMT.rglob("*.h"))
    return key("simt", compiler(), *CXX_FLAGS, wave, *ARCH_MACROS[wave], files=[*closure(source, CSRC), *emulation])


def build(wave: int) -> Path:
    """The shared object of the kernels and of shim.cpp for a wave size."""
    keys = {source: key_of(source, wave) for source in [*kernel_sources(CSRC), SHIM]}

    def link(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            tree = Path(tmp) / "csrc"
            hipify(CSRC, tree)
            of_device = [*(f"-D{macro}" for macro in ARCH_MACROS[wave]), f"-I{tree}", "-DUSE_ROCM", "-D__HIP__"]

            def compile_one(source: Path) -> Path:
                hip = tree / source.relative_to(CSRC).with_suffix(".hip") if source != SHIM else None
                what = [*of_device, "-x", "c++", hip] if hip else [f"-I{CSRC}", source]
                make = lambda place: compile_cxx(*what, "-c", "-o", place / "object.o", wave=wave)  # noqa: E731
                return cached(keys[source], make) / "object.o"

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, keys))
        compile_cxx("-shared", "-Wl,-Bsymbolic", *objects, "-ldl", "-o", folder / "kernels.so", wave=wave)

    with alone(f"simt-{wave}"):  # of the processes of the tests, one builds and the others find what it has built
        return cached(key("simt library", *keys.values()), link) / "kernels.so"

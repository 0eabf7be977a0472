"""Compiles every kernel for AMD GPUs and checks the machine code.

Forbidden are spills, scratch memory and calls. Required, by kernel, are vector loads, FP8 conversions and matrix
instructions. Neither ROCm nor a GPU is needed: clang comes from `pip install ziglang`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cache import CSRC, cached, closure, key
from hipified import hipify, kernel_sources
from isa_report import (
    E4M3,
    E5M2,
    MMA,
    SCALED_MMA,
    VECTORS,
    WIDE_VECTORS,
    Kernel,
    arguments,
    found,
    in_parallel,
    print_report,
    short_names,
)

ARCHS = ("gfx942", "gfx950")
STUB = Path(__file__).parent / "hip_stub"
FLAGS = "--cuda-device-only -nogpulib -nogpuinc -std=c++17 -O3 -ffp-contract=off -DUSE_ROCM".split()
ISA = {
    VECTORS: r"\b(global|buffer)_load_(lds_)?dwordx[24]\b",
    WIDE_VECTORS: r"\b(global|buffer)_load_(lds_)?dwordx4\b",
    E4M3: r"\bv_cvt_pk_fp8_f32\b",
    E5M2: r"\bv_cvt_pk_bf8_f32\b",
    MMA: r"\bv_mfma_f32_",
    SCALED_MMA: r"\bv_mfma_scale_f32_16x16x128_f8f6f4\b",
}


def compiler() -> list[str]:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("hip_check: no compiler for AMD GPUs: run pip install ziglang==0.17.0 first")
    zig = Path(spec.origin).parent
    return [str(zig / "zig"), "clang", "--target=x86_64-linux-gnu", "-resource-dir", str(zig / "lib")]


def parse(assembly: str, arch: str) -> list[Kernel]:
    """Reads the metadata and the instructions of every kernel from clang's assembly."""
    _, _, metadata = assembly.partition("amdhsa.kernels:")
    fields = re.compile(r"^    \.(\w+): +(\S+)$", re.M)
    entries = [dict(fields.findall(text)) for text in re.split(r"^  - (?=\.)", metadata, flags=re.M)[1:]]
    kernels = []
    names = short_names(entry["name"] for entry in entries)
    for entry in entries:
        body = assembly.split(f"\n{entry['name']}:", 1)[1].split("\n.Lfunc_end", 1)[0]
        forbidden = {
            "vgpr spills": int(entry["vgpr_spill_count"]),  # scalar registers spill into these
            "bytes of scratch": int(entry["private_segment_fixed_size"]),
            "calls": len(re.findall(r"^\s+s_swappc_b64\b", body, re.M)),
        }
        registers, shared = int(entry["vgpr_count"]), int(entry["group_segment_fixed_size"])
        kernels.append(Kernel(names[entry["name"]], arch, registers, shared, forbidden, found(body, ISA)))
    return kernels


def main() -> int:
    parser = arguments(__doc__)
    everything = os.environ.get("MOE_FP8_CHECK_ALL") == "1"
    parser.add_argument("--all", action="store_true", default=everything, help=f"for {' and '.join(ARCHS)}")
    args = parser.parse_args()
    clang = compiler()
    version = subprocess.run([clang[0], "version"], capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "csrc"
        hipify(CSRC, tree)

        def check_one(source: Path, arch: str) -> list[Kernel]:
            def make(folder: Path) -> None:
                hip = tree / source.relative_to(CSRC).with_suffix(".hip")
                command = [*clang, "-x", "hip", f"--offload-arch={arch}", *FLAGS, f"-I{STUB}", f"-I{tree}", "-S", hip]
                subprocess.run([*command, "-o", folder / "assembly"], check=True, capture_output=True, text=True)

            files = [*closure(source, CSRC), *sorted(STUB.rglob("*.h"))]
            assembly = cached(key("hip", version, *FLAGS, arch, files=files), make) / "assembly"
            return parse(assembly.read_text(), arch)

        archs = ARCHS if args.all else ARCHS[:1]
        kernels = in_parallel(check_one, [(s, arch) for s in kernel_sources(CSRC) for arch in archs])
    return print_report(kernels, "vgpr", args.each)


if __name__ == "__main__":
    sys.exit(main())

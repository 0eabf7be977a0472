"""Compiles every kernel for AMD GPUs and checks the machine code: no spills, scratch memory or calls; vector loads and
fp8 conversion instructions where they belong. Needs neither ROCm nor a GPU: clang comes from `pip install ziglang`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from hipified import hipify
from isa_report import Kernel, Patterns, compile_all, parse_arguments, print_report, short_names

STUB = Path(__file__).parent / "hip_stub"
ISA = Patterns(
    vector_load=r"\b(global|buffer)_load_(lds_)?dwordx[24]\b",
    cast={"E4M3": r"\bv_cvt_pk_fp8_f32\b", "E5M2": r"\bv_cvt_pk_bf8_f32\b"},
)


def compiler() -> list[str]:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("hip_check: no compiler for AMD GPUs; pip install ziglang==0.17.0")
    zig = Path(spec.origin).parent
    return [str(zig / "zig"), "clang", "--target=x86_64-linux-gnu", "-resource-dir", str(zig / "lib")]


def parse(assembly: str, arch: str) -> list[Kernel]:
    """Reads clang's assembly text: the metadata of every kernel, and its instructions."""
    _, _, metadata = assembly.partition("amdhsa.kernels:")
    fields = re.compile(r"^    \.(\w+): +(\S+)$", re.M)
    entries = [dict(fields.findall(text)) for text in re.split(r"^  - (?=\.)", metadata, flags=re.M)[1:]]
    kernels = []
    names = short_names(entry["name"] for entry in entries)
    for entry in entries:
        body = assembly.split(f"\n{entry['name']}:", 1)[1].split("\n.Lfunc_end", 1)[0]
        kernel = Kernel(names[entry["name"]], arch, int(entry["vgpr_count"]), int(entry["group_segment_fixed_size"]))
        kernel.forbid(
            vgpr_spills=int(entry["vgpr_spill_count"]),  # scalar registers spill into lanes of these, not into memory
            bytes_of_scratch=int(entry["private_segment_fixed_size"]),
            calls=len(re.findall(r"^\s+s_swappc_b64\b", body, re.M)),
        )
        kernel.check_body(body, ISA)
        kernels.append(kernel)
    return kernels


def main() -> int:
    args = parse_arguments(__doc__, ("gfx942", "gfx950"))
    clang = compiler()
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "csrc"
        sources = hipify(args.csrc, tree)

        def compile_one(source: Path, arch: str) -> list[Kernel]:
            command = [
                *clang, "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "-nogpulib", "-nogpuinc",
                "-std=c++17", "-O3", "-ffp-contract=off", "-DUSE_ROCM", f"-I{STUB}", f"-I{tree}",
                "-S", str(source), "-o", "-",
            ]  # fmt: skip
            return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout, arch)

        kernels = compile_all(compile_one, [(source, arch) for source in sources for arch in args.archs])
    return print_report(kernels, "vgpr", args.all)


if __name__ == "__main__":
    sys.exit(main())

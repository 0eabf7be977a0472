"""Compiles every kernel for NVIDIA GPUs and checks it: no spills and no stack; vector loads and fp8 conversion
instructions where they belong, read from the SASS where cuobjdump is installed and from the PTX elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from isa_report import Kernel, Patterns, compile_all, parse_arguments, print_report, short_names

PTX = Patterns(
    vector_load=r"\bld\.global\S*\.(v4\.|v2\.[ubf](32|64))|\bcp\.async\.(bulk|cg)",
    cast={"E4M3": r"\bcvt\.rn\.satfinite\.e4m3x2", "E5M2": r"\bcvt\.rn\.satfinite\.e5m2x2"},
    e8m0=r"\bcvt\.rp\.satfinite\.ue8m0x2\.f32",
)
SASS = Patterns(
    vector_load=r"\bLDG\S*\.(64|128|256)\b|\bLDGSTS\S*\.128\b|\bUTMALDG\b|\bUBLKCP\b",
    cast={"E4M3": r"\bF2FP\.SATFINITE\.E4M3", "E5M2": r"\bF2FP\.SATFINITE\.E5M2"},
    e8m0=r"\bF2FP\S*\.UE8M0",
)


def resources(log: str) -> dict[tuple[str, str], dict[str, int]]:
    """Reads what `ptxas -v` says of every (symbol, arch)."""
    found = {}
    for entry in log.split("Compiling entry function ")[1:]:
        symbol, arch = re.match(r"'(\S+)' for '(\w+)'", entry).groups()
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = {what: int(count) for count, what in re.findall(r"(\d+) (?:bytes )?(registers|smem)\b", entry)}
        found[symbol, arch] = {
            "registers": used["registers"],
            "shared": used.get("smem", 0),
            **dict(zip(("stack", "stores", "loads"), map(int, frame.groups()), strict=True)),
        }
    return found


def ptx_bodies(ptx: str) -> dict[str, str]:
    parts = re.split(r"\.entry (\w+)\(", ptx)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sass_bodies(sass: str) -> dict[str, str]:
    parts = re.split(r"Function : (\w+)", sass)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def judge(log: str, arch: str, bodies: dict[str, str], patterns: Patterns) -> list[Kernel]:
    """Combines ptxas' log with the instructions of every kernel."""
    found = {symbol: r for (symbol, a), r in resources(log).items() if a == arch}
    names = short_names(found)
    kernels = []
    for symbol, r in found.items():
        kernel = Kernel(names[symbol], arch, r["registers"], r["shared"])
        kernel.forbid(bytes_of_stack=r["stack"], bytes_of_spills=r["stores"] + r["loads"])
        kernel.check_body(bodies[symbol], patterns)
        kernels.append(kernel)
    return kernels


def find(tool: str) -> str | None:
    return shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")


def main() -> int:
    args = parse_arguments(__doc__, ("90a", "100a"))
    nvcc, cuobjdump = find("nvcc"), find("cuobjdump")
    if nvcc is None:
        print("cuda_check: no nvcc here, nothing checked")
        return 0

    def run(*command: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run(command, check=True, capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as tmp:

        def compile_one(source: Path, number: str) -> list[Kernel]:
            ptx, cubin = (Path(tmp) / f"{source.stem}.{number}.{kind}" for kind in ("ptx", "cubin"))
            flags = ["-std=c++17", "-O3", "-fmad=false", f"-I{args.csrc}"]
            run(nvcc, *flags, f"-arch=compute_{number}", "-ptx", source, "-o", ptx)
            log = run(nvcc, f"-arch=sm_{number}", "-Xptxas", "-v", "-cubin", ptx, "-o", cubin).stderr
            if cuobjdump:
                return judge(log, f"sm_{number}", sass_bodies(run(cuobjdump, "-sass", cubin).stdout), SASS)
            return judge(log, f"sm_{number}", ptx_bodies(ptx.read_text()), PTX)

        sources = sorted(args.csrc.glob("kernels/*.cu"))
        kernels = compile_all(compile_one, [(source, number) for source in sources for number in args.archs])
    return print_report(kernels, "registers", args.all)


if __name__ == "__main__":
    sys.exit(main())

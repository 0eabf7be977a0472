"""Checks every kernel of the CUDA build: no spills, no stack, no wait that the compiler put between the tensor cores'
products, no sum that shares a bank of registers with what is added to it; vector loads, fp8 conversions and the tensor
cores' instructions where they belong. Read from the SASS where cuobjdump is installed and from the PTX elsewhere.

The build's own commands run again, by way of the cache: nothing is compiled where compile_cached.py was the launcher.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cache import ROOT
from compile_cached import compiled
from isa_report import (
    BOXES,
    E4M3,
    E5M2,
    E8M0,
    MATRICES,
    OF_BF16,
    OF_FP8,
    VECTORS,
    Kernel,
    arguments,
    found,
    print_report,
    short_names,
    side_by_side,
)

PTX = {
    VECTORS: r"\bld\.global\S*\.(v4\.|v2\.[ubf](32|64))|\bcp\.async\.(bulk|cg)",
    E4M3: r"\bcvt\.rn\.satfinite\.e4m3x2",
    E5M2: r"\bcvt\.rn\.satfinite\.e5m2x2",
    E8M0: r"\bcvt\.rp\.satfinite\.ue8m0x2\.f32",
    OF_FP8: r"\bwgmma\.mma_async\.sync\S*\.f32\.e[45]m[23]",
    OF_BF16: r"\bwgmma\.mma_async\.sync\S*\.f32\.bf16",
    BOXES: r"\bcp\.async\.bulk\.tensor",
    MATRICES: r"\bmma\.sync\.aligned",
}
SASS = {
    VECTORS: r"\bLDG\S*\.(64|128|256)\b|\bLDGSTS\S*\.128\b|\bUTMALDG\b|\bUBLKCP\b",
    E4M3: r"\bF2FP\.SATFINITE\.E4M3",
    E5M2: r"\bF2FP\.SATFINITE\.E5M2",
    E8M0: r"\bF2FP\S*\.UE8M0",
    OF_FP8: r"\bQGMMA\b",
    OF_BF16: r"\bHGMMA\S*\.BF16\b",
    BOXES: r"\bUTMALDG\b",
    MATRICES: r"\b[HQ]MMA\b",
}
FUSED_SUM = re.compile(r"\bFFMA(?:\.\S+)? R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)")


def resources(log: str) -> dict[tuple[str, str], dict[str, int]]:
    """Reads what `ptxas -v` says of every (symbol, arch)."""
    all_of = {}
    for entry in log.split("Compiling entry function ")[1:]:
        symbol, arch = re.match(r"'(\S+)' for '(\w+)'", entry).groups()
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = {what: int(count) for count, what in re.findall(r"(\d+) (?:bytes )?(registers|smem)\b", entry)}
        all_of[symbol, arch] = {
            "waits": len(re.findall(rf"\(C75\d\d\).*'{symbol}'", log)),
            "registers": used["registers"],
            "shared": used.get("smem", 0),
            **dict(zip(("stack", "stores", "loads"), map(int, frame.groups()), strict=True)),
        }
    return all_of


def ptx_bodies(ptx: str) -> dict[str, str]:
    parts = re.split(r"\.entry (\w+)\(", ptx)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sass_bodies(sass: str) -> dict[str, str]:
    parts = re.split(r"Function : (\w+)", sass)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sums_of_one_bank(body: str) -> int:
    """Fused multiplications and additions whose three sources are all even registers, or all odd: they take turns."""
    return sum(len({int(register) % 2 for register in registers}) == 1 for registers in FUSED_SUM.findall(body))


def judge(log: str, arch: str, bodies: dict[str, str], patterns: dict[str, str]) -> list[Kernel]:
    """Combines ptxas' log with the instructions of every kernel."""
    of_arch = {symbol: r for (symbol, a), r in resources(log).items() if a == arch}
    names = short_names(of_arch)
    kernels = []
    for symbol, r in of_arch.items():
        forbidden = {"bytes of stack": r["stack"], "bytes of spills": r["stores"] + r["loads"]}
        forbidden["waits between products"] = r["waits"]
        if "grouped_gemm_kernel" in symbol:  # Hopper's, which is short of what its registers can read; PTX has none yet
            forbidden["sums of one bank of registers"] = sums_of_one_bank(bodies[symbol])
        holds = found(bodies[symbol], patterns)
        kernels.append(Kernel(names[symbol], arch, r["registers"], r["shared"], forbidden, holds))
    return kernels


def find_tool(tool: str) -> str | None:
    return next(filter(None, map(lambda p: shutil.which(tool, path=p), (None, "/usr/local/cuda/bin"))), None)


def build_commands() -> list[list[str]]:
    """How the last CUDA build compiles its kernels, without a launcher."""
    builds = sorted((ROOT / "build").glob("cuda-*/build.ninja"), key=lambda file: file.stat().st_mtime)
    ninja = find_tool("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if not builds or ninja is None:
        return []
    answer = subprocess.run([ninja, "-C", builds[-1].parent, "-t", "compdb"], capture_output=True, check=True).stdout
    commands = []
    for entry in json.loads(answer):
        if entry["file"].endswith(".cu"):
            words = shlex.split(entry["command"])
            compiler = next(i for i, word in enumerate(words) if Path(word).name == "nvcc")
            commands.append(words[compiler:])
    return commands


def check_one(command: list[str]) -> list[Kernel]:
    cuobjdump, folder = find_tool("cuobjdump"), compiled(command)
    log, kernels = (folder / "log").read_text(), []
    for ptx in sorted(folder.glob("*.ptx")):
        text = ptx.read_text()
        arch = re.search(r"^\.target (\w+)", text, re.M)[1]
        if cuobjdump:
            machine = [cuobjdump, "-sass", ptx.with_suffix(".cubin")]
            sass = subprocess.run(machine, check=True, capture_output=True, text=True).stdout
            kernels += judge(log, arch, sass_bodies(sass), SASS)
        else:
            kernels += judge(log, arch, ptx_bodies(text), PTX)
    return kernels


def main() -> int:
    args = arguments(__doc__).parse_args()
    commands = build_commands()
    if not commands:
        print("cuda_check: no CUDA build in build/, nothing checked")
        return 0
    kernels = side_by_side(check_one, [(command,) for command in commands])
    return print_report(kernels, "registers", args.each)


if __name__ == "__main__":
    sys.exit(main())

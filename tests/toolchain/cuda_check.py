"""Checks the machine code of every kernel in the last CUDA build.

Forbidden are spills, stack frames, waits that the compiler inserted between tensor core instructions, and fused
multiply-adds whose sources share a register bank. Required, by kernel, are vector loads, FP8 conversions and tensor
core instructions. They are read from the SASS if cuobjdump is installed, and otherwise from the PTX.

The check repeats the commands of the build through the cache. If compile_cached.py was the launcher of the build,
nothing is compiled again.
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
    E4M3,
    E5M2,
    E8M0,
    MMA,
    TMA_COPIES,
    VECTORS,
    WGMMA_BF16,
    WGMMA_FP8,
    Kernel,
    arguments,
    found,
    in_parallel,
    print_report,
    short_names,
)

PTX = {
    VECTORS: r"\bld\.global\S*\.(v4\.|v2\.[ubf](32|64))|\bcp\.async\.(bulk|cg)",
    E4M3: r"\bcvt\.rn\.satfinite\.e4m3x2",
    E5M2: r"\bcvt\.rn\.satfinite\.e5m2x2",
    E8M0: r"\bcvt\.rp\.satfinite\.ue8m0x2\.f32",
    WGMMA_FP8: r"\bwgmma\.mma_async\.sync\S*\.f32\.e[45]m[23]",
    WGMMA_BF16: r"\bwgmma\.mma_async\.sync\S*\.f32\.bf16",
    TMA_COPIES: r"\bcp\.async\.bulk\.tensor",
    MMA: r"\bmma\.sync\.aligned",
}
SASS = {
    VECTORS: r"\bLDG\S*\.(64|128|256)\b|\bLDGSTS\S*\.128\b|\bUTMALDG\b|\bUBLKCP\b",
    E4M3: r"\bF2FP\.SATFINITE\.E4M3",
    E5M2: r"\bF2FP\.SATFINITE\.E5M2",
    E8M0: r"\bF2FP\S*\.UE8M0",
    WGMMA_FP8: r"\bQGMMA\b",
    WGMMA_BF16: r"\bHGMMA\S*\.BF16\b",
    TMA_COPIES: r"\bUTMALDG\b",
    MMA: r"\b[HQ]MMA\b",
}
FUSED_SUM = re.compile(r"\bFFMA(?:\.\S+)? R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)")


def resources(log: str) -> dict[tuple[str, str], dict[str, int]]:
    """Reads the report of `ptxas -v` on every (symbol, arch)."""
    reports = {}
    for entry in log.split("Compiling entry function ")[1:]:
        symbol, arch = re.match(r"'(\S+)' for '(\w+)'", entry).groups()
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = {unit: int(count) for count, unit in re.findall(r"(\d+) (?:bytes )?(registers|smem)\b", entry)}
        reports[symbol, arch] = {
            "waits": len(re.findall(rf"\(C75\d\d\).*'{symbol}'", log)),
            "registers": used["registers"],
            "shared": used.get("smem", 0),
            **dict(zip(("stack", "stores", "loads"), map(int, frame.groups()), strict=True)),
        }
    return reports


def ptx_bodies(ptx: str) -> dict[str, str]:
    parts = re.split(r"\.entry (\w+)\(", ptx)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sass_bodies(sass: str) -> dict[str, str]:
    parts = re.split(r"Function : (\w+)", sass)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sums_of_one_bank(body: str) -> int:
    """Counts FFMA instructions whose sources are all even or all odd registers: these read one bank, one at a time."""
    return sum(len({int(register) % 2 for register in registers}) == 1 for registers in FUSED_SUM.findall(body))


def judge(log: str, arch: str, bodies: dict[str, str], patterns: dict[str, str]) -> list[Kernel]:
    """Combines ptxas' log with the instructions of every kernel."""
    reports = {symbol: r for (symbol, a), r in resources(log).items() if a == arch}
    names = short_names(reports)
    kernels = []
    for symbol, r in reports.items():
        forbidden = {"bytes of stack": r["stack"], "bytes of spills": r["stores"] + r["loads"]}
        forbidden["waits between wgmma instructions"] = r["waits"]
        if "grouped_gemm_kernel" in symbol:  # on Hopper it is limited by register reads; PTX has no banks
            forbidden["FFMAs of one register bank"] = sums_of_one_bank(bodies[symbol])
        holds = found(bodies[symbol], patterns)
        kernels.append(Kernel(names[symbol], arch, r["registers"], r["shared"], forbidden, holds))
    return kernels


def find_tool(tool: str) -> str | None:
    return next(filter(None, map(lambda p: shutil.which(tool, path=p), (None, "/usr/local/cuda/bin"))), None)


def build_commands() -> list[list[str]]:
    """Returns the commands that compile the kernels of the last CUDA build, without the launcher."""
    builds = sorted((ROOT / "build").glob("cu*/build.ninja"), key=lambda file: file.stat().st_mtime)
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
    kernels = in_parallel(check_one, [(command,) for command in commands])
    return print_report(kernels, "registers", args.each)


if __name__ == "__main__":
    sys.exit(main())

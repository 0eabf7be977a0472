"""What the compile checks of both vendors share: names of kernels, what their code must hold, and the table."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

VECTORS = "vector loads"  # 8 or 16 bytes at a time from global memory
WIDE = "16-byte loads"
E4M3, E5M2 = "E4M3 casts", "E5M2 casts"
E8M0 = "E8M0 casts"  # instructions that round up to an E8M0 scale
OF_FP8, OF_BF16 = "tensor core products of fp8", "tensor core products of bfloat16"  # of a warpgroup
BOXES = "copies by tensor maps"
MATRICES = "matrix instructions"  # of one wave: mma.sync, MFMA
SCALED = "matrix instructions that take scales"
AMD_REGISTERS = 256  # of products by instructions: two blocks of four waves share four SIMDs, of 512 registers
BY_INSTRUCTIONS = r"mma_kernel<Traits<\(Types\)[01]"  # not what is looked up in tables
# Of chips without the instructions, or code that may not use them, the casts are arithmetic.
CASTS_IN_SOFTWARE = ("sm_80", "sm_86", "sm_87")
ROUNDS_TO_E8M0 = ("sm_100a", "sm_103a", "sm_120a", "sm_121a")
OF_E8M0 = r"\(ScaleType\)1|\(ScaleOrder\)[02]"  # kernels of formats with such scales
# enum class Fp8Variant of quantize/types.h
KINDS = {"(Fp8Variant)0": {E4M3}, "(Fp8Variant)1": {E5M2}, "(Fp8Variant)2": {E4M3, E5M2}}

# Kernels that quantize nothing: whether any instance, or those with this type, load vectors. The others load a word or
# an index at a time.
OTHERS: dict[str, str | bool] = {
    "activate_backward_kernel": "VectorAccess<BF16>",
    "activate_kernel": "VectorAccess<BF16>",
    "add_groups_kernel": True,
    "choose_experts_backward_kernel": "ExpertLanes<",
    "choose_experts_kernel": True,
    "combine_backward_kernel": "SlotVectorAccess",
    "combine_kernel": "SlotVectorAccess",
    "copy_rows_kernel": True,
    "count_tokens_kernel": False,
    "dequantize_kernel": "OutputVectors<BF16>",
    "find_amax_kernel": "Vectorized",
    "find_sources_kernel": False,
    "grouped_gemm_kernel": False,
    "invert_indices_kernel": False,
    "mma_kernel": True,
    "move_columns_kernel": False,
    "pack_tokens_kernel": True,
    "permute_indices_kernel": False,
    "permute_quantized_kernel": True,
    "place_gradient_tiles_kernel": False,
    "place_rows_kernel": False,
    "place_chunks_kernel": False,
    "place_tokens_kernel": False,
    "prepare_offs_kernel": False,
    "scale_batch_columns_kernel": False,
    "sum_gradient_tiles_kernel": False,
    "swizzle_scales_kernel": True,
    "token_groups_kernel": False,
    "tokens_by_rank_kernel": False,
    "zero_rows_kernel": False,
    "zero_unused_rows_kernel": False,
}
MX_IN_BF16 = "(Scales)4"  # Scales::kMx of gemm/sm90/args.h


@dataclasses.dataclass
class Kernel:
    """One compiled instance of a kernel."""

    name: str  # see short_names()
    arch: str
    registers: int
    shared: int
    forbidden: dict[str, int]  # such as bytes of spills: none may be there
    found: set[str]

    @property
    def problems(self) -> list[str]:
        needed = needs(self.name, self.arch)
        if needed is None:
            return ["isa_report.py does not know it"]
        present = [f"{count} {what}" for what, count in self.forbidden.items() if count]
        if never_runs(self.name, self.arch):
            return present + [f"{what} in what never runs" for what in sorted(self.found)]
        shares = self.arch.startswith("gfx") and re.match(BY_INSTRUCTIONS, self.name)
        if shares and self.registers > AMD_REGISTERS:
            present += [f"{self.registers} registers, more than {AMD_REGISTERS}"]
        return present + [f"no {what}" for what in sorted(needed - self.found)]


def base_of(name: str) -> str:
    return name.partition("<")[0]


def never_runs(name: str, arch: str) -> bool:
    """Kernels with an instruction, or in need of memory, that this chip of a build lacks are there for another."""
    if base_of(name) == "quantize_gradient_tiles_kernel":
        sm = re.match(r"sm_(\d+)", arch)
        return sm is None or not 90 <= int(sm[1]) < 120  # as least_shared() of platform/launch.h
    return arch != "gfx950" and re.search(r"\bScaled\b", name) is not None


def needs(name: str, arch: str) -> set[str] | None:
    """What the code of a kernel must hold; None of an unknown one."""
    base = base_of(name)
    if never_runs(name, arch):
        return set()
    if base.startswith("quantize_"):
        fast = re.search(r"\bVectorized<\w+, (\(Fp8Variant\)\d)>", name)
        if not fast:
            return set() if re.search(r"\bGeneric\b", name) else None
        of_scales = {E8M0} if arch in ROUNDS_TO_E8M0 and re.search(OF_E8M0, name) else set()
        of_values = set() if arch in CASTS_IN_SOFTWARE else KINDS[fast[1]]
        return {VECTORS, *of_values, *of_scales}
    if base not in OTHERS:
        return None
    scaled = re.search(r"\bScaled\b", name)
    vectors = OTHERS[base]
    loads = {VECTORS} if vectors is True or (vectors and vectors in name) else set()
    matrices = {SCALED if scaled else MATRICES} if base == "mma_kernel" else set()
    if base == "mma_kernel" and arch.startswith("gfx"):  # elsewhere it copies in the background, 16 bytes at a time
        loads = {WIDE}
    of_hopper = set()
    if (base, arch) == ("grouped_gemm_kernel", "sm_90a"):  # elsewhere it is never run
        of_hopper = {OF_BF16 if MX_IN_BF16 in name else OF_FP8, BOXES}
    return loads | matrices | of_hopper


def found(body: str, patterns: dict[str, str]) -> set[str]:
    return {what for what, pattern in patterns.items() if re.search(pattern, body)}


def short_names(symbols: Iterable[str]) -> dict[str, str]:
    """Demangles kernel symbols, without namespaces and parameters: `quantize_rows_kernel<Vectorized<BF16, ...>, 2>`."""
    symbols = list(symbols)
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    return dict(zip(symbols, map(_short, text.splitlines()), strict=True))


def _short(name: str) -> str:
    name = re.sub(r"(\w+|\(anonymous namespace\))::", "", name.removeprefix("void "))
    plain = re.match(r"\w+(<.*>)?(?=\()", name)
    return plain[0] if plain else name


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--each", action="store_true", help="a line for every instance of a kernel")
    return parser


def side_by_side(check_one: Callable[..., list[Kernel]], jobs: Iterable[tuple]) -> list[Kernel]:
    """Runs check_one(*job) for all jobs; a compiler's error message ends the program."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            return [kernel for kernels in pool.map(lambda job: check_one(*job), jobs) for kernel in kernels]
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{error.stderr}\n{' '.join(map(str, error.cmd))}") from None


def print_report(kernels: list[Kernel], register_name: str, each: bool = False) -> int:
    """Prints the table and what is wrong; returns the exit status."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name if each else base_of(kernel.name), kernel.arch].append(kernel)
    width = max(map(len, [name for name, _ in groups] + ["kernel"]))
    print(f"{'kernel':{width}}  {'arch':8} instances  {register_name:>9}  shared  ok")
    for (name, arch), group in sorted(groups.items()):
        registers, shared = max(k.registers for k in group), max(k.shared for k in group)
        ok = "no" if any(k.problems for k in group) else "yes"
        print(f"{name:{width}}  {arch:8} {len(group):9}  {registers:9}  {shared:6}  {ok}")
    for arch in sorted({arch for _, arch in groups}):
        print(f"{sum(k.arch == arch for k in kernels)} kernels for {arch}")
    for kernel in kernels:
        if kernel.problems:
            print(f"BAD {kernel.arch} {kernel.name}: {', '.join(kernel.problems)}")
    if not kernels:
        print("BAD no kernels found")
    return 0 if kernels and not any(k.problems for k in kernels) else 1

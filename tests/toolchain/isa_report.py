"""Shared by the compile checks of both vendors: names of kernels, requirements on their code, and the report."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

VECTORS = "vector loads"  # loads of 8 or 16 bytes from global memory
WIDE_VECTORS = "16-byte loads"
E4M3, E5M2 = "E4M3 casts", "E5M2 casts"
E8M0 = "E8M0 casts"  # instructions that round up to an E8M0 scale
WGMMA_FP8, WGMMA_BF16 = "FP8 wgmma instructions", "BF16 wgmma instructions"  # executed by a warpgroup
TMA_COPIES = "TMA copies"
MMA = "matrix instructions"  # executed by one wave: mma.sync, MFMA
SCALED_MMA = "matrix instructions that take scales"
AMD_REGISTERS = 256  # limit of mma kernels: two blocks of four waves share four SIMDs with 512 registers each
BY_INSTRUCTIONS = r"mma_kernel<Traits<\(Types\)[01]"  # mma kernels that do not decode operands by tables
# These have no conversion instructions, or their code may not use them: they cast by arithmetic.
CASTS_IN_SOFTWARE = ("sm_80", "sm_86", "sm_87")
ROUNDS_TO_E8M0 = ("sm_100a", "sm_103a", "sm_120a", "sm_121a")
WITH_E8M0 = r"\(ScaleType\)1|\(ScaleOrder\)[02]"  # kernels for formats with E8M0 scales
# The casts of enum class Fp8Variant (quantize/types.h).
CASTS = {"(Fp8Variant)0": {E4M3}, "(Fp8Variant)1": {E5M2}, "(Fp8Variant)2": {E4M3, E5M2}}

# Kernels that do not quantize. True: all instances load vectors. A string: instances with this type load vectors.
# False: they load one word or one index at a time.
LOADS_VECTORS: dict[str, str | bool] = {
    "activate_backward_kernel": "VectorAccess<BF16>",
    "activate_kernel": "VectorAccess<BF16>",
    "add_bias_kernel": "VectorAccess<BF16>",
    "add_groups_kernel": True,
    "cast_factor_rows_kernel": "<8>",
    "cast_factor_tiles_kernel": False,
    "choose_experts_backward_kernel": "ExpertLanes<",
    "choose_experts_kernel": True,
    "add_low_rank_kernel": False,
    "combine_backward_kernel": "SlotVectorAccess",
    "combine_kernel": "SlotVectorAccess",
    "copy_rows_kernel": True,
    "count_tokens_kernel": False,
    "dequantize_kernel": "OutputVectors<BF16>",
    "expand_scales_kernel": False,
    "find_amax_kernel": "Vectorized",
    "find_sources_kernel": False,
    "grouped_gemm_kernel": False,
    "invert_indices_kernel": False,
    "mma_kernel": True,
    "move_columns_kernel": False,
    "pack_tokens_kernel": True,
    "narrow_tokens_any_kernel": False,
    "narrow_tokens_kernel": True,
    "outer_tokens_any_kernel": False,
    "outer_tokens_kernel": True,
    "permute_indices_kernel": False,
    "permute_quantized_kernel": True,
    "place_gradient_tiles_kernel": False,
    "place_rows_kernel": False,
    "place_chunks_kernel": False,
    "place_tokens_kernel": False,
    "prepare_gradient_row_blocks_kernel": False,
    "prepare_offs_kernel": False,
    "scale_batch_columns_kernel": False,
    "sum_gradient_row_blocks_kernel": False,
    "sum_gradient_tiles_kernel": False,
    "sum_partials_kernel": False,
    "sum_rows_kernel": "VectorAccess<BF16>",
    "swizzle_scales_kernel": True,
    "token_groups_kernel": False,
    "tokens_by_rank_kernel": False,
    "transpose_weight_kernel": False,
    "zero_rows_kernel": False,
    "zero_unused_rows_kernel": False,
}
WITH_MX = "(Scales)4"  # Scales::kMx of gemm/sm90/args.h


@dataclasses.dataclass
class Kernel:
    """One compiled instance of a kernel."""

    name: str  # see short_names()
    arch: str
    registers: int
    shared: int
    forbidden: dict[str, int]  # counts that must be zero, such as bytes of spills
    found: set[str]

    @property
    def problems(self) -> list[str]:
        needed = needs(self.name, self.arch)
        if needed is None:
            return ["isa_report.py does not list it"]
        present = [f"{count} {what}" for what, count in self.forbidden.items() if count]
        if never_runs(self.name, self.arch):
            return present + [f"{what} in a kernel that never runs" for what in sorted(self.found)]
        is_limited = self.arch.startswith("gfx") and re.match(BY_INSTRUCTIONS, self.name)
        if is_limited and self.registers > AMD_REGISTERS:
            present += [f"{self.registers} registers, more than {AMD_REGISTERS}"]
        return present + [f"no {what}" for what in sorted(needed - self.found)]


def base_of(name: str) -> str:
    return name.partition("<")[0]


def never_runs(name: str, arch: str) -> bool:
    """Whether the kernel needs an instruction or an amount of shared memory that this architecture lacks."""
    if base_of(name) == "quantize_gradient_tiles_kernel":
        sm = re.match(r"sm_(\d+)", arch)
        return sm is None or not 90 <= int(sm[1]) < 120  # as min_shared_bytes() of platform/launch.h
    if base_of(name) == "quantize_gradient_long_rows_kernel":  # it needs clusters
        sm = re.match(r"sm_(\d+)", arch)
        return sm is None or int(sm[1]) < 90
    return arch != "gfx950" and re.search(r"\bScaled\b", name) is not None


def needs(name: str, arch: str) -> set[str] | None:
    """Returns the instructions that the code of a kernel must contain, or None for an unknown kernel."""
    base = base_of(name)
    if never_runs(name, arch):
        return set()
    if base.startswith("quantize_"):
        vectorized = re.search(r"\bVectorized<\w+, (\(Fp8Variant\)\d)>", name)
        if not vectorized:
            return set() if re.search(r"\bGeneric\b", name) else None
        scales = {E8M0} if arch in ROUNDS_TO_E8M0 and re.search(WITH_E8M0, name) else set()
        values = set() if arch in CASTS_IN_SOFTWARE else CASTS[vectorized[1]]
        return {VECTORS, *values, *scales}
    if base not in LOADS_VECTORS:
        return None
    scaled = re.search(r"\bScaled\b", name)
    vectors = LOADS_VECTORS[base]
    loads = {VECTORS} if vectors is True or (vectors and vectors in name) else set()
    matrices = {SCALED_MMA if scaled else MMA} if base == "mma_kernel" else set()
    if base == "mma_kernel" and arch.startswith("gfx"):  # on NVIDIA it copies asynchronously, 16 bytes at a time
        loads = {WIDE_VECTORS}
    hopper = set()
    if (base, arch) == ("grouped_gemm_kernel", "sm_90a"):  # it never runs on other architectures
        hopper = {WGMMA_BF16 if WITH_MX in name else WGMMA_FP8, TMA_COPIES}
    return loads | matrices | hopper


def found(body: str, patterns: dict[str, str]) -> set[str]:
    return {what for what, pattern in patterns.items() if re.search(pattern, body)}


def short_names(symbols: Iterable[str]) -> dict[str, str]:
    """Demangles symbols, without namespaces and parameters: `quantize_rows_kernel<Vectorized<BF16, ...>, 2>`."""
    symbols = list(symbols)
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    return dict(zip(symbols, map(_short, text.splitlines()), strict=True))


def _short(name: str) -> str:
    name = re.sub(r"(\w+|\(anonymous namespace\))::", "", name.removeprefix("void "))
    plain = re.match(r"\w+(<.*>)?(?=\()", name)
    return plain[0] if plain else name


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--each", action="store_true", help="print a line for every instance of a kernel")
    return parser


def in_parallel(check_one: Callable[..., list[Kernel]], jobs: Iterable[tuple]) -> list[Kernel]:
    """Runs check_one(*job) for all jobs. If a compiler fails, its message ends the program."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            return [kernel for kernels in pool.map(lambda job: check_one(*job), jobs) for kernel in kernels]
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{error.stderr}\n{' '.join(map(str, error.cmd))}") from None


def print_report(kernels: list[Kernel], register_name: str, each: bool = False) -> int:
    """Prints the table and the problems. Returns the exit status."""
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

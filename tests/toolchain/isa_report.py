"""What the compile checks of both vendors share: the rule of every kernel, names, arguments and the table."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FORMATS = ("E4M3FN", "E5M2", "E4M3FNUZ", "E5M2FNUZ")  # enum class Fp8Type, in order
ROUNDS_TO_E8M0 = ("sm_100a",)
NATIVE_FORMATS = {"gfx942": FORMATS[2:]}  # every other architecture that is checked converts the first two


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the machine code of a kernel must hold. The first rule whose pattern matches the whole name counts."""

    pattern: str
    vector_loads: bool = True  # 8 or 16 bytes at a time from global memory
    casts: bool = True  # fp8 conversion instructions, where the architecture has them for the format


RULES = (
    Rule(r"quantize_rowwise_kernel<.*, false>", vector_loads=False),  # misaligned rows, element by element
    Rule(r"quantize_row_blocks_kernel<.*, false>", vector_loads=False),
    Rule(r"quantize_tiles_kernel<TileTraits<.*\(Access\)2> >", vector_loads=False),  # misaligned, element by element
    Rule(r"quantize_(rowwise|rowwise_beside|strips|row_blocks|tiles)_kernel<.*>"),
    Rule(r"scaled_grouped_mm_kernel|dequantize_kernel<\w+, 8>|copy_rows_kernel<Vec16>", casts=False),
    Rule(r"dequantize_kernel<.*>", vector_loads=False, casts=False),  # a word for 16 bytes of float32; misaligned ones
    Rule(r"copy_rows_kernel<.*>", vector_loads=False, casts=False),  # rows that are not multiples of 16 bytes
    Rule(r"token_groups_kernel<\w+>|permute_indices_kernel", vector_loads=False, casts=False),  # an index a row
    Rule(
        r"prepare_offs_kernel|zero_rows_kernel|zero_empty_groups_kernel", vector_loads=False, casts=False
    ),  # a few words, or stores alone
    Rule(r"place_rows_kernel", vector_loads=False, casts=False),  # an index a row, and stores
    Rule(r"invert_indices_kernel", vector_loads=False, casts=False),  # an atomic for every word
    Rule(r"combine(_backward)?_kernel<.*Vec16.*>", casts=False),
    Rule(r"combine(_backward)?_kernel<.*>", vector_loads=False, casts=False),  # misaligned rows, element by element
    Rule(r"zero_unused_rows_kernel<.*>", vector_loads=False, casts=False),  # an index a lane, and stores
    Rule(r"swizzle_scales_kernel<.*>", casts=False),
    Rule(r"(count|place)_tokens_kernel<\w+>", vector_loads=False, casts=False),  # an id a lane, in the order of lanes
)


@dataclasses.dataclass(frozen=True)
class Patterns:
    """Regular expressions of one assembly language."""

    vector_load: str
    cast: dict[str, str]  # by the first four characters of the format
    e8m0: str | None = None  # rounding up to an E8M0 scale, of those in ROUNDS_TO_E8M0


@dataclasses.dataclass
class Kernel:
    """One compiled kernel instantiation."""

    name: str  # see short_names()
    arch: str
    registers: int
    shared: int
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def software_format(self) -> str | None:
        """The fp8 format that this architecture converts in software, if the kernel writes such."""
        fmt = format_of(self.name)
        return fmt if fmt and fmt not in native_formats(self.arch) else None

    def forbid(self, **counts: int) -> None:
        self.problems += [f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count]

    def check_body(self, body: str, patterns: Patterns) -> None:
        """Applies the kernel's rule to its assembly text."""
        rule = next((r for r in RULES if re.fullmatch(r.pattern, self.name)), None)
        if rule is None:
            self.problems.append("no rule in isa_report.py says what it must contain")
            return
        if rule.vector_loads and not re.search(patterns.vector_load, body):
            self.problems.append("no vector loads")
        writes_e8m0 = re.search(r"\b(MxFormat|SectorMap)\b", self.name)
        if writes_e8m0 and self.arch in ROUNDS_TO_E8M0 and not re.search(patterns.e8m0 or "$^", body):
            self.problems.append("no E8M0 conversion instructions")
        fmt = format_of(self.name)
        if not rule.casts or self.software_format:
            return
        if fmt is None:
            self.problems.append("its name tells no fp8 format")
        elif not re.search(patterns.cast[fmt[:4]], body):
            self.problems.append(f"no {fmt} conversion instructions")


def native_formats(arch: str) -> tuple[str, ...]:
    return NATIVE_FORMATS.get(arch, FORMATS[:2])


def format_of(name: str) -> str | None:
    found = re.search(rf"\b({'|'.join(FORMATS)})\b", name)
    return found[1] if found else None


def short_names(symbols: Iterable[str]) -> dict[str, str]:
    """Demangles kernel symbols: no namespaces, no parameter list, formats by name: `kernel<BF16, E5M2, true>`."""
    symbols = list(symbols)
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    return dict(zip(symbols, map(_short, text.splitlines()), strict=True))


def _short(name: str) -> str:
    name = re.sub(r"(\w+|\(anonymous namespace\))::", "", name.removeprefix("void "))
    name = re.sub(r"\(Fp8Type\)(\d+)", lambda m: FORMATS[int(m[1])], name)
    plain = re.match(r"\w+(<.*>)?(?=\()", name)
    return plain[0] if plain else name


def parse_arguments(description: str, archs: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--csrc", type=Path, default=CSRC, help="C++ source tree (default: %(default)s)")
    parser.add_argument("--archs", nargs="+", default=archs, help="architectures (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="one line per instantiation, not per kernel")
    return parser.parse_args()


def compile_all(compile_one: Callable[..., list[Kernel]], jobs: Iterable[tuple]) -> list[Kernel]:
    """Runs `compile_one(*job)` for all jobs, two at a time; a compiler's error message ends the program."""
    with ThreadPoolExecutor(2) as pool:
        try:
            return [kernel for kernels in pool.map(lambda job: compile_one(*job), jobs) for kernel in kernels]
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{error.stderr}\n{' '.join(map(str, error.cmd))}") from None


def print_report(kernels: list[Kernel], register_name: str, every: bool = False) -> int:
    """Prints the table and what is wrong; returns the exit status."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name if every else kernel.name.split("<")[0], kernel.arch].append(kernel)
    width = max(map(len, [name for name, _ in groups] + ["kernel"]))
    print(f"{'kernel':{width}}  {'arch':8} variants  {register_name:>9}  shared  software casts  ok")
    for (name, arch), group in sorted(groups.items()):
        software = sum(k.software_format is not None for k in group)
        registers, shared = max(k.registers for k in group), max(k.shared for k in group)
        ok = "no" if any(k.problems for k in group) else "yes"
        print(f"{name:{width}}  {arch:8} {len(group):8}  {registers:9}  {shared:6}  {software:14}  {ok}")
    for arch in sorted({k.arch for k in kernels if k.software_format}):
        exempt = sorted({k.software_format for k in kernels if k.arch == arch and k.software_format})
        print(f"{arch} has no conversion instructions for {', '.join(exempt)}: exempt from that rule")
    for group in groups.values():
        bad = [k for k in group if k.problems]
        for kernel in bad if every else bad[:3]:
            print(f"BAD {kernel.arch} {kernel.name}: {', '.join(kernel.problems)}")
        if len(bad) > 3 and not every:
            print(f"BAD {bad[0].arch} ... and {len(bad) - 3} more, see --all")
    if not kernels:
        print("BAD no kernels found")
    return 0 if kernels and not any(k.problems for k in kernels) else 1

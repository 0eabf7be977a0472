"""Compares our products and layers with other implementations, one row for each kind, rival, size and groups.

    python bench/beside.py --out bench/results/beside.json

A process measures one rival. In it, ours and the variants of the rival take turns on one GPU. A rival that is absent,
fails or takes too long costs only its own rows, which say why. Rows of --out that were measured again are replaced, so
that a comparison can be made in several calls, with --kinds, --rivals, --sizes and --groups. --merge adds the rows of
other files.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import cases_experts
import torch
from case import EVEN, TABLE, ZIPF
from rivals import COMPILES, KINDS, RECIPES, REUSED, Given, Variant, forget_tuning, versions

WARM_SECONDS, SECONDS, ROUNDS = 0.35, 0.35, 3
AGREE = 0.125  # E4M3 rounds by up to 2^-4; a layer multiplies four rounded operands, whose errors add up like noise
HOST_CALLS, HOST_BATCHES = 8, 7
HOST_ROWS = 128  # of an expert, so that the host and not the GPU takes the time
PRODUCTS = {name: TABLE["grouped_gemm_MKNE"][name] for name in ("dsv3_up", "qwen3_up")} | {
    "qwen3_235b_up": [131072, 4096, 3072, 16],
    "kimi_up": [98304, 7168, 4096, 48],
}
SMALL = {"product": {"small": [300, 128, 256, 3]}, "experts": {"small": [300, 128, 64, 5, 2]}}  # for a CPU
MIB = 2**20
LIMIT = 270  # seconds of one process
KEY = "kind", "rival", "sizes", "groups"

Names = dict[str, object]


def layer_sizes() -> dict[str, list[int]]:
    return {name: [*sizes] for name, sizes in cases_experts.SIZES.items()} | {"few_tokens": [4096, 2048, 768, 128, 8]}


def sizes_of(kind: str) -> dict[str, list[int]]:
    if not torch.cuda.is_available():
        return SMALL["product" if kind == "product" else "experts"]
    return PRODUCTS if kind == "product" else layer_sizes()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], object], count: int) -> float:
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return time.perf_counter() - began


def sustained_us(step: Callable[[], object], seconds: float) -> float:
    """Warms up for as long as it measures, because the chip's power is limited."""
    seconds_of(step, 1)
    count = max(3, round(seconds / seconds_of(step, 1)))
    seconds_of(step, max(1, round(count * WARM_SECONDS / SECONDS)))
    return seconds_of(step, count) / count * 1e6


def host_us(step: Callable[[], object]) -> float:
    """Microseconds to issue a step. The least of several batches counts: other work on the host can only add to it."""
    found = []
    for _ in range(HOST_BATCHES):
        synchronize()
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            step()
        found.append((time.perf_counter() - began) / HOST_CALLS * 1e6)
    synchronize()
    return min(found)


def kept_mib(variant: Variant) -> float:
    """What a forward keeps for backward, copies of weights included."""
    if not torch.cuda.is_available():
        return 0.0
    variant.forward()
    synchronize()
    before = torch.cuda.memory_allocated()
    out = variant.forward()
    return (torch.cuda.memory_allocated() - before - out.nbytes) / MIB


def clear(variant: Variant) -> None:
    for leaf in variant.leaves:
        leaf.grad = None


def step_of(variant: Variant, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        clear(variant)
        variant.forward().backward(grad)

    return step


def made(kind: str, rival: str, given: Given) -> tuple[dict[str, Variant], dict[str, float], dict[str, str]]:
    """Ours and the rival's variants that run and agree with ours in BF16, by how much they differ, and why the others
    do not run."""
    _, ours, rivals = KINDS[kind]
    makers = ours(given) | rivals[rival](given)
    variants: dict[str, Variant] = {}
    differences: dict[str, float] = {}
    not_run: dict[str, str] = {}
    expected = None
    for name, make in makers.items():
        try:
            variant = make()
            out = variant.forward()
            out.backward(given.grad)
            synchronize()
            expected = out.detach() if expected is None else expected
            differences[name] = ((out.detach() - expected).norm() / expected.norm()).item()
            if not differences[name] < AGREE:
                raise AssertionError(f"its result differs from ours by {differences[name]:.2g}")
        except Exception as error:
            if name.removesuffix(REUSED) in RECIPES:
                raise
            not_run[name] = reason(error)
        else:
            variants[name] = variant
            clear(variant)
    return variants, differences, not_run


def reason(error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:200]}"


def measure(kind: str, rival: str, groups: str, dims: list[int], fast: bool) -> Names:
    inputs, *_ = KINDS[kind]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    given = inputs(device, groups, *dims)
    variants, differences, not_run = made(kind, rival, given)
    us: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 if fast else ROUNDS):
        for name, variant in variants.items():
            with variant.within():
                us[name].append(sustained_us(step_of(variant, given.grad), 0.01 if fast else SECONDS))
            clear(variant)
    kept = {name: kept_mib(variant) for name, variant in variants.items() if not name.endswith(REUSED)}
    found = {"us": us, "kept_mib": kept, "weights_mib": sum(w.numel() for w in given.weights[:2]) / MIB}
    del variants, given
    found |= {"host_us": host_times(kind, rival, dims) if groups == EVEN else {}}
    return found | {"difference": differences, "not_run": not_run}


def host_times(kind: str, rival: str, dims: list[int]) -> dict[str, float]:
    """Microseconds of the host with few tokens, where the GPU does not hold it up."""
    inputs, *_ = KINDS[kind]
    device, experts = "cuda" if torch.cuda.is_available() else "cpu", dims[3]
    slots = 1 if kind == "product" else dims[4]
    given = inputs(device, EVEN, min(dims[0], HOST_ROWS * experts // slots), *dims[1:])
    found = {}
    for name, variant in made(kind, rival, given)[0].items():
        with variant.within():
            found[name] = host_us(step_of(variant, given.grad))
        clear(variant)
    return found


def compile_at(kind: str, rival: str, dims: list[int]) -> None:
    """Runs the rival once with few tokens. Its kernels are compiled for widths, not for numbers of tokens."""
    inputs, _, rivals = KINDS[kind]
    given = inputs("cuda" if torch.cuda.is_available() else "cpu", EVEN, 1024, *dims[1:])
    for make in rivals[rival](given).values():
        make().forward().backward(given.grad)


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Waits until no other process measures."""
    if file is None:
        yield
        return
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def write(file: Path, held: object) -> None:
    """Writes a file at once, so that a process that is ended leaves the file as it was."""
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(held, indent=1) + "\n")
    whole.replace(file)


def child(args: argparse.Namespace) -> None:
    """Measures one rival and writes rows as they come."""
    (kind,), (rival,), rows = args.kinds, args.rivals, []
    dims, places = sizes_of(kind), [place.split(":") for place in args.child]
    if rival in COMPILES:
        try:
            for size in dict(places):
                compile_at(kind, rival, dims[size])
        except Exception as error:
            print(f"{rival} did not compile: {reason(error)}", file=sys.stderr, flush=True)
    with turn(args.turn):
        if rival in COMPILES and torch.cuda.is_available():
            forget_tuning()
            torch.cuda.empty_cache()
        for size, groups in places:
            began = time.perf_counter()
            row = dict(zip(KEY, (kind, rival, size, groups), strict=True)) | {"dims": dims[size]}
            try:
                row |= measure(kind, rival, groups, dims[size], args.fast)
            except Exception as error:
                row["error"] = reason(error)
            rows.append(row | {"versions": versions()})
            write(args.out, rows)
            us = {name: round(median(rounds), 1) for name, rounds in row.get("us", {}).items()}
            print(*(row[name] for name in KEY), row.get("error", us), row.get("not_run", ""), flush=True)
            print(f"    {time.perf_counter() - began:.0f} s", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if "CUDA error" in row.get("error", ""):  # nothing runs in this process any more
                sys.exit(1)


def run_children(args: argparse.Namespace, kind: str, rival: str, file: Path | None, sizes: list[str]) -> list[Names]:
    """Rows of a process. If it dies, the row that it was at says so, and another process measures the rest."""
    deadline, dims = time.monotonic() + args.limit, sizes_of(kind)
    left, rows = [(size, groups) for size in sizes for groups in args.groups], []
    name = "_".join((kind, rival, *(sizes if file else ())))
    part = args.out.parent / f".{args.out.stem}_{name}.json"
    while left:
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--out", part, "--kinds", kind, "--rivals", rival]
        command += [*(["--turn", file] if file else []), *(["--fast"] if args.fast else [])]
        command += ["--child", *(f"{size}:{groups}" for size, groups in left)]
        why = f"all took more than {args.limit:.0f} s"
        try:
            ended = subprocess.run([*map(str, command)], timeout=max(1, deadline - time.monotonic())).returncode
            why = f"the process ended with {ended}"
        except subprocess.TimeoutExpired:
            pass
        found = json.loads(part.read_text()) if part.exists() else []
        part.unlink(missing_ok=True)
        rows, left = [*rows, *found], left[len(found) :]
        lost = left if time.monotonic() > deadline else left[: not found]
        for size, groups in lost:
            row = dict(zip(KEY, (kind, rival, size, groups), strict=True))
            rows.append(row | {"dims": dims[size], "error": why})
        left = left[len(lost) :]
    return rows


def jobs(args: argparse.Namespace) -> list[tuple[str, str, list[list[str]]]]:
    """Kind, rival, and the sizes of each of its processes."""
    found = []
    for kind, (*_, rivals) in KINDS.items():
        sizes = [size for size in sizes_of(kind) if not args.sizes or size in args.sizes]
        for rival in rivals:
            if sizes and kind in args.kinds and (not args.rivals or rival in args.rivals):
                found.append((kind, rival, [[size] for size in sizes] if rival in COMPILES else [sizes]))
    return found


def merged(rows: list[Names], later: list[Names]) -> list[Names]:
    """Later rows replace rows of the same key, unless a later row has no figures and the earlier one has."""
    found = {tuple(row[name] for name in KEY): row for row in rows}
    for row in later:
        key = tuple(row[name] for name in KEY)
        if "us" in row or "us" not in found.get(key, {}):
            found[key] = row
    return [*found.values()]


def save(rows: list[Names], file: Path) -> None:
    held = json.loads(file.read_text())["rows"] if file.exists() else []
    write(file, {"rows": merged(held, rows)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="default: all")
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=[], help="default: all")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", default=[], help="names of sizes, default: all")
    parser.add_argument("--groups", nargs="+", default=[EVEN, ZIPF], help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one process, default: %(default)s")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="measures nothing, adds these files")
    parser.add_argument("--fast", action="store_true", help="one round of few calls: tries the code, measures nothing")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.merge:
        for file in args.merge:
            save(json.loads(file.read_text())["rows"], args.out)
        return
    if args.child:
        child(args)
        return
    from run import environment  # imports every case, which the processes need not wait for

    where = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for kind, rival, processes in jobs(args):
        file = args.out.with_suffix(".turn") if len(processes) > 1 else None
        with ThreadPoolExecutor(len(processes)) as pool:
            run_one = partial(run_children, args, kind, rival, file)
            rows = [row | where for found in pool.map(run_one, processes) for row in found]
        save(rows, args.out)
        if file:
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

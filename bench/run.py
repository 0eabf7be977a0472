"""Measures every op, and prints a table and writes one JSON file. timing.py defines how each figure is taken, and
"How performance is counted" in CONTRIBUTING.md defines the comparisons. Without a GPU the CPU loops run on small
shapes, and no target applies."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import report
import timing
import torch
from case import EVEN, Case, Shape
from peers import Peer, peers_of
from provenance import environment
from tqdm import tqdm

try:
    from cases import CASES

except ImportError as error:
    sys.exit(f"bench: moe_fp8_ext cannot be imported ({error}); `make bench` builds it first")

TARGETS_FOR = "H200"  # the figures in the cases are for this GPU


def attempt(call: Callable[[], object], name: str) -> object:
    """The result of a peer, or None if it fails: a peer may have other limits than we have."""
    try:
        return call()
    except Exception as error:
        tqdm.write(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None


def tensor_bytes(values: object) -> int:
    """Bytes of a tensor, or of all tensors in a tuple. Other values have none."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(tensor_bytes, values)) if isinstance(values, (tuple, list)) else 0


def calls_of(call: Callable[..., object], sets: list[tuple]) -> list[timing.Call]:
    return [lambda args=args: call(*args) for args in sets]


def host_times(call: timing.Call, device_us: float, device: torch.device) -> dict:
    of_call, of_relu = timing.host_us(call, device_us, device)
    return {"host_us": of_call, "relu_host_us": of_relu, "host_relu": of_call / of_relu}


def measure_memory_bound(case: Case, shape: Shape, rivals: dict[str, Peer], args: argparse.Namespace) -> dict:
    sets = [case.inputs(args.device, shape.groups, **shape.dims)]
    out = case.call(*sets[0])
    moved = case.moved(sets[0], out) if case.moved else tensor_bytes(sets[0]) + tensor_bytes(out)
    del out
    row: dict = {"peers": {}}
    if args.device.type == "cpu":
        row["us"] = timing.eager_us({"op": lambda: case.call(*sets[0])}, args.repeats, args.device)["op"]
    else:
        sets += [case.inputs(args.device, shape.groups, **shape.dims) for _ in range(timing.input_sets(moved) - 1)]
        row["us"] = timing.graph_us(calls_of(case.call, sets), args.repeats)
        if not shape.uneven:  # the host does not read the groups
            row |= host_times(lambda: case.call(*sets[0]), row["us"], args.device)
        if case.baseline:
            row["baseline_us"] = timing.graph_us(calls_of(case.baseline, sets), args.repeats)
            row["ratio"] = row["baseline_us"] / row["us"]
        for name, rival in rivals.items():
            peer_us = lambda rival=rival: timing.graph_us([rival(*given) for given in sets], args.repeats)  # noqa: E731
            row["peers"][name] = attempt(peer_us, f"{name} {case.label} {shape.label}")
    gbps = moved / row["us"] / 1e3
    return row | {"gbps": gbps, "of_copy": gbps / args.copy_gbps}


def measure_gemm(case: Case, shape: Shape, rivals: dict[str, Peer], args: argparse.Namespace) -> dict:
    inputs = case.inputs(args.device, shape.groups, **shape.dims)
    calls = {"op": lambda: case.call(*inputs)}
    if args.device.type == "cuda":  # neither baseline is tuned for a CPU, so a ratio would mean nothing
        for name, rival in {"baseline": lambda *given: lambda: case.baseline(*given), **rivals}.items():
            call = attempt(lambda rival=rival: rival(*inputs), f"{name} {case.label} {shape.label}")
            if call and attempt(call, f"{name} {case.label} {shape.label}") is not None:
                calls[name] = call
    us = timing.eager_us(calls, args.repeats, args.device)
    row = {"us": us.pop("op"), "baseline_us": us.pop("baseline", None), "peers": us}
    row["tflops"] = case.flops(**shape.dims) / row["us"] / 1e6
    if "torch FP8" in us:
        row["over_torch_fp8"] = us["torch FP8"] / row["us"]
    if row["baseline_us"]:
        row["ratio"] = row["baseline_us"] / row["us"]
    if args.device.type == "cuda" and not shape.uneven:
        row |= host_times(calls["op"], row["us"], args.device)
    if case.kept:
        row["kept"] = case.kept(*inputs)
    return row


def measure(case: Case, shape: Shape, args: argparse.Namespace) -> dict:
    row: dict = {"op": case.label, "shape": shape.label, "groups": shape.groups, "dims": shape.dims, "targets": []}
    rivals = peers_of(case.label, shape.label, not shape.uneven, args.compiled)
    try:
        with case.within():
            row |= (measure_gemm if case.flops else measure_memory_bound)(case, shape, rivals, args)
    except torch.OutOfMemoryError:  # a smaller GPU can still run the other rows
        row["error"] = "out of memory"
    else:
        if shape.groups == EVEN:
            args.even_us[case.label, shape.label] = row["us"]
        elif even_us := args.even_us.get((case.label, shape.label)):
            row["of_even"] = even_us / row["us"]
    if args.device.type == "cuda":
        torch.cuda.empty_cache()
    for target in case.targets(shape) if args.targets else ():
        met = target.metric in row and target.met(row[target.metric])
        row["targets"].append({**dataclasses.asdict(target), "met": met})
    return row


def name_of(case: Case, shape: Shape) -> str:
    return f"{case.label} {shape.label} {shape.groups or ''}".strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    text = "only rows that have every WORD in their name, such as quantize_both zipf; several -k: all that any selects"
    parser.add_argument("-k", nargs="+", action="append", metavar="WORD", default=[], help=text)
    parser.add_argument("--list", action="store_true", help="print the names of the rows and measure nothing")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a result")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile of the plain formula")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    text = "write JSON to DIR; a complete run on a GPU writes to bench/results without being asked"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "write the rows of this run into that file of results, in place of what it has of them"
    parser.add_argument("--again", type=Path, metavar="FILE", help=text)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"bench: --out {args.out}: {error.strerror}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    todo = [(case, shape) for case in CASES.values() for shape in case.shapes(device.type == "cpu")]
    if args.k:
        todo = [row for row in todo if any(all(word in name_of(*row) for word in words) for words in args.k)]
    if not todo:
        sys.exit(f"bench: -k {' -k '.join(map(' '.join, args.k))}: no row has all of that in its name")
    if args.list:
        print("\n".join(name_of(case, shape) for case, shape in todo))
        return
    result = environment(device)
    if args.again:
        whole = json.loads(args.again.read_text())
        if whole["device"] != result["device"] or result["dirty"]:
            sys.exit(
                f"bench: --again takes rows of a commit on {whole['device']}, got {report.commit_of(result)} on "
                f"{result['device']}"
            )
    args.repeats = 5 if args.quick or device.type == "cpu" else 30
    args.targets = TARGETS_FOR in result["device"]
    torch.manual_seed(0)
    args.device, args.copy_gbps = device, timing.copy_gbps(device, args.repeats)
    args.even_us = {}
    result |= {"copy_gbps": args.copy_gbps, "rows": []}
    for case, shape in (bar := tqdm(todo, unit="row")):
        bar.set_description(name_of(case, shape))
        result["rows"].append(measure(case, shape, args))
        if args.out:  # row by row, so that an interrupted run keeps its rows
            report.save(result, args.out)
    print(json.dumps(result, indent=1) if args.json else f"\n{report.table(result['rows'])}\n\n{report.origin(result)}")
    if not args.json:
        if device.type == "cpu":
            print("No GPU here: these are CPU times on small shapes, and no target applies.")
        elif not args.targets:
            print(f"Targets are for one {TARGETS_FOR}; none is checked here.")
        else:
            print(f"{report.summary(result)}.")
    if args.again:
        args.again.write_text(json.dumps(report.renewed(whole, result), indent=1) + "\n")
    complete = not args.k and not args.quick and device.type == "cuda"
    if folder := args.out or (report.RESULTS if complete else None):
        print(f"wrote {report.save(result, folder)}", file=sys.stderr)
    if folder == report.RESULTS:
        report.write()


if __name__ == "__main__":
    main()

"""Tables of the documents, each from some rows of the results or from a file of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from operator import itemgetter
from statistics import fmean, median

import device_time
from case import EVEN, RECIPES, ZIPF, commits_of, is_uneven, training_rows
from models import layer_name, named, product_name
from tabulate import tabulate

TITAN = "torchtitan.json"  # from bench/titan.py
FINETUNE = "finetune.json"  # from bench/finetune.py
FINETUNE_LOSSES = "finetune_losses.json"  # from bench/finetune_losses.py
MEGATRON = "megatron.json"  # from bench/mcore.py
PARALLEL = "expert_parallel.json"  # from bench/expert_parallel.py
AUTO, AUTO_FORWARD = "auto.json", "auto_forward.json"  # from bench/auto_sweep.py, for bench/fit_auto.py
PROFILE = "profile.json"  # from bench/profile_layer.py
WHOLE = "whole_models.json"  # from bench/whole_models.py
STATS = "stats.json"  # from bench/stats.py
ADAPTERS = "adapters.json"  # from bench/adapters.py
SHARED = "shared_experts.json"  # from bench/shared_experts.py
DECODE = "decode.json"  # from bench/decode.py
# Results of the demo's --losses with --ep on several GPUs, and on one.
PARALLEL_LOSSES = "expert_parallel_losses.json"
GENERIC = ("float8_e4m3fnuz", "unaligned")  # variants for the generic kernels
NOT_MEASURED = "Not measured yet: `make bench` on a GPU fills this table."
Value = Callable[[dict, float], str]  # text of a cell, from the row and microseconds


def generic_table(results: dict[str, dict]) -> str:
    """The loss of speed if the fast kernels do not take the operands, relative to the usual case at the same sizes."""
    body = []
    for result in results.values():
        timed = {(r["op"], r["shape"]): r["us"] for r in result["rows"] if "us" in r and not is_uneven(r["groups"])}
        for (op, shape), us in timed.items():
            usual, _, variant = op.rpartition(" ")
            if variant in GENERIC and (usual, shape) in timed:
                fast = timed[usual, shape]
                times = (f"{fast:,.1f}", f"{us:,.1f}", f"{us / fast:.1f}")
                body.append((result["device"], usual, variant, shape, *times))
    if not body:
        return NOT_MEASURED
    headings = ("GPU", "op", "operand", "shape", "fast us", "generic us", "times as long")
    align = ["left"] * 4 + ["right"] * 3
    return tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)


def sizes_of(dims: dict[str, int]) -> str:
    """The sizes of a row, after the model that has them."""
    layer = [dims[name] for name in "dfek"] if {*"dfek"} <= {*dims} else None
    return named(layer and layer_name(*layer), [*dims.values()])


def beside_baseline(results: dict[str, dict], op: str, sizes: str, baseline: str, text: str, value: Value) -> str:
    """Rows of an op by size, with a column for the baseline and one for each format."""
    parts = []
    for result in results.values():
        rows = [row for row in result["rows"] if row["op"].split()[0] == op and row.get("ratio")]
        formats = [*dict.fromkeys(row["op"].split()[1] for row in rows)]
        body = []
        for shape, groups in dict.fromkeys((row["shape"], row.get("groups")) for row in rows):
            found = {row["op"].split()[1]: row for row in rows if (row["shape"], row.get("groups")) == (shape, groups)}
            first = next(iter(found.values()))
            cells = [
                f"{value(row, row['us'])} ({row['ratio']:.2f} x)" if row else "-" for row in map(found.get, formats)
            ]
            size = f"{sizes_of(first['dims'])}{', uneven' if is_uneven(groups) else ''}"
            body.append((size, value(first, first["baseline_us"]), *cells))
        if body:
            on = f" of forward and backward on {result['device']} at {(commits := commits_of(rows, result))}"
            said = text.format(on=on)
            if " and " in commits:
                said = f"{said.removesuffix(':')}, in the run of `{formats[0]}`; every speed is within a run:"
            align = ["left"] + ["right"] * (len(formats) + 1)
            lines = tabulate(
                body, (sizes, baseline, *formats), tablefmt="github", colalign=align, disable_numparse=True
            )
            parts.append(f"{textwrap.fill(said, 120)}\n\n{lines}")
    return "\n\n".join(parts)


def recipe_table(results: dict[str, dict]) -> str:
    """The fastest recipe at each size, from the largest share of casts to the smallest."""
    parts = []
    for result in results.values():
        ratios: dict[tuple[int, ...], dict[str, dict[str, float]]] = {}
        for row in training_rows(result):
            m, k, n, e = (row["dims"][name] for name in "mkne")
            ratios.setdefault((m, k, n, e), {}).setdefault(row["op"].split()[1], {})[row["groups"]] = row["ratio"]
        body = []
        for m, k, n, e in sorted(ratios, key=lambda s: s[3] / s[0] + 1 / s[1] + 1 / s[2]):
            found = {recipe: by_groups for recipe, by_groups in ratios[m, k, n, e].items() if len(by_groups) == 2}
            cells = [f"{found[r][EVEN]:.2f} / {found[r][ZIPF]:.2f}" if r in found else "-" for r in RECIPES]
            least = {"bf16": 1.0} | {recipe: min(by_groups.values()) for recipe, by_groups in found.items()}
            fastest = max(least, key=least.get) if len(found) > 1 else "-"  # one recipe alone has no rival
            size, share = named(product_name(k, n, e), [m, k, n, e]), f"1 / {1 / (e / m + 1 / k + 1 / n):.0f}"
            body.append((size, share, *cells, fastest))
        if body:
            text = (
                f"Speed of forward and backward of `grouped_mm` over BF16 on {result['device']} at "
                f"{commits_of(training_rows(result), result)}, with even / uneven groups. The last column names the "
                "fastest recipe in the worse of the two:"
            )
            headings, align = ("M, K, N, E", "E / M + 1 / K + 1 / N", *RECIPES, "fastest"), ["left"] + ["right"] * 4
            lines = tabulate(body, headings, tablefmt="github", colalign=[*align, "left"], disable_numparse=True)
            parts.append(f"{textwrap.fill(text, 120)}\n\n{lines}")
    return "\n\n".join(parts) or NOT_MEASURED


def layer_table(results: dict[str, dict]) -> str:
    text = (
        "Microseconds{on}, for experts chosen at random, without the router. The first column of times is a layer of "
        "torch's own ops around `torch._grouped_mm`:"
    )
    columns = "T, D, F, E, top_k", "torch's ops, BF16"
    return beside_baseline(results, "experts", *columns, text, lambda row, us: f"{us:,.0f}") or NOT_MEASURED


def adoption_table(results: dict[str, dict]) -> str:
    """The experts of Transformers alone, beside Transformers' own. Every row says where it was measured."""
    body, formats = [], []
    for result in results.values():
        rows = [row for row in result["rows"] if row["op"].startswith("transformers_experts") and row.get("ratio")]
        for shape in dict.fromkeys(row["shape"] for row in rows):
            found = {row["op"].split()[1]: row for row in rows if row["shape"] == shape}
            formats = [*dict.fromkeys((*formats, *found))]
            first = next(iter(found.values()))
            speed = {name: row["dims"]["t"] / row["us"] * 1e6 for name, row in found.items()}
            cells = {name: f"{speed[name]:,.0f} ({row['ratio']:.2f} x)" for name, row in found.items()}
            baseline = f"{first['dims']['t'] / first['baseline_us'] * 1e6:,.0f}"
            body.append((sizes_of(first["dims"]), place_of([*found.values()], result), baseline, cells))
    if not body:
        return NOT_MEASURED
    text = (
        "Tokens per second of forward and backward, for the experts of one layer alone, chosen at random. The first "
        "column of speeds is Transformers' own `grouped_mm`:"
    )
    lines = tabulate(
        [(*head, *(cells.get(name, "-") for name in formats)) for *head, cells in body],
        ("T, D, F, E, top_k", "measured on", "`grouped_mm`", *formats),
        tablefmt="github",
        colalign=["left", "left", *["right"] * (1 + len(formats))],
        disable_numparse=True,
    )
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def place_of(rows: list[dict], result: dict) -> str:
    """The GPU, the versions and the commit of rows. Older results have no version of Transformers."""
    versions = [f"torch {result['torch'].partition('+')[0]}"] if "torch" in result else []
    versions.append(f"Transformers {result.get('transformers', '(version not recorded)')}")
    return f"{', '.join((result['device'], *versions))} at {commits_of(rows, result)}"


def profile_text(result: dict | None) -> str:
    """Where the time of a layer goes, as bench/profile_layer.py found it."""
    if not result:
        command = f"python bench/profile_layer.py --out bench/results/{PROFILE}"
        return f"Not measured yet: `{command}` on a GPU fills this table."
    work = [*dict.fromkeys(work for row in result["rows"] for work in row["us"])]
    body = []
    for row in result["rows"]:
        total = sum(row["us"].values())
        shares = (f"{row['us'].get(name, 0) / total:.0%}" for name in work)
        body.append((sizes_of(dict(zip("tdfek", row["dims"], strict=True))), row["recipe"], f"{total:,.0f}", *shares))
    text = (
        f"Microseconds of all kernels in one forward and backward of `experts` on {result['device']} at "
        f"{(result['commit'] or 'unknown')[:7]}, by `torch.profiler`, and the share of each kind of work. "
        f"{device_time.said(result)}"
    )
    headings = ("T, D, F, E, top_k", "recipe", "us", *work)
    align = ["left", "left", *["right"] * (len(headings) - 2)]
    lines = tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def titan_table(result: dict, style: str = "simple") -> str:
    base = result["runs"][0]["tokens_per_second"]
    body = []
    for run in result["runs"]:
        losses, speed = (run["losses"][0], fmean(run["losses"][-10:])), run["tokens_per_second"]
        body.append((run["recipe"], *(f"{loss:.4f}" for loss in losses), f"{speed:,.0f}", f"{speed / base:.2f}"))
    headings = ("recipe", "first loss", "mean of the last 10", "tokens/s", "x BF16")
    return tabulate(body, headings, tablefmt=style, colalign=["left"] + ["right"] * 4, disable_numparse=True)


def titan_text(result: dict | None) -> str:
    if not result:
        return f"Not measured yet: `python bench/titan.py --out bench/results/{TITAN}` on a GPU fills this table."
    sequences, context = result["step"]
    compiled = " Every layer is compiled." if result.get("compiled") else " Nothing is compiled."
    text = (
        f"torchtitan {result['torchtitan']}, torch {result['torch']}, {result['device']} at "
        f"{(result['commit'] or 'unknown')[:7]}: {len(result['runs'][0]['losses'])} steps of {sequences} x {context:,} "
        f"bytes of Python's standard library with the model {result['model']}, cut to {result['layers']} layers and a "
        f"vocabulary of bytes, by `bench/titan.py`; bf16 is torchtitan's own.{compiled}"
    )
    parts = [textwrap.fill(text, 120), titan_table(result, "github")]
    if all("us" in run for run in result["runs"]):
        parts += [
            textwrap.fill(
                "Milliseconds of a step, by kind of work. Idle is what kernels leave of a step without the profiler; "
                f"the rest are kernels of torch that have no kind here. {device_time.said(result)}",
                120,
            ),
            _titan_waterfall(result["runs"]),
        ]
    return "\n\n".join(parts)


def _titan_waterfall(runs: list[dict]) -> str:
    kinds = [*dict.fromkeys(kind for run in runs for kind in run["us"])]
    body = []
    for run in runs:
        step = median(run["seconds"]) * 1e3
        idle = step - sum(run["us"].values()) / 1e3
        cells = [f"{run['us'].get(kind, 0) / 1e3:.1f}" for kind in kinds]
        body.append([run["recipe"], f"{step:.1f}", *cells, f"{idle:.1f}"])
    headings, align = ("recipe", "step", *kinds, "idle"), ["left"] + ["right"] * (2 + len(kinds))
    return tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)


def stats_text(result: dict | None) -> str:
    """What statistics cost, as bench/stats.py found it."""
    if not result:
        return f"Not measured yet: `python bench/stats.py --out bench/results/{STATS}` on a GPU fills this table."
    text = (
        f"Milliseconds of a step with {result['tokens']:,} tokens, forward and backward of one layer, on "
        f"{result['device']} at {(result['commit'] or 'unknown')[:7]}, torch {result['torch']}. Medians of rounds that "
        "take turns; in the first column, the spread of the rounds:"
    )
    body = []
    for row in result["rows"]:
        off, *on = ([1e3 * second for second in seconds] for seconds in row["seconds"].values())
        middle = median(off)
        cells = [f"{row['layer']}, `{row['recipe']}`", f"{middle:.2f} ({(max(off) - min(off)) / middle:.1%})"]
        body.append([*cells, *(f"{median(ms):.2f} ({median(ms) / middle - 1:+.1%})" for ms in on)])
    headings = ("layer, recipe", "without", f"one step in {result['steps']}", "every step")
    lines = tabulate(body, headings, tablefmt="github", colalign=["left"] + ["right"] * 3, disable_numparse=True)
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def adapters_text(result: dict | None) -> str:
    """What adapters cost, as bench/adapters.py found it."""
    if not result:
        return f"Not measured yet: `python bench/adapters.py --out bench/results/{ADAPTERS}` on a GPU fills this table."
    text = (
        f"Milliseconds of forward and backward of a layer with {result['tokens']:,} tokens, on {result['device']} at "
        f"{(result['commit'] or 'unknown')[:7]}, torch {result['torch']}. Weights are frozen in FP8, and factors are "
        'float32. In the column "shared", all experts share A of gate_up and B of down:'
    )
    body = []
    for row in result["rows"]:
        plain, *adapted = (1e3 * median(seconds) for seconds in row["seconds"].values())
        d, f, e, top_k = row["sizes"]
        layer = f"{row['model']}: D {d}, F {f}, {e} experts, top {top_k}"
        body.append([layer, f"`{row['recipe']}`", f"{plain:.2f}", *(f"{ms:.2f} ({ms / plain:.2f})" for ms in adapted)])
    headings = ("layer", "recipe", *result["rows"][0]["seconds"])
    lines = tabulate(body, headings, tablefmt="github", colalign=["left"] * 2 + ["right"] * 4, disable_numparse=True)
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def shared_text(result: dict | None) -> str:
    """What a shared expert costs, as bench/shared_experts.py found it."""
    if not result:
        command = f"python bench/shared_experts.py --out bench/results/{SHARED}"
        return f"Not measured yet: `{command}` on a GPU fills this table."
    text = (
        f"Microseconds of forward and backward of a layer with {result['tokens']:,} tokens and one shared expert, on "
        f"{result['device']} at {(result['commit'] or 'unknown')[:7]}, torch {result['torch']}, with its router. In "
        "brackets is what the shared expert adds:"
    )
    body = []
    for row in result["rows"]:
        alone, *others = row["us"].values()
        d, f, e, top_k = row["sizes"]
        layer = f"{row['model']}: D {d}, F {f}, {e} experts, top {top_k}"
        added = (f"{us:,.0f} (+{us - alone:,.0f})" for us in others)
        body.append([layer, f"`{row['recipe']}`", f"{alone:,.0f}", *added])
    headings = ("layer", "recipe", *result["rows"][0]["us"])
    lines = tabulate(body, headings, tablefmt="github", colalign=["left"] * 2 + ["right"] * 3, disable_numparse=True)
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def decode_text(result: dict | None) -> str:
    """What a few tokens cost, as bench/decode.py found it."""
    if not result:
        return f"Not measured yet: `python bench/decode.py --out bench/results/{DECODE}` on a GPU fills this table."
    text = (
        "Microseconds of a layer of experts for a few tokens, by `bench/decode.py`: eager / as a CUDA graph, on "
        f"{result['device']} at {(result['commit'] or 'unknown')[:7]}, torch {result['torch']}, Transformers "
        f"{result['transformers']}. Transformers' own implementations compute in BF16. Where an eager call takes much "
        "longer than a graph, the host sets its pace."
    )
    kinds = [*result["rows"][0]["eager_us"]]
    body = []
    for row in result["rows"]:
        times = (f"{median(row['eager_us'][kind]):,.0f} / {row['graph_us'][kind]:,.1f}" for kind in kinds)
        body.append((f"{row['model']}, {row['experts']} experts", row["tokens"], *times))
    headings = ("layer", "tokens", *kinds)
    lines = tabulate(body, headings, tablefmt="github", colalign=["left"] + ["right"] * (1 + len(kinds)))
    return f"{textwrap.fill(text, 120)}\n\n{lines}"


def megatron_text(results: list[dict] | None) -> str:
    if not results:
        return f"Not measured yet: `python bench/mcore.py --out bench/results/{MEGATRON}` on a GPU fills this table."
    return "\n\n".join(map(megatron_part, results))


def megatron_part(result: dict) -> str:
    """A measurement of bench/mcore.py, and where the time of a step went if it was profiled."""
    runs, (number, sequences, context) = result["runs"], result["step"].split(",")
    fused = result["permutations"] == "fused"
    device = f"{result['ranks']} x {result['device']} at {(result['commit'] or 'unknown')[:7]}"
    text = (
        f"megatron-core {result['megatron_core']}, torch {result['torch']}, {device}, dispatcher "
        f"`{result['dispatcher']}`: {len(runs[0]['losses'])} steps of {number} micro-batches of {sequences} x "
        f"{int(context):,} bytes of Python's standard library for each GPU, by `bench/mcore.py`. The model has the "
        f"layer sizes of Qwen3-30B-A3B, cut to {result['layers']} layers and a vocabulary of bytes. Gradients go "
        "through Megatron's DDP and its distributed optimizer. TransformerEngine and APEX are not installed. "
    )
    if fused:
        text += "All rows use the permutations of `bench/mcore_permute.py`, in place of TransformerEngine's fused ones."
    else:
        text += "All rows use Megatron's unfused permutations."
    body = [megatron_row(run, {run["kind"]: run for run in runs}) for run in runs]
    headings = (
        *("experts", "tokens/s", "x SequentialMLP", "x `bf16`", "x `bf16` without the optimizer", "peak GiB"),
        "mean of the last 5 losses",
    )
    colalign = ["left"] + ["right"] * 6
    parts = [textwrap.fill(text, 120), tabulate(body, headings, "github", colalign=colalign, disable_numparse=True)]
    if any("profile_ms" in run for run in runs):
        said = f"Milliseconds of a step, by kind of work. {device_time.said(result)}"
        parts += [textwrap.fill(said, 120), profile_table(runs, [megatron_name(run["kind"]) for run in runs])]
    return "\n\n".join(parts)


def megatron_name(kind: str) -> str:
    names = {"sequential": "Megatron's SequentialMLP, BF16", "rowwise+": "`rowwise`, with `reuse_weights()`"}
    return names.get(kind, f"`{kind}`")


def megatron_row(run: dict, by_kind: dict[str, dict]) -> tuple[str, ...]:
    def beside(kind: str, name: str = "tokens_per_second") -> str:
        return f"{run[name] / by_kind[kind][name]:.2f}" if kind in by_kind else ""

    without = beside("bf16", "tokens_per_second_without_optimizer")
    peak = f"{run['peak_bytes'] / 2**30:.1f}" if run.get("peak_bytes") else ""
    speeds = f"{run['tokens_per_second']:,.0f}", beside("sequential"), beside("bf16"), without
    return megatron_name(run["kind"]), *speeds, peak, f"{sum(run['losses'][-5:]) / 5:.3f}"


def profile_table(runs: list[dict], names: list[str]) -> str:
    """Lines are kinds of work, the longest of the last run first. Columns are the runs that were profiled."""
    names, runs = zip(*(pair for pair in zip(names, runs, strict=True) if "profile_ms" in pair[1]), strict=True)
    kinds = dict.fromkeys(kind for run in runs[::-1] for kind in run["profile_ms"])
    body = [(kind, *(f"{run['profile_ms'].get(kind, 0):,.1f}" for run in runs)) for kind in kinds]
    align = ["left"] + ["right"] * len(runs)
    return tabulate(body, ("work", *names), tablefmt="github", colalign=align, disable_numparse=True)


def loads_text(runs: list[dict]) -> str:
    """What runs recorded of the load of experts, by `bench/routing.py`; nothing if they did not."""
    loads = [load for run in runs for load in run.get("busiest_expert", ()) if load is not None]
    if not loads:
        return ""
    found = f"{min(loads):.1f} to {max(loads):.1f}"
    return f" Routing is nearly even: in a layer, the busiest expert has {found} times as many slots as the mean."


def finetune_text(runs: list[dict] | None, losses: dict | None = None) -> str:
    if not runs:
        text = f"Not measured yet: `python bench/finetune.py --impl ours --out bench/results/{FINETUNE}` on a GPU, and"
        return textwrap.fill(f"{text} the same with `--impl stock`, fill this table.", 120)
    text = (
        "LoRA on attention and experts, forward, backward and step, with gradient checkpointing and random weights, by "
        "`bench/finetune.py`: experts in FP8 by `moe_fp8_ext` beside Transformers with PEFT in BF16. GB are 10^9 bytes "
        "allocated at the peak of training. No step waits for the GPU."
    )
    if any(run["adapters"] == "autocast" for run in runs):
        text += " Adapters by autocast are in float32, with products in BF16 by `torch.autocast`."
    if any(run.get("graphs") for run in runs):
        text += " With CUDA graphs, `graph_layers_` replaces checkpoints. Peaks then include the memory of the graphs."
    if any(run.get("memory") for run in runs):
        text += " Rows in 80 GB may allocate no more than that, although the GPU has more."
    parts = [textwrap.fill(text + loads_text(runs), 120)]
    headings = ("model", "step", "adapters", "experts", "tokens/s", "x BF16", "peak GB", "of BF16's")
    place = itemgetter("device", "commit")
    for device, commit in dict.fromkeys(map(place, runs)):
        same = [run for run in runs if place(run) == (device, commit)]
        body = [finetune_row(run, same) for run in same]
        alignment = ["left"] * 4 + ["right"] * 4
        table = tabulate(body, headings, tablefmt="github", colalign=alignment, disable_numparse=True)
        parts += [f"{device} at {(commit or 'unknown')[:7]}:", table]
    if profiled := [run for run in runs if "profile_ms" in run]:
        said = f"Milliseconds of a step, by kind of work. {device_time.said(profiled[0])}"
        parts += [textwrap.fill(said, 120), profile_table(runs, [finetune_name(run) for run in runs])]
    return "\n\n".join([*parts, *([finetune_losses_text(losses)] if losses else [])])


def finetune_name(run: dict) -> str:
    return f"{run['model']}{finetune_variant(run)}, {run['device'].removeprefix('NVIDIA ')}, {finetune_experts(run)}"


def finetune_variant(run: dict) -> str:
    """How the layers of a run are made faster, and what memory it has, for both kinds of experts."""
    parts = [f"{run['compile']} compiled"] if run.get("compile") else []
    parts += ["CUDA graphs"] * bool(run.get("graphs"))
    parts += [f"in {run['memory']} GB"] if run.get("memory") else []
    return "".join(f", {part}" for part in parts)


def finetune_experts(run: dict) -> str:
    return "Transformers + PEFT, BF16" if run["impl"] == "stock" else "moe_fp8_ext, FP8"


def finetune_row(run: dict, runs: list[dict]) -> list[str]:
    """A run, and its relation to the run of stock of the same model and step. runs: of one GPU and commit."""
    same = "model", "layers", "rank", "context", "sequences", "adapters", "attention_only", "compile"
    same += "graphs", "memory", "impl"
    key = {name: run.get(name) or None for name in same} | {"impl": "stock"}  # older runs lack names that are False
    alike = (other for other in runs if all((other.get(name) or None) == value for name, value in key.items()))
    stock = next(alike, None)
    layers = "" if run["layers"] == run["of_layers"] else f", {run['layers']} of {run['of_layers']} layers"
    layers += finetune_variant(run)
    where = "attention" if run["attention_only"] else "attention and experts"
    cells = [f"{run['model']}{layers}", f"{run['sequences']} x {run['context']:,}"]
    cells += [f"r={run['rank']}, {run['adapters']}, {where}", finetune_experts(run)]
    if "out_of_memory" in run:
        return [*cells, "out of memory", "", "", ""]
    speed, peak = run["tokens_per_second"], run["peak_bytes"]
    ratios = ["", ""]
    if stock and "out_of_memory" not in stock:
        ratios = [f"{speed / stock['tokens_per_second']:.2f}", f"{peak / stock['peak_bytes']:.2f}"]
    return [*cells, f"{speed:,.0f}", ratios[0], f"{peak / 1e9:.1f}", ratios[1]]


def finetune_losses_text(result: dict) -> str:
    held_out = result["held_out"]
    by_seed = ", ".join(f"{difference:+.4f}" for difference in held_out["difference_of_seeds"])
    where = f"{result['device']} at {(result['commit'] or 'unknown')[:7]}"
    text = (
        f"Losses: a small MoE with LoRA over its own FP8 checkpoint, and over BF16, {result['steps']} steps by "
        f"`bench/finetune_losses.py` on {where}. The held-out loss is {held_out['fp8']:.4f} over FP8 and "
        f"{held_out['bf16']:.4f} over BF16, means of {len(held_out['difference_of_seeds'])} seeds. They differ by "
        f"{held_out['difference']:+.4f}. BF16 alone differs by {held_out['spread_of_bf16']:.4f} among its seeds. "
        f"Seed by seed, FP8 differs from BF16 by {by_seed}."
    )
    return textwrap.fill(text, 120)


def parallel_text(result: dict | None, losses: dict | None = None) -> str:
    if not result:
        return "Not measured yet: `bench/expert_parallel.py` on two GPUs fills this table."
    recipes, layer = ("rowwise", "blockwise"), result["layer_us"]

    def over_bf16(what: str, asked: str, found: dict[str, float]) -> list[str]:
        base = found["bf16"]
        return [what, asked, f"{base:,.0f}", *(f"{found[r]:,.0f} ({found[r] / base:.2f})" for r in recipes)]

    def speed(what: str, asked: str, mode: str, over: str) -> list[str]:
        us = [(layer.get(f"{recipe} {mode}"), layer.get(over.format(recipe))) for recipe in recipes]
        return [what, asked, "", *(f"{m:,.0f} ({theirs / m:.2f} x)" if m and theirs else "" for m, theirs in us)]

    alone = result["exchange_us"]["alone"] / result["exchange_us"]["in a dispatch"]
    body = [
        over_bf16("dispatch, us (over BF16's)", "<= 0.60", result["dispatch_us"]),
        over_bf16("bytes of a token (over BF16's)", "<= 0.52", result["bytes"]),
        ["time of the all-to-all alone, over that in a dispatch", ">= 0.90", "", f"{alone:.2f}", ""],
        ["layer of torch's own ops, us", "", f"{layer['torch BF16']:,.0f}", "", ""],
        speed("layer, us (speed over that)", ">= 1.45", "exact", "torch BF16"),
        speed('layer, us (speed over recipe "bf16")', "", "exact", "bf16 exact"),
        speed('layer, mode="static", us (speed over "exact")', ">= 0.97", "static", "{} exact"),
        speed('layer, gradients="fp8", us (speed over "bf16")', "", "exact, FP8 gradients", "{} exact"),
        speed("layer, chunks=2, us (speed over 1)", "", "exact, 2 chunks", "{} exact"),
    ]
    text = (
        f"{result['gpus']} {result['device']} of one host at {(result['commit'] or 'unknown')[:7]}, torch "
        f"{result['torch']}: forward and backward of the layer, microseconds of the slowest rank."
    )
    headings, align = ("", "asked", "BF16", *recipes), ["left"] * 2 + ["right"] * 3
    lines = tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)
    parts = [textwrap.fill(text, 120), lines, *([parallel_losses_text(losses)] if losses else [])]
    return "\n\n".join(parts)


def parallel_losses_text(result: dict) -> str:
    text = (
        f"The demo, {result['steps']} steps at its sizes for GPUs, over {result['ranks']} {result['device']} and on "
        f"one, at {result['commit'][:7]}; what differs is the order of sums, which training carries on."
    )
    body = []
    for over, one in zip(result["over ranks"], result["one"], strict=True):
        held_out = over["held_out"], one["held_out"]
        body.append([over["recipe"], *(f"{loss:.4f}" for loss in held_out), f"{held_out[0] / held_out[1] - 1:+.2%}"])
    headings = "held-out loss, nats a byte", f"over {result['ranks']} ranks", "on one GPU", "difference"
    align = ["left", *["right"] * 3]
    lines = tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)
    return f"{textwrap.fill(text, 120)}\n\n{lines}"

"""The benchmark cases of the quantizers in every format: rows and tokens, in order and by index, and weights. Some
cases are for the generic kernels: formats that the hardware does not cast to, and unaligned operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import (
    EVEN,
    RECIPES,
    TABLE,
    Case,
    Rule,
    Shape,
    Target,
    activations,
    always,
    even_and_uneven,
    exchanged_shapes,
    group_ends,
    grouped_shapes,
    is_,
    normal,
    of_copy,
    over_100_mb,
    skewed,
    small_sizes,
)
from cases_experts import SIZES, routed
from cases_tokens import exchanged_counts
from torch import Tensor

from moe_fp8_ext import ops

FOREIGN = torch.float8_e4m3fnuz  # only gfx942 casts to it


def _groups(cpu: bool) -> list[Shape]:
    return grouped_shapes(small_sizes() if cpu else TABLE["grouped_MKE"])


def _skewed(cpu: bool) -> list[Shape]:
    sizes = [(131072, 4096, 16), (262144, 2048, 128), (1_000_000, 2048, 64)]
    return grouped_shapes(small_sizes() if cpu else sizes, skewed)


def _with_one_group(cpu: bool) -> list[Shape]:
    one = Shape("[8192, 7168] E=1", {"m": 8192, "k": 7168, "e": 1}, EVEN)
    return _groups(cpu) + ([] if cpu else [one])


def _rows_and_groups(cpu: bool) -> list[Shape]:
    """If groups are given, blocked scales are laid out by groups of rows."""
    return activations(cpu) + _groups(cpu)


def _weights(cpu: bool) -> list[Shape]:
    sizes = [(e, k, k) for _, k, e in small_sizes()] if cpu else TABLE["weights_ENK"]
    return [Shape(f"[{e}, {n}, {k}]", {"e": e, "n": n, "k": k}) for e, n, k in sizes]


def _weights_of_layers(cpu: bool) -> list[Shape]:
    """Weights of small experts, whose rows are short."""
    layers = [(0, 96, 64, 5, 0)] if cpu else [SIZES["fine_grained"], SIZES["qwen3_30b"]]
    sizes = [size for _, d, f, e, _ in layers for size in ((e, 2 * f, d), (e, d, f))]
    return [Shape(f"[{e}, {n}, {k}]", {"e": e, "n": n, "k": k}) for e, n, k in sizes]


def _short_rows(cpu: bool) -> list[Shape]:
    """The slots of a layer, after its first product and before its second."""
    t, _, f, _, k = (300, 96, 64, 5, 2) if cpu else SIZES["fine_grained"]
    return [Shape(f"[{t * k}, {width}]", {"m": t * k, "k": width}) for width in (f, 2 * f)]


def _one_of_each(shapes: Callable[[bool], list[Shape]], label: str) -> Callable[[bool], list[Shape]]:
    """The shape with this label and even groups. On a CPU it is the first shape."""
    return lambda cpu: [s for s in shapes(cpu) if cpu or s.label == label][:1]


def _weight(device: torch.device, groups: None, *, e: int, n: int, k: int) -> tuple[Tensor]:
    return (normal(device, e, n, k),)


def _rows(device: torch.device, groups: str | None, *, m: int, k: int, e: int = 0) -> tuple[Tensor, Tensor | None]:
    return normal(device, m, k), group_ends(groups, m, e, device) if groups else None


def _by_index(device: torch.device, groups: str, *, m: int, k: int, r: int, e: int) -> tuple[Tensor, ...]:
    indices, offs, _ = ops.permute_indices(exchanged_counts(device, groups, m, r, e), e, r, m)
    return normal(device, m, k), offs, indices


def _tokens_of_layers(cpu: bool) -> list[Shape]:
    sizes = [(300, 96, 0, 5, 2)] if cpu else SIZES.values()
    return even_and_uneven(Shape(f"[{t}, {d}] E={e} top_k={k}", dict(t=t, d=d, e=e, k=k)) for t, d, _, e, k in sizes)


def _at_slots(device: torch.device, groups: str, *, t: int, d: int, e: int, k: int) -> tuple[object, ...]:
    permutation, offs, _ = ops.sort_tokens(routed(device, groups, t, e, k)[0], e)
    return normal(device, t, d), offs, permutation, k


def _unaligned(x: Tensor) -> Tensor:
    """Equal values whose base and rows begin at odd elements."""
    *outer, k = x.shape
    room = x.new_empty(*outer, k + 1)[..., 1:]
    return room.copy_(x)


def quantizer(op: str, format: str, **options: object) -> Callable[..., object]:
    """The op as a function of x and, in some cases, offs and indices."""
    quantize = getattr(ops, op)
    if op == "quantize_weight":
        return lambda w: quantize(w, format, **options)

    def call(x: Tensor, offs: Tensor | None, indices: Tensor | None = None, top_k: int = 1) -> object:
        return quantize(x, format, offs=offs, indices=indices, top_k=None if indices is None else top_k, **options)

    return call


def _many_tokens(shape: Shape) -> bool:
    return shape.dims["m"] >= 131072


def _expert_to_24_mb(shape: Shape) -> bool:
    return shape.dims["n"] * shape.dims["k"] * 2 <= 24e6


def _strips(e64: float, e128: float, large: float) -> tuple[Rule, ...]:
    return (
        (is_("[16640, 5120] E=64"), of_copy(e64)),
        (is_("[16640, 2048] E=128"), of_copy(e128)),
        (_many_tokens, of_copy(large)),
    )


def _large(bound: float) -> tuple[Rule, ...]:
    return ((over_100_mb, of_copy(bound)),)


_RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("quantize_rows", "rowwise"): (
        (is_("[512, 7168]"), Target("us", "<=", 4.5)),
        (is_("[8192, 7168]"), of_copy(0.95)),
        (over_100_mb, of_copy(0.97)),
    ),
    ("quantize_rows", "blockwise"): _large(0.97),
    ("quantize_rows", "mxfp8"): _large(0.96),
    ("quantize_rows", "mxfp8_rowmajor"): _large(0.96),
    ("quantize_tokens", "rowwise"): _strips(0.78, 0.65, 0.70),
    ("quantize_tokens", "blockwise"): _large(0.90),
    ("quantize_tokens", "mxfp8"): _large(0.88),
    ("quantize_both", "rowwise"): _strips(0.60, 0.48, 0.58),
    ("quantize_both", "blockwise"): (
        (is_("[8192, 7168] E=1"), Target("us", "<=", 65)),
        (is_("[16640, 5120] E=64"), of_copy(0.78)),
        (over_100_mb, of_copy(0.84)),
    ),
    ("quantize_both", "mxfp8"): _large(0.84),
    ("quantize_weight", "rowwise"): ((_expert_to_24_mb, of_copy(0.70)), (always, of_copy(0.58))),
    ("quantize_weight", "blockwise"): ((always, of_copy(0.84)),),
}
_BY_INDEX = {
    ("quantize_rows", "rowwise"): 0.85,
    ("quantize_both", "rowwise"): 0.52,
    ("quantize_both", "blockwise"): 0.78,
}
_OF_EVEN: tuple[Rule, ...] = ((always, Target("of_even", ">=", 0.85)),)
# One or two ops for every kernel that has a generic twin.
_GENERIC = (
    ("quantize_rows", "rowwise"),
    ("quantize_rows", "mxfp8"),
    ("quantize_tokens", "rowwise"),
    ("quantize_both", "rowwise"),
    ("quantize_both", "blockwise"),
    ("quantize_both", "mxfp8"),
    ("quantize_weight", "rowwise"),
    ("quantize_weight", "mxfp8"),
)


def _case(op: str, format: str) -> Case:
    if op == "quantize_weight":
        shapes, inputs = _weights, _weight
    elif op == "quantize_rows":
        shapes, inputs = (_rows_and_groups if format == "mxfp8" else activations), _rows
    else:
        block_both = op == "quantize_both" and format != "rowwise"
        shapes, inputs = (_with_one_group if block_both else _groups), _rows
    return Case(op, shapes, inputs, quantizer(op, format), _RULES.get((op, format), ()), format)


def _gathered(op: str, format: str) -> Case:
    bound = _BY_INDEX.get((op, format))
    rules = ((is_("[131072, 7168] R=8 E=8"), of_copy(bound)),) if bound else ()
    return Case(op, exchanged_shapes, _by_index, quantizer(op, format), rules, format, "by index")


def _of_slots(op: str, amax: str) -> Case:
    """The cast of a layer's tokens along tokens, once per slot or once per token. With amax "batch", rows are cast
    too."""
    call = quantizer(op, "rowwise", rounding="pow2", amax=amax)
    return Case(op, _tokens_of_layers, _at_slots, call, format="rowwise", variant=f"by index, {amax}")


def _of_squares(op: str) -> Case:
    call = quantizer(op, "blockwise", amax="square")
    return Case(op, _groups, _rows, call, format="blockwise", variant="squares")


def _of_layer(format: str, directions: str) -> Case:
    call = quantizer("quantize_weight", format, directions=directions)
    variant = "of a layer" if directions == "both" else f"of a layer, {directions}"
    return Case("quantize_weight", _weights_of_layers, _weight, call, format=format, variant=variant)


def _foreign(case: Case, shapes: Callable[[bool], list[Shape]]) -> Case:
    call = quantizer(case.op, case.format, dtype=FOREIGN)
    return Case(case.op, shapes, case.inputs, call, format=case.format, variant=str(FOREIGN).removeprefix("torch."))


def _odd(case: Case, shapes: Callable[[bool], list[Shape]]) -> Case:
    def inputs(*args: object, **dims: int) -> tuple[object, ...]:
        x, *others = case.inputs(*args, **dims)
        return _unaligned(x), *others

    return Case(case.op, shapes, inputs, case.call, format=case.format, variant="unaligned")


def _generic(op: str, format: str) -> tuple[Case, Case]:
    case = _case(op, format)
    label = {"quantize_rows": "[16640, 5120]", "quantize_weight": "[64, 1408, 2048]"}.get(op, "[16640, 5120] E=64")
    return tuple(make(case, _one_of_each(case.shapes, label)) for make in (_foreign, _odd))


QUANTIZE_CASES: tuple[Case, ...] = (
    *(_case("quantize_rows", format) for format in (*RECIPES, "mxfp8_rowmajor")),
    *(_case(op, format) for op in ("quantize_tokens", "quantize_both", "quantize_weight") for format in RECIPES),
    *(
        Case(op, _skewed, _rows, quantizer(op, "rowwise"), _OF_EVEN, "rowwise", "skewed")
        for op in ("quantize_tokens", "quantize_both")
    ),
    *(_gathered(op, format) for op in ("quantize_rows", "quantize_both") for format in RECIPES),
    *(_of_slots("quantize_tokens", amax) for amax in ("group", "batch")),
    _of_slots("quantize_both", "batch"),
    *map(_of_squares, ("quantize_tokens", "quantize_both")),
    Case("quantize_rows", _short_rows, _rows, quantizer("quantize_rows", "rowwise"), (), "rowwise", "of a layer"),
    *(_of_layer(f, directions) for f in ("rowwise", "blockwise") for directions in ("both", "rows", "transposed")),
    *(case for op, format in _GENERIC for case in _generic(op, format)),
)

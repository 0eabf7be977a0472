"""Random valid calls of every op of torch.ops.moe_fp8, whose results are exact in any order of summation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, INT32_MAX, INT32_MIN, inverse_of, seed_generators
from torch import Tensor

from moe_fp8_ext.reference.numerics import FORMATS

Call = tuple[list[object], dict[str, object]]
OPS: dict[str, Callable[[random.Random], Call]] = {}
ROWS = (0, 1, 2, 7, 16, 31, 33, 64, 100, 129, 200)
COLUMNS = (0, 1, 3, 8, 15, 16, 32, 33, 64, 100, 128, 130, 257)
EXPERTS = (0, 1, 2, 3, 5, 9, 40)
RANKS = (0, 1, 3, 8, 16, 24, 64, 100)
MOVABLE = (*INPUT_DTYPES, *FP8_DTYPES, torch.int8, torch.int32, torch.bool, torch.float8_e8m0fnu)


def op(make: Callable[[random.Random], Call]) -> Callable[[random.Random], Call]:
    OPS[make.__name__] = make
    return make


def schema(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.moe_fp8, name).default._schema


def is_written(name: str) -> list[bool]:
    """For every argument, whether the op writes to it."""
    return [a.alias_info is not None and a.alias_info.is_write for a in schema(name).arguments]


# Arguments


def generator(r: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.getrandbits(32))


def placed(r: random.Random, x: Tensor) -> Tensor:
    """x itself, or a view of its values: at an odd address, with longer rows, or with one row repeated."""
    placement = r.randrange(4)
    if placement == 0 or x.dim() < 2 or x.numel() == 0:
        return x
    if placement == 1:
        return x[:1].expand(x.shape)
    first, spare = r.choice(((1, 3), (0, 5), (16, 16)))
    buffer = x.new_zeros(*x.shape[:-1], first + x.shape[-1] + spare)
    buffer[..., first : first + x.shape[-1]] = x
    return buffer[..., first : first + x.shape[-1]]


def values(r: random.Random, *shape: int) -> Tensor:
    """Input for a quantizer: of many magnitudes, sometimes zero, subnormal or not finite."""
    g = generator(r)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-20, 21, shape, generator=g).float())
    if r.random() < 0.3 and x.numel():
        odd = torch.tensor([0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan, 3e38])
        where = torch.rand(shape, generator=g) < 0.05
        x = torch.where(where, odd[torch.randint(len(odd), shape, generator=g)], x)
    return placed(r, x.to(r.choice(INPUT_DTYPES)))


def integers(r: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    return placed(r, torch.randint(-8, 9, shape, generator=generator(r)).to(dtype))


def raw(r: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits. A bool is 0 or 1, because copies of other bits are not compared."""
    *outer, k = shape
    end = 2 if dtype == torch.bool else 256
    words = torch.randint(end, (*outer, k * dtype.itemsize), dtype=torch.uint8, generator=generator(r))
    return placed(r, words.view(dtype) if k else torch.empty(shape, dtype=dtype))


def int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def offsets(r: random.Random, m: int, e: int | None = None, unit: int = 1) -> Tensor:
    """Offsets of e groups over m rows; in one call of four, arbitrary numbers."""
    e = r.choice(EXPERTS) if e is None else e
    if r.random() < 0.25:
        return int32([r.choice((INT32_MIN, -1, 0, m // 2, m, m + 1, INT32_MAX)) // unit * unit for _ in range(e)])
    return int32(sorted(r.randint(0, m // unit) * unit for _ in range(e)))


def slots(r: random.Random, count: int, p: int) -> Tensor:
    """p of the slots in any order, mixed with padding, indices out of range and equal ones."""
    return int32(
        [r.choice((-1, INT32_MIN, INT32_MAX, count, *[r.randint(0, max(count - 1, 0))] * 9)) for _ in range(p)]
    )


# Quantizers


def quantizer(r: random.Random, fmt: str, along_tokens: bool, with_offs: bool = True) -> Call:
    m, k, f, how = r.choice(ROWS), r.choice(COLUMNS), FORMATS[fmt], {}
    p = m
    if r.random() < 0.4:
        p, top_k = r.choice(ROWS), r.randint(1, 3)
        how |= {"indices": slots(r, m * top_k, p), "top_k": top_k}
    if with_offs:
        how["offs"] = offsets(r, p)
    if along_tokens:
        min_align, max_align = f.aligns
        how["align"] = r.choice([None, *(2**i for i in range(9) if min_align <= 2**i <= max_align)])
    return [values(r, m, k), fmt], how | rule(r, fmt)


def rule(r: random.Random, fmt: str) -> dict[str, object]:
    return {"dtype": r.choice((None, *FP8_DTYPES)), "rounding": r.choice((None, *FORMATS[fmt].roundings))}


@op
def quantize_rows(r: random.Random) -> Call:
    fmt = r.choice(list(FORMATS))
    if fmt == "rowwise" and r.random() < 0.3:
        return [values(r, *(r.choice((0, 1, 2, 5)) for _ in range(r.randint(0, 3))), r.choice(COLUMNS)), fmt], rule(
            r, fmt
        )
    return quantizer(r, fmt, along_tokens=False, with_offs=r.random() < 0.5)


@op
def quantize_tokens(r: random.Random) -> Call:
    args, how = quantizer(r, r.choice(list(FORMATS)), along_tokens=True)
    return args, how | {"amax": r.choice(FORMATS[args[1]].amaxes)}


@op
def quantize_both(r: random.Random) -> Call:
    return quantize_tokens(r)


@op
def quantize_weight(r: random.Random) -> Call:
    fmt = r.choice(list(FORMATS))
    how = {"directions": r.choice(("both", "rows", "transposed"))}
    return [values(r, r.choice((0, 1, 3)), r.choice(ROWS), r.choice(COLUMNS)), fmt], rule(r, fmt) | how


@op
def transpose_weight(r: random.Random) -> Call:
    return [raw(r, r.choice(FP8_DTYPES), r.choice((0, 1, 3)), r.choice(ROWS), r.choice(COLUMNS))], {}


@op
def dequantize(r: random.Random) -> Call:
    fmt, ops = r.choice(list(FORMATS)), torch.ops.moe_fp8
    how = {"out_dtype": r.choice((None, *INPUT_DTYPES))}
    what = r.choice(("rows", "tokens", "weight"))
    if what == "weight":
        q, scale, *_ = ops.quantize_weight(values(r, r.choice((0, 1, 3)), r.choice(ROWS), r.choice(COLUMNS)), fmt)
    elif what == "rows":
        (x, _), given = quantizer(r, fmt, along_tokens=False)
        q, scale = ops.quantize_rows(x, fmt, **given)
        how["offs"] = given["offs"]
    else:
        (x, _), given = quantizer(r, fmt, along_tokens=True)
        q, scale, ends = ops.quantize_tokens(x, fmt, **given, amax=r.choice(FORMATS[fmt].amaxes))
        how |= {"offs": ends, "along": "tokens"}
    return [q, scale, fmt], how


# Scales


def scale_bytes(r: random.Random) -> tuple[Tensor, dict[str, object]]:
    groups = r.choice((None, "rows", "columns", "experts"))
    shape = r.choice(ROWS), r.choice(COLUMNS)
    experts = (r.choice((0, 1, 3)),) if groups == "experts" else ()
    scale = raw(r, r.choice((torch.uint8, torch.int8, torch.float8_e8m0fnu, *FP8_DTYPES)), *experts, *shape)
    if groups in ("rows", "columns"):
        return scale, {"groups": groups, "offs": offsets(r, shape[groups == "columns"])}
    return scale, {"groups": groups}


@op
def swizzle_scales(r: random.Random) -> Call:
    scale, how = scale_bytes(r)
    return [scale], how


@op
def unswizzle_scales(r: random.Random) -> Call:
    scale, how = scale_bytes(r)
    return [torch.ops.moe_fp8.swizzle_scales(scale, **how)[0], *scale.shape[-2:]], how


@op
def expand_scales(r: random.Random) -> Call:
    while True:
        (q, scale, fmt), how = dequantize(r)
        if fmt == "blockwise":
            return [q, scale], {name: value for name, value in how.items() if name != "out_dtype" and q.dim() == 2}


# Activations


def activation_of(r: random.Random, h: Tensor) -> tuple[str, int]:
    """An activation that takes h, and its number of features."""
    gated = ("swiglu", "geglu", "swiglu_oai") if h.shape[1] % 2 == 0 else ()
    name = r.choice((*gated, "silu", "gelu", "relu2"))
    return name, h.shape[1] // 2 if name in gated else h.shape[1]


@op
def activate(r: random.Random) -> Call:
    h = values(r, r.choice(ROWS), r.choice(COLUMNS))
    return [h, activation_of(r, h)[0]], {"interleaved": r.random() < 0.3}


@op
def add_bias(r: random.Random) -> Call:
    x = values(r, r.choice(ROWS), r.choice(COLUMNS))
    offs = offsets(r, len(x))
    return [x, torch.randn(len(offs), x.shape[1], generator=generator(r)).to(x.dtype), offs], {}


@op
def sum_groups(r: random.Random) -> Call:
    x, how = values(r, r.choice(ROWS), r.choice(COLUMNS)), {}
    rows = len(x)
    if r.random() < 0.5:
        how["top_k"] = r.choice((1, 3))
        rows = r.choice(ROWS)
        how["indices"] = torch.randint(-2, len(x) * how["top_k"] + 2, (rows,), generator=generator(r)).int()
    if r.random() < 0.5:
        slots = len(x) * how.get("top_k", 1)
        how["scores"] = torch.rand(slots, generator=generator(r))
    return [x, offsets(r, rows)], how


@op
def quantize_activated(r: random.Random) -> Call:
    h = values(r, r.choice(ROWS), r.choice(COLUMNS))
    fmt = r.choice(list(FORMATS))
    how = {"interleaved": r.random() < 0.3, "keep_h": r.random() < 0.5, "offs": r.choice((None, offsets(r, len(h))))}
    if how["offs"] is not None and r.random() < 0.5:
        how["bias"] = torch.randn(len(how["offs"]), h.shape[1], generator=generator(r)).to(h.dtype)
    return [h, activation_of(r, h)[0], fmt], how | rule(r, fmt)


@op
def activate_backward(r: random.Random) -> Call:
    """Each row of grad has one value that is not zero, so that the sum of grad_scores has one term."""
    h = values(r, r.choice(ROWS), r.choice(COLUMNS))
    name, f = activation_of(r, h)
    grad = torch.zeros(len(h), f)
    if f:
        grad[:, r.randrange(f)] = torch.randn(len(h), generator=generator(r))
    how = {"scores": r.choice((None, torch.randn(len(h), generator=generator(r)))), "interleaved": r.random() < 0.3}
    if r.random() < 0.3:  # scores of slots, each of which has at most one row
        count = r.choice((0, len(h), len(h) + 7))
        indices = torch.randperm(max(count, len(h)), generator=generator(r))[: len(h)].int()
        how |= {"scores": torch.randn(count, generator=generator(r)), "indices": indices}
    if r.random() < 0.5:
        return [placed(r, grad.to(h.dtype)), h, name], how
    fmt = r.choice(list(FORMATS))
    q, scale = torch.ops.moe_fp8.quantize_rows(h, fmt, dtype=r.choice(FP8_DTYPES))
    return [placed(r, grad.to(r.choice(INPUT_DTYPES))), q, name], how | {"h_scale": scale, "format": fmt}


@op
def quantize_activated_backward(r: random.Random) -> Call:
    args, how = activate_backward(r)
    fmt = how.pop("format", r.choice(list(FORMATS)))
    align = r.choice((None, FORMATS[fmt].aligns[0], FORMATS[fmt].aligns[1]))
    how |= {"offs": offsets(r, len(args[0])), "align": align, "grad_dtype": r.choice((None, *FP8_DTYPES))}
    how |= {"amax": r.choice(FORMATS[fmt].amaxes), "sum_grad_h": r.random() < 0.5}
    return [*args, fmt], how | rule(r, fmt)


@op
def quantize_activated_backward_rows(r: random.Random) -> Call:
    args, how = activate_backward(r)
    fmt = how.pop("format", r.choice(list(FORMATS)))
    how |= {"offs": offsets(r, len(args[0])), "keep_grad_h": r.random() < 0.5, "keep_a": r.random() < 0.5}
    return [*args, fmt], how | rule(r, fmt)


# Tokens


def scored(r: random.Random, t: int, e: int) -> tuple[Tensor, dict[str, object]]:
    """Logits, sometimes with equal or infinite values, and the options that make them scores."""
    logits = torch.randn(t, e, generator=generator(r)) * 2.0 ** r.randint(-3, 5)
    if r.random() < 0.3:
        logits = logits.round()
    if r.random() < 0.2 and t * e:
        logits[r.randrange(t), r.randrange(e)] = r.choice((math.inf, -math.inf, math.nan))
    how = {"scoring": r.choice(("softmax", "sigmoid", "sqrtsoftplus")), "normalize": r.random() < 0.7}
    return placed(r, logits), how | {"scaling_factor": r.choice((1.0, 2.5, -0.1))}


@op
def choose_experts(r: random.Random) -> Call:
    e = r.choice((1, 2, 5, 64, 130, 256, 1024))
    groups = r.choice([g for g in (1, 1, 1, 2, 5, 8, 1024) if e % g == 0])
    top_groups = r.randint(1, groups)
    logits, how = scored(r, r.choice(ROWS), e)
    how |= {"num_groups": groups, "top_groups": top_groups, "group_score": r.choice(("top2_sum", "max"))}
    bias = r.choice((None, torch.randn(e, generator=generator(r))))
    top_k = min(r.choice((1, 2, 8, 40)), e // groups * top_groups)
    if r.random() < 0.3:
        dtype = r.choice((torch.int32, torch.int64))
        given_ids = torch.randint(-1, e + 1, (len(logits), top_k), dtype=dtype, generator=generator(r))
        how["given_ids"] = placed(r, given_ids)
    return [logits, top_k, bias], how


@op
def choose_experts_backward(r: random.Random) -> Call:
    t, e, top_k = r.choice(ROWS), r.choice((0, 1, 2, 5, 64, 130, 256, 1024)), r.choice((0, 1, 2, 8, 40))
    logits, how = scored(r, t, e)
    dtype = r.choice((torch.int32, torch.int64))
    ids = torch.randint(-1, e + 1, (t, top_k), dtype=dtype, generator=generator(r))
    if how["normalize"] and top_k <= e and r.random() < 0.5:  # logits of the chosen experts, each once per token
        logits = logits.gather(1, torch.randint(0, e, (t, top_k), generator=generator(r))) if top_k else logits[:, :0]
        ids = torch.rand(t, e + 2, generator=generator(r)).argsort(1)[:, :top_k].to(dtype) - 1
        how["num_experts"] = max(e, 1)
    how["parts"] = r.choice((1, 2))
    return [placed(r, torch.randn(t, top_k, generator=generator(r))), logits, placed(r, ids)], how


@op
def sort_tokens(r: random.Random) -> Call:
    e = r.choice((1, 2, 5, 64, 1024))
    shape = (r.choice(ROWS), r.choice((0, 1, 2, 5, 8)))[: r.randint(1, 2)]
    ids = torch.randint(-1, e + 1, shape, dtype=r.choice((torch.int32, torch.int64)), generator=generator(r))
    return [placed(r, ids), e], {}


@op
def tokens_by_rank(r: random.Random) -> Call:
    ranks = r.choice((1, 2, 3, 8, 300))
    e = ranks * r.choice((1, 2, 60))
    shape = r.choice(ROWS), r.choice((0, 1, 2, 5, 8))
    ids = torch.randint(-1, e + 1, shape, dtype=r.choice((torch.int32, torch.int64)), generator=generator(r))
    return [placed(r, ids), e, ranks], {}


@op
def permute_indices(r: random.Random) -> Call:
    ranks, e, m = r.choice((1, 2, 8)), r.choice((1, 3, 9)), r.choice(ROWS)
    counts = torch.randint(0, 2 * m // (ranks * e) + 2, (ranks, e), generator=generator(r))
    if r.random() < 0.2:
        counts[r.randrange(ranks), r.randrange(e)] = r.choice((-1, INT32_MIN, INT32_MAX))
    counts = counts.to(r.choice((torch.int32, torch.int64)))
    args = [counts if r.random() < 0.5 else counts.view(-1), e, ranks, m, r.choice((1, 2, 16, 256)), r.random() < 0.5]
    return args[: r.randint(4, 6)], {}


@op
def permute_pad(r: random.Random) -> Call:
    m, top_k = r.choice(ROWS), r.randint(1, 3)
    return [raw(r, r.choice(MOVABLE), m, r.choice(COLUMNS)), slots(r, m * top_k, r.choice(ROWS)), top_k], {}


@op
def permute_quantized(r: random.Random) -> Call:
    fmt, m, p, top_k = r.choice(list(FORMATS)), r.choice(ROWS), r.choice(ROWS), r.randint(1, 3)
    how = rule(r, fmt)
    q, scale = torch.ops.moe_fp8.quantize_rows(values(r, m, r.choice(COLUMNS)), fmt, **how)
    return [placed(r, q), scale, fmt, slots(r, m * top_k, p), top_k], {"offs": r.choice((None, offsets(r, p)))}


@op
def pack_tokens(r: random.Random) -> Call:
    m, top_k, n, e = r.choice(ROWS), r.randint(1, 3), r.choice((0, 1, 2, 5, 8)), r.choice((0, 1, 9, 300))
    scale = raw(r, r.choice(MOVABLE), m, r.choice((1, 2, 7, 56)))
    scale = r.choice((None, scale[:, 0], scale, scale.t().contiguous().t()))
    ids = torch.randint(-1, e + 1, (m, n), dtype=r.choice((torch.int32, torch.int64)), generator=generator(r))
    columns = r.choice((None, placed(r, ids))), r.choice((None, raw(r, r.choice(MOVABLE), m, n))), scale
    x = raw(r, r.choice(MOVABLE), m, r.choice(COLUMNS))
    return [x, *columns, slots(r, m * top_k, r.choice(ROWS)), top_k, e], {}


@op
def quantize_and_pack(r: random.Random) -> Call:
    fmt, m, rows = r.choice(list(FORMATS)), r.choice(ROWS), r.choice(ROWS)
    n, e = r.choice((0, 1, 2, 5)), r.choice((0, 9))
    ids = torch.randint(-1, e + 1, (m, n), dtype=r.choice((torch.int32, torch.int64)), generator=generator(r))
    others = r.choice((None, placed(r, ids))), r.choice((None, raw(r, r.choice(MOVABLE), m, n)))
    top_k = r.randint(0, 3)
    indices = slots(r, m * top_k, rows)
    inverse = r.choice((inverse_of(indices, m, top_k), slots(r, rows, m * top_k).view(m, top_k)))
    return [values(r, m, r.choice(COLUMNS)), *others, fmt, indices, inverse, e], rule(r, fmt)


@op
def unpermute(r: random.Random) -> Call:
    p, m, top_k = r.choice(ROWS), r.choice(ROWS), r.randint(1, 3)
    k = r.choice(COLUMNS)
    y = raw(r, r.choice(MOVABLE), p, k) if top_k == 1 else integers(r, r.choice(INPUT_DTYPES), p, k)
    return [y, slots(r, m * top_k, p), top_k, m], {}


def routed(r: random.Random) -> tuple[torch.dtype, int, Tensor, Tensor | None]:
    dtype, p, t, top_k = r.choice(INPUT_DTYPES), r.choice(ROWS), r.choice((0, 1, 5, 33)), r.choice((0, 1, 2, 5, 9))
    inverse = slots(r, p, t * top_k).view(t, top_k)
    scores = torch.randint(-4, 5, (t, top_k), generator=generator(r)).to(r.choice((torch.float32, dtype)))
    return dtype, p, inverse, r.choice((None, scores))


@op
def combine(r: random.Random) -> Call:
    dtype, p, inverse, scores = routed(r)
    return [integers(r, dtype, p, r.choice(COLUMNS)), inverse, scores], {}


@op
def combine_backward(r: random.Random) -> Call:
    dtype, p, inverse, scores = routed(r)
    k = r.choice(COLUMNS)
    y = r.choice((None, integers(r, dtype, p, k)))
    return [integers(r, dtype, len(inverse), k), y, scores, inverse, p], {"keep_grad_y": r.random() < 0.7}


def sorted_rows(r: random.Random) -> tuple[int, int, int, dict[str, object]]:
    """How many tokens, rows and slots there are, and the indices of the rows, if rows are not the tokens themselves."""
    t = r.choice(ROWS)
    if r.random() < 0.4:
        return t, t, t, {}
    p, top_k = r.choice(ROWS), r.randint(1, 3)
    return t, p, t * top_k, {"indices": slots(r, t * top_k, p), "top_k": top_k}


def tokens_for_factors(r: random.Random, t: int) -> tuple[Tensor, dict[str, object]]:
    """Tokens in bfloat16, or quantized with powers of two, so that sums are exact."""
    x = integers(r, torch.bfloat16, t, r.choice(COLUMNS))
    if r.random() < 0.5:
        return x, {}
    format = r.choice(("rowwise", "blockwise"))
    q, scale = torch.ops.moe_fp8.quantize_rows(x, format, dtype=r.choice(FP8_DTYPES), rounding="pow2")
    return q, {"x_scale": scale, "format": format}


@op
def narrow_tokens(r: random.Random) -> Call:
    t, p, _, how = sorted_rows(r)
    x, scales = tokens_for_factors(r, t)
    m = integers(r, torch.bfloat16, r.choice(EXPERTS), r.choice(RANKS), x.shape[1])
    return [x, m, offsets(r, p, len(m))], how | scales


@op
def outer_tokens(r: random.Random) -> Call:
    t, p, count, how = sorted_rows(r)
    if r.random() < 0.5:
        scores = torch.randint(-4, 5, (count,), generator=generator(r)).float()
        how["scores"] = scores.view(t, -1) if t and r.random() < 0.5 else scores
    how["out_dtype"] = r.choice((None, torch.bfloat16, torch.float32))
    x, scales = tokens_for_factors(r, t)
    return [integers(r, torch.bfloat16, p, r.choice(RANKS)), x, offsets(r, p)], how | scales


@op
def cast_factor(r: random.Random) -> Call:
    """m has its dimensions in any order in memory. A size of out is m's, the next multiple of 8, or any other."""
    shape = [r.choice((1, 2, 5, 33)), r.choice((0, 1, 7, 16, 70)), r.choice(COLUMNS)][r.randrange(2) :]
    dims = r.sample(range(len(shape)), len(shape))
    m = values(r, *(shape[d] for d in dims)).permute([dims.index(d) for d in range(len(dims))])
    *experts, rows, cols = (r.choice((n, n, n + -n % 8, r.choice(COLUMNS))) for n in shape)
    how = {"scaling": r.choice((1.0, 1.0, 0.3, -2.0))}
    if experts:
        how["num_experts"] = experts[0] + r.randrange(2)
    order = "".join(r.sample("erc"[-len(shape) :], len(shape)))
    return [m, rows, cols, order, r.choice(INPUT_DTYPES)], how


@op
def pad_token_groups(r: random.Random) -> Call:
    m = r.choice(ROWS)
    return [raw(r, r.choice(MOVABLE), m, r.choice(COLUMNS)), offsets(r, m), r.choice((1, 2, 16, 256))][
        : r.randint(2, 3)
    ], {}


@op
def pad_token_groups_to(r: random.Random) -> Call:
    m, e, rows = r.choice(ROWS), r.choice(EXPERTS), r.choice(ROWS)
    x = raw(r, r.choice(MOVABLE), m, r.choice(COLUMNS))
    return [x, offsets(r, m, e), offsets(r, rows, e), rows], {}


@op
def unpad_token_groups(r: random.Random) -> Call:
    p, m, e = r.choice(ROWS), r.choice(ROWS), r.choice(EXPERTS)
    y = raw(r, r.choice(MOVABLE), p, r.choice(COLUMNS))
    return [y, offsets(r, m, e), offsets(r, p, e), m], {}


# Products


@op
def scaled_grouped_mm(r: random.Random) -> Call:
    from gemm_problem import UNIT, exact_2d2d, exact_2d3d, scales

    fmt, k, n = r.choice(list(FORMATS)), r.choice(COLUMNS), r.choice((0, 1, 16, 33, 130))
    dtypes = r.choice(FP8_DTYPES), r.choice(FP8_DTYPES)
    seed_generators(r.getrandbits(32))
    how = {"out_dtype": r.choice((None, torch.float32)), "use_fast_accum": r.random() < 0.5}
    how["rounding"] = r.choice((None, *FORMATS[fmt].roundings))
    if r.random() < 0.3:
        m, p, top_k = r.choice(ROWS), r.choice(ROWS), r.choice((1, 3))
        offs = offsets(r, p)
        a, b, _, scale_b, _, _ = exact_2d3d(fmt, m, k, n, offs, dtypes=dtypes)
        scale_a = scales(fmt, *torch.ops.moe_fp8.quantize_rows(torch.zeros(m, k), fmt)[1].shape)
        how |= {"indices": slots(r, m * top_k, p), "top_k": top_k} | low_rank_term(r, p, len(offs), n)
        return [a, b, scale_a, scale_b, fmt, offs], how
    if r.random() < 0.5:
        m = r.choice(ROWS)
        args = exact_2d3d(fmt, m, k, n, offsets(r, m), dtypes=dtypes)
        return args, how | low_rank_term(r, m, len(args[5]), n)
    unit = UNIT[fmt]
    p = r.choice((0, 1, 3, 8)) * unit
    args = exact_2d2d(fmt, p, k, n, offsets(r, p, unit=unit), dtypes=dtypes)
    return some_of_squares(r, args), how | {"align": r.choice((1, unit)), "out_transposed": r.random() < 0.5}


def low_rank_term(r: random.Random, rows: int, experts: int, n: int) -> dict[str, object]:
    """The low-rank term of a product, or none. Out is float32, because some GEMMs round before they add the term."""
    from gemm_problem import ternary

    if r.random() < 0.7:
        return {}
    rank = r.choice((0, 1, 4, 16, 40))
    a, b = ternary(rows, rank, dtype=torch.bfloat16), ternary(experts, n, rank, dtype=torch.bfloat16).mT
    return {"low_rank_a": a, "low_rank_b": b, "out_dtype": torch.float32}


def some_of_squares(r: random.Random, args: list[object]) -> list[object]:
    """The arguments of a product of two operands along tokens. Their scales may be squares."""
    from gemm_problem import scales

    a, b, scale_a, scale_b, fmt, offs = args
    if fmt == "blockwise" and r.random() < 0.4:
        scale_a = scales(fmt, scale_a.shape[1], -(-a.shape[0] // 128)).t()
    if fmt == "blockwise" and r.random() < 0.4:
        scale_b = scales(fmt, scale_b.shape[0], -(-b.shape[1] // 128))
    return [a, b, scale_a, scale_b, fmt, offs]


@op
def add_scaled_grouped_mm(r: random.Random) -> Call:
    from gemm_problem import UNIT, exact_2d2d

    fmt, k, n = r.choice(list(FORMATS)), r.choice(COLUMNS), r.choice((0, 1, 16, 33, 130))
    seed_generators(r.getrandbits(32))
    unit = UNIT[fmt]
    p = r.choice((0, 1, 3, 8)) * unit
    offs = offsets(r, p, unit=unit)
    args = exact_2d2d(fmt, p, k, n, offs, dtypes=(r.choice(FP8_DTYPES), r.choice(FP8_DTYPES)))
    args = some_of_squares(r, args)
    total = torch.randn(len(offs), n, k, dtype=r.choice((torch.float32, torch.bfloat16)))
    how = {"align": r.choice((1, unit)), "use_fast_accum": r.random() < 0.5}
    return [total, *args], how | {"rounding": r.choice((None, *FORMATS[fmt].roundings))}

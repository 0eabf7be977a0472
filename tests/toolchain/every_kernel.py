"""Runs every kernel on small inputs and compares each byte with the CPU's loops. It is made for compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/toolchain/every_kernel.py

Arguments select the calls that have one of these words in their name: an op, a format or an activation. Words behind
--without exclude calls. Sizes are small, because a tool slows a kernel down a hundred times, but every geometry, path
and launch choice has a case. Small inputs come first. sanitize.py runs several of these processes at once.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import default_fp8_dtype
from moe_fp8_ext.quantization.format import FORMATS

OPS = torch.ops.moe_fp8
GATED = ("swiglu", "geglu", "swiglu_oai")
ACTIVATIONS = (*GATED, "silu", "gelu", "relu2")
DIRECTIONS = ("both", "rows", "transposed")
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
FN, FNUZ = (torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# FP8 types that the GPU converts to, and one to which it does not.
HARDWARE, (_, FOREIGN) = (FN, FNUZ) if default_fp8_dtype(DEVICE) in FN else (FNUZ, FN)

Call = tuple[str, Callable[..., object], tuple, dict]


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def tokens(rows: int, columns: int, dtype: torch.dtype, misaligned: bool = False) -> Tensor:
    x = torch.randn(rows, columns + misaligned, dtype=torch.float32).to(dtype)
    return x[:, 1:] if misaligned else x


def quantizers(fmt: str, x: Tensor, offs: Tensor, **how: object) -> Iterator[Call]:
    index = {k: how.pop(k) for k in ("indices", "top_k") if k in how}
    yield f"quantize_rows {fmt}", OPS.quantize_rows, (x, fmt), {"offs": offs, **index, **how}
    for amax in ("group", "square") if fmt == "blockwise" else ("group",):
        of_tokens = {"offs": offs, **index, **how, "amax": amax}
        yield f"quantize_tokens {fmt} {amax}", OPS.quantize_tokens, (x, fmt), of_tokens
        yield f"quantize_both {fmt} {amax}", OPS.quantize_both, (x, fmt), of_tokens


def cases_of_quantizers() -> Iterator[Call]:
    indices = torch.randperm(2 * 260, dtype=torch.int32)
    indices[17::29] = -1
    for fmt in FORMATS:
        for dtype, fp8 in itertools.product(INPUTS, HARDWARE):
            yield from quantizers(fmt, tokens(300, 272, dtype), offsets(0, 100, 101, 290), dtype=fp8)
            w = torch.randn(3, 144, 272).to(dtype)
            for directions in DIRECTIONS:
                how = {"dtype": fp8, "directions": directions}
                yield f"quantize_weight {fmt} {directions}", OPS.quantize_weight, (w, fmt), how
        x = tokens(260, 288, torch.bfloat16)
        yield from quantizers(fmt, x, offsets(128, 128, 500), indices=indices, top_k=2, dtype=HARDWARE[0])
        for dtype in INPUTS:  # the generic kernels: odd strides, odd sizes, a foreign FP8 type
            x = tokens(260, 131, dtype, misaligned=True)
            yield from quantizers(fmt, x, offsets(3, 3, 200), dtype=HARDWARE[0])
            yield from quantizers(fmt, x, offsets(100, 333, 520), indices=indices, top_k=2, dtype=FOREIGN)
            w = torch.randn(2, 33, 67).to(dtype)
            for directions in DIRECTIONS:
                how = {"directions": directions}
                yield f"quantize_weight {fmt} {directions}", OPS.quantize_weight, (w, fmt), how
    for dtype, fp8 in itertools.product(INPUTS, (*HARDWARE, FOREIGN)):
        for columns, align in ((288, 32), (131, 8)):
            x, how = tokens(260, columns, dtype, misaligned=columns == 131), {"amax": "batch", "dtype": fp8}
            for offs, index in ((offsets(100, 333, 500), {"indices": indices, "top_k": 2}), (offsets(3, 3, 200), {})):
                for op in ("quantize_tokens", "quantize_both"):
                    options = {"offs": offs, "align": align, **index, **how}
                    yield f"{op} rowwise batch", getattr(OPS, op), (x, "rowwise"), options
    for rows, columns in ((64, 64), (40, 4096), (24, 8192), (16, 16384), (2100, 1024), (5000, 128)):
        x, offs = tokens(rows, columns, torch.bfloat16), offsets(rows // 3, rows)
        yield "quantize_both rowwise batch", OPS.quantize_both, (x, "rowwise"), {"offs": offs, "amax": "batch"}
    # Launch choices of whole rows and strips: short and long rows, clusters, rows that overlap columns.
    for rows, columns in ((64, 64), (40, 4096), (24, 16384), (16, 40000), (2100, 1024), (5000, 128), (20000, 64)):
        x = tokens(rows, columns, torch.bfloat16)
        yield from quantizers("rowwise", x, offsets(rows // 3, rows))
    # A long group among short ones: several small blocks share its strip, or it moves through the shared memory of one.
    among_short = offsets(*range(30, 600, 30), 2600, *range(2630, 3000, 30))
    for columns in (272, 131):
        x = tokens(3000, columns, torch.bfloat16, misaligned=columns == 131)
        yield from quantizers("rowwise", x, among_short)


def cases_of_scales() -> Iterator[Call]:
    scale, offs = torch.randint(1, 254, (300, 37), dtype=torch.uint8), offsets(5, 5, 131, 290)
    of_columns = offsets(3, 3, 20, 33)
    for groups, ends in ((None, None), ("rows", offs), ("columns", of_columns)):
        yield "swizzle_scales", OPS.swizzle_scales, (scale,), {"groups": groups, "offs": ends}
        blocked, _ = OPS.swizzle_scales(scale, groups=groups, offs=ends)
        yield "unswizzle_scales", OPS.unswizzle_scales, (blocked, 300, 37), {"groups": groups, "offs": ends}
    of_experts = scale[:296].reshape(2, 148, 37)
    yield "swizzle_scales", OPS.swizzle_scales, (of_experts,), {"groups": "experts"}
    blocked, _ = OPS.swizzle_scales(of_experts, groups="experts")
    yield "unswizzle_scales", OPS.unswizzle_scales, (blocked, 148, 37), {"groups": "experts"}
    for columns in (272, 131):
        q = tokens(300, columns, torch.bfloat16).to(torch.float8_e4m3fn)
        for rows in (288, 150):
            yield "transpose_weight", OPS.transpose_weight, (torch.stack([q[:rows], q[-rows:]]),), {}
    x, ends = tokens(300, 272, torch.bfloat16), offsets(0, 100, 101, 290)
    for fmt, out in itertools.product(FORMATS, INPUTS):
        q, scale, q_t, scale_t, padded = OPS.quantize_both(x, fmt, offs=ends, dtype=HARDWARE[0])
        yield f"dequantize {fmt}", OPS.dequantize, (q, scale, fmt), {"offs": ends, "out_dtype": out}
        along = {"along": "tokens", "offs": padded, "out_dtype": out}
        yield f"dequantize {fmt}", OPS.dequantize, (q_t, scale_t, fmt), along
        if fmt == "blockwise":
            yield "expand_scales", OPS.expand_scales, (q, scale), {"offs": ends}
            yield "expand_scales", OPS.expand_scales, (q_t, scale_t), {"along": "tokens", "offs": padded}
            yield "expand_scales", OPS.expand_scales, OPS.quantize_weight(torch.stack([x, x]), fmt)[:2], {}


def cases_of_activations() -> Iterator[Call]:
    """A row of grad has one nonzero number, so that the sums of the CPU and of a wave have one term."""
    half, single = (torch.float16, 24), (torch.float32, 24)
    sizes = *((INPUTS[0], f) for f in (37, 136, 640, 1040)), half, single
    for name, (dtype, f) in itertools.product(ACTIVATIONS, sizes):
        h = tokens(70, 2 * f if name in GATED else f, dtype, misaligned=f == 37)
        grad, how = torch.zeros(70, f, dtype=dtype), {"scores": torch.rand(70)}
        grad[:, f // 2] = 1.5
        for interleaved in (False, True):
            yield f"activate {name}", OPS.activate, (h, name, interleaved), {}
            how_backward = how | {"interleaved": interleaved}
            yield f"activate_backward {name}", OPS.activate_backward, (grad, h, name), how_backward
            by_slot = how_backward | {"indices": torch.randperm(70).int()}
            yield f"activate_backward {name}", OPS.activate_backward, (grad, h, name), by_slot
            for fmt in FORMATS:
                how_quantized = {"offs": offsets(3, 60), "interleaved": interleaved, "keep_h": not interleaved}
                yield f"quantize_activated {name} {fmt}", OPS.quantize_activated, (h, name, fmt), how_quantized
                how_quantized["bias"] = h[:2].clone()
                yield (
                    f"quantize_activated {name} {fmt} with a bias",
                    OPS.quantize_activated,
                    (h, name, fmt),
                    how_quantized,
                )
        yield f"add_bias {f}", OPS.add_bias, (h, h[:2].clone(), offsets(3, 60)), {}
        yield f"sum_groups {f}", OPS.sum_groups, (h, offsets(3, 60)), {"scores": torch.rand(70)}
        by_slot = {"indices": torch.randperm(70).int(), "top_k": 1}
        yield f"sum_groups {f}", OPS.sum_groups, (h, offsets(3, 60)), by_slot
        fp8 = {37: FOREIGN, 136: HARDWARE[0]}.get(f, HARDWARE[-1])
        for fmt in FORMATS:
            q, scale = OPS.quantize_rows(h, fmt, dtype=fp8)
            of_fp8 = {"h_scale": scale, "format": fmt, "interleaved": f == 1040}
            yield f"activate_backward {name} {fmt}", OPS.activate_backward, (grad, q, name), how | of_fp8
            grads = {"grad_dtype": HARDWARE[f == 136], "dtype": HARDWARE[0], "offs": offsets(3, 3, 40, 60)}
            call = f"quantize_activated_backward {name} {fmt}", OPS.quantize_activated_backward
            yield *call, (grad, h, name, fmt), how | grads | {"interleaved": f == 640}
            q, scale = OPS.quantize_rows(h, fmt, dtype=HARDWARE[0])
            for amax in FORMATS[fmt].amaxes:
                of_fp8 = {"interleaved": f == 640, "h_scale": scale, "amax": amax}
                yield *call, (grad, q, name, fmt), how | grads | of_fp8
                of_fp8["indices"] = torch.randperm(70).int()
                yield *call, (grad, q, name, fmt), how | grads | of_fp8
            del of_fp8["amax"], grads["grad_dtype"]
            call = f"quantize_activated_backward_rows {name} {fmt}", OPS.quantize_activated_backward_rows
            yield *call, (grad, q, name, fmt), how | grads | of_fp8 | {"keep_grad_h": f == 640, "keep_a": f == 1040}


def cases_of_gradient_tiles() -> Iterator[Call]:
    """More rows than a tile, both halves of h, gradients in E5M2, and one term in the sum of a row. Then a partial last
    tile and, in rows with one scale, a cluster for each row."""
    for (f, interleaved), name, fmt in itertools.product(((256, False), (2120, True)), ACTIVATIONS, FORMATS):
        h = tokens(300, 2 * f if name in GATED else f, torch.bfloat16)
        q, scale = OPS.quantize_rows(h, fmt, dtype=HARDWARE[0])
        grad = torch.zeros(300, f, dtype=torch.bfloat16)
        grad[torch.arange(300), torch.randint(f, (300,))] = torch.randn(300).bfloat16()
        for amax in FORMATS[fmt].amaxes:
            how = {"offs": offsets(0, 100, 101, 290), "scores": torch.rand(300), "h_scale": scale, "amax": amax}
            how |= {"dtype": HARDWARE[0], "grad_dtype": HARDWARE[1], "interleaved": interleaved}
            call = f"quantize_activated_backward {name} {fmt}", OPS.quantize_activated_backward
            yield *call, (grad, q, name, fmt), how
            yield *call, (grad, q, name, fmt), how | {"sum_grad_h": True}


def cases_of_choices() -> Iterator[Call]:
    """Every number of experts and slots per lane, aligned and misaligned logits, and groups of experts."""
    for (e, groups), scoring in itertools.product(((8, 1), (130, 13), (256, 8), (500, 1), (1024, 4)), SCORINGS):
        logits, bias = 3 * tokens(300, e, torch.float32, misaligned=groups == 4), torch.randn(e)
        top_k = 40 if groups == 13 else 6
        for normalize in (True, False):
            how = {"scoring": scoring, "normalize": normalize, "scaling_factor": 2.5}
            of_groups = {"num_groups": groups, "top_groups": (groups + 1) // 2}
            given = None if groups == 8 else bias
            yield f"choose_experts {scoring}", OPS.choose_experts, (logits, top_k, given), how | of_groups
            ids, scores, topk_logits = OPS.choose_experts(logits, top_k, **how)
            args = torch.randn_like(scores), logits, ids
            for parts in (1, 2):
                backward = f"choose_experts_backward {scoring}", OPS.choose_experts_backward
                yield *backward, args, how | {"parts": parts}
                if normalize:
                    of_chosen = args[0], topk_logits, ids
                    yield *backward, of_chosen, how | {"num_experts": e, "parts": parts}


def cases_of_tokens() -> Iterator[Call]:
    ids = torch.randint(-1, 9, (300, 4))
    permutation, offs, inverse = OPS.sort_tokens(ids, 9)
    yield "sort_tokens", OPS.sort_tokens, (ids, 9), {}
    yield "sort_tokens", OPS.sort_tokens, (torch.randint(0, 700, (3000, 2)), 700), {}
    for experts, ranks in ((8, 2), (600, 300)):
        yield "tokens_by_rank", OPS.tokens_by_rank, (torch.randint(-1, experts + 1, (3000, 4)), experts, ranks), {}
    counts = torch.randint(0, 30, (4, 6), dtype=torch.int32)
    indices, _, _ = OPS.permute_indices(counts, 6, 4, 500)
    yield "permute_indices", OPS.permute_indices, (counts, 6, 4, 500), {}
    for fmt in FORMATS:
        q, scale = OPS.quantize_rows(tokens(300, 272, torch.bfloat16), fmt, dtype=HARDWARE[0])
        for ends in (None, offs):
            args = q, scale, fmt, permutation, 4
            yield f"permute_quantized {fmt}", OPS.permute_quantized, args, {"offs": ends}
    x, scores = tokens(300, 136, torch.bfloat16), torch.rand(300, 4)
    columns = scores.t().contiguous().t()
    for scale in (scores[:, 0], columns, columns.half(), columns.byte()):
        yield "pack_tokens", OPS.pack_tokens, (x, ids, scores, scale, permutation, 4, 9), {}
    yield "pack_tokens", OPS.pack_tokens, (x[:, 1:], ids.int(), scores[:, :3].half(), None, permutation, 4, 9), {}
    of_ranks, _, ranks_of = OPS.sort_tokens(OPS.tokens_by_rank(ids, 9, 3)[0], 3)
    of_many = torch.randperm(300 * 40).int()  # 40 slots per token, more than a wave of 32 has lanes
    many_of = of_many.argsort().int().view(300, 40)
    for fmt, dtype, columns in itertools.product(FORMATS, INPUTS, (136, 144, 2064)):
        x = tokens(300, columns, dtype)
        for fp8, rows in ((HARDWARE[0], 700), (HARDWARE[1], 900)):
            args = x, ids, scores, fmt, of_ranks[:rows], ranks_of, 9
            yield f"quantize_and_pack {fmt}", OPS.quantize_and_pack, args, {"dtype": fp8}
    x = tokens(300, 2064, torch.bfloat16)
    for fmt in FORMATS:
        yield f"quantize_and_pack {fmt}", OPS.quantize_and_pack, (x, None, None, fmt, of_many, many_of, 0), {}
    for dtype, columns in itertools.product(INPUTS, (136, 37)):
        x, y = tokens(500, columns, dtype), tokens(1200, columns, dtype)
        yield "permute_pad", OPS.permute_pad, (x, indices, 1), {}
        yield "unpermute", OPS.unpermute, (OPS.permute_pad(x, indices, 1), indices, 1, 500), {}
        yield "unpermute", OPS.unpermute, (y, permutation, 4, 300), {}
        for scores in (None, torch.rand(300, 4)):
            yield "combine", OPS.combine, (y, inverse, scores), {}
        for out_dtype, order in itertools.product(INPUTS, ("erc", "ecr", "rce")):
            m = tokens(5 * 12, columns, dtype).view(5, 12, columns)
            for view in (m, m.mT.contiguous().mT, m.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
                args = view, 16, columns, order, out_dtype
                yield "cast_factor", OPS.cast_factor, args, {"num_experts": 6, "scaling": 0.3}
        grad = tokens(300, columns, dtype)
        for keep in (True, False):
            args = grad, None, torch.rand(300, 4), inverse, 1200
            yield "combine_backward", OPS.combine_backward, args, {"keep_grad_y": keep}
        padded, starts, _ = OPS.pad_token_groups(x, offsets(0, 100, 490))
        yield "pad_token_groups", OPS.pad_token_groups, (x, offsets(0, 100, 490)), {}
        yield "pad_token_groups_to", OPS.pad_token_groups_to, (x, offsets(0, 100, 490), starts, 640), {}
        yield "unpad_token_groups", OPS.unpad_token_groups, (padded, offsets(0, 100, 490), starts, 500), {}


def cases_of_low_rank() -> Iterator[Call]:
    """Factors that tensor cores take, and others. Integers have exact sums in every order."""

    def ternary(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).bfloat16()

    permutation, offs, _ = OPS.sort_tokens(torch.randint(-1, 9, (300, 4)), 9)
    scores, by_slot = torch.randint(-2, 3, (300, 4)).float(), {"indices": permutation, "top_k": 4}
    for rank, width in itertools.product((3, 8, 16, 24, 40, 100), (37, 136, 1032)):
        x, m, u = ternary(300, width), ternary(9, rank, width), ternary(1200, rank)
        yield "narrow_tokens", OPS.narrow_tokens, (x, m, offs), by_slot
        yield "narrow_tokens", OPS.narrow_tokens, (x, m, offs.clamp(max=290)), {}
        for dtype in (torch.bfloat16, torch.float32):
            yield "outer_tokens", OPS.outer_tokens, (u, x, offs, scores), by_slot | {"out_dtype": dtype}
            yield "outer_tokens", OPS.outer_tokens, (u[:300], x, offs.clamp(max=290)), {"out_dtype": dtype}
    for rank, width, fmt, dtype in itertools.product((8, 24), (144, 1037), ("rowwise", "blockwise"), HARDWARE):
        m, u = ternary(9, rank, width), ternary(1200, rank)
        q, scale = OPS.quantize_rows(ternary(300, width), fmt, dtype=dtype, rounding="pow2")
        how = by_slot | {"x_scale": scale, "format": fmt}
        yield f"narrow_tokens {fmt}", OPS.narrow_tokens, (q, m, offs), how
        yield f"outer_tokens {fmt}", OPS.outer_tokens, (u, q, offs, scores), how


def products(fmt: str, sizes: tuple[int, int, int], offs: Tensor) -> Iterator[Call]:
    """Calls of the 2D x 3D product, with and without indices, and of the 2D x 2D product. Sizes are M, N and K."""
    m, n, k = sizes
    fp8 = {"dtype": HARDWARE[0]}
    q, scale, q_t, scale_t, padded = OPS.quantize_both(tokens(m, k, torch.bfloat16), fmt, offs, **fp8)
    b, scale_b, _, _ = OPS.quantize_weight(torch.randn(len(offs), n, k).bfloat16(), fmt, **fp8)
    x, scale_x = OPS.quantize_rows(tokens(m // 2, k, torch.bfloat16), fmt, **fp8)
    indices = torch.randint(-1, m // 2 * 2, (m,), dtype=torch.int32)
    dy_t, scale_dy, _ = OPS.quantize_tokens(tokens(m, n, torch.bfloat16), fmt, offs, **fp8)
    wgrads = [(dy_t, q_t.t(), scale_dy, scale_t, fmt, padded)]
    if fmt == "blockwise":
        squares = tokens(m, k, torch.bfloat16)
        squares_t, scale_squares, _ = OPS.quantize_tokens(squares, fmt, offs, amax="square", **fp8)
        scale_b = scale_b.mT
        wgrads = [
            (dy_t, x_t.t(), scale_dy, scale_x_t.t(), fmt, padded)
            for x_t, scale_x_t in ((q_t, scale_t), (squares_t, scale_squares))
        ]
    for out in (torch.bfloat16, torch.float32):
        how = {"align": 32, "out_dtype": out}
        yield f"scaled_grouped_mm {fmt}", OPS.scaled_grouped_mm, (q, b.mT, scale, scale_b, fmt, offs), how
        factors = tokens(m, 24, torch.bfloat16), torch.randn(len(offs), n, 24).bfloat16().mT
        adapted = how | dict(zip(("low_rank_a", "low_rank_b"), factors, strict=True))
        yield f"scaled_grouped_mm {fmt}", OPS.scaled_grouped_mm, (q, b.mT, scale, scale_b, fmt, offs), adapted
        by_slot = {"indices": indices, "top_k": 2, "out_dtype": out}
        yield f"scaled_grouped_mm {fmt}", OPS.scaled_grouped_mm, (x, b.mT, scale_x, scale_b, fmt, offs), by_slot
        for operands in wgrads:
            yield f"scaled_grouped_mm {fmt}", OPS.scaled_grouped_mm, operands, how
            transposed = how | {"out_transposed": True}
            yield f"scaled_grouped_mm {fmt}", OPS.scaled_grouped_mm, operands, transposed
        for operands, fast in itertools.product(wgrads, (True, False)):
            total = torch.ones(len(offs), n, k, dtype=out)
            yield f"add_scaled_grouped_mm {fmt}", added, (total, *operands), {"align": 32, "use_fast_accum": fast}


def added(total: Tensor, *args: object, **kwargs: object) -> Tensor:
    total = total.clone()
    OPS.add_scaled_grouped_mm(total, *args, **kwargs)
    return total


def cases_of_gemm() -> Iterator[Call]:
    """Sizes that every GEMM takes, and sizes that only `mma` takes."""
    for fmt in FORMATS:
        yield from products(fmt, (130, 37, 131), offsets(0, 40, 41, 120))
        yield from products(fmt, (700, 144, 272), offsets(0, 300, 301, 650))
        yield from products(fmt, (300, 400, 1040), offsets(17, 17, 145, 300))
        yield from products(fmt, (200, 272, 272), offsets(60, 61, 200))  # the last block scales do not fill a chunk
        # Several rounds of stages, and remainders.
        yield from products(fmt, (2250, 272, 144), offsets(970, 1000, 1000, 2240))


def moved(value: object, device: str) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


def as_bytes(out: object) -> list[Tensor]:
    outputs = [out] if isinstance(out, Tensor) else list(out)
    return [t.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in outputs]


def elements(call: Call) -> int:
    _, _, args, kwargs = call
    return sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, Tensor))


def selected(wanted: set[str], without: set[str]) -> list[Call]:
    of_values = cases_of_activations, cases_of_gradient_tiles, cases_of_choices
    of_rows = cases_of_quantizers, cases_of_scales, *of_values, cases_of_tokens, cases_of_low_rank
    calls = []
    for cases in (*of_rows, cases_of_gemm):
        for name, op, args, kwargs in cases():
            words = set(name.split())
            if (not wanted or wanted & words) and not without & words:
                calls.append((name, op, args, dict(kwargs)))  # a copy: some cases change theirs for the next call
    return sorted(calls, key=elements)


def turns(queue: Path | None, calls: int) -> Iterator[int]:
    """Numbers of the calls that this process makes. Processes with the same queue file divide the calls."""
    if queue is None:
        yield from range(calls)
        return
    while True:
        with queue.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            turn = int(file.read())
            file.seek(0)
            file.write(str(turn + 1))
        if turn >= calls:
            return
        yield turn


def differs(call: Call) -> bool:
    """Whether the GPU's outputs differ from the CPU's.

    GEMMs sum in an order and a precision that depend on the device, and they round outputs or operands to bfloat16.
    One rounding moves a value by at most 2^-8 of itself. The bound allows two, relative to the value (rtol) and to
    terms that cancelled in it, which are about as large as the largest value (atol).
    """
    name, op, args, kwargs = call
    if name.startswith("quantize_"):
        kwargs.setdefault("dtype", HARDWARE[0])  # the default depends on the device
    want = op(*args, **kwargs)
    got = op(*(moved(a, "cuda") for a in args), **{k: moved(a, "cuda") for k, a in kwargs.items()})
    if not name.startswith(("scaled_grouped_mm", "add_scaled_grouped_mm")):
        return not all(map(torch.equal, as_bytes(got), as_bytes(want)))
    got, want = got.cpu().float(), want.float()
    return not torch.allclose(got, want, rtol=2**-7, atol=2**-7 * want.abs().max().item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="make only calls that have one of these words in their name")
    parser.add_argument("--without", nargs="*", default=[], help="leave out calls that have one of these words")
    parser.add_argument("--queue", type=Path, help="a file with the number of the next call, which processes share")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no call after this time.time()")
    options = parser.parse_args()
    torch.manual_seed(0)
    calls = selected(set(options.words), set(options.without))
    wrong = count = 0
    for turn in turns(options.queue, len(calls)):
        name, _, args, kwargs = calls[turn]
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        call = f"{name} {shapes} {args[0].dtype} {[k for k in kwargs if kwargs[k] is not None]}"
        start = time.monotonic()
        if options.queue:
            print(f"call {turn + 1} of {len(calls)}: {call}")
        if differs(calls[turn]):
            wrong += 1
            print(f"differs: {call}")
        if options.queue:
            print(f"call {turn + 1} took {time.monotonic() - start:.2f} s")
        count += 1
        if time.time() > options.until:
            break
    print(f"{count} calls, {wrong} differ")
    return wrong != 0 or (count == 0 and options.queue is None)


if __name__ == "__main__":
    sys.exit(main())

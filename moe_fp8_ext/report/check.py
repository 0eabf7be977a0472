"""Calls every op once, in each format, and compares its bytes with a second implementation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import moe_fp8_ext as moe
from moe_fp8_ext import reference
from moe_fp8_ext.ops.checks import default_fp8_dtype
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import RECIPES

OPS = torch.ops.moe_fp8
Case = tuple[str, list[object], dict[str, object]]  # the op and its arguments, on the CPU
M, K, N, E, TOP_K = 96, 64, 32, 3, 2


def cases(fp8: torch.dtype) -> Iterator[Case]:
    """Makes a call of every op. `fp8` is the dtype of the device's own casts."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    def make_integers(*shape: int) -> Tensor:  # sums of their products are exact in every order
        return torch.randint(-3, 4, shape, generator=make).bfloat16()

    x, w, h, ends = normal(M, K), normal(E, N, K), normal(M, 2 * N), torch.tensor([32, 32, 90], dtype=torch.int32)
    logits, offs = normal(M, E + 2, dtype=torch.float32), {"offs": ends}
    grad = torch.zeros(M, N, dtype=torch.bfloat16)
    grad[:, 5] = 1.5  # sums of one term have one order
    yield "choose_experts", [logits, TOP_K], {}
    ids, scores, _ = OPS.choose_experts(logits, TOP_K)
    yield "choose_experts_backward", [normal(M, TOP_K, dtype=torch.float32), logits, ids], {}
    yield "sort_tokens", [ids, E + 2], {}
    yield "tokens_by_rank", [ids, E + 3, 3], {}
    slots, _, inverse = OPS.sort_tokens(ids, E + 2)
    yield "permute_indices", [torch.tensor([5, 0, 7, 9, 3, 8]), E, 2, M], {}
    yield "permute_pad", [x, slots, TOP_K], {}
    yield "unpermute", [normal(M * TOP_K, K), slots, TOP_K, M], {}
    yield "combine", [normal(M * TOP_K, K), inverse, scores], {}
    tokens, factors, rows = (make_integers(*s) for s in ((M, K), (E, 16, K), (M * TOP_K, 16)))
    by_slot = {"indices": slots, "top_k": TOP_K}
    yield "narrow_tokens", [tokens, factors, ends], by_slot
    yield "outer_tokens", [rows, tokens, ends], by_slot | {"scores": scores.round()}
    q, scale = torch.ops.moe_fp8.quantize_rows(tokens, "blockwise", rounding="pow2")
    of_tokens = by_slot | {"x_scale": scale, "format": "blockwise"}
    yield "narrow_tokens", [q, factors, ends], of_tokens
    yield "outer_tokens", [rows, q, ends], of_tokens | {"scores": scores.round()}
    factor = normal(E, 12, K, dtype=torch.float32)
    for m, dtype in ((factor, torch.bfloat16), (factor.permute(1, 2, 0).contiguous().permute(2, 0, 1), torch.float32)):
        for order in ("erc", "ecr"):
            yield "cast_factor", [m, 16, K, order, dtype], {"num_experts": E + 1, "scaling": 0.3}
    yield "combine_backward", [x, None, scores, inverse, M * TOP_K], {}
    yield "pack_tokens", [x, ids, scores, None, slots, TOP_K, E + 2], {}
    padded, starts, _ = OPS.pad_token_groups(x, ends)
    yield "pad_token_groups", [x, ends], {}
    yield "pad_token_groups_to", [x, ends, starts, len(padded)], {}
    yield "unpad_token_groups", [padded, ends, starts, M], {}
    scale = torch.arange(M * 8, dtype=torch.int32).to(torch.uint8).view(M, 8)
    yield "swizzle_scales", [scale], {}
    yield "unswizzle_scales", [OPS.swizzle_scales(scale)[0], M, 8], {}
    yield "activate", [h, "swiglu"], {}
    yield "add_bias", [h, h[:E], ends], {}
    yield "sum_groups", [h, ends], {}
    yield "sum_groups", [x, ends], {"indices": slots[: len(x)], "top_k": TOP_K, "scores": scores.flatten()}
    yield "activate_backward", [grad, h, "swiglu"], {"scores": scores[:, 0].contiguous()}
    of_ranks, _, ranks_of = OPS.sort_tokens(OPS.tokens_by_rank(ids, E + 3, 3)[0], 3)
    for name, format in FORMATS.items():
        how = {"dtype": fp8}
        yield "quantize_rows", [x, name], how | offs
        for directions in ("both", "rows", "transposed"):
            yield "quantize_weight", [w, name], how | {"directions": directions}
        for amax in format.amaxes:
            yield "quantize_tokens", [x, name], how | offs | {"amax": amax}
            yield "quantize_both", [x, name], how | offs | {"amax": amax}
        yield "quantize_activated", [h, "swiglu", name], how | offs
        yield "quantize_activated", [h, "swiglu", name], how | offs | {"bias": h[:E]}
        yield "quantize_activated_backward", [grad, h, "swiglu", name], how | offs | {"sum_grad_h": True}
        yield "quantize_activated_backward_rows", [grad, h, "swiglu", name], how | offs | {"keep_grad_h": True}
        yield "quantize_and_pack", [x, ids, scores, name, of_ranks, ranks_of, E + 3], how
        q, scale, q_t, scale_t, ends_t = OPS.quantize_both(x, name, **how, **offs)
        yield "dequantize", [q, scale, name], offs
        plain, plain_scale = OPS.quantize_rows(x, name, **how)
        yield "permute_quantized", [plain, plain_scale, name, slots, TOP_K], {}
        b, scale_b, _, _ = OPS.quantize_weight(w, name, **how)
        yield "transpose_weight", [b], {}
        scale_b = scale_b.mT if name == "blockwise" else scale_b
        yield "scaled_grouped_mm", [q, b.mT, scale, scale_b, name, ends], {}
        factors = normal(len(q), 8), normal(E, b.shape[1], 8).mT
        adapted = dict(zip(("low_rank_a", "low_rank_b"), factors, strict=True))
        yield "scaled_grouped_mm", [q, b.mT, scale, scale_b, name, ends], adapted
        if name == "blockwise":
            yield "expand_scales", [q, scale], offs
            yield "expand_scales", [q_t, scale_t], {"along": "tokens", "offs": ends_t}
        total = torch.ones(E, K, K, dtype=torch.float32)
        scale_k = scale_t.t() if name == "blockwise" else scale_t
        of_tokens = [q_t, q_t.t(), scale_t, scale_k, name, ends_t]
        yield "scaled_grouped_mm", of_tokens, {"align": 32, "out_transposed": True}
        yield "add_scaled_grouped_mm", [total, *of_tokens], {"align": 32}


def called(op: object, args: list[object], kwargs: dict[str, object], device: str) -> list[Tensor]:
    """Returns the results of a call on a device, or the tensor that it writes to, on the CPU."""
    moved = [a.to(device, copy=True) if isinstance(a, Tensor) else a for a in args]
    out = op(*moved, **{k: a.to(device) if isinstance(a, Tensor) else a for k, a in kwargs.items()})
    out = moved[0] if out is None else out
    return [t.cpu().clone(memory_format=torch.contiguous_format) for t in ([out] if isinstance(out, Tensor) else out)]


def same(got: list[Tensor], want: list[Tensor], is_product: bool) -> bool:
    """Whether results are equal to the byte or, for products, within two roundings to bfloat16.

    A GEMM sums in an order and a precision that depend on the device. It may round an operand and the result to
    bfloat16. Each rounding moves a value by up to 2^-8 of itself. If terms cancelled, the error is 2^-8 of these terms,
    which are about as large as the largest value.
    """
    if is_product:
        return all(
            torch.allclose(a.float(), b.float(), rtol=2**-7, atol=2**-7 * b.abs().max().item())
            for a, b in zip(got, want, strict=True)
        )
    as_bytes = [[t.view(torch.uint8) for t in results] for results in (got, want)]
    return len(got) == len(want) and all(map(torch.equal, *as_bytes))


def layer(recipe: str, device: str) -> list[Tensor]:
    """Returns the output and the gradients of a small layer."""
    make = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(s, generator=make).bfloat16() for s in ((M, K), (E, 2 * N, K), (E, K, N)))
    x, up, down = (t.to(device).requires_grad_() for t in (x, up, down))
    ids, scores = torch.arange(M, device=device)[:, None] % E, torch.ones(M, 1, device=device)
    out = moe.experts(x, ids, scores, up, down, recipe=recipe)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.sum(), (x, up, down)))]


def check(device: str) -> dict[str, object]:
    """Compares a GPU's bytes with the CPU's, or the CPU's with `moe_fp8_ext.reference`."""
    failed, count = [], 0
    for name, args, kwargs in cases(default_fp8_dtype(device)):
        count += 1
        label = " ".join([name, *(a for a in (*args, *kwargs.values()) if isinstance(a, str))])
        try:
            second = getattr(reference if device == "cpu" else OPS, name)
            want = called(second, args, kwargs, "cpu")
            if not same(called(getattr(OPS, name), args, kwargs, device), want, name.endswith("grouped_mm")):
                failed.append(f"{label}: other bytes")
        except RuntimeError as error:
            failed.append(f"{label}: {error}")
    for recipe in RECIPES:
        count += 1
        try:
            if not same(layer(recipe, device), layer(recipe, device), False):
                failed.append(f"layer {recipe}: two calls give different bytes")
        except RuntimeError as error:
            failed.append(f"layer {recipe}: {error}")
    against = "moe_fp8_ext.reference" if device == "cpu" else "the CPU"
    return {"device": device, "against": against, "calls": count, "failed": failed}

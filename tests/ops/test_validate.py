"""MOE_FP8_VALIDATE=1 checks contents. Its errors name the function that was called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import error_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_fp8_ext
from moe_fp8_ext import experts, grouped_mm, ops
from moe_fp8_ext.quantization.format import FORMATS

RECIPES = "bf16", "rowwise", "blockwise", "mxfp8"
QUANTIZERS = "quantize_rows", "quantize_tokens", "quantize_both"


@pytest.fixture
def validates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.ones(32, 16, dtype=torch.bfloat16, device=device)


def int32(x: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=x.device)


def transposed(x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """x in FP8 with the scales of every group, as products over tokens read it."""
    q, scale = ops.quantize_rows(x, "rowwise")
    return q.t().contiguous(), scale[:16].repeat(len(o), 1)


def forward(x: Tensor, o: Tensor) -> None:
    q, scale = ops.quantize_rows(x, "rowwise")
    w, w_scale, _, _ = ops.quantize_weight(x[:16].repeat(len(o), 1, 1), "rowwise")
    ops.scaled_grouped_mm(q, w.transpose(1, 2), scale, w_scale, "rowwise", o)


def wgrad(x: Tensor, o: Tensor) -> None:
    q_t, scale_t = transposed(x, o)
    ops.scaled_grouped_mm(q_t, q_t.t(), scale_t, scale_t, "rowwise", o)


def added(x: Tensor, o: Tensor) -> None:
    q_t, scale_t = transposed(x, o)
    total = torch.zeros(len(o), 16, 16, device=x.device)
    ops.add_scaled_grouped_mm(total, q_t, q_t.t(), scale_t, scale_t, "rowwise", o)


def dequantized(x: Tensor, o: Tensor) -> None:
    q_t, scale_t = transposed(x, o)
    ops.dequantize(q_t, scale_t, "rowwise", along="tokens", offs=o)


def product(recipe: str) -> Callable[[Tensor, Tensor], object]:
    return lambda x, o: grouped_mm(x, x.repeat(len(o), 1, 1).transpose(1, 2), o, recipe=recipe)


def quantizer(of: object, name: str, fmt: str) -> Callable[[Tensor, Tensor], object]:
    return lambda x, o: getattr(of, name)(x, fmt, offs=o)


def activated(fmt: str) -> Callable[[Tensor, Tensor], object]:
    return lambda x, o: ops.quantize_activated(x, "silu", fmt, offs=o)


def activated_backward(fmt: str) -> Callable[[Tensor, Tensor], object]:
    return lambda x, o: ops.quantize_activated_backward(x, x, "silu", fmt, offs=o)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, quantizer(ops, name, fmt)) for name in QUANTIZERS for fmt in FORMATS),
        *((name, quantizer(moe_fp8_ext, name, "mxfp8")) for name in QUANTIZERS),
        *(("quantize_activated", activated(fmt)) for fmt in FORMATS),
        *(("quantize_activated_backward", activated_backward(fmt)) for fmt in FORMATS),
        *(("grouped_mm", product(recipe)) for recipe in RECIPES),
        ("scaled_grouped_mm", forward),
        ("scaled_grouped_mm", wgrad),
        ("add_scaled_grouped_mm", added),
        ("dequantize", dequantized),
        ("pad_token_groups", ops.pad_token_groups),
        ("pad_token_groups_to", lambda x, o: ops.pad_token_groups_to(x, o, o - o.diff(prepend=o[:1] * 0), 32)),
        ("unpad_token_groups", lambda x, o: ops.unpad_token_groups(x, o, torch.zeros_like(o), 32)),
    ],
)
def test_offs(name, call, x, validates):
    for good in ((0, 16, 32), (16, 16, 16), ()):
        call(x, int32(x, *good))
    for bad, got in (((-1, 16, 32), "-1"), ((16, 7, 32), "7"), ((0, 16, 33), "33")):
        message = error_of(call, [x, int32(x, *bad)])
        assert message.startswith(f"{name}: offs ") and got in message.split("got", 1)[1], message


@pytest.mark.parametrize("off", ["0", "", None])
def test_off_by_default(off, x, monkeypatch):
    if off is None:
        monkeypatch.delenv("MOE_FP8_VALIDATE", raising=False)
    else:
        monkeypatch.setenv("MOE_FP8_VALIDATE", off)
    ops.quantize_rows(x, "rowwise", offs=int32(x, -1, 16, 32))


def check_refused(text: str, call: Callable[[], object]) -> None:
    assert error_of(call, []).startswith(text), error_of(call, [])


@pytest.mark.parametrize("format", RECIPES[1:])
def test_tokens_quantized_for_other_groups(format, x, validates):
    w, offs = torch.ones(2, 8, 16, dtype=x.dtype, device=x.device), int32(x, 5, 32)
    rows, tokens = moe_fp8_ext.quantize_both(x, format, offs=offs)
    grouped_mm((rows, tokens), w.mT, offs.clone(), recipe=format)
    other = int32(x, 7, 32)
    text = "grouped_mm: A must be quantized along rows for offs, with groups that end at [7, 32], got [5, 32]"
    assert error_of(grouped_mm, (rows, w.mT, other), dict(recipe=format)) == text
    of_others = moe_fp8_ext.quantize_rows(x, format, offs=int32(x, 0, 32)), tokens
    text = "grouped_mm: A must be quantized along tokens for offs, with groups that end at [0, 32], got [32, 64]"
    assert error_of(grouped_mm, (of_others, w.mT, int32(x, 0, 32)), dict(recipe=format)) == text


def test_groups_of_a_sum_that_are_not_aligned(x, validates):
    q_t, scale_t = transposed(x, int32(x, 16, 24))
    multiply = partial(ops.scaled_grouped_mm, q_t, q_t.t(), scale_t, scale_t, "rowwise", int32(x, 16, 24))
    multiply(align=8)
    text = "scaled_grouped_mm: offs must be multiples of align, 16, got offs[1] = 24"
    check_refused(text, lambda: multiply(align=16))
    total = torch.zeros(2, 16, 16, device=x.device)
    check_refused(f"add_{text}", lambda: ops.add_scaled_grouped_mm(total, *multiply.args, align=16))


def test_tokens_of_two_groupings(x, validates):
    of, other = (moe_fp8_ext.quantize_tokens(x, "rowwise", offs=int32(x, *ends)) for ends in ((8, 32), (0, 32)))
    moe_fp8_ext.scaled_grouped_mm(of, of)
    text = "scaled_grouped_mm: b must be of the groups of a, which end at [32, 64], got [0, 32]"
    check_refused(text, lambda: moe_fp8_ext.scaled_grouped_mm(of, other))


def test_padded_starts(x, validates):
    ends = int32(x, 16, 32)
    ops.unpad_token_groups(x, ends, int32(x, 0, 0), 32)
    for starts, got in (((-1, 0), "-1"), ((0, 17), "17")):
        for name in ("pad_token_groups_to", "unpad_token_groups"):
            message = error_of(getattr(ops, name), [x, ends, int32(x, *starts), 32])
            assert message.startswith(f"{name}: padded_starts must leave") and got in message, message
    # Overlapping groups may be read, but not written.
    message = error_of(ops.pad_token_groups_to, [x, ends, int32(x, 0, 15), 32])
    assert message.startswith("pad_token_groups_to: padded_starts must leave") and "15" in message, message
    ops.unpad_token_groups(x, ends, int32(x, 0, 15), 32)


def test_blocks_of_a_sum(x, validates):
    q_t, scale = x.t().to(torch.float8_e4m3fn).contiguous(), torch.ones(16, 1, device=x.device)

    def call(scale: Tensor, *ends: int) -> Tensor:
        return ops.scaled_grouped_mm(q_t, q_t.t(), scale, scale.t(), "blockwise", int32(x, *ends))

    call(scale, 32), call(scale.repeat(1, 2), 16, 32)
    check_refused("scaled_grouped_mm: scale_a must have 2 blocks in dimension 1, as offs", lambda: call(scale, 16, 32))


@pytest.mark.parametrize("bad", [-2, 32])
def test_indices(bad, x, validates):
    indices, ends = int32(x, 31, bad), int32(x, 2)
    text = f"indices must be -1 or one of the 32 slots, got {bad} in place 1"
    slots = {"indices": indices, "top_k": 1}
    ops.permute_pad(x, int32(x, 31, -1, 0), 1)
    check_refused(f"permute_pad: {text}", lambda: ops.permute_pad(x, indices, 1))
    of_slots = {"scores": torch.zeros(32, device=x.device), "indices": indices}
    check_refused(f"activate_backward: {text}", lambda: ops.activate_backward(x[:2], x[:2], "silu", **of_slots))
    check_refused(f"unpermute: {text}", lambda: ops.unpermute(x[:2], indices, 1, 32))
    q, scale = ops.quantize_rows(x, "rowwise")
    product = q, q[:16].t()[None], scale, scale[None, :16], "rowwise", ends[:1]
    check_refused(f"scaled_grouped_mm: {text}", lambda: ops.scaled_grouped_mm(*product, **slots))
    check_refused(f"pack_tokens: {text}", lambda: ops.pack_tokens(x, None, None, None, indices, 1, 0))
    check_refused(f"permute_quantized: {text}", lambda: ops.permute_quantized(q, scale, "rowwise", indices, 1))
    for fmt in FORMATS:
        check_refused(f"quantize_rows: {text}", lambda fmt=fmt: ops.quantize_rows(x, fmt, **slots))
        for name in ("quantize_tokens", "quantize_both"):
            check_refused(f"{name}: {text}", lambda fmt=fmt, name=name: getattr(ops, name)(x, fmt, offs=ends, **slots))
    for recipe in RECIPES:
        check_refused(
            f"grouped_mm: {text}", lambda recipe=recipe: grouped_mm(x, x.t()[None], ends, recipe=recipe, **slots)
        )


def test_indices_that_are_there_twice(x, validates):
    ops.unpermute(x[:3], int32(x, -1, 7, -1), 1, 32)
    check_refused(
        "unpermute: indices must be distinct, got 5 twice", lambda: ops.unpermute(x[:3], int32(x, 5, 7, 5), 1, 32)
    )
    of_slots = {"scores": torch.zeros(32, device=x.device), "indices": int32(x, 5, 7, 5)}
    check_refused(
        "activate_backward: indices must be distinct, got 5 twice",
        lambda: ops.activate_backward(x[:3], x[:3], "silu", **of_slots),
    )
    multiply = partial(grouped_mm, x, x.t()[None], int32(x, 3), top_k=1)
    multiply(indices=int32(x, -1, 7, -1))
    check_refused("grouped_mm: indices must be distinct, got 5 twice", lambda: multiply(indices=int32(x, 5, 7, 5)))


def test_contents_that_a_gradient_asks_for(x, validates):
    """The error names the op that the caller called, in either spelling, and not the op that computes the gradient."""
    x.requires_grad_()
    for of in (ops, torch.ops.moe_fp8):
        for out, text in (
            (of.permute_pad(x, int32(x, 5, 7, 5), 1), "permute_pad: indices must be distinct, got 5 twice"),
            (of.combine(x, int32(x, 2, 2)[None]), "combine: inverse must be distinct, got 2 twice"),
            (
                of.unpad_token_groups(x, int32(x, 16, 32), int32(x, 0, 15), 32),
                "unpad_token_groups: padded_starts must leave every group its rows",
            ),
        ):
            check_refused(text, lambda out=out: out.sum().backward())


@pytest.mark.parametrize("bad", [6, 99, -2])
def test_rows_of_messages(bad, x, validates):
    def packed(*rows: int, slots: tuple[int, ...] = (2, -1, -1, 3, -1, 0)) -> torch.Tensor:
        inverse = int32(x, *rows).view(2, 2)
        return ops.quantize_and_pack(x[:2], None, None, "rowwise", int32(x, *slots), inverse, 0)

    packed(5, -1, 0, 3)
    text = "quantize_and_pack: inverse must be"
    check_refused(f"{text} -1 or one of the 6 rows, got {bad} in place 1", lambda: packed(5, bad, 0, 3))
    got = "got 3 in place 0 where indices has 3 in place 3"
    check_refused(f"quantize_and_pack: inverse must agree with indices, {got}", lambda: packed(3, -1, 0, 3))
    text = "quantize_and_pack: indices must be"
    check_refused(f"{text} -1 or one of the 4 slots, got 4 in place 1", lambda: packed(5, -1, 0, 3, slots=(2, 4)))
    got = "got 1 in place 1 where inverse has -1 in place 1"
    slots = 2, 1, -1, 3, -1, 0
    text = "quantize_and_pack: indices must agree with inverse"
    check_refused(f"{text}, {got}", lambda: packed(5, -1, 0, 3, slots=slots))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_topk_ids(dtype, x, validates):
    ids = torch.tensor([[0, 1, 9], [2, 0, 9]], dtype=dtype, device=x.device)
    ops.sort_tokens(ids[:, :2] - 1, 3)
    ops.sort_tokens(ids[:0], 3)
    ops.tokens_by_rank(ids[:, :2] - 1, 3, 3)
    at = int32(x, 0, 1), 1
    ops.pack_tokens(x[:2], ids[:, :2] - 1, None, None, *at, 3)
    text = "pack_tokens: topk_ids must be -1 or from 0 to 2, got 9 in slot 2"
    check_refused(text, lambda: ops.pack_tokens(x[:2], ids, None, None, *at, 3))
    for name, sizes in (("sort_tokens", (3,)), ("tokens_by_rank", (3, 3))):
        text, op = f"{name}: topk_ids must be -1 or from 0 to 2, got", getattr(ops, name)
        check_refused(f"{text} 9 in slot 2", lambda op=op, sizes=sizes: op(ids, *sizes))
        check_refused(f"{text} -2 in slot 1", lambda op=op, sizes=sizes: op(ids[1:, :2] - 2, *sizes))
    tokens, w_up, w_down = x[:2], x[:4, :16].expand(3, 4, 16), x[:16, :4].expand(3, 16, 4)
    for recipe in RECIPES:
        call = partial(experts, recipe=recipe, activation="silu")
        call(tokens, ids[:, :2] - 1, tokens[:, :2], w_up, w_down)
        text = "experts: topk_ids must be -1 or from 0 to 2, got 9 in slot 2"
        check_refused(text, lambda call=call: call(tokens, ids, tokens[:, :3], w_up, w_down))
    grad, logits = torch.ones(2, 3, device=x.device), torch.zeros(2, 3, device=x.device)
    ops.choose_experts_backward(grad[:, :2], logits, ids[:, :2] - 1)
    text = "choose_experts_backward: topk_ids must be -1 or from 0 to 2, got 9 in slot 2"
    check_refused(text, lambda: ops.choose_experts_backward(grad, logits, ids))
    text = "choose_experts: given_ids must be -1 or from 0 to 2, got 9 in slot 2"
    check_refused(text, lambda: ops.choose_experts(logits, ids.shape[1], given_ids=ids))


def test_inverse(x, validates):
    def places(*rows: int) -> Tensor:
        return int32(x, *rows)[None]

    ops.combine(x[:3], places(2, -1, 2))
    for bad, rows in ((3, (2, 3)), (-2, (-2,))):
        text = f"combine: inverse must be -1 or one of the 3 rows of y, got {bad}"
        check_refused(text, lambda rows=rows: ops.combine(x[:3], places(*rows)))
    for rows, text in (((2, 3), "-1 or one of the 3 rows"), ((2, 2), "distinct, got 2 twice")):
        check_refused(
            f"combine_backward: inverse must be {text}",
            lambda rows=rows: ops.combine_backward(x[:1], None, None, places(*rows), 3),
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts(x, validates, dtype):
    ops.permute_indices(int32(x, 1, 2, 3, 4), 2, 2, 10)
    for counts, text in (((1, -2, 3, 4), "must not be negative, got -2"), ((1, 2, 3, 5), "the 10 tokens, got 11")):
        message = error_of(ops.permute_indices, [int32(x, *counts).to(dtype), 2, 2, 10])
        assert message.startswith("permute_indices: ") and text in message, message


def test_fake_tensors_have_no_values(validates):
    """Tracing a model uses fake tensors. They hold no values, so nothing is checked."""
    with FakeTensorMode():
        x, w, offs = torch.ones(32, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16(), torch.ones(2, dtype=torch.int32)
        assert grouped_mm(x, w.mT, offs).shape == (32, 8)
        ids, scores = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1)
        assert experts(x, ids, scores, w, torch.ones(2, 16, 4).bfloat16()).shape == (32, 16)

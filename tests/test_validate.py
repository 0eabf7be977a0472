"""MOE_FP8_VALIDATE=1 checks contents, and its errors name the function that was called; a subprocess, because the
extension may read it once."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import torch
import moe_fp8_ext
from moe_fp8_ext import grouped_mm, ops

device = sys.argv[1]
FORMATS = "rowwise", "blockwise", "mxfp8", "mxfp8_rowmajor"
x = torch.ones(32, 16, dtype=torch.bfloat16, device=device)
q, scale = ops.quantize_rows(x, "rowwise")

def offs(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=device)

def wgrad(o):
    q_t, scale_t = q.t().contiguous(), scale[:16].repeat(len(o), 1)
    return ops.scaled_grouped_mm(q_t, q_t.t(), scale_t, scale_t, o, "rowwise")

def added(o):
    q_t, scale_t = q.t().contiguous(), scale[:16].repeat(len(o), 1)
    total = torch.zeros(len(o), 16, 16, device=device)
    ops.add_scaled_grouped_mm(total, q_t, q_t.t(), scale_t, scale_t, o, "rowwise")

def forward(o):
    w, w_scale, _, _ = ops.quantize_weight(x[:16].repeat(len(o), 1, 1), "rowwise")
    return ops.scaled_grouped_mm(q, w.transpose(1, 2), scale, w_scale, o, "rowwise")

def product(recipe):
    return lambda o: grouped_mm(x, x.repeat(len(o), 1, 1).transpose(1, 2), o, recipe=recipe)

def quantizer(name, fmt):
    return lambda o: getattr(ops, name)(x, fmt, offs=o)

quantizers = "quantize_rows", "quantize_tokens", "quantize_both"
calls = [
    *((name, quantizer(name, fmt)) for name in quantizers for fmt in FORMATS),
    ("scaled_grouped_mm", forward),
    ("scaled_grouped_mm", wgrad),
    ("add_scaled_grouped_mm", added),
    ("dequantize", lambda o: ops.dequantize(
        q.t().contiguous(), scale[:16].repeat(len(o), 1), "rowwise", along="tokens", offs=o)),
    ("pad_token_groups", lambda o: ops.pad_token_groups(x, o)),
    ("pad_token_groups_to", lambda o: ops.pad_token_groups_to(x, o, o - o.diff(prepend=o[:1] * 0), 32)),
    ("unpad_token_groups", lambda o: ops.unpad_token_groups(x, o, torch.zeros_like(o), 32)),
    *(("grouped_mm", product(recipe)) for recipe in ("bf16", "rowwise", "blockwise", "mxfp8")),
    *((name, lambda o, name=name: getattr(moe_fp8_ext, name)(x, "mxfp8", offs=o)) for name in quantizers),
]
for name, call in calls:
    call(offs(0, 16, 32))
    call(offs(16, 16, 16))
    call(offs())
    for bad, value in ((offs(-1, 16, 32), "-1"), (offs(16, 7, 32), "7"), (offs(0, 16, 33), "33")):
        try:
            call(bad)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
            assert message.startswith(f"{name}: offs ") and value in message, message
        else:
            raise AssertionError(f"{name} took {bad.tolist()}")
ops.unpad_token_groups(x, offs(16, 32), offs(0, 0), 32)
movers = ops.pad_token_groups_to, ops.unpad_token_groups
for bad, value, writes_only in ((offs(-1, 0), "-1", False), (offs(0, 17), "17", False), (offs(0, 15), "15", True)):
    for op in movers[: 1 if writes_only else 2]:
        try:
            op(x, offs(16, 32), bad, 32)
        except RuntimeError as error:
            assert "padded_starts must leave" in str(error) and value in str(error), error
        else:
            raise AssertionError(f"{op.__name__} took {bad.tolist()}")

def refuses(call, *pieces):
    try:
        call()
    except RuntimeError as error:
        assert all(piece in str(error).splitlines()[0] for piece in pieces), error
    else:
        raise AssertionError(f"{pieces} went through")

q_t, short = q.t().contiguous(), torch.ones(16, 1, device=device)
blocks = lambda scale, o: ops.scaled_grouped_mm(q_t, q_t.t(), scale, scale.t(), o, "blockwise")
blocks(short, offs(32)), blocks(short.repeat(1, 2), offs(16, 32))
refuses(lambda: blocks(short, offs(16, 32)), "scaled_grouped_mm: scale_a must have 2 blocks in dimension 1, as offs")

ops.permute_pad(x, offs(31, -1, 0), 1)
for bad in (-2, 32):
    indices = offs(31, bad)
    text = f"indices must be -1 or one of the 32 slots, got {bad} in place 1"
    slots = {"indices": indices, "top_k": 1}
    refuses(lambda: ops.permute_pad(x, indices, 1), f"permute_pad: {text}")
    refuses(lambda: ops.unpermute(x[:2], indices, 32, 1), f"unpermute: {text}")
    for fmt in FORMATS:
        refuses(lambda: ops.quantize_rows(x, fmt, **slots), f"quantize_rows: {text}")
        refuses(lambda: ops.quantize_tokens(x, fmt, offs=offs(2), **slots), f"quantize_tokens: {text}")
        refuses(lambda: ops.quantize_both(x, fmt, offs=offs(2), **slots), f"quantize_both: {text}")
    for recipe in ("bf16", "rowwise", "blockwise", "mxfp8"):
        refuses(lambda: grouped_mm(x, x.t()[None], offs(2), recipe=recipe, **slots), f"grouped_mm: {text}")
refuses(lambda: ops.unpermute(x[:3], offs(5, 7, 5), 32, 1), "unpermute: indices must be distinct, got 5 twice")
ops.unpermute(x[:3], offs(-1, 7, -1), 32, 1)
for dtype in (torch.int32, torch.int64):
    ids = torch.tensor([[0, 1, 9], [2, 0, 9]], dtype=dtype, device=device)
    ops.sort_tokens(ids[:, :2] - 1, 3)
    ops.sort_tokens(ids[:0], 3)
    text = "sort_tokens: topk_ids must be -1 or from 0 to 2, got"
    refuses(lambda: ops.sort_tokens(ids, 3), f"{text} 9 in slot 2")
    refuses(lambda: ops.sort_tokens(ids[1:, :2] - 2, 3), f"{text} -2 in slot 1")
combine, backward = ops.combine, ops.combine_backward
combine(x[:3], offs(2, -1, 2).view(1, 3))
refuses(lambda: combine(x[:3], offs(2, 3).view(1, 2)), "combine: inverse must be -1 or one of the 3 rows of y, got 3")
refuses(lambda: combine(x[:3], offs(-2).view(1, 1)), "combine: inverse must be -1 or one of the 3 rows of y, got -2")
refuses(lambda: backward(x[:1], None, offs(2, 3).view(1, 2), None, 3), "combine_backward: inverse must be")
refuses(lambda: backward(x[:1], None, offs(2, 2).view(1, 2), None, 3), "inverse must be distinct, got 2 twice")
ops.permute_indices(offs(1, 2, 3, 4), 2, 2, 10)
refuses(lambda: ops.permute_indices(offs(1, -2, 3, 4), 2, 2, 10), "permute_indices", "must not be negative, got -2")
refuses(lambda: ops.permute_indices(offs(1, 2, 3, 5).long(), 2, 2, 10), "permute_indices", "the 10 tokens, got 11")
print("checked")
"""


def run(device: str, validate: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "MOE_FP8_VALIDATE": validate}
    return subprocess.run([sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, env=env, check=False)


def test_contents_of_offs_are_checked(device):
    result = run(device, "1")
    assert result.stdout == "checked\n", result.stderr


def test_off_by_default(device):
    result = run(device, "0")
    assert "quantize_rows took [-1, 16, 32]" in result.stderr

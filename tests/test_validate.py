"""MOE_FP8_VALIDATE=1 checks the contents of offs; a subprocess, because the extension may read it once."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import torch
from moe_fp8_ext import grouped_mm, quantize_colwise, quantize_rowcol, quantize_rowwise, quantize_weight
from moe_fp8_ext import pad_token_groups, pad_token_groups_to, scaled_grouped_mm, unpad_token_groups
from moe_fp8_ext import permute_indices, permute_pad, permute_pad_quantize_rowcol, permute_pad_quantize_rowwise
from moe_fp8_ext import combine, combine_backward, dequantize, quantize_128x1, sort_tokens, unpermute

device = sys.argv[1]
x = torch.ones(32, 16, dtype=torch.bfloat16, device=device)
q, scale = quantize_rowwise(x)

def offs(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=device)

def wgrad(o):
    q_t, scale_t = q.t().contiguous(), scale[:16].repeat(len(o), 1)
    return scaled_grouped_mm(q_t, q_t.t(), scale_t, scale_t, o)

def forward(o):
    w, w_scale, _, _ = quantize_weight(x[:16].repeat(len(o), 1, 1))
    return scaled_grouped_mm(q, w.transpose(1, 2), scale, w_scale, o)

ops = {
    "quantize_colwise": lambda o: quantize_colwise(x, o),
    "quantize_rowcol": lambda o: quantize_rowcol(x, o),
    "quantize_128x1": lambda o: quantize_128x1(x, o),
    "scaled_grouped_mm": forward,
    "scaled_grouped_mm ": wgrad,
    "dequantize": lambda o: dequantize(q.t().contiguous(), scale[:16].repeat(len(o), 1), "colwise", o),
    "pad_token_groups": lambda o: pad_token_groups(x, o),
    "pad_token_groups_to": lambda o: pad_token_groups_to(x, o, o - o.diff(prepend=o[:1] * 0), 32),
    "unpad_token_groups": lambda o: unpad_token_groups(x, o, torch.zeros_like(o), 32),
    "grouped_mm": lambda o: grouped_mm(x, x.repeat(len(o), 1, 1).transpose(1, 2), o, recipe="bf16"),
}
for name, op in ops.items():
    op(offs(0, 16, 32))
    op(offs(16, 16, 16))
    op(offs())
    for bad, value in ((offs(-1, 16, 32), "-1"), (offs(16, 7, 32), "7"), (offs(0, 16, 33), "33")):
        try:
            op(bad)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
            assert message.startswith(f"{name.strip()}: offs ") and value in message, message
        else:
            raise AssertionError(f"{name} took {bad.tolist()}")
unpad_token_groups(x, offs(16, 32), offs(0, 0), 32)
for bad, value, writes_only in ((offs(-1, 0), "-1", False), (offs(0, 17), "17", False), (offs(0, 15), "15", True)):
    for op in (pad_token_groups_to, unpad_token_groups)[: 1 if writes_only else 2]:
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
blocks = lambda scale, o: scaled_grouped_mm(q_t, q_t.t(), scale, scale.t(), o, None, True, 128)
blocks(short, offs(32)), blocks(short.repeat(1, 2), offs(16, 32))
refuses(lambda: blocks(short, offs(16, 32)), "scaled_grouped_mm: scale_a must have 2 blocks in dimension 1, as offs")

permute_pad(x, offs(31, -1, 0))
for bad in (-2, 32):
    indices = offs(31, bad)
    text = f"indices must be -1 or one of the 32 slots, got {bad} in place 1"
    refuses(lambda: permute_pad(x, indices), "permute_pad", text)
    refuses(lambda: unpermute(x[:2], indices, 32), "unpermute", text)
    refuses(lambda: permute_pad_quantize_rowwise(x, indices), "permute_pad_quantize_rowwise", text)
    refuses(lambda: permute_pad_quantize_rowcol(x, indices, offs(2)), "permute_pad_quantize_rowcol", text)
refuses(lambda: unpermute(x[:3], offs(5, 7, 5), 32), "unpermute: indices must be distinct, got 5 twice")
unpermute(x[:3], offs(-1, 7, -1), 32)
for dtype in (torch.int32, torch.int64):
    ids = torch.tensor([[0, 1, 9], [2, 0, 9]], dtype=dtype, device=device)
    sort_tokens(ids[:, :2] - 1, 3)
    sort_tokens(ids[:0], 3)
    text = "sort_tokens: topk_ids must be -1 or from 0 to 2, got"
    refuses(lambda: sort_tokens(ids, 3), f"{text} 9 in slot 2")
    refuses(lambda: sort_tokens(ids[1:, :2] - 2, 3), f"{text} -2 in slot 1")
combine(x[:3], offs(2, -1, 2).view(1, 3))
refuses(lambda: combine(x[:3], offs(2, 3).view(1, 2)), "combine: inverse must be -1 or one of the 3 rows of y, got 3")
refuses(lambda: combine(x[:3], offs(-2).view(1, 1)), "combine: inverse must be -1 or one of the 3 rows of y, got -2")
refuses(lambda: combine_backward(x[:1], None, offs(2, 3).view(1, 2), None, 3), "combine_backward: inverse must be")
refuses(lambda: combine_backward(x[:1], None, offs(2, 2).view(1, 2), None, 3), "inverse must be distinct, got 2 twice")
permute_indices(offs(1, 2, 3, 4), 2, 2, 10)
refuses(lambda: permute_indices(offs(1, -2, 3, 4), 2, 2, 10), "permute_indices", "must not be negative, got -2")
refuses(lambda: permute_indices(offs(1, 2, 3, 5).long(), 2, 2, 10), "permute_indices", "the 10 tokens, got 11")
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
    assert "quantize_colwise took [-1, 16, 32]" in result.stderr

"""Private names of torch stand in moe_fp8_ext/_torch.py alone, each with a fallback that works."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

from moe_fp8_ext import _torch

PACKAGE = ROOT / "moe_fp8_ext"
# Attributes of torch, of its tensors, modules and ops that have no public documentation.
PRIVATE = re.compile(
    r"\btorch\._(?!_version__)\w+|\bfrom torch\._|\bops\.aten\._\w+|\.__create_chunk_list__"
    r"|\._(?:schema|opname|op|version|base|cdata|local_tensor|make_wrapper_subclass|current_level|compiled_call_impl)\b"
    r"|_torchdynamo_inline"
)
ALLOWED = {"ops/dispatch.py": {"._op", "_torchdynamo_inline"}}  # behind _torch.can_bind_ops


def private_names(text: str) -> list[str]:
    """Of code, without comments and text between quotes."""
    code = re.sub(r'""".*?"""|"[^"\n]*"|\'[^\'\n]*\'|#[^\n]*', "", text, flags=re.S)
    return [match[0] for match in PRIVATE.finditer(code)]


def test_private_names_stand_in_one_module():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != "_torch.py":
            assert set(private_names(path.read_text())) <= ALLOWED.get(name, set()), name


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch._C._any_requires_grad(x)", ["torch._C"]),
        ("from torch._ops import OpOverload", ["from torch._"]),
        ("x._version + w._local_tensor", ["._version", "._local_tensor"]),
        ("torch.ops.aten._grouped_mm", ["ops.aten._grouped_mm"]),
        ("_torch.in_backward()  # torch._C", []),
        ('"""torch._grouped_mm"""', []),
        ("torch.library.Library", []),
    ],
)
def test_private_names_are_seen(code, found):
    assert private_names(code) == found


def test_every_choice_is_reported():
    print(_torch.report())
    lines = _torch.report().splitlines()
    assert len(lines) == 1 + len(_torch._CHOICES) > 10
    if not _torch.ONLY_PUBLIC:  # on the versions that tests run with
        missing = [choice.name for choice in _torch._CHOICES if not choice.is_private]
        assert not missing, "this torch has lost private names; see whether their fallbacks will do"


FALLBACKS = """
import torch
import moe_fp8_ext
from moe_fp8_ext import _torch, ops

assert not any(choice.is_private for choice in _torch._CHOICES)
x = torch.randn(6, 32).bfloat16().requires_grad_()
w = [torch.randn(2, *size).bfloat16().requires_grad_() for size in ((32, 32), (32, 16))]
ids, scores = torch.randint(2, (6, 1)), torch.rand(6, 1).requires_grad_()
moe_fp8_ext.experts(x, ids, scores, *w).sum().backward()
assert all(t.grad.isfinite().all() for t in (x, scores, *w))
a = ops.activate(x, "swiglu")
assert torch.autograd.grad(a.sum(), x)[0].shape == x.shape
for call in (ops.quantize_rows, torch.ops.moe_fp8.quantize_rows):
    try:
        call(x, "rowwise")
    except RuntimeError as error:
        assert "quantize_rows: x must not ask for a gradient" in str(error), error
    else:
        raise AssertionError("a gradient was lost")
"""


def test_fallbacks_compute_and_refuse():
    environment = os.environ | {"MOE_FP8_PUBLIC_TORCH": "1"}
    subprocess.run([sys.executable, "-c", FALLBACKS], env=environment, check=True)

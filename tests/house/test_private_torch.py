"""Private names of torch stand only in moe_fp8_ext/_torch.py, each with a fallback that works."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from helpers import ROOT
from torch import Tensor

from moe_fp8_ext import _torch

PACKAGE = ROOT / "moe_fp8_ext"
# Public names with a leading underscore: documented ones of torch, methods of NamedTuple, and names that a library
# tells its users to define.
PUBLIC = {"__version__", "__config__", "_make", "_replace", "_fields", "_asdict"}
PUBLIC |= {"__wrapped__", "__signature__", "__torch_function__", "__torch_dispatch__"}
KINDS = type, types.FunctionType, types.MethodType, types.ModuleType, int, list, OSError
PUBLIC |= {name for kind in KINDS for name in dir(kind)}
# Private names of libraries other than torch, each with the file that uses it.
OF_OTHERS = {
    "integrations/convert.py": {"_grouped_mm"},  # of torchtitan's experts
    "integrations/export.py": {"_keys_to_ignore_on_save"},  # of Transformers' models
    "integrations/fp8_loading.py": {"_experts_implementation"},
    "integrations/peft.py": {"_check_merge_allowed"},  # of PEFT's models
    "integrations/torchtitan.py": {"_owner"},
    "integrations/transformers.py": {"_apply_gate", "_experts_implementation"},
}
OF_TORCH = (
    torch,
    torch.Tensor,
    torch.nn.Parameter,
    torch.nn.Identity(),
    torch.ops.aten.add.Tensor,
    torch.UntypedStorage,
)


def definitions(tree: ast.AST) -> Iterator[str]:
    """Attribute names that the file itself defines: functions, classes and their members."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = getattr(part, "targets", [getattr(part, "target", None)])
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value):
            yield from (str(word.value) for word in node.args if isinstance(word, ast.Constant))  # a frozen dataclass


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and name not in PUBLIC


def private_names(tree: ast.AST, defined: set[str]) -> list[str]:
    """Private names of other packages in a file: attributes, imports, and the strings of getattr and the like."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = not is_self(node.value) and any(hasattr(owner, node.attr) for owner in OF_TORCH)
            found += [node.attr] if is_private(node.attr) and (of_torch or node.attr not in defined) else []
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            outside = [name for name in names if name.partition(".")[0] not in ("moe_fp8_ext", "__future__")]
            found += [name for name in outside if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            words = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
            found += [word for word in words if is_private(str(word)) and word not in defined]
    return found


def test_private_names_stand_in_one_module():
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    defined = {name for tree in trees.values() for name in definitions(tree)}
    assert {"_C", "_version", "_current_graph_task_id"} <= set(private_names(trees.pop("_torch.py"), defined))
    for name, tree in trees.items():
        assert set(private_names(tree, defined)) <= OF_OTHERS.get(name, set()), name


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch._C._any_requires_grad(x)", ["_any_requires_grad", "_C"]),
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        (
            "from torch.nn.modules.module import _global_forward_hooks",
            ["torch.nn.modules.module._global_forward_hooks"],
        ),
        ("import torch._dynamo as dynamo", ["torch._dynamo"]),
        ("x._version + w._local_tensor", ["_version", "_local_tensor"]),
        ("p.__create_chunk_list__()", ["__create_chunk_list__"]),
        ("getattr(x, '_base', None)", ["_base"]),
        ("class A:\n  def _version(self): return self._version", []),
        ("class A:\n  def _version(self): return x._version", ["_version"]),
        ("class A:\n  _own: int\nA()._own, self._mine", ["_mine"]),
        ("from moe_fp8_ext import _torch\n_torch.in_backward()  # torch._C", []),
        ('"""torch._grouped_mm"""\ncall._replace(x=1), type(x).__name__', []),
    ],
)
def test_private_names_are_seen(code, found):
    tree = ast.parse(code)
    assert sorted(private_names(tree, set(definitions(tree)))) == sorted(found)


def test_every_choice_is_reported():
    print(_torch.report())
    lines = _torch.report().splitlines()
    assert len(lines) == 1 + len(_torch._CHOICES) > 10
    if not _torch.ONLY_PUBLIC:  # on the versions that tests run with
        missing = [choice.names for choice in _torch._CHOICES if not choice.is_private]
        assert not missing, "this torch has lost private names; see whether their fallbacks will do"


def test_a_name_that_has_changed_is_not_used():
    chosen = [
        _torch._choose("name", "a test", "fallback", "what it does")(probe)
        for probe in (
            lambda: torch._C._no_such_name,
            lambda: _torch._expect(False),
            lambda: None + 1,
            lambda: "private",
        )
    ]
    if not _torch.ONLY_PUBLIC:
        assert chosen == ["fallback", "fallback", "fallback", "private"]
    del _torch._CHOICES[-4:]


def test_a_needed_name_that_torch_lacks():
    with pytest.raises(
        ImportError, match=rf"needs name of torch for a test, which torch {torch.__version__[:4]}.* lacks"
    ):
        _torch._need("name", "a test", lambda: torch._C._no_such_name)


FALLBACKS = """
import torch
import moe_fp8_ext
from moe_fp8_ext import _torch, ops

assert not any(choice.is_private for choice in _torch._CHOICES if choice.fallback)
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


@pytest.mark.skipif(_torch.ONLY_PUBLIC, reason="private names are switched off")
@pytest.mark.parametrize("within", [torch.inference_mode(), torch.vmap, torch.func.grad, torch.func.functionalize])
def test_the_package_may_be_imported_anywhere(within):
    def choices(x: Tensor) -> Tensor:
        missing = [c.names for c in runpy.run_path(_torch.__file__)["_CHOICES"] if not c.is_private]
        assert not missing
        return x.sum()

    within(choices)(torch.ones(3))

"""The rules that keep the house: what every op must have, and what may stand where in csrc/."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import moe_fp8_ext
from moe_fp8_ext import reference

CSRC = ROOT / "csrc"
LAYERS = ("numerics", "primitives", "kernels", "ops")  # calls go from right to left
TORCH_FREE = LAYERS[:3]
PLATFORM = "csrc/numerics/platform.h"  # the one file that knows vendors

SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cu", ".cuh", ".cpp"))
PYTHON = sorted(
    p for d in ("moe_fp8_ext", "tests", "bench", "examples", "build_backend") for p in (ROOT / d).rglob("*.py")
)
MAX_LINES = {"csrc": 320, "moe_fp8_ext": 400, "tests": 450, "bench": 400, "examples": 400}
LONG_FILES = {PLATFORM: 630, "moe_fp8_ext/reference.py": 730}  # every vendor difference, every op: each in one place


# Every op has everything

SCHEMA = re.compile(r'm\.def\(\s*"(\w+)\(')
OPS = SCHEMA.findall((CSRC / "library.cpp").read_text())


def bench_module(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module(name)


def test_library_declares_what_is_registered():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_fp8::")}
    assert {f"moe_fp8::{op}" for op in OPS} == registered
    assert len(OPS) == len(set(OPS)) > 0


@pytest.mark.parametrize("op", OPS)
def test_op_is_public(op):
    wrapper = getattr(moe_fp8_ext, op)
    assert op in moe_fp8_ext.__all__
    stem = wrapper.__module__.removeprefix("moe_fp8_ext.ops.")
    assert (ROOT / "moe_fp8_ext" / "ops" / f"{stem}.py").exists()
    assert (CSRC / "ops" / f"{stem}.cpp").exists()


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_reference(op):
    assert callable(getattr(reference, op, None))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("key", ["CPU", "Meta"])
def test_op_has_a_cpu_and_a_fake_implementation(op, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_fp8::{op}", key)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("op", OPS)
def test_op_has_a_gpu_implementation(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_fp8::{op}", "CUDA")


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_docstring(op):
    doc = getattr(moe_fp8_ext, op).__doc__ or ""
    assert not [section for section in ("Args:", "Returns:", "Raises:", "Source:") if section not in doc]


@pytest.mark.parametrize("op", OPS)
def test_op_has_tests(op):
    stem = getattr(moe_fp8_ext, op).__module__.rpartition(".")[2]
    assert op in (ROOT / "tests" / f"test_{stem}.py").read_text()


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_bench_case(op, monkeypatch):
    assert op in bench_module("cases", monkeypatch).CASES


def test_readme_table_is_what_the_bench_makes(monkeypatch):
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    assert bench_module("report", monkeypatch).readme_is_current(), "run: python bench/report.py"


# Rules on source text: each takes a path relative to the root and the text, and returns what breaks it

DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(.*)$", re.M)
VENDOR = re.compile(r"CUDA|HIP|ROCM|NVCC|AMD|gfx|GFX|SIMT")
BUILD_MODE = re.compile(r"\bMOE_FP8_(?:CUDA|HIP|GPU)\b")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"][^>"]+)[>"]', re.M)
TORCH_HEADER = re.compile(r'[<"](?:torch|ATen|c10|pybind11)/')
COMMENTED_CPP = re.compile(
    r"""^(?:
        \#\s*(?:include|if|ifdef|endif|define|pragma)\b.*
      | (?:if|for|while|switch|else|return)\b.*[;{}]
      | [\w:.\->\[\]]+\(.*\);
      | (?:const\s+)?(?:[\w:<>,*&]+\s+)?[\w:.\->\[\]]+\s*[-+*/|&^]?=[^=].*;
    )$""",
    re.X,
)
COMMENTED_PYTHON = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Return, ast.For, ast.While, ast.If, ast.With),
    *(ast.Assert, ast.Raise, ast.Delete, ast.Try),
)


def layer(path: str) -> str:
    return path.split("/")[1]


def vendor_conditions(path: str, text: str) -> list[str]:
    may_choose_build = layer(path) in ("ops", "module.cpp")
    conditions = (BUILD_MODE.sub("", c) if may_choose_build else c for c in DIRECTIVE.findall(text))
    return [] if path == PLATFORM else [c.strip() for c in conditions if VENDOR.search(c)]


def torch_includes(path: str, text: str) -> list[str]:
    return [i for i in INCLUDE.findall(text) if layer(path) in TORCH_FREE and TORCH_HEADER.match(i)]


def upward_includes(path: str, text: str) -> list[str]:
    if layer(path) not in LAYERS:
        return []
    includes = (i[1:].removeprefix("../") for i in INCLUDE.findall(text))
    above = LAYERS[LAYERS.index(layer(path)) + 1 :]
    return [i for i in includes if i.split("/")[0] in above]


def launches(path: str, text: str) -> list[str]:
    return re.findall(r".*<<<.*", text) if layer(path) == "ops" else []


def exits(path: str, text: str) -> list[str]:
    return re.findall(r"\b(?:_?exit|quick_exit|abort|terminate|v?f?printf|puts)\s*\(", text)


def commented_cpp(path: str, text: str) -> list[str]:
    return [c for c in re.findall(r"//[/!]?\s*(.*\S)", text) if COMMENTED_CPP.match(c)]


def commented_python(path: str, text: str) -> list[str]:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        code = token.string.lstrip("#").strip()
        try:
            body = ast.parse(code + ("\n    pass" if code.endswith(":") else "")).body
        except SyntaxError:
            continue
        if any(
            isinstance(node, COMMENTED_PYTHON) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            for node in body
        ):
            found.append(code)
    return found


def too_long(path: str, text: str) -> list[str]:
    limit, lines = LONG_FILES.get(path, MAX_LINES.get(path.split("/")[0], 400)), text.count("\n")
    found = [f"{lines} lines, at most {limit}"] if lines > limit else []
    return found + [f"line {i} is longer than 120" for i, line in enumerate(text.splitlines(), 1) if len(line) > 120]


Rule = Callable[[str, str], list[str]]
CPP_RULES: tuple[Rule, ...] = (
    *(vendor_conditions, torch_includes, upward_includes, launches, exits, commented_cpp, too_long),
)
PYTHON_RULES: tuple[Rule, ...] = (commented_python, too_long)


def violations(rule: Rule, paths: Iterable[Path]) -> list[str]:
    named = ((p.relative_to(ROOT).as_posix(), p.read_text()) for p in paths)
    return [f"{name}: {found}" for name, text in named for found in rule(name, text)]


@pytest.mark.parametrize("rule", CPP_RULES)
def test_csrc(rule):
    assert SOURCES
    found = violations(rule, SOURCES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", PYTHON_RULES)
def test_python(rule):
    found = violations(rule, PYTHON)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "broken", "kept"),
    [
        (vendor_conditions, "csrc/kernels/k.cu", "#ifdef __CUDA_ARCH__\n", "#ifdef NDEBUG\n"),
        (vendor_conditions, "csrc/primitives/p.h", "#if defined(__HIP__)\n", "// if HIP\n"),
        (vendor_conditions, "csrc/kernels/k.cu", "#  if defined(MOE_FP8_CUDA)\n", "#pragma once\n"),
        (vendor_conditions, "csrc/ops/o.cpp", "#if defined(__gfx942__)\n", "#if defined(MOE_FP8_HIP)\n"),
        (torch_includes, "csrc/kernels/k.h", "#include <torch/csrc/stable/tensor.h>\n", "#include <cstdint>\n"),
        (torch_includes, "csrc/numerics/n.h", '#include "ATen/ATen.h"\n', '#include "numerics/formats.h"\n'),
        (upward_includes, "csrc/numerics/n.h", '#include "kernels/k.h"\n', '#include "numerics/m.h"\n'),
        (upward_includes, "csrc/kernels/k.cu", '#include "../ops/common.h"\n', '#include "primitives/p.h"\n'),
        (launches, "csrc/ops/o.cpp", "k<<<1, 2>>>();\n", "std::cout << 1;\n"),
        (exits, "csrc/kernels/k.cu", "  exit(1);\n", "  exited(1);\n"),
        (exits, "csrc/ops/o.cpp", '  std::printf("x");\n', "  snprintf(b, 4, f);\n"),
        (commented_cpp, "csrc/kernels/k.cu", "// x = load(p);\n", "// q = cast(x * m)\n"),
        (commented_cpp, "csrc/kernels/k.cu", "// sync();\n", "// The whole group is needed (see above);\n"),
        (commented_cpp, "csrc/kernels/k.cu", "// if (x) {\n", "// if x is NaN\n"),
        (commented_python, "tests/t.py", "# import os\n", "# imports are slow\n"),
        (commented_python, "tests/t.py", "# check(x, y)\n", "# m = RN32(448 / amax)\n"),
        (commented_python, "tests/t.py", "x = 1  # if x > 2:\n", "x = 1  # in the order of the call:\n"),
        (too_long, "csrc/ops/o.cpp", "\n" * 321, "\n" * 320),
        (too_long, "csrc/ops/o.cpp", "x" * 121, "x" * 120),
    ],
)
def test_rule_catches_what_breaks_it(rule, path, broken, kept):
    assert rule(path, broken)
    assert not rule(path, kept)

"""The rules of the tree: the places of every op, and the contents of each folder. Sources are parsed for them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path

import cpp_text
import pytest
import torch
from helpers import ROOT

import moe_fp8_ext
from moe_fp8_ext import ops, reference

CSRC = ROOT / "csrc"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cu", ".cuh", ".cpp"))
FOLDERS = ("moe_fp8_ext", "tests", "bench", "examples", "build_backend", "docs")
PYTHON = sorted(p for d in FOLDERS for p in (ROOT / d).rglob("*.py"))
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench" / "results").glob("*.md")])


# ---- Every op has its five places of CONTRIBUTING.md -----------------------------------------------------------------

LIBRARY = (CSRC / "library.cpp").read_text()
SCHEMAS = [torch._C.parse_schema("moe_fp8::" + text) for text in cpp_text.strings_given_to("m.def", LIBRARY)]
OPS = [schema.name.removeprefix("moe_fp8::") for schema in SCHEMAS]


def registrations() -> dict[str, list[str]]:
    """The files of csrc/ops that register each op."""
    found: dict[str, list[str]] = {}
    for path in sorted((CSRC / "ops").glob("*.cpp")):
        for op in re.findall(r"\bMOE_FP8_REGISTER\s*\(\s*(\w+)\s*\)", cpp_text.code(path.read_text())):
            found.setdefault(op, []).append(path.stem)
    return found


def module_of(function: object) -> str:
    return inspect.unwrap(function).__module__


@functools.cache
def names_in(path: Path) -> set[str]:
    """Names of functions and of arguments of calls, and all strings, in a test file and the support that it imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            parts = (getattr(part, "attr", getattr(part, "id", None)) for part in (node.func, *node.args))
            names |= {part for part in parts if isinstance(part, str)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module != "helpers":
            support = ROOT / "tests" / "support" / f"{node.module}.py"
            names |= names_in(support) if support.exists() else set()
    return names


def files_with(*names: str) -> list[str]:
    """The test files that contain all of these names."""
    return [p.name for p in sorted((ROOT / "tests").rglob("test_*.py")) if names_in(p).issuperset(names)]


def described(schema: torch.FunctionSchema) -> list[tuple[str, object]]:
    """(name, default) of every argument. Without a default it is inspect.Parameter.empty."""
    empty = inspect.Parameter.empty
    return [(a.name, a.default_value if a.has_default_value() else empty) for a in schema.arguments]


def signature(function: Callable) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def bench_module(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module(name)


def test_library_declares_what_is_registered():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_fp8::")}
    assert sorted(schema.name for schema in SCHEMAS) == sorted(registered)
    for schema in SCHEMAS:
        assert str(getattr(torch.ops.moe_fp8, schema.name[9:]).default._schema) == str(schema)
    # Sizes are SymInt, all but these.
    assert {name for schema in SCHEMAS for name in re.findall(r"\bint\?? (\w+)", str(schema))} == {"align", "parts"}


@pytest.mark.parametrize("op", OPS)
def test_op_has_its_files(op):
    """One C++ and one Python file, both named after the op's family."""
    assert [f"moe_fp8_ext.ops.{stem}" for stem in registrations()[op]] == [module_of(getattr(ops, op))]


@pytest.mark.parametrize("op", OPS)
def test_op_is_in_the_package(op):
    assert op in ops.__all__
    assert signature(getattr(ops, op)) == described(SCHEMAS[OPS.index(op)])


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_reference(op):
    function = getattr(reference, op)
    assert op in reference.__all__ and module_of(function).startswith("moe_fp8_ext.reference.")
    assert signature(function) == described(SCHEMAS[OPS.index(op)])


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
    doc = getattr(ops, op).__doc__ or ""
    sections = re.findall(r"^ {4}(Args|Returns|Raises|Source):", doc, re.M)
    assert sections[:2] == ["Args", "Returns"]
    documented = doc.split("Args:")[1].split("Returns:")[0]
    missing = [
        name
        for name, *_ in described(SCHEMAS[OPS.index(op)])
        if not re.search(rf"^ +.*\b{name}\b.*:", documented, re.M)
    ]
    assert not missing


@pytest.mark.parametrize("op", OPS)
def test_op_has_tests(op):
    """Byte equality, `opcheck`, bad arguments, and random calls."""
    for check in ("assert_same", "check_opcheck", "check_error"):
        assert files_with(op, check), check
    assert op in importlib.import_module("calls").OPS


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_bench_case(op, monkeypatch):
    assert op in {case.op for case in bench_module("cases", monkeypatch).CASES.values()}


@pytest.mark.parametrize("op", OPS)
def test_op_is_in_the_documents(op):
    for name in ("DESIGN.md", "docs/ops.md"):
        assert re.search(rf"`{op}\b", (ROOT / name).read_text()), name


def test_contributing_names_the_places_of_an_op():
    """These are the places that the tests above check."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    steps = re.findall(r"^(\d)\. (?:(?!^\d\. |^#).*\n?)+", text.split("## Adding an op")[1].split("\n## ")[0], re.M)
    assert steps == ["1", "2", "3", "4", "5"]
    chapter = text.split("## Adding an op")[1].split("\n## ")[0]
    for place in (
        "csrc/library.cpp",
        "csrc/ops/<family>.cpp",
        "moe_fp8_ext/ops/<family>.py",
        "moe_fp8_ext/reference/<family>.py",
        "tests/ops/test_<family>.py",
    ):
        assert f"`{place}`" in chapter
    for path in re.findall(r"`((?:csrc|moe_fp8_ext|tests|bench|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_documents_are_what_the_bench_makes(monkeypatch):
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    assert bench_module("report", monkeypatch).outdated() == [], "run: python bench/report.py"


# ---- Public names ----------------------------------------------------------------------------------------------------

PUBLIC = (
    *("DelayedWgrads", "Experts", "FrozenWeight", "LoRA", "MoE", "Quantized", "Recipe", "Router", "build_info"),
    "clamped_swiglu",
    *("combine", "convert_", "experts", "experts_of_groups", "export_fp8", "fp8_report", "fp8_state"),
    *("gather_in_fp8_", "graphed", "grouped_mm", "permute_indices", "permute_pad", "quantize_both"),
    *("quantize_rows", "quantize_tokens", "quantize_weight", "reuse_weights", "revert_", "save_ops"),
    *("scaled_grouped_mm", "sort_tokens", "stats", "swizzle_scales", "unpermute", "unswizzle_scales", "validate"),
)


def test_public_names():
    assert sorted(PUBLIC) == moe_fp8_ext.__all__
    modules = {path.stem for path in (ROOT / "moe_fp8_ext").iterdir()} | {"_C"}
    others = {n for n in vars(moe_fp8_ext) if not n.startswith("_")} - set(PUBLIC) - modules
    assert not others
    for name in PUBLIC:
        assert (getattr(moe_fp8_ext, name).__doc__ or "").strip()


@pytest.mark.parametrize("module", [moe_fp8_ext, ops, reference])
def test_all_is_what_is_imported(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {name for name in imported if name[0] != "_"} == set(module.__all__)
    assert list(module.__all__) == sorted(set(module.__all__))


def test_the_package_is_typed():
    """Every argument of every public function has an annotation."""
    assert (ROOT / "moe_fp8_ext" / "py.typed").exists()
    for function in (*(getattr(moe_fp8_ext, n) for n in PUBLIC), *(getattr(ops, op) for op in OPS)):
        if inspect.isfunction(function):
            hints, parameters = inspect.get_annotations(function), inspect.signature(function).parameters
            assert set(hints) == {*parameters, "return"}, function


# ---- The tree --------------------------------------------------------------------------------------------------------


def python_folders() -> list[Path]:
    return sorted(p.parent for p in (ROOT / "moe_fp8_ext").rglob("__init__.py"))


@pytest.mark.parametrize("folder", python_folders(), ids=lambda p: p.name)
def test_no_function_shadows_a_module(folder):
    """`import moe_fp8_ext.a.b` and `from moe_fp8_ext.a import b` give the same module."""
    package = ".".join(folder.relative_to(ROOT).parts)
    modules = [p.stem for p in (*folder.glob("*.py"), *folder.glob("*/")) if not p.name.startswith("__")]
    assert not shadowed(importlib.import_module(package), modules)


def shadowed(package: object, stems: list[str]) -> list[str]:
    """Names of modules of a package under which the package has another object."""
    return [s for s in stems if hasattr(package, s) and not inspect.ismodule(getattr(package, s))]


def test_shadowed_finds_a_function_in_place_of_a_module():
    assert shadowed(inspect, ["signature", "ast", "no_such_name"]) == ["signature"]


def test_tests_live_in_folders():
    tests = ROOT / "tests"
    assert [p.name for p in tests.glob("*.py")] == ["conftest.py"]
    assert {p.parent.parent for p in tests.rglob("test_*.py")} == {tests}


def test_design_names_every_folder():
    tree = (ROOT / "DESIGN.md").read_text().split("\ncsrc/\n")[1].split("```")[0]
    cpp, python = tree.split("\nmoe_fp8_ext/")
    for root, text in ((CSRC, cpp), (ROOT / "moe_fp8_ext", python)):
        folders = {p.name for p in root.iterdir() if p.is_dir() and p.name != "__pycache__"}
        assert folders == set(re.findall(r"^  (\w+)/", text, re.M))


# ---- Includes of C++: calls go one way -------------------------------------------------------------------------------

RANKS = {"platform": 0, "numerics": 1, "primitives": 2, "quantize": 3, "scales": 3, "gemm": 3}
RANKS |= {"tokens": 4, "activations": 4, "low_rank": 4}
RANKS |= {"cpu": 5, "ops": 6, "library.cpp": 7, "tables.cpp": 7}
TORCH = re.compile(r'[<"](?:torch|ATen|c10)/')
MAY_SEE_TORCH = ("ops/", "library.cpp", "cpu/parallel.h")


def rank(path: str) -> int:
    return RANKS[path.split("/")[0]]


def uphill(graph: dict[str, list[str]]) -> list[str]:
    return [
        f"{path} includes {i}" for path, found in graph.items() for i in found if i[0] != "?" and rank(i) > rank(path)
    ]


def test_includes_go_one_way():
    graph = cpp_text.include_graph(CSRC, SOURCES)
    assert {path.split("/")[0] for path in graph} == set(RANKS)
    assert not uphill(graph), "\n".join(uphill(graph))
    assert cpp_text.cycle(graph) is None
    unknown = [f"{path}: {i}" for path, found in graph.items() for i in found if i[0] == "?"]
    assert not unknown, "\n".join(unknown)
    included = {i for found in graph.values() for i in found}
    unused = [p for p in graph if p.endswith(".h") and p not in included]
    assert not unused, f"included by nothing: {unused}"


def test_rules_of_includes_catch_what_breaks_them():
    assert uphill({"numerics/n.h": ["quantize/q.h"], "ops/o.cpp": ["cpu/c.h"]}) == [
        "numerics/n.h includes quantize/q.h"
    ]
    assert cpp_text.cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert cpp_text.cycle({"a": ["b", "c"], "b": ["c"]}) is None
    assert (
        cpp_text.includes('// #include "a.h"\n#  include "b.h"\n"\\\n#include <c>"\n#include <d.h>')
        == ['"b.h', "<c", "<d.h"][::2]
    )


# ---- Rules about the text of a file ----------------------------------------------------------------------------------
# A rule takes a path relative to the root and the text, and returns the violations.

VENDOR = re.compile(r"CUDA|HIP|ROCM|NVCC|AMD|gfx|GFX|SIMT")
BUILD_MODE = re.compile(r"\bMOE_FP8_(?:CUDA|HIP|GPU)\b")
EXITS = re.compile(r"\b(?:_?exit|quick_exit|abort|terminate|v?f?printf|puts)\s*\(")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|WIP|HACK)\b")
HOW_IT_WAS_WRITTEN = re.compile(r"\b(?:coordinators?|sub-?agents?|sessions?)\b", re.I)  # pages say what is, not who
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


def vendor_conditions(path: str, text: str) -> list[str]:
    place = path.removeprefix("csrc/")
    if place.startswith("platform/"):
        return []
    may_choose_build = rank(place) >= RANKS["ops"]
    conditions = [f"{n} {rest}" for n, rest in cpp_text.directives(text) if n in ("if", "ifdef", "ifndef", "elif")]
    return [c for c in conditions if VENDOR.search(BUILD_MODE.sub("", c) if may_choose_build else c)]


def torch_includes(path: str, text: str) -> list[str]:
    if path.removeprefix("csrc/").startswith(MAY_SEE_TORCH):
        return []
    return [i for i in cpp_text.includes(text) if TORCH.match(i)]


def launches(path: str, text: str) -> list[str]:
    return re.findall(r".*<<<.*", cpp_text.code(text)) if path.startswith(("csrc/ops/", "csrc/cpu/")) else []


def exits(path: str, text: str) -> list[str]:
    return EXITS.findall(cpp_text.code(text))


def commented_cpp(path: str, text: str) -> list[str]:
    return [c for c in cpp_text.comments(text) if COMMENTED_CPP.match(c)]


def unfinished_cpp(path: str, text: str) -> list[str]:
    return [c for c in cpp_text.comments(text) if UNFINISHED.search(c) or HOW_IT_WAS_WRITTEN.search(c)]


@functools.cache
def python_comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT]


def commented_python(path: str, text: str) -> list[str]:
    found = []
    for code in python_comments(text):
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


def unfinished_python(path: str, text: str) -> list[str]:
    tree = ast.parse(text)
    scopes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    words = [*python_comments(text), *(ast.get_docstring(n) or "" for n in scopes)]
    return [w for w in words if UNFINISHED.search(w) or HOW_IT_WAS_WRITTEN.search(w)]


def unfinished_text(path: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if UNFINISHED.search(line) or HOW_IT_WAS_WRITTEN.search(line)]


def long_lines(path: str, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    if path.endswith(".md"):  # Markdown cannot break the rows of tables and addresses
        lines = ((i, line) for i, line in lines if not line.startswith("|") and "](http" not in line)
    return [f"line {i} is longer than 120" for i, line in lines if len(line) > 120]


Rule = Callable[[str, str], list[str]]
CPP_RULES: tuple[Rule, ...] = (
    *(vendor_conditions, torch_includes, launches, exits, commented_cpp, unfinished_cpp, long_lines),
)
PYTHON_RULES: tuple[Rule, ...] = commented_python, unfinished_python, long_lines
TEXT_RULES: tuple[Rule, ...] = unfinished_text, long_lines


def violations(rule: Rule, paths: Iterable[Path]) -> list[str]:
    named = ((p.relative_to(ROOT).as_posix(), p.read_text()) for p in paths)
    return [f"{name}: {found}" for name, text in named for found in rule(name, text)]


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        *((rule, SOURCES) for rule in CPP_RULES),
        *((rule, PYTHON) for rule in PYTHON_RULES),
        *((rule, TEXTS) for rule in TEXT_RULES),
    ],
)
def test_sources(rule, paths):
    found = violations(rule, paths)
    assert paths and not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "broken", "kept"),
    [
        (vendor_conditions, "csrc/quantize/k.cu", "#ifdef __CUDA_ARCH__\n", "#ifdef NDEBUG\n"),
        (vendor_conditions, "csrc/primitives/p.h", "#if defined(__HIP__)\n", "// #if defined(__HIP__)\n"),
        (vendor_conditions, "csrc/quantize/k.cu", "#if 1 && \\\n  defined(MOE_FP8_CUDA)\n", "#pragma once\n"),
        (vendor_conditions, "csrc/ops/o.cpp", "#if defined(__gfx942__)\n", "#if defined(MOE_FP8_HIP)\n"),
        (vendor_conditions, "csrc/gemm/sm90/k.cu", "#if defined(MOE_FP8_HIP)\n", '"#if HIP"\n'),
        (torch_includes, "csrc/tokens/k.h", "#include <torch/csrc/stable/tensor.h>\n", "#include <cstdint>\n"),
        (torch_includes, "csrc/numerics/n.h", '#include "ATen/ATen.h"\n', "/*\n#include <torch/t.h>\n*/\n"),
        (torch_includes, "csrc/cpu/loops.cpp", "#include <ATen/Parallel.h>\n", '#include "cpu/parallel.h"\n'),
        (launches, "csrc/ops/o.cpp", "k<<<1, 2>>>();\n", 'std::cout << 1; s = "<<<";\n'),
        (exits, "csrc/scales/k.cu", "  exit(1);\n", "  exited(1);  // not exit(1)\n"),
        (exits, "csrc/ops/o.cpp", '  std::printf("x");\n', "  snprintf(b, 4, f);\n"),
        (commented_cpp, "csrc/scales/k.cu", "// x = load(p);\n", "// q = cast(x * m)\n"),
        (commented_cpp, "csrc/scales/k.cu", "// sync();\n", "// The whole group is needed (see above);\n"),
        (commented_cpp, "csrc/scales/k.cu", "/* if (x) { */\n", "// if x is NaN\n"),
        (unfinished_cpp, "csrc/ops/o.cpp", "f();  // TODO\n", 'f("TODO");\n'),
        (commented_python, "tests/t.py", "# import os\n", "# imports are slow\n"),
        (commented_python, "tests/t.py", "# check(x, y)\n", "# m = RN32(448 / amax)\n"),
        (commented_python, "tests/t.py", "x = 1  # if x > 2:\n", "x = 1  # in the order of the call:\n"),
        (unfinished_cpp, "csrc/ops/o.cpp", "// As the coordinator said.\n", "// See PyTorch issue 189522.\n"),
        (unfinished_python, "tests/t.py", '"""As a sub-agent said."""\n', 'x = "sub-agent"\n'),
        (unfinished_text, "DESIGN.md", "what the last session measured\n", "measured on an H200, issue #11\n"),
        (long_lines, "csrc/ops/o.cpp", "x" * 121, "x" * 120),
        (long_lines, "README.md", "x" * 121, "| " + "x" * 121),
    ],
)
def test_rule_catches_what_breaks_it(rule, path, broken, kept):
    assert rule(path, broken)
    assert not rule(path, kept)

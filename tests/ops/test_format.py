"""The table of formats agrees between C++, the reference and DESIGN.md."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT

from moe_fp8_ext import _C
from moe_fp8_ext.reference import numerics
from moe_fp8_ext.reference.numerics import FORMATS

ENTRIES = {entry["name"]: entry for entry in _C.TABLES["formats"]}
ROW = re.compile(r"^\| `(\w+)` \|(.+)\|$", re.M)
SECTION = re.search(r"^\| format \|.*?\n\n", (ROOT / "DESIGN.md").read_text(), re.M | re.S)[0]
DESIGN = {name: [cell.strip() for cell in cells.split("|")] for name, cells in ROW.findall(SECTION)}


def test_there_is_one_list_of_formats():
    assert list(ENTRIES) == list(FORMATS) == list(DESIGN)


@pytest.mark.parametrize("name", FORMATS)
def test_compiled_table_is_the_reference(name):
    entry, f = ENTRIES[name], FORMATS[name]
    assert (entry["block"] or None) == f.block
    assert entry["weight_rows"] == f.weight_rows
    assert getattr(torch, entry["scale_dtype"]) == f.scale_dtype
    assert entry["order"] == f.order
    assert (entry["min_align"], entry["max_align"]) == f.aligns
    assert entry["align"] == f.align
    assert tuple(entry["roundings"]) == f.roundings
    assert tuple(entry["amaxes"]) == f.amaxes


@pytest.mark.parametrize("name", FORMATS)
def test_design_says_the_same(name):
    block, of_weight, scale, order, align, rounding, amax = DESIGN[name]
    if block.startswith("as "):
        other = DESIGN[re.search(r"`(\w+)`", block)[1]]
        block, of_weight, align, rounding, amax = (
            o if mine.startswith("as ") else mine
            for mine, o in zip((block, of_weight, align, rounding, amax), (*other[:2], *other[4:]), strict=True)
        )
    f = FORMATS[name]
    assert (int(re.match(r"\d+", block)[0]) if block[0].isdigit() else None) == f.block
    assert ("128 x 128" in of_weight) == (f.weight_rows == 128)
    assert scale == {torch.float32: "float32", numerics.E8M0: "E8M0"}[f.scale_dtype]
    assert f.order.replace("_", "-") in order
    least, most, usual = map(int, re.findall(r"\d+", align))
    assert (least, most) == f.aligns and usual == f.align
    assert tuple(re.findall(r"`(\w+)`", rounding)) == f.roundings
    assert tuple(re.findall(r"`(\w+)`", amax)) == f.amaxes


@pytest.mark.parametrize("name", FORMATS)
def test_formats_hang_together(name):
    f = FORMATS[name]
    assert f.align in range(f.aligns[0], f.aligns[1] + 1) and f.align & (f.align - 1) == 0
    assert f.scale_dtype in (torch.float32, numerics.E8M0)
    if f.scale_dtype == numerics.E8M0:  # every group starts a new block of scales
        assert f.aligns[0] % f.block == 0


KINDS = """
#include "numerics/format.h"
using namespace moe_fp8;
constexpr Format changed(FormatId id, int block, int weight_rows, ScaleType type, ScaleOrder order, Rounding usual,
                         Rounding other) {
  Format f = format_of(id);
  f.block = block;
  f.weight_rows = weight_rows;
  f.scale_type = type;
  f.order = order;
  f.roundings[0] = usual;
  f.roundings[1] = other;
  return f;
}
static_assert(is_supported_kind(changed(FormatId::%s, %s)) == %s);
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize(
    ("name", "change", "usual", "other", "known"),
    [
        ("kRowwise", "0, 1, ScaleType::kF32, ScaleOrder::kRowMajor", "kExact", "kPow2", True),
        ("kRowwise", "0, 1, ScaleType::kF32, ScaleOrder::kRowMajor", "kPow2", "kExact", True),
        ("kRowwise", "0, 1, ScaleType::kF32, ScaleOrder::kRowMajor", "kExact", "kFloor", False),
        ("kBlockwise", "128, 128, ScaleType::kF32, ScaleOrder::kColumnMajor", "kExact", "kPow2", True),
        ("kMxfp8", "32, 1, ScaleType::kE8M0, ScaleOrder::kRowMajor", "kFloor", "kRceil", True),
        ("kMxfp8", "32, 1, ScaleType::kE8M0, ScaleOrder::kRowMajor", "kExact", "kPow2", False),
        ("kBlockwise", "64, 64, ScaleType::kF32, ScaleOrder::kColumnMajor", "kExact", "kPow2", False),
        ("kBlockwise", "128, 1, ScaleType::kF32, ScaleOrder::kColumnMajor", "kExact", "kPow2", False),
        ("kMxfp8", "16, 1, ScaleType::kE8M0, ScaleOrder::kBlocked", "kRceil", "kFloor", False),
        ("kMxfp8", "32, 1, ScaleType::kF32, ScaleOrder::kRowMajor", "kExact", "kPow2", False),
        # This entry pads groups to less than 32.
        ("kRowwise", "32, 1, ScaleType::kE8M0, ScaleOrder::kRowMajor", "kRceil", "kFloor", False),
    ],
)
def test_kinds_that_code_is_there_for(name, change, usual, other, known, tmp_path):
    """Entries of the table that no kernel supports do not compile."""
    source = tmp_path / "kinds.cpp"
    change = f"{change}, Rounding::{usual}, Rounding::{other}"
    source.write_text(KINDS % (name, change, str(known).lower()))
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", source], check=True)

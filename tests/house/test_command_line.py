"""`python -m moe_fp8_ext`: what it prints, what its check finds, and its exit status."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers import ROOT

from moe_fp8_ext import __main__ as command
from moe_fp8_ext import ops
from moe_fp8_ext._C import build_info, gemms
from moe_fp8_ext.report import check, machine, speed
from moe_fp8_ext.report.models import Sizes

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_prints_the_build_the_machine_and_packages(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    for text in (f"moe_fp8_ext {build_info()['version']}", f"torch {torch.__version__}", "mxfp8 ", "megatron-core: "):
        assert text in out


def test_tested_versions():
    """The list has the versions that `make test` installs, and the pages name every version of the list."""
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)[;"]', (ROOT / "pyproject.toml").read_text()))
    pages = dict(zip(machine.TESTED, ("transformers", "torchtitan", "finetuning", "megatron"), strict=True))
    for name, versions in machine.TESTED.items():
        page = (ROOT / "docs" / f"{pages[name]}.md").read_text()
        assert pinned[name] in versions and all(version in page for version in versions), name


@NO_GPU
def test_check_on_a_cpu(capsys):
    assert command.main(["--check", "--speed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["failed"] == [] and found["check"]["against"] == "moe_fp8_ext.reference"
    assert found["speed"] == {"error": command.ON_A_CPU}


def test_check_calls_every_op():
    assert {name for name, *_ in check.cases(torch.float8_e4m3fn)} == set(ops.__all__)


@NO_GPU
@pytest.mark.parametrize("op", ["quantize_rows", "scaled_grouped_mm", "sort_tokens"])
def test_check_sees_wrong_bytes(op, monkeypatch, capsys):
    right = getattr(check.reference, op)

    def wrong(*args: object, **kwargs: object) -> object:
        out = right(*args, **kwargs)
        first = out if isinstance(out, torch.Tensor) else out[0]
        first.view(torch.uint8).view(-1)[1] ^= 64
        return out

    monkeypatch.setattr(check.reference, op, wrong)
    assert command.main(["--check"]) == 1
    assert f"FAILED {op}" in capsys.readouterr().out


def test_bad_use(capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["--chekc"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("archs", "sm", "gfx", "runs"),
    [
        ("80 89 90a 100a 120", 86, "", True),
        ("80 89 90a 100a 120", 121, "", True),
        ("80 89 90a 100a 120", 103, "", False),
        ("90a", 90, "", True),
        ("90a", 80, "", False),
        ("89", 86, "", False),
        ("gfx942 gfx950", 94, "gfx942", True),
        ("gfx942", 94, "gfx90a", False),
        ("", 90, "", False),
    ],
)
def test_code_for_a_gpu(archs, sm, gfx, runs):
    assert machine.has_code(archs, sm, gfx) == runs


def test_backends_of_recipes():
    table = [gemm for gemm in gemms() if "cuda" in gemm["builds"]]
    hopper, ampere = (machine.backends(table, "gpu", sm) for sm in (90, 80))
    assert [hopper[r].partition(":")[0] for r in ("rowwise", "blockwise", "mxfp8")] == ["sm90", "sm90", "sm90_mxfp8"]
    assert {ampere[r].partition(":")[0] for r in ("rowwise", "blockwise", "mxfp8")} == {"mma"}
    assert "blockwise, pow2" not in hopper | ampere
    blackwell = machine.backends(table, "gpu", 100)
    assert blackwell["rowwise"].startswith("mma: ")
    assert blackwell["blockwise"] == "torch_bfloat16: dequantize + aten::_grouped_mm"
    assert blackwell["blockwise, pow2"] == "torch_mxfp8_expanded: expand_scales + aten::_scaled_grouped_mm"
    without = [gemm for gemm in table if not gemm["optional"]]
    assert "blockwise, pow2" not in machine.backends(without, "gpu", 100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_speed_on_a_gpu(monkeypatch):
    monkeypatch.setattr(speed, "LAYERS", {"small": (256, Sizes(256, 256, 8, 2))})
    (line,) = speed.text(speed.speed())
    assert line.startswith("small: ") and 'take recipe="' in line

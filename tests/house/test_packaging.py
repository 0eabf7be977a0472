"""The library is found and loaded with errors that help, and wheels have the name and the metadata that they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import moe_fp8_ext
from moe_fp8_ext import _C

sys.path.insert(0, str(ROOT))
from build_backend import environment  # noqa: E402

tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 cannot read pyproject.toml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_library_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(_C, "LIBRARY", tmp_path / "libmoe_fp8.so")
    with pytest.raises(ImportError, match=r"moe_fp8_ext: there is no \S+/libmoe_fp8.so: run `make build`"):
        _C._load()


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "libmoe_fp8.so").write_text("not a library")
    monkeypatch.setattr(_C, "LIBRARY", tmp_path / "libmoe_fp8.so")
    with pytest.raises(ImportError, match=r"moe_fp8_ext: .*libmoe_fp8.so: .*, with torch 2\S*: it needs torch 2\.11"):
        _C._load()


def test_the_library_needs_no_python():
    listed = subprocess.run(["nm", "-D", "--undefined-only", _C.LIBRARY], capture_output=True, text=True, check=True)
    needed = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert "aoti_torch_library_init_def" in needed
    assert not {name for name in needed if re.match("_?Py", name)}


def test_tables_are_copies():
    """A caller may change what it gets."""
    _C.build_info()["scaled_grouped_mm"][0]["name"] = "other"
    assert "other" not in str(_C.build_info())


def test_the_version_has_one_source():
    assert moe_fp8_ext.__version__.partition("+")[0] == PROJECT["version"]


# What setuptools says of a wheel before it builds it.
WHEEL = """
import sys, setuptools
from distutils.core import run_setup
distribution = run_setup("setup.py", sys.argv[1:], stop_after="commandline")
wheel = distribution.get_command_obj("bdist_wheel")
wheel.ensure_finalized()
print(distribution.get_version(), *wheel.get_tag()[:2], *distribution.install_requires)
"""


@pytest.mark.parametrize(
    ("command", "local", "version"),
    [("bdist_wheel", "0", ""), ("bdist_wheel", "1", "+cpu"), ("sdist", "1", "")],
)
def test_one_wheel_serves_every_python_and_every_torch(command, local, version):
    settings = {"MOE_FP8_BACKEND": "cpu", "MOE_FP8_LOCAL_VERSION": local}
    command = [sys.executable, "-c", WHEEL, command]
    said = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=True)
    # A requirement without a local version: any torch that is installed satisfies it.
    assert said.stdout.split() == [PROJECT["version"] + version, "py3", "none", "torch>=2.11"]


@pytest.mark.parametrize(
    ("backend", "says", "variant"),
    [
        ("cuda", "Cuda compilation tools, release 12.8, V12.8.93", "cu128"),
        ("cuda", "Cuda compilation tools, release 13.0, V13.0.88", "cu130"),
        ("rocm", "HIP version: 6.4.43482-0f2d60242", "rocm6.4"),
        ("cpu", None, "cpu"),
    ],
)
def test_variants_are_named_as_torch_names_its_own(tmp_path, backend, says, variant):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{says}'\n")
    compiler.chmod(0o755)
    assert environment.variant_of(backend, says and str(compiler)) == variant


def test_wheels_are_for_the_torch_that_the_library_targets():
    """Everything that names the oldest torch names the same one."""
    major, minor = environment.TORCH_MINIMUM.split(".")
    assert (
        f"TORCH_TARGET_VERSION=0x{int(major):02x}{int(minor):02x}000000000000ULL"
        in (ROOT / "CMakeLists.txt").read_text()
    )
    assert moe_fp8_ext.build_info()["torch_target"] == environment.TORCH_MINIMUM
    assert f"torch {environment.TORCH_MINIMUM} or newer" in Path(_C.__file__).read_text()

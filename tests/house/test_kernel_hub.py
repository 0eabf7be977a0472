"""The layout for Hugging Face's kernel hub, loaded from a local folder by the package `kernels`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import ROOT, blocks

from moe_fp8_ext import _C

sys.path.insert(0, str(ROOT / "build_backend"))
import kernel_hub  # noqa: E402

# The library of this tree has the usual namespace of ops. So the package must not be loaded beside it.
(BLOCK,) = blocks("docs/install.md", "Hugging Face's kernel hub")
BLOCK = BLOCK.replace('hub"))', 'hub"), backend="cpu")')  # a torch for CUDA looks for a build for CUDA
LOAD = f"""
import sys
import torch
{BLOCK}
kernel = moe_fp8_ext
x = torch.randn(64, 128).bfloat16().requires_grad_()
w = torch.randn(2, 128, 32).bfloat16()
kernel.grouped_mm(x, w, torch.tensor([40, 64], dtype=torch.int32)).sum().backward()
assert x.grad.isfinite().all()
assert "moe_fp8_ext" not in sys.modules
print(kernel.__name__, sys.modules[kernel.__name__ + "._C"].LIBRARY)
"""


def test_source_code_under_another_name():
    code = (
        "from moe_fp8_ext._C import x\n"
        'import_module(f"moe_fp8_ext.integrations.{module}")\n'
        'register_fake("moe_fp8::combine")(torch.ops.moe_fp8.combine, torch.ops.moe_fp8_ext.mm, "moe_fp8_ext::mm")\n'
        'fail("moe_fp8_ext: libmoe_fp8.so, moe_fp8_tables")\n'
    )
    assert kernel_hub.renamed(code, "_name", "_space") == (
        "from _name._C import x\n"
        'import_module(f"_name.integrations.{module}")\n'
        'register_fake("_space::combine")(torch.ops._space.combine, torch.ops._name.mm, "_name::mm")\n'
        'fail("moe_fp8_ext: libmoe_fp8.so, moe_fp8_tables")\n'
    )


def test_names_of_variants(monkeypatch):
    monkeypatch.setattr(kernel_hub.platform, "machine", lambda: "aarch64")
    assert kernel_hub.name_of_variant("cu130") == "torch-stable-abi211-cu130-aarch64-linux"
    assert kernel_hub.name_of_variant("rocm6.4") == "torch-stable-abi211-rocm64-aarch64-linux"


@pytest.mark.skipif(not importlib.util.find_spec("kernels"), reason="the package kernels is not installed")
def test_kernels_loads_it(tmp_path):
    folder = tmp_path / "dist" / "kernel-hub" / "build" / kernel_hub.name_of_variant("cpu")
    name = kernel_hub.name_of_build("cpu")
    kernel_hub.lay_out(_C.LIBRARY, name, "moe_fp8", "cpu", [], folder)
    paths = [path for path in sys.path if path and path != str(ROOT)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", LOAD]
    loaded = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert loaded.stdout.split() == [name, str(folder / "libmoe_fp8.so")], loaded.stderr

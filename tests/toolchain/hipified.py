"""Translates the kernels to HIP, as a ROCm build does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from cache import ROOT


def kernel_sources(csrc: Path) -> list[Path]:
    """Returns the kernels that a ROCm build compiles: all except kernels for one NVIDIA architecture."""
    return sorted(s for s in csrc.rglob("*.cu") if not re.search(r"/sm\d+/", s.as_posix()))


def hipify(csrc: Path, out: Path) -> None:
    """Writes the hipified copy of `csrc` to `out`."""
    torch = importlib.util.find_spec("torch")  # an import would take seconds
    if torch is None or torch.origin is None:
        raise SystemExit("hipify is part of torch, which is not installed")
    command = [sys.executable, ROOT / "build_backend" / "hipify.py", Path(torch.origin).parent, csrc, out]
    subprocess.run(command, check=True, capture_output=True, text=True)

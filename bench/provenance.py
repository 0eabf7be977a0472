"""Where a result comes from: GPU, versions, commit and date."""

from __future__ import annotations

import datetime
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def shell(*command: str) -> str | None:
    """The output of a command, or None if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def transformers() -> str | None:
    """The version of Transformers that is installed. The speed of its own experts differs between versions."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict:
    gpu = device.type == "cuda"
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    # The variable is for a copy without .git. It holds a hash, followed by -dirty if the copy has local changes.
    stated = os.environ.get("MOE_FP8_COMMIT")
    commit = stated or shell("git", "rev-parse", "HEAD") or ""
    driver = shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None
    forced = os.environ.get("MOE_FP8_GEMM")  # the only backend that multiplies
    named = ({"gemm": forced} if forced else {}) | ({"transformers": found} if (found := transformers()) else {})
    return named | {
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "torch": torch.__version__,
        "toolkit": toolkit if gpu else None,
        "driver": driver.splitlines()[0] if driver else None,
        "commit": commit.removesuffix("-dirty") or None,
        "dirty": commit.endswith("-dirty") if stated else bool(shell("git", "status", "--porcelain")),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }

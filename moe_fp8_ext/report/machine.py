"""The build, the GPUs, the backend of each recipe on them, and the packages that the integrations are for."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from moe_fp8_ext._C import build_info
from moe_fp8_ext.quantization.recipe import RECIPES, Recipe

# The versions that tests have run with.
TESTED = {
    "transformers": ("5.17.0", "5.23.0", "5.24.0"),
    "torchtitan": ("0.3.0",),
    "peft": ("0.19.1", "0.20.0", "0.21.2"),
    "megatron-core": ("0.16.1",),
}
_DRIVERS = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), ("rocm-smi", "--showdriverversion")


def machine() -> dict[str, object]:
    """Returns the properties of this machine, in types that JSON can hold."""
    info = build_info()
    gemms = info.pop("scaled_grouped_mm")
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    gpus = [_gpu(i, info, gemms) for i in range(torch.cuda.device_count())]
    return {
        "build": info,
        "torch": torch.__version__,
        "torch_toolkit": toolkit if torch.version.hip or torch.version.cuda else "none",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": _driver() if gpus else None,
        "gpus": gpus,
        "cpu_backends": backends(gemms, "cpu", 0),
        "packages": {name: _package(name, tested) for name, tested in TESTED.items()},
    }


def backends(gemms: list[dict], device: str, sm: int) -> dict[str, str]:
    """Returns the backend that multiplies for each recipe, for sizes that every backend takes: multiples of 32.

    "blockwise, pow2" is `Recipe("blockwise", rounding="pow2")`. It is listed if another GEMM multiplies it than
    "blockwise".

    Args:
        gemms: the table of `build_info`, in the order in which the backends are tried.
        device, sm: "gpu" and 10 * its compute capability, or "cpu" and any number.
    """
    chosen = {}
    for name, recipe in RECIPES.items():
        if name == "auto":
            chosen[name] = "chosen for each call, by its sizes"
        elif recipe.format is None:
            chosen[name] = "torch's grouped_mm" if device == "gpu" else "aten::mm of each group"
        else:
            chosen[name] = _first(gemms, recipe, device, sm)
    pow2 = _first(gemms, Recipe("blockwise", rounding="pow2"), device, sm)
    if pow2 != chosen["blockwise"]:
        chosen["blockwise, pow2"] = pow2
    return chosen


def _first(gemms: list[dict], recipe: Recipe, device: str, sm: int) -> str:
    """Returns the name of the first GEMM that takes the recipe's operands."""
    for gemm in gemms:
        least, most = gemm["compute_capability"] or (sm, sm)
        is_of_device = gemm["device"] == device and least <= sm <= most
        if is_of_device and recipe.format in gemm["formats"] and gemm["rounding"] in (None, recipe.rounding):
            return f"{gemm['name']}: {gemm['what']}"
    return "none"


def has_code(archs: str, sm: int, gfx: str = "") -> bool:
    """Whether a build for archs runs on a GPU. Builds have no PTX. Code for sm_XY runs on X.Y and later X.Z.

    Args:
        archs: the architectures of `build_info`, such as "80 90a" or "gfx942". Code with a suffix runs on that
            capability alone.
        sm: 10 * the compute capability, of NVIDIA's GPUs.
        gfx: the architecture of an AMD GPU.
    """
    if gfx:
        return gfx in re.findall(r"\w+", archs)
    for number, suffix in re.findall(r"\b(\d+)([a-z]?)\b", archs):
        built = int(number)
        if built == sm or (not suffix and built // 10 == sm // 10 and built < sm):
            return True
    return False


def _gpu(i: int, info: dict, gemms: list[dict]) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(i)
    sm = 10 * properties.major + properties.minor
    gfx = properties.gcnArchName.partition(":")[0] if torch.version.hip else ""
    runs = info["backend"] != "cpu" and has_code(info["archs"], sm, gfx)
    return {
        "name": properties.name,
        "architecture": gfx or f"sm_{sm}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "has_code": runs,
        "backends": backends(gemms, "gpu", 0 if gfx else sm) if runs else {},
    }


def _driver() -> str | None:
    for command in _DRIVERS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue  # a tool of another vendor
        if done.returncode == 0 and (found := re.search(r"\d+\.[\d.]+", done.stdout)):
            return found.group()
    return None


def installed(name: str) -> str:
    """Returns the name and the version of a package, for errors of its integration."""
    if find_spec(name.partition("-")[0]) is None:
        return f"no {name}"
    return f"{name} {_version(name) or 'of unknown version'}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package(name: str, tested: tuple[str, ...]) -> dict[str, object]:
    found = _version(name)
    return {"version": found, "tested": list(tested), "is_tested": found in tested}


def text(found: dict) -> list[str]:
    """Returns the lines that show what `machine` found."""
    build = found["build"]
    archs = f" for {build['archs']}" if build["archs"] else ""
    lines = [f"moe_fp8_ext {build['version']}: {build['backend']}{archs}, {build['toolkit']}, {build['compiler']}"]
    lines += [f"torch {found['torch']}, {found['torch_toolkit']}, Python {found['python']}, {found['platform']}"]
    for i, gpu in enumerate(found["gpus"]):
        code = "the build has code for it" if gpu["has_code"] else "THE BUILD HAS NO CODE FOR IT"
        of_gpu = f"{gpu['name']}, {gpu['architecture']}, {gpu['memory_gib']} GiB, driver {found['driver']}"
        lines += [f"GPU {i}: {of_gpu}; {code}", *_listed(gpu["backends"])]
    if not found["gpus"]:
        lines.append("no GPU that torch sees")
    lines += ["CPU:", *_listed(found["cpu_backends"])]
    for name, package in found["packages"].items():
        if package["version"] is None:
            state = "not installed"
        elif package["is_tested"]:
            state = f"{package['version']}, a tested version"
        else:
            state = f"{package['version']}, not tested; tested: {', '.join(package['tested'])}"
        lines.append(f"{name}: {state}")
    return lines


def _listed(chosen: dict[str, str]) -> list[str]:
    width = max(map(len, chosen), default=0) + 1
    return [f"  {recipe:{width}}{backend}" for recipe, backend in chosen.items()]

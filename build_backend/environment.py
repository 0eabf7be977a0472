"""Finds torch, build tools and compilers on this machine, and chooses the backend.

It uses the standard library only. Run as a script, it prints one requirement per line: the packages that pip must
install before a build without isolation.
"""

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TORCH_MINIMUM = "2.11"  # the same as TORCH_TARGET_VERSION in CMakeLists.txt
TORCH = f"torch>={TORCH_MINIMUM}"
CMAKE_MINIMUM = "3.21"
SETUPTOOLS_MINIMUM = "77"  # as in pyproject.toml, which pip ignores in a build without isolation
DEFAULT_ARCHS = {"cuda": "80;89;90a;100a;120", "rocm": "gfx942;gfx950", "cpu": ""}  # without a GPU
# The GEMMs have matrix instructions for NVIDIA GPUs from this compute capability on, and for these AMD GPUs.
OLDEST_GPU = 8.0
AMD_GPUS = ("gfx942", "gfx950")


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"moe_fp8_ext: {sentence}")


def at_least(version: str, minimum: str) -> bool:
    def key(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:2]]

    return key(version) >= key(minimum)


# ---- torch -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    path: Path
    version: str
    hip: str | None


def find_torch() -> Torch | None:
    """Finds the torch to build against, without an import: that takes seconds and may need a driver."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).parent if spec and spec.origin else _torch_outside_isolation()
    if path is None:
        return None
    facts = runpy.run_path(str(path / "version.py"))
    return Torch(path, facts["__version__"], facts.get("hip"))


def _torch_outside_isolation() -> Path | None:
    # pip isolates a build by setting PYTHONPATH for the interpreter that it installs into. Without these variables,
    # the interpreter finds the torch of its environment, and the extension will run with that torch.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin or '' if s else '')"
    found = subprocess.run([sys.executable, "-c", code], env=env, cwd=sys.prefix, capture_output=True, text=True)
    return Path(found.stdout.strip()).parent if found.stdout.strip() else None


# ---- tools -----------------------------------------------------------------------------------------------------------


def find_tool(name: str, minimum: str = "0.0") -> str | None:
    """Returns the first `name` that runs. In an isolated build, the scripts of pip's packages may fail, so try each."""
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), sysconfig.get_path("scripts")]:
        tool = shutil.which(name, path=folder) if folder else None
        if tool:
            answer = subprocess.run([tool, "--version"], capture_output=True, text=True)
            version = re.search(r"\d+\.\d+", answer.stdout)
            if answer.returncode == 0 and version and at_least(version.group(), minimum):
                return tool
    return None


def _first_file(*candidates: str | None) -> str | None:
    return next((c for c in candidates if c and Path(c).is_file()), None)


def find_nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return _first_file(os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home))


def find_hipcc() -> str | None:
    return _first_file(shutil.which("hipcc"), f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/bin/hipcc")


def check_compiler() -> None:
    named = os.environ.get("CXX")
    if named and not shutil.which(named.split()[0]):
        fail(f"CXX={named} names no compiler that can be run.")
    if not named and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        fail("no C++ compiler found: install g++ or clang++ (Debian: apt-get install g++), or name one in CXX.")


# ---- toolchain -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolchain:
    torch: Torch
    cmake: str
    ninja: str
    backend: str
    device_compiler: str | None
    archs: str
    reason: str  # why this backend and these architectures
    variant: str  # cpu, cu130 or rocm6.4: the backend and its toolkit, in torch's words


def machine_archs(backend: str) -> list[str]:
    """Returns the architectures of this machine's GPUs."""

    def answer(*command: str) -> str:
        tool = shutil.which(command[0]) or _first_file(f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/bin/{command[0]}")
        return subprocess.run([tool, *command[1:]], capture_output=True, text=True).stdout if tool else ""

    if backend == "cuda":
        text = answer("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        found = sorted({float(capability) for capability in re.findall(r"^\d+\.\d+$", text, re.M)})
        return [f"{10 * c:.0f}{'a' if c >= 9 else ''}" for c in found]
    if backend == "rocm":
        text = answer("rocm_agent_enumerator") or answer("rocminfo")
        return sorted(set(re.findall(r"\bgfx\w+", text)) - {"gfx000"})  # gfx000 is a CPU
    return []


def is_too_old(arch: str) -> bool:
    return int(re.sub(r"\D", "", arch) or 0) < 10 * OLDEST_GPU


def supported(backend: str, archs: list[str]) -> str:
    """Returns the supported ones among archs, separated by semicolons; empty if there is none."""
    is_supported = (lambda arch: arch in AMD_GPUS) if backend == "rocm" else (lambda arch: not is_too_old(arch))
    return ";".join(filter(is_supported, archs))


def choose_backend(torch: Torch) -> tuple[str, str | None, str]:
    """Returns (backend, device compiler, reason), from MOE_FP8_BACKEND or else from torch and the machine."""
    asked = os.environ.get("MOE_FP8_BACKEND", "")
    if asked not in ("", "native", *DEFAULT_ARCHS):
        fail(f"MOE_FP8_BACKEND must be one of native, {', '.join(DEFAULT_ARCHS)}, got {asked!r}.")
    if asked in DEFAULT_ARCHS:
        backend, reason = asked, "MOE_FP8_BACKEND says so"
    else:
        backend, reason = "rocm" if torch.hip else "cuda" if find_nvcc() else "cpu", "no nvcc and no ROCm here"
        if asked == "native" and backend != "cpu" and not supported(backend, machine_archs(backend)):
            backend, reason = "cpu", "no supported GPU here"
    if backend == "cpu":
        return backend, None, reason
    compiler = find_nvcc() if backend == "cuda" else find_hipcc()
    if compiler is None and backend == "cuda":
        fail("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit or unset MOE_FP8_BACKEND.")
    if compiler is None:
        fail(f"no hipcc on PATH or in ROCM_PATH for torch {torch.version}: install ROCm or set MOE_FP8_BACKEND=cpu.")
    return backend, compiler, ""


def choose_archs(backend: str, device_compiler: str) -> tuple[str, str]:
    """Returns (architectures, reason)."""
    variable = f"MOE_FP8_{backend.upper()}_ARCHS"
    asked, found = os.environ.get(variable), machine_archs(backend)
    here = supported(backend, found)
    if found and not here and not asked:
        here = ", ".join(found)
        expected = f"architectures from {10 * OLDEST_GPU:.0f} on" if backend == "cuda" else " and ".join(AMD_GPUS)
        fail(
            f"supported GPUs are {expected}, but this machine has {here}: set MOE_FP8_BACKEND=cpu, or {variable} to "
            "build for another machine."
        )
    archs = asked or here or DEFAULT_ARCHS[backend]
    if backend == "cuda":
        old = [arch for arch in archs.split(";") if is_too_old(arch)]
        if old:
            fail(f"{variable} must name architectures from {10 * OLDEST_GPU:.0f} on, got {', '.join(old)} of {archs}.")
        known = subprocess.run([device_compiler, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
        unknown = [arch for arch in archs.split(";") if f"sm_{arch.rstrip('af')}" not in known]
        if unknown:
            fail(f"{device_compiler} does not know {', '.join(unknown)} of {archs}: update CUDA or set {variable}.")
        if "90" in archs.split(";"):  # 90 would compile, but without the instructions of the GEMMs
            fail(f"{variable} must name Hopper as 90a, which its GEMMs need, got 90 in {archs}.")
    else:
        # Features may follow an architecture, behind a colon.
        unknown = [arch for arch in archs.split(";") if arch.partition(":")[0] not in AMD_GPUS]
        if unknown:
            fail(f"{variable} must name some of {', '.join(AMD_GPUS)}, got {', '.join(unknown)} of {archs}.")
    if asked:
        return archs, f"{variable} says so"
    if here:
        return archs, "the GPUs of this machine"
    advice = f"this takes minutes; {variable} with one architecture, or MOE_FP8_BACKEND=cpu, is faster"
    return archs, f"no GPU here; {advice}"


def variant_of(backend: str, device_compiler: str | None) -> str:
    """Returns the name of a build in a wheel's version and in build/."""
    if device_compiler is None:
        return backend
    text = subprocess.run([device_compiler, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(?:release|HIP version:) (\d+)\.(\d+)", text)
    if found is None:
        fail(f"{device_compiler} --version names no release.")
    return "cu{}{}".format(*found.groups()) if backend == "cuda" else "rocm{}.{}".format(*found.groups())


def check_torch(torch: Torch | None) -> None:
    if torch and not at_least(torch.version, TORCH_MINIMUM):
        fail(f"needs torch {TORCH_MINIMUM} or newer, found {torch.version}: run pip install '{TORCH}' first.")


def has_setuptools() -> bool:
    found = next(iter(importlib.metadata.distributions(name="setuptools")), None)
    return found is not None and at_least(found.version, SETUPTOOLS_MINIMUM)


def missing() -> list[str]:
    """Returns the build requirements that this environment lacks. Fails if pip cannot install one of them."""
    torch = find_torch()
    check_torch(torch)
    check_compiler()
    found = {
        TORCH: torch is not None,
        f"setuptools>={SETUPTOOLS_MINIMUM}": has_setuptools(),
        f"cmake>={CMAKE_MINIMUM}": find_tool("cmake", CMAKE_MINIMUM) is not None,
        "ninja": find_tool("ninja") is not None,
    }
    return [requirement for requirement, is_found in found.items() if not is_found]


def toolchain() -> Toolchain:
    lacking = missing()
    if lacking:
        fail(f"{' and '.join(lacking)} not found: run pip install {' '.join(map(repr, lacking))} first.")
    torch = find_torch()
    backend, device_compiler, reason = choose_backend(torch)
    archs = ""
    if device_compiler:
        archs, reason = choose_archs(backend, device_compiler)
    cmake = find_tool("cmake", CMAKE_MINIMUM)
    variant = variant_of(backend, device_compiler)
    return Toolchain(torch, cmake, find_tool("ninja"), backend, device_compiler, archs, reason, variant)


if __name__ == "__main__":
    print(*missing(), sep="\n")

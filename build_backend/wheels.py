"""Builds the wheels that this machine can build, into dist/: one for its CUDA or ROCm, and one for the CPU.

    make wheel

A wheel serves every Python, every torch from 2.11 on, and every Linux whose glibc is GLIBC or newer. auditwheel checks
the last. torch's libraries stay outside, because torch is installed with them. CUDA's runtime is linked in.

MOE_FP8_BACKEND=cpu or =cuda builds one of them. The version names the variant, such as 0.1.0+cu130; PyPI refuses such
versions, and MOE_FP8_LOCAL_VERSION=0 leaves the variant out.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"  # torch's wheels need the same
MAX_BYTES = 12 << 20
OUTSIDE = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libamdhip64.so.*")


def backends() -> list[str]:
    asked = os.environ.get("MOE_FP8_BACKEND")
    if asked:
        return [asked]
    found = environment.choose_backend(environment.find_torch())[0]
    return [found, "cpu"] if found != "cpu" else ["cpu"]


def settings(backend: str) -> dict[str, str]:
    """The environment of a build for other machines: all architectures, an old glibc."""
    given = {"MOE_FP8_BACKEND": backend, "MOE_FP8_GLIBC": GLIBC}
    if backend != "cpu":
        archs = f"MOE_FP8_{backend.upper()}_ARCHS"
        given[archs] = os.environ.get(archs) or environment.DEFAULT_ARCHS[backend]
    return os.environ | given


def build(backend: str) -> Path:
    """Builds a wheel into dist/ and returns it."""
    raw = ROOT / "build" / "wheel"
    # setuptools packs whatever an earlier build left in build/lib.
    for folder in (raw, *ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):
        shutil.rmtree(folder, ignore_errors=True)
    command = ["pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "-w", raw, ROOT]
    run(*command, env={"MOE_FP8_LOCAL_VERSION": "1"} | settings(backend))
    (wheel,) = raw.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    outside = [word for library in OUTSIDE for word in ("--exclude", library)]
    run("auditwheel", "repair", "--plat", tag, "--only-plat", *outside, "-w", raw / "repaired", wheel)
    (repaired,) = raw.glob("repaired/*.whl")
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(repaired, ROOT / "dist"))


def run(module: str, *args: object, env: dict[str, str] | None = None) -> None:
    if subprocess.run([sys.executable, "-m", module, *map(str, args)], env=env).returncode:
        environment.fail(f"{module} failed; see its messages above.")


if __name__ == "__main__":
    wheels = [build(backend) for backend in backends()]
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:5.1f} MiB  {wheel.relative_to(ROOT)}")
    if any(wheel.stat().st_size > MAX_BYTES for wheel in wheels):
        environment.fail(f"a wheel has more than {MAX_BYTES >> 20} MiB.")

"""Lays the package out as a kernel of Hugging Face's hub, in dist/kernel-hub, which `kernels.get_local_kernel` loads.

    make kernel-hub

The package `kernels` may load several versions of a kernel in one process. So each build has a name of its own, for
its Python package and for its namespace under torch.ops: imports and names of ops are rewritten.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import environment
import wheels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moe_fp8_ext"
LIBRARY = "libmoe_fp8.so"
OUT = ROOT / "dist" / "kernel-hub"


def name_of_build(backend: str) -> str:
    """A name that says which sources were built."""
    digest = hashlib.sha256()
    for file in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return f"_moe_fp8_ext_{backend}_{digest.hexdigest()[:7]}"


def name_of_variant(variant: str) -> str:
    """The folder of a build: "torch-stable-abi211-cu130-x86_64-linux"."""
    stable_abi = environment.TORCH_MINIMUM.replace(".", "")
    return f"torch-stable-abi{stable_abi}-{variant.replace('.', '')}-{platform.machine()}-linux"


def renamed(text: str, name: str, namespace: str) -> str:
    """Source code of the package under another name, for a library with another namespace of ops."""
    text = re.sub(r"\b(from |import |import_module\(f?\"|torch\.ops\.)moe_fp8_ext\b", rf"\g<1>{name}", text)
    text = re.sub(r"\bmoe_fp8_ext(?=::)", name, text)
    return re.sub(r"\bmoe_fp8\b", namespace, text)


def lay_out(library: Path, name: str, namespace: str, backend: str, archs: list[str], folder: Path) -> None:
    """Fills the folder of a variant."""
    for source in PACKAGE.rglob("*.py"):
        target = folder / source.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(source.read_text(), name, namespace))
    shutil.copy(library, folder)
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "_ops.py").write_text(
        f'"""The ops of this build: torch.ops.{namespace}."""\n\nimport torch\n\nfrom {name} import _C\n\n'
        f"ops = torch.ops.{namespace}\n\n\n"
        f'def add_op_namespace_prefix(op: str) -> str:\n    return f"{namespace}::{{op}}"\n'
    )
    metadata = {"name": "moe-fp8-ext", "id": name, "version": 1, "license": "BSD-3-Clause", "python-depends": []}
    metadata["backend"] = {"type": backend} | ({"archs": archs} if archs else {})
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def build(backend: str) -> Path:
    """Builds the library in a namespace of its own, and fills the folder of its variant."""
    os.environ.update(wheels.settings(backend))
    found, name, built = environment.toolchain(), name_of_build(backend), ROOT / "build" / "kernel-hub"
    shutil.rmtree(built, ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", built]
    if subprocess.run(command, cwd=ROOT, env=os.environ | {"MOE_FP8_NAMESPACE": name}).returncode:
        environment.fail("the library was not built; see the messages above.")
    folder = OUT / "build" / name_of_variant(found.variant)
    shutil.rmtree(folder, ignore_errors=True)
    archs = [re.sub(r"(\d)([a-f]?)$", r".\1\2", arch) for arch in found.archs.split(";")] if backend == "cuda" else []
    lay_out(built / "moe_fp8_ext" / LIBRARY, name, name, backend, archs, folder)
    return folder


if __name__ == "__main__":
    folders = [build(backend) for backend in wheels.backends()]
    shutil.copy(ROOT / "README.md", OUT)
    print(*folders, sep="\n")

"""Builds the CPU backend with AddressSanitizer and UBSan, and calls every op of it at random: tests/support/fuzz.py.

    python tests/toolchain/sanitized_fuzz.py [--seeds 3] [--plant]

The build is one of its own in build/sanitized. --plant checks the check: it adds a signed overflow to a copy of the
sources, and the run must find it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cache import ROOT

sys.path.insert(0, str(ROOT / "build_backend"))
import environment  # noqa: E402

FLAGS = (
    "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
)
CALLS = "valid=150", "junk=300"


def build(csrc: Path, folder: Path) -> Path:
    """A copy of the package with a sanitized module."""
    torch, package = environment.find_torch(), folder / "site" / "moe_fp8_ext"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "moe_fp8_ext", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS": FLAGS,
        "CMAKE_CXX_FLAGS_DEBUG": "",
        "CMAKE_MAKE_PROGRAM": environment.find_tool("ninja"),
        "MOE_FP8_ARCHS": "",
        "MOE_FP8_BACKEND": "cpu",
        "MOE_FP8_PYTHON_INCLUDE": sysconfig.get_path("include"),
        "MOE_FP8_TORCH": torch.path,
        "MOE_FP8_VERSION": "sanitized",
    }
    cmake, tree = environment.find_tool("cmake", environment.CMAKE_MINIMUM), folder / "cmake"
    defines = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(
        [cmake, "-S", csrc.parent, "-B", tree, "-G", "Ninja", *defines], check=True, stdout=subprocess.DEVNULL
    )
    jobs = os.environ.get("MAX_JOBS")
    subprocess.run(
        [cmake, "--build", tree, *(["--parallel", jobs] if jobs else [])], check=True, stdout=subprocess.DEVNULL
    )
    shutil.copy(tree / "_C.so", package / "_C.so")
    return package.parent


def preloaded() -> str:
    """AddressSanitizer's library must come first, and look for exceptions in a libstdc++ that is there already."""
    compiler, found = os.environ.get("CXX", "g++").split(), []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*compiler, f"-print-file-name={name}"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found.append(str(Path(answer).resolve()))
    return " ".join(found)


def fuzz(site: Path, seed: int) -> int:
    """The exit status of random calls. Leaks are not looked for: Python leaves much behind."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {
        "PYTHONPATH": path,
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, ROOT / "tests" / "support" / "fuzz.py", str(seed), *CALLS]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode or done.stdout != "".join(f"done {calls}\n" for calls in CALLS):
        print(
            f"seed {seed}: exit status {done.returncode}\n", "\n".join(done.stderr.splitlines()[-40:]), file=sys.stderr
        )
        return done.returncode or 1
    return 0


def planted(folder: Path) -> Path:
    """A copy of the sources in which a loop over experts counts past the largest int."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    library = folder / "csrc" / "ops" / "sorting.cpp"
    text = library.read_text()
    at = text.index("call.empty") if "call.empty" in text else text.index("empty(")
    line = text.rindex("\n", 0, at) + 1
    library.write_text(f"{text[:line]}  volatile int past = 0x7fffffff; past = past + 1;\n{text[line:]}")
    return folder / "csrc"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="processes of random calls")
    parser.add_argument("--plant", action="store_true", help="add an overflow that must be found")
    arguments = parser.parse_args()
    folder = ROOT / "build" / ("planted" if arguments.plant else "sanitized")
    folder.mkdir(parents=True, exist_ok=True)
    csrc = planted(folder / "tree") if arguments.plant else ROOT / "csrc"
    print("building for the CPU with AddressSanitizer and UBSan", flush=True)
    site = build(csrc, folder)
    failed = [seed for seed in range(arguments.seeds) if fuzz(site, seed)]
    if arguments.plant:
        print("the planted overflow was found" if failed else "the planted overflow was not found")
        return not failed
    print(f"{arguments.seeds} times {' and '.join(CALLS)} random calls, sanitized: {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Random calls of every op, on guarded memory and in separate processes, so that a crash is seen. See fuzz.py.

Set MOE_FP8_FUZZ=50 in the environment to make fifty times as many calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TIMES = int(os.environ.get("MOE_FP8_FUZZ", "1"))
CALLS = ("valid=200", "junk=500")  # calls of one process; starting one takes as long as some hundred calls


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the allocator that guard_pages.cpp builds."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("guard pages take Linux and a C++ compiler")
    library = tmp_path_factory.mktemp("guard") / "guard_pages.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", SUPPORT / "guard_pages.cpp", "-o", library], check=True)
    return library


@pytest.mark.parametrize("seed", range(TIMES))
def test_random_calls(seed, guard):
    environment = os.environ | {"LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "fuzz.py"), str(seed), *CALLS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    tail = "\n".join(result.stderr.splitlines()[-25:])
    assert result.returncode == 0, f"exit status {result.returncode}\n{tail}"
    assert result.stdout == "".join(f"done {calls}\n" for calls in CALLS), tail


@pytest.mark.parametrize("touch", ["pass", "string_at(p, 17)", "memset(p + 5, 0, 1)", "memset(p - 1, 0, 1)"])
def test_the_guard_sees_what_lies_beside_a_tensor(touch, guard):
    """5 bytes are allocated. Reading beyond 16 bytes, writing behind the 5 bytes, and writing before them end the
    process."""
    program = "from ctypes import *; v = c_void_p(); c = CDLL(None); c.posix_memalign(byref(v), 64, 5); p = v.value"
    program += f"; {touch}; c.free(v)"
    result = subprocess.run([sys.executable, "-c", program], env=os.environ | {"LD_PRELOAD": str(guard)}, check=False)
    assert result.returncode == 0 if touch == "pass" else result.returncode < 0

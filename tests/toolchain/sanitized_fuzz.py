"""Builds the CPU backend with AddressSanitizer and UBSan, and calls every op at random (tests/support/fuzz.py).

    python tests/toolchain/sanitized_fuzz.py [--seeds 10] [--plant]

The build is separate, in build/sanitized; the usual build stays as it is. --plant tests the check itself: it
builds a copy of the sources with two bugs and expects the sanitizers to report both.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cache import ROOT

sys.path.insert(0, str(ROOT / "build_backend"))
import environment  # noqa: E402

# Without optimization, the build takes half of the time and the calls as long as with it: most of theirs is Python's.
FLAGS = (
    "-O0 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
)
CALLS = "valid=150", "junk=300"
SETTINGS = {
    # Python frees little at exit. Some calls ask for more memory than there is: torch raises where it gets none, but
    # Linux promises more than it has, and kills the process that writes it.
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:max_allocation_size_mb=1024",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
}
# --plant inserts this at the start of sort_tokens_op. The variable chooses the bug by a word of the sanitizer's report.
BUGGY_FILE, BUGS = "csrc/ops/sorting.cpp", ("signed integer overflow", "heap-buffer-overflow")
BUGGY_CODE = """
  if (const char* bug = std::getenv("PLANTED_BUG")) {
    volatile int largest = 0x7fffffff;
    std::vector<int> one(1);
    largest = *bug == 's' ? largest + 1 : one.data()[1];
  }
"""


def run_cmake(*arguments: str | Path) -> None:
    """Runs CMake and prints its messages only if it fails."""
    cmake = environment.find_tool("cmake", environment.CMAKE_MINIMUM)
    done = subprocess.run([cmake, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout)


def build(sources: Path, folder: Path) -> Path:
    """Builds the extension from a tree of sources. Returns a folder for PYTHONPATH with a copy of the package."""
    package = folder / "site" / "moe_fp8_ext"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "moe_fp8_ext", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS": FLAGS,
        "CMAKE_CXX_FLAGS_DEBUG": "",
        "CMAKE_MAKE_PROGRAM": environment.find_tool("ninja"),
        "MOE_FP8_ARCHS": "",
        "MOE_FP8_BACKEND": "cpu",
        "MOE_FP8_TORCH": environment.find_torch().path,
        "MOE_FP8_VERSION": "sanitized",
    }
    objects, jobs = folder / "cmake", os.environ.get("MAX_JOBS")
    cache = objects / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={objects}\n" not in cache.read_text():
        shutil.rmtree(objects)  # the tree was moved, and CMake refuses to build in another place
    run_cmake("-S", sources, "-B", objects, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items()))
    run_cmake("--build", objects, *(["--parallel", jobs] if jobs else []))
    shutil.copy(objects / "libmoe_fp8.so", package)
    return package.parent


def plant_bugs(folder: Path) -> Path:
    """Copies the sources to a folder and inserts the bugs."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    file = folder / BUGGY_FILE
    text, count = re.subn(r"(\bsort_tokens_op\([^)]*\) \{\n)", rf"\1{BUGGY_CODE}", file.read_text())
    assert count == 1, f"{BUGGY_FILE} has no sort_tokens_op to plant bugs in"
    file.write_text(f"#include <cstdlib>\n#include <vector>\n{text}")
    return folder


def preloaded_libraries() -> str:
    """AddressSanitizer's library must come first. It looks for the functions of exceptions in libstdc++ right then."""
    compiler, paths = os.environ.get("CXX", "g++").split(), []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*compiler, f"-print-file-name={name}"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        paths.append(str(Path(answer).resolve()))
    return " ".join(paths)


def errors_of_calls(site: Path, seed: int, bug: str = "") -> str:
    """Makes random calls in one process. Returns its output if it failed."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = SETTINGS | {"PYTHONPATH": path, "LD_PRELOAD": preloaded_libraries()}
    settings |= {"PLANTED_BUG": bug} if bug else {}
    command = [sys.executable, ROOT / "tests" / "support" / "fuzz.py", str(seed), *CALLS]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    is_complete = done.stdout == "".join(f"done {calls}\n" for calls in CALLS)
    return "" if done.returncode == 0 and is_complete else f"{done.stderr}\nexit status {done.returncode}"


def excerpt(errors: str) -> str:
    """The call that failed and its report, without frames outside of this tree."""
    lines = [line for line in errors.splitlines() if not re.match(r" +#\d+ (?!.*/csrc/)", line)]
    last_call = max((i for i, line in enumerate(lines) if re.match(r"(valid|junk) call \d+: ", line)), default=0)
    return "\n".join(line[:300] for line in lines[last_call:][-30:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many processes make random calls")
    parser.add_argument("--plant", action="store_true", help="plant bugs, which must be found")
    arguments = parser.parse_args()
    name = "planted" if arguments.plant else "sanitized"
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    print("moe_fp8_ext: building for the CPU with AddressSanitizer and UBSan: a minute on two cores", flush=True)
    if arguments.plant:
        site, missed = build(plant_bugs(folder / "tree"), folder), []
        for bug in BUGS:
            errors = errors_of_calls(site, 0, bug)
            is_found = bug in errors and Path(BUGGY_FILE).name in errors
            missed += [] if is_found else [bug]
            print(f"planted {bug}: {'found' if is_found else f'NOT FOUND {excerpt(errors)}'}")
        return bool(missed)
    site, failed = build(ROOT, folder), 0
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count())) as pool:
        outputs = list(pool.map(lambda seed: errors_of_calls(site, seed), range(arguments.seeds)))
    for seed, errors in enumerate(outputs):
        if errors:
            failed += 1
            print(f"seed {seed} failed:\n{excerpt(errors)}")
    print(f"{arguments.seeds} processes of {' and '.join(CALLS)} random calls under sanitizers: {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

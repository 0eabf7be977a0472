"""Lets a machine with a new glibc link a library for machines with an older one.

A linker writes the versions of glibc's symbols that it finds on the build machine into a library, and an older machine
then refuses to load it. The package ziglang makes stand-ins of glibc's libraries at any version: they have its symbols
and no code. The library links with these instead. A function that the older glibc lacks is an error of the linker.
The one name that headers of libstdc++ ask of a newer glibc is a variable, which the library then brings along.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Zero means that there may be threads, which is always true.
MISSING = '__attribute__((visibility("hidden"))) char __libc_single_threaded;'
LIBRARIES = ("c", "dl", "ld", "m", "pthread", "rt")


def stand_ins(glibc: str, folder: Path, machine: str) -> Path:
    """Fills the folder with stand-ins of glibc's libraries, such as "2.28", under the names that linkers look for."""
    if (folder / "missing.o").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, linked = Path(scratch, "missing.c"), Path(scratch, "linked.so")
        source.write_text(MISSING)
        libraries = ["-ldl", "-lm", "-lpthread", "-lrt"]
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{glibc}", "-fPIC", source]
        for output in (["-shared", *libraries, "-o", linked], ["-c", "-o", folder / "missing.o"]):
            subprocess.run([*zig, *output], env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": scratch}, check=True)
        for name in LIBRARIES:
            (made,) = Path(scratch).glob(f"o/*/lib{name}.so.[0-9]*")
            shutil.copy(made, folder / f"lib{name}.so")
        (made,) = Path(scratch).glob("o/*/libc_nonshared.a")  # such as atexit, before glibc 2.34
        shutil.copy(made, folder)
    return folder

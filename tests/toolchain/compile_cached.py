"""A compiler launcher for CMake that takes objects from the cache. It also keeps nvcc's messages, for cuda_check.py.

To use it, set CMAKE_CUDA_COMPILER_LAUNCHER="python3;.../compile_cached.py" in the environment of the first build.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cache import CSRC, ROOT, cached, closure, key

PLACE_OF_ROOT = "@root@"  # stands for the path of the clone in a list of dependencies


def value(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


def source(command: list[str]) -> Path | None:
    """Returns the file of csrc/ that the command compiles, or None."""
    name = value(command, "-c")
    return Path(name) if name and Path(name).is_relative_to(CSRC) else None


def compiled(command: list[str]) -> Path:
    """Returns a folder with the command's outputs: object, dependencies, log and, from nvcc, PTX and machine code."""
    outputs = {"-o": "object", "-MF": "dependencies"}
    words = [word for word in command if word not in {value(command, o) for o in (*outputs, "-MT")}]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    # The key holds the contents of this tree's headers, but only the version of torch.
    packages = [Path(word).parent / "version.py" for word in command]
    files = [*closure(source(command), CSRC), *sorted({p for p in packages if p.is_file()})]

    def make(folder: Path) -> None:
        changed = list(command)
        for option, name in outputs.items():
            if option in command:
                changed[command.index(option) + 1] = str(folder / name)
        if source(command).suffix == ".cu":
            changed += ["--keep", "--keep-dir", str(folder), "-Xptxas", "-v"]
        done = subprocess.run(changed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (folder / "log").write_text(done.stdout)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stdout)
        for file in folder.iterdir():
            if file.suffix not in ("", ".ptx", ".cubin"):
                file.unlink()
        dependencies = folder / "dependencies"
        if dependencies.is_file():
            dependencies.write_text(dependencies.read_text().replace(str(ROOT), PLACE_OF_ROOT))

    return cached(key("object", version, *words, files=files), make)


def main(command: list[str]) -> int:
    if source(command) is None:
        return subprocess.run(command).returncode
    try:
        folder = compiled(command)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return error.returncode
    Path(value(command, "-o")).write_bytes((folder / "object").read_bytes())
    if "-MF" in command:
        text = (folder / "dependencies").read_text()
        Path(value(command, "-MF")).write_text(text.replace(PLACE_OF_ROOT, str(ROOT)))
    log = (folder / "log").read_text()
    print(re.sub(r"^(ptxas info|    \d+ bytes).*\n", "", log, flags=re.M), end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

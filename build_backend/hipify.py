"""Translates the kernels and headers of csrc to HIP, with torch's hipify: hipify.py <torch package> <csrc> <out>."""

import shutil
import sys
from pathlib import Path


def hipify(torch_path: Path, csrc: Path, out: Path) -> None:
    # hipify imports nothing else of torch. Imported as a top-level package, it works even if torch cannot be imported.
    sys.path.insert(0, str(torch_path / "utils"))
    from hipify import hipify_python

    shutil.rmtree(out, ignore_errors=True)  # hipify copies only if the folder does not exist
    hipify_python.hipify(
        project_directory=str(csrc),
        output_directory=str(out),
        header_include_dirs=["."],
        includes=["*"],
        extensions=(".cu", ".cuh", ".h"),
        show_progress=False,
        is_pytorch_extension=True,
    )


if __name__ == "__main__":
    hipify(*(Path(arg).resolve() for arg in sys.argv[1:]))

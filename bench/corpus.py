"""Collects the text of the installed packages: Python sources and documentation, as bytes.

    python bench/corpus.py --out corpus.pt

Every text counts once, however many packages ship it. Texts follow one another in the order of their hashes, so the
corpus depends on neither paths nor the order of folders. The hash of a text also decides whether the text is held out.
A zero byte ends each text.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

SUFFIXES = ".py", ".md", ".rst", ".txt"
PACKAGES = "site-packages", "dist-packages"
SEPARATOR = b"\0"
LARGEST = 1_000_000  # bytes of a text; larger files are tables and fixtures
LIMIT = 400_000_000  # bytes of the corpus
HELD_OUT = 2  # percent of the texts


def folders() -> list[Path]:
    """The standard library, and every folder of packages that Python searches."""
    library = Path(sysconfig.get_path("stdlib"))
    return [library, *(Path(p) for p in sys.path if Path(p).name in PACKAGES)]


def files(folder: Path) -> Iterator[str]:
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in PACKAGES and name != "__pycache__"]
        yield from (os.path.join(place, name) for name in names if name.endswith(SUFFIXES))


def read(path: str) -> bytes:
    """The text of a file, or nothing if the file is no text, is too large or cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST + 1)
    except OSError:
        return b""
    return b"" if len(text) > LARGEST or SEPARATOR in text else text


def collect(where: list[Path], limit: int = LIMIT) -> dict:
    """Returns {"train", "held_out": uint8 tensors, "files": how many texts, "hash": of both tensors}."""
    paths = sorted({path for folder in where for path in files(folder)})
    with ThreadPoolExecutor(max_workers=32) as pool:
        texts = {blake2b(text, digest_size=16).digest(): text for text in pool.map(read, paths) if text}
    parts, count, total = {"train": bytearray(), "held_out": bytearray()}, 0, 0
    for digest in sorted(texts):
        if total + len(texts[digest]) >= limit:
            break
        # The last bytes decide, because the first ones decide what a limit cuts off.
        part = parts["held_out" if int.from_bytes(digest[-4:], "little") % 100 < HELD_OUT else "train"]
        part += texts[digest] + SEPARATOR
        count, total = count + 1, total + len(texts[digest]) + 1
    whole = blake2b(digest_size=16)
    for part in parts.values():
        whole.update(part)
    tensors = {name: torch.frombuffer(part, dtype=torch.uint8) for name, part in parts.items() if part}
    return tensors | {"files": count, "hash": whole.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the corpus, for bench/pretrain.py")
    out, began = parser.parse_args().out, time.perf_counter()
    corpus = collect(folders())
    torch.save(corpus, out)
    sizes = ", ".join(f"{corpus[name].numel():,} bytes {name.replace('_', ' ')}" for name in ("train", "held_out"))
    print(f"{corpus['files']:,} texts, {sizes}, hash {corpus['hash']}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()

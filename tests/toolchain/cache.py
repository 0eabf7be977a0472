"""A cache of compilers' outputs, by a hash of all inputs. It is in the user's cache folder, and all clones share it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
DAYS = 30  # an entry is removed this long after its last use


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_fp8_ext"


def closure(source: Path, *roots: Path) -> list[Path]:
    """Returns the source and all headers that it includes. A header is looked up beside the file that includes it, then
    in the roots."""
    found, todo = [], [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', file.read_text(), re.M):
            places = (place / name for place in (file.parent, *roots))
            todo += [place.resolve() for place in places if place.is_file()][:1]
    return sorted(found)


def key(*words: object, files: Iterable[Path] = ()) -> str:
    """Hashes words and contents of files. The root is cut from paths, so that all clones have the same key."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(f"{word}\0".replace(str(ROOT), "").encode())
    for file in files:
        name, text = str(file).replace(str(ROOT), ""), file.read_bytes()
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:32]


def cached(key: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder of a key. If it does not exist, make(folder) fills it first."""
    entry = folder() / key
    if entry.is_dir():
        os.utime(entry)
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=entry.parent))
    try:
        make(draft)
        draft.rename(entry)
    except OSError:
        if not entry.is_dir():  # if it exists now, another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _forget()
    return entry


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """A context that one process at a time can enter."""
    import fcntl  # not on Windows, where nothing calls this

    folder().mkdir(parents=True, exist_ok=True)
    with open(folder().with_suffix(f".{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget() -> None:
    oldest = time.time() - DAYS * 24 * 3600
    for entry in folder().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has renamed its draft
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)

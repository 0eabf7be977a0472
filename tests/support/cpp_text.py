"""C++ sources for the house tests: code without comments and strings, directives, includes and their graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PIECE = re.compile(
    r"""(?P<comment>//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/)
      | (?P<raw>R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)")
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<digits>\d[\w.']*)
    """,
    re.S | re.X,
)


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yields comments, strings and the code between them, as (kind, text)."""
    position = 0
    for match in _PIECE.finditer(text):
        kind = match.lastgroup if match.lastgroup != "mark" else "raw"
        if kind == "digits":
            continue
        if match.start() > position:
            yield "code", text[position : match.start()]
        yield ("string" if kind == "raw" else kind), match[0]
        position = match.end()
    yield "code", text[position:]


def comments(text: str) -> list[str]:
    """The lines of all comments."""
    found = (piece for kind, piece in pieces(text) if kind == "comment")
    lines = (line.strip().removeprefix("//").strip("/*! ") for piece in found for line in piece.splitlines())
    return [line for line in lines if line]


def strings_given_to(function: str, text: str) -> list[str]:
    """For every call of `function`, its string literals, joined as the compiler joins adjacent ones."""
    found: list[str] = []
    for kind, piece in pieces(text):
        if kind == "code":
            found += [""] * len(re.findall(rf"\b{re.escape(function)}\s*\(", piece))
        elif kind == "string" and found:
            found[-1] += piece[1:-1]
    return found


def code(text: str, with_strings: bool = False) -> str:
    """The code without comments. Strings are emptied unless with_strings. Continued lines are joined."""
    kept = {"comment": lambda piece: " " + "\n" * piece.count("\n"), "string": lambda p: p if with_strings else '""'}
    return "".join(kept.get(kind, str)(piece) for kind, piece in pieces(text)).replace("\\\n", " ")


def directives(text: str) -> list[tuple[str, str]]:
    """(name, rest) of every preprocessor directive."""
    return re.findall(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*?)[ \t]*$", code(text, with_strings=True), re.M)


def includes(text: str) -> list[str]:
    """The included names, each with its leading quote or bracket."""
    return [m[1] for name, rest in directives(text) if name == "include" and (m := re.match(r'([<"][^>"]+)[>"]', rest))]


def include_graph(root: Path, sources: list[Path]) -> dict[str, list[str]]:
    """For every source under `root`, the files under `root` that it includes; both by their paths relative to it."""
    graph = {}
    for path in sources:
        found = []
        for name in (i[1:] for i in includes(path.read_text()) if i[0] == '"'):
            places = (p.resolve() for p in (root / name, path.parent / name))
            place = next((p for p in places if p.is_file()), None)
            found.append(place.relative_to(root).as_posix() if place else f"? {name}")
        graph[path.relative_to(root).as_posix()] = found
    return graph


def cycle(graph: dict[str, list[str]]) -> list[str] | None:
    """A path from a file back to itself, or None."""
    visited: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in visited:
            return None
        found = next(filter(None, (walk(n, [*path, node]) for n in graph.get(node, ()))), None)
        visited.add(node)
        return found

    return next(filter(None, (walk(node, []) for node in graph)), None)

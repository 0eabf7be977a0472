"""Pages of the site that are files outside docs/, and links that lead out of it.

A link in a Markdown file is a path in the repository, so that it works there too. Here it becomes a link between pages
of the site. A link to any other file of the repository becomes plain text, or a link to `repo_url` if mkdocs.yml has
one. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {  # page of the site: file of the repository
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "design.md": "DESIGN.md",
    "results.md": "bench/results/README.md",
}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    folder = posixpath.dirname(OUTSIDE.get(uri, f"docs/{uri}"))
    pages = {source: name for name, source in OUTSIDE.items()}
    pages |= {f"docs/{file.src_uri}": file.src_uri for file in files if file.src_uri not in OUTSIDE}

    def target(path: str) -> str:
        return posixpath.normpath(posixpath.join(folder, path))

    def from_here(site_path: str) -> str:
        return posixpath.relpath(site_path, posixpath.dirname(uri) or ".")

    def link(found: re.Match) -> str:
        text, path, anchor = found[1], target(found[2]), found[3] or ""
        if path in pages:
            return f"[{text}]({from_here(pages[path])}{anchor})"
        if path == "README.md":
            return f"[{text}]({from_here('index.md')}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"{uri}: the link to {found[2]} leads to no file")
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    def image(found: re.Match) -> str:
        path = target(found[2])
        if path not in pages:
            raise PluginError(f"{uri}: {found[2]} is no picture in docs/")
        return f"![{found[1]}]({from_here(pages[path])})"

    def text(part: str) -> str:
        return IMAGE.sub(image, LINK.sub(link, part))

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):  # code stays as it is
        parts += [text(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, text(markdown[at:])])

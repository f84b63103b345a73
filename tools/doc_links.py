"""Finds dead links in the Markdown files of this repository: pages, anchors, images, and files named in backquotes.

Needs neither mkdocs nor torch, so that it runs among the fast tests. ``make docs`` runs it as well.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: #+)?$", re.MULTILINE)
_FILE = re.compile(r"(?:src|tests|benchmarks|docs|tools)/[\w./*-]+")


def sources() -> dict[Path, str]:
    """The Markdown files, with their text."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in files}


def dead_links(pages: Mapping[Path, str]) -> list[str]:
    """One line for each link that leads nowhere; ``pages`` are all pages there are, by their path."""
    found = anchors(pages)
    return [
        f"{path.relative_to(ROOT)}: {problem}"
        for path, text in pages.items()
        for problem in (*_links(path, text, found), *_files(text))
    ]


def anchors(pages: Mapping[Path, str]) -> dict[Path, set[str]]:
    """The anchors of each page."""
    return {path: set(_slugs(text)) for path, text in pages.items()}


def _links(path: Path, text: str, found: Mapping[Path, set[str]]) -> Iterator[str]:
    for target in _LINK.findall(_CODE.sub("", _FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        if to not in found and not to.is_file():
            yield f"no such file: {target}"
        elif DOCS in path.parents and DOCS not in to.parents:
            yield f"not part of the site: {target}"
        elif anchor and anchor not in found.get(to, set()):
            yield f"no such anchor: {target}"


def _files(text: str) -> Iterator[str]:
    """Files of the repository that are named in backquotes."""
    for _, code in _CODE.findall(_FENCE.sub("", text)):
        for name in _FILE.findall(code) if _FILE.match(code) else ():
            if not any(ROOT.glob(name.rstrip("."))):
                yield f"no such file in the repository: {name}"


def _slugs(text: str) -> Iterator[str]:
    """Anchors of the headings, as Python-Markdown makes them."""
    seen: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        ascii_text = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip().lower())
        number, name = 0, slug
        while name in seen:
            number, name = number + 1, f"{slug}_{number + 1}"
        seen.add(name)
        yield name

"""The reference pages in the repository are those that the code gives."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import reference_pages

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"


def test_the_reference_is_that_of_the_code():
    stale = [name for name, text in reference_pages.pages().items() if (DOCS / name).read_text("utf-8") != text]
    assert not stale, f"{', '.join(stale)}: run `make reference`"


def test_every_option_is_named_on_a_page_or_in_a_test():
    """One that is not has no reader who could know of it, and nothing that shows what it is good for."""
    pages = [p for p in DOCS.rglob("*.md") if p.parent.name != "reference"]
    files = [*pages, *(p for p in TESTS.rglob("*.py") if p != Path(__file__))]
    named = set(re.findall(r"--[a-z][a-z0-9-]*", "\n".join(path.read_text("utf-8") for path in files)))
    options = re.findall(r"^\| `(?:-\w, )?(--[\w-]+)", (DOCS / "reference/options.md").read_text("utf-8"), re.MULTILINE)
    assert len(options) > 100
    assert sorted(set(options) - named) == []

"""The reference pages in the repository are those that the code gives."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import reference_pages

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_that_of_the_code():
    stale = [name for name, text in reference_pages.pages().items() if (DOCS / name).read_text("utf-8") != text]
    assert not stale, f"{', '.join(stale)}: run `make reference`"

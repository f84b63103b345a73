"""No link of the documentation is dead: pages, anchors, images, and files named in backquotes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import doc_links


def test_no_link_is_dead():
    problems = doc_links.dead_links(doc_links.sources())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](nowhere.md)", "no such file: nowhere.md"),
        ("[a](glossary.md#nothing)", "no such anchor: glossary.md#nothing"),
        ("[a](#nothing)", "no such anchor: #nothing"),
        ("![a](../images/nothing.png)", "no such file: ../images/nothing.png"),
        ("[a](../../README.md)", "not part of the site: ../../README.md"),
        ("see `tests/nothing.py`", "no such file in the repository: tests/nothing.py"),
    ],
)
def test_a_dead_link_is_found(text, problem):
    page = doc_links.DOCS / "concepts" / "new.md"
    assert doc_links.dead_links({**doc_links.sources(), page: text}) == [f"docs/concepts/new.md: {problem}"]


def test_links_that_lead_somewhere():
    links = "[a](#one-two) [b](glossary.md#due) [c](../reference/exit-codes.md) `tests/docs/*.py`"
    text = f"# One `two`\n{links}\n```\n[d](x.md)\n```\n"
    page = doc_links.DOCS / "concepts" / "new.md"
    assert doc_links.dead_links({**doc_links.sources(), page: text}) == []

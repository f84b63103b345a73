"""How the package is cited: a file of the Citation File Format 1.2.0 that says what pyproject.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import unsilent

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith(" "))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {
        "cff-version",
        "message",
        "title",
        "version",
        "license",
    } <= fields.keys()  # with authors, all that the format asks for
    assert lines[lines.index("authors:") + 1] == "  - name: The Unsilent developers"
    assert (fields["cff-version"], fields["type"]) == ("1.2.0", "software")
    assert (fields["license"], fields["version"]) == (project["license"], unsilent.__version__)

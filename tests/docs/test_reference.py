"""The reference pages in the repository are those that the code gives."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

import unsilent
from unsilent.campaigns.kinds import Kind

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


def test_the_page_of_python_has_every_public_name():
    """And no name that there is not. Kinds of campaigns are for those who add a study."""
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", (DOCS / "reference/api.md").read_text("utf-8"), re.MULTILINE)
    importable = [(module, name) for module, name in listed if not module.startswith("unsilent.integrations.")]
    shown = {id(getattr(importlib.import_module(module), name)) for module, name in importable}
    assert len(shown) == len(importable)
    for module in (
        "unsilent",
        "unsilent.faults",
        "unsilent.monitor",
        "unsilent.placement",
        "unsilent.replicas",
        "unsilent.selftest",
    ):
        package = importlib.import_module(module)
        public = {name: getattr(package, name) for name in package.__all__ if not name.startswith("_")}
        assert [name for name, value in public.items() if not isinstance(value, Kind) and id(value) not in shown] == []


def test_functions_that_are_made_at_run_time_are_shown_as_functions():
    griffe = pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("griffe_functions", TESTS.parent / "tools" / "griffe_functions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extensions = griffe.load_extensions(module.GeneratedFunctions)
    for name, place in (
        ("pvf", "studies/pvf/study"),
        ("training", "studies/training/study"),
        ("load", "workloads/__init__"),
    ):
        file = TESTS.parent / "src" / "unsilent" / f"{place}.py"
        path = f"unsilent.{place}".replace("/", ".").removesuffix(".__init__")
        shown = griffe.visit(path, file, file.read_text("utf-8"), extensions=extensions)[name]
        assert shown.is_function
        assert [p.name for p in shown.parameters] == [*inspect.signature(getattr(unsilent, name)).parameters]
        sections = {section.kind.value: section.value for section in shown.docstring.parsed}
        assert {p.name for p in sections["parameters"]} <= {p.name for p in shown.parameters}
        if name == "pvf":
            trials = shown.parameters["trials"]
            assert (trials.annotation, trials.default, trials.kind.value) == (
                "int | str | None",
                "None",
                "keyword-only",
            )

"""A job of four ranks whose device fails goes on without it, with the bits of a clean start, also where the launcher is killed.

``python -m benchmarks.isolation`` does the same twenty times.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        yield importlib.import_module("benchmarks.isolation")


def test_a_job_goes_on_without_the_faulty_device(bench, tmp_path):
    run = bench.IsolatedRun(slot=2, step=37, killed="verdict", is_corrupt=True)
    problems = bench.problems_of(run, tmp_path / "job", bench.References(tmp_path / "references"))
    assert problems == [], (tmp_path / "job" / "log").read_text()

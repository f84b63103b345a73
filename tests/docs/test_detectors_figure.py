"""The table of detectors of corrupted answers is complete, is what the figure shows, and has what the page says of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("detectors_figure", ROOT / "tools" / "detectors_figure.py")
detectors_figure = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(detectors_figure)


@pytest.fixture
def table():
    """Columns of the file, as lists of texts; read without the code of the tool."""
    head, *lines = (ROOT / "docs" / detectors_figure.TABLE).read_text("utf-8").splitlines()
    return dict(zip(head.split(","), zip(*(line.split(",") for line in lines), strict=True), strict=True))


def test_there_is_one_row_for_each_workload_error_model_and_detector(table):
    rows = set(zip(table["workload"], table["faults"], table["detector"], strict=True))
    assert len(rows) == len(table["workload"]) == 11 * 4 * 13
    assert [len(set(column)) for column in zip(*rows, strict=True)] == [11, 4, 13]
    assert all(0 <= int(share) <= 100 for share in (*table["of_faults_percent"], *table["of_answers_percent"]))


def test_the_figure_shows_the_table(table):
    pytest.importorskip("matplotlib")
    panels = detectors_figure.draw(detectors_figure.read_table(ROOT / "docs" / detectors_figure.TABLE)).axes[:4]
    shares = np.array(table["of_faults_percent"], int).reshape(11, 4, 13)  # as the rows of the file are ordered
    for number, axes in enumerate(panels):
        assert (axes.images[0].get_array() == shares[:, number]).all()
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(table["workload"][:: 4 * 13])
    assert [label.get_text() for label in panels[2].get_xticklabels()] == list(table["detector"][:13])


def test_what_the_page_says_of_the_figure(table):
    shares = np.array(table["of_faults_percent"], int).reshape(11, 4, 13)
    at = {name: number for number, name in enumerate(table["detector"][:13])}
    assert (shares[..., at["duplication"]] == 100).all()
    assert (shares[:, :2, at["weight-integrity"]] == 100).all()
    assert (shares[:, 2:, at["weight-integrity"]] == 0).all()
    rules = [at["dr-dna"], at["ranger"]]
    assert (shares[:, 2:, rules] > 50).sum(axis=0).min() >= 10  # workloads, of eleven
    assert (shares[:, 0, rules].min(), shares[:, 0, rules].max()) == (56, 86)
    scenes = table["workload"].index("scenes-detector") // (4 * 13)
    assert shares[scenes, 2, at["dr-dna"]] == 46 == shares[:, 2:, at["dr-dna"]].min()

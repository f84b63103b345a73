"""A few damaged stores of every kind; hundreds of them in ``tests/claims/test_hostile_stores.py``."""

from __future__ import annotations

import pytest

import hostile_stores
import hostile_verbs as verbs

pytestmark = pytest.mark.slow

EACH = 11
"""The first half of the ways there are for stores of unsilent pvf, the second for trainings."""


def attacked(path, kind, trial, ways, tmp_path, monkeypatch):
    monkeypatch.setattr(hostile_stores, "WAYS", ways)
    monkeypatch.chdir(path.parent)
    watch = verbs.Watch()
    for turn, (told, mutant) in enumerate(hostile_stores.mutants(path, tmp_path / "m", kind, len(ways), verbs.repair)):
        verbs.attack(watch, told, mutant, kind, path, trial, turn)
    assert watch.codes[2] > len(ways)


def test_stores_of_pvf(stored, tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    attacked(stored.resolve(), "pvf", "first/x1/0", hostile_stores.WAYS[:EACH], tmp_path, monkeypatch)


def test_stores_of_trainings(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    attacked(verbs.make_training(tmp_path), "training", "random/x/0", hostile_stores.WAYS[EACH:], tmp_path, monkeypatch)

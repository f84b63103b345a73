"""``unsilent report STORE --help``: options of stores of one kind; without a store those of every store."""

from __future__ import annotations

import pytest

from unsilent.cli.table import load_command
from unsilent.options import options_of
from unsilent.studies.campaign_kinds import KINDS
from unsilent.studies.pvf.kind import PVF


@pytest.mark.parametrize("verb", ["report", "diff", "replay"])
def test_without_a_store_there_are_no_options_of_a_kind(verb):
    assert set(options_of(*load_command(verb).all_option_classes())) < {
        "store", "first", "second", "output", "canonical", "as_json", "plain",
        "trial", "workload", "accelerator", "options", "data", "weights",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_store_has_the_options_of_its_kind(kind, monkeypatch):
    monkeypatch.setattr("unsilent.studies.campaign_kinds.find_kind_of_store", lambda path: kind)
    shown = options_of(*load_command("report").all_option_classes(["s.sqlite"]))
    assert set(options_of(kind.analysis_options, kind.report_options)) < set(shown)
    assert ("card" in shown) == (kind is PVF)

"""Contract tests for kinds of campaign: continuing, splitting, merging and exporting must not change a row."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

from unsilent.campaigns.driver import run_campaign
from unsilent.campaigns.export import canonical_lines, export_store
from unsilent.campaigns.inline import InlineExecutor
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.merging import merge_stores
from unsilent.campaigns.options import Budget
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.store import Store


class KindContract(ABC):
    """Tests of a kind of campaign.

    A subclass defines `make_kind` and `make_spec`. Trials run in the test process.

    Attributes:
        trials: Number of trials for each target and number of flips.
    """

    trials: ClassVar[int] = 12

    @abstractmethod
    def make_kind(self) -> Kind[Any, Any, Any]:
        """The kind to test."""

    @abstractmethod
    def make_spec(self) -> Any:
        """A spec of the kind whose trials are quick."""

    def run(self, path: Path, trials: int, shard: tuple[int, int] = (1, 1)) -> Path:
        """Run or continue a campaign and return the path of its store."""
        spec = self.make_spec()
        with (
            InlineExecutor(WorkerJob(self.make_kind().runner, spec)) as executor,
            Store(path, self.make_kind(), write=True) as store,
        ):
            run_campaign(spec, Budget(trials, shard), executor, store, command="a test")
        return path

    def lines(self, path: Path) -> list[str]:
        """The canonical export of a store, as lines."""
        with Store(path, self.make_kind()) as store:
            return list(canonical_lines(store))

    def test_its_records_can_be_stored_and_asked_for(self) -> None:
        self.make_kind().check_records()
        assert json.loads(json.dumps(self.make_spec().to_json()))

    def test_a_campaign_that_is_continued_has_the_rows_of_one_that_was_not(self, tmp_path: Path) -> None:
        path = self.run(tmp_path / "a.sqlite", self.trials // 3)
        first = self.lines(path)
        whole = self.lines(self.run(path, self.trials))
        assert whole == self.lines(self.run(tmp_path / "b.sqlite", self.trials))
        assert len(whole) > len(first)

    def test_shards_are_merged_into_the_whole(self, tmp_path: Path) -> None:
        parts = [self.run(tmp_path / f"{i}.sqlite", self.trials, (i, 3)) for i in (1, 2, 3)]
        merge_stores(tmp_path / "out.sqlite", parts, self.make_kind())
        assert self.lines(tmp_path / "out.sqlite") == self.lines(self.run(tmp_path / "whole.sqlite", self.trials))

    @pytest.mark.parametrize("ending", [".csv", ".json", ".jsonl"])
    def test_an_export_has_every_trial(self, tmp_path: Path, ending: str) -> None:
        with Store(self.run(tmp_path / "a.sqlite", self.trials), self.make_kind()) as store:
            export_store(store, tmp_path / f"out{ending}")
            trials = [str(trial) for trial in store.stored_trial_ids()]
        text = (tmp_path / f"out{ending}").read_text()
        assert trials
        assert all(trial in text for trial in trials)
        assert len(text.splitlines()) == {".csv": len(trials) + 1, ".json": 1, ".jsonl": len(trials)}[ending]

    def test_a_store_is_analysed_and_reported(self, tmp_path: Path) -> None:
        kind = self.make_kind()
        with Store(self.run(tmp_path / "a.sqlite", self.trials), kind) as store:
            report = kind.report(kind.analyse(store))
        assert report.headline
        assert report.schema

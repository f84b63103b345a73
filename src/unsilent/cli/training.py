"""``unsilent training WORKLOAD``: what it adds to other campaigns: noise floors and the guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.cli.paths import default_store
from unsilent.options import OptionValues
from unsilent.report.text import count_text
from unsilent.studies.training.kind import TRAINING
from unsilent.studies.training.spec import ReferenceRunOptions, TrainingAnalysisOptions


class TrainingVerb(CampaignVerb):
    """``unsilent training``."""

    fields_unknown_in_dry_run = ("horizon",)
    example_arguments = "train-resnet --trials 100"

    def default_store_identity(self, asked: OptionValues, spec: Any) -> dict[str, Any]:
        return {**super().default_store_identity(asked, spec), "horizon": asked["horizon"]}

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        floors = 2 * asked["replicas"] + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"
        if asked["guard"]:
            yield "trials that differ from the golden run beyond noise run again under the guard"
            yield "the time estimate does not include runs under the guard"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.cli.progress import make_observer
        from unsilent.studies.training.judging import replica_spec
        from unsilent.studies.training.study import floors_and_horizon, run_training

        path = asked["floor"] or Path(default_store("noise", replica_spec(spec).identity()))
        with make_observer(
            quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"], noun="replica"
        ) as watcher:  # before trials, which take their time
            floors, spec = floors_and_horizon(
                spec, asked.make_dataclass(ReferenceRunOptions), path, asked["jobs"], watcher
            )
        budget, reading = self.budget(asked), asked.make_dataclass(TrainingAnalysisOptions)
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_training(
                spec, budget, executor, store, floors, reading,
                guard=asked["guard"], observer=observer, command=self.command_line(asked),
            )  # fmt: skip


COMMAND = TrainingVerb(TRAINING).command

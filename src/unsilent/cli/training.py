"""``unsilent training WORKLOAD``: what it adds to other campaigns: noise floors and the guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.cli.paths import default_store
from unsilent.options import Asked
from unsilent.report.text import count_text
from unsilent.studies.training.kind import TRAINING
from unsilent.studies.training.spec import ReferenceRunOptions, TrainingAnalysisOptions


class TrainingVerb(CampaignVerb):
    """``unsilent training``."""

    fields_unknown_in_dry_run = ("horizon",)
    example_arguments = "train-resnet --trials 100"

    def default_store_identity(self, asked: Asked, spec: Any) -> dict[str, Any]:
        return {**super().default_store_identity(asked, spec), "horizon": asked[ReferenceRunOptions].horizon}

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        options = asked[ReferenceRunOptions]
        floors = 2 * options.replicas + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"
        if options.guard:
            yield "trials that differ from the golden run beyond noise run again under the guard"
            yield "the time estimate does not include runs under the guard"

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        from unsilent.studies.training.judging import replica_spec
        from unsilent.studies.training.study import floors_and_horizon, run_training

        options = asked[ReferenceRunOptions]
        path = options.floor or Path(default_store("noise", replica_spec(spec).identity()))
        with self.display(asked, "replica") as watcher:  # before trials, which take their time
            floors, spec = floors_and_horizon(spec, options, path, self.execution_options(asked).jobs, watcher)
        budget, reading = self.budget(asked), asked[TrainingAnalysisOptions]
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_training(
                spec, budget, executor, store, floors, reading,
                guard=options.guard, observer=observer, command=self.command_line(asked),
            )  # fmt: skip


COMMAND = TrainingVerb(TRAINING).command

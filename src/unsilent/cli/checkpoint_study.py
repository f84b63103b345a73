"""``unsilent checkpoint study WORKLOAD``: what it adds to other campaigns: noise floors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.cli.paths import default_store
from unsilent.options import Asked
from unsilent.report.text import count_text
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY
from unsilent.studies.checkpoint.spec import CheckpointAnalysisOptions, FloorOptions


class CheckpointStudyVerb(CampaignVerb):
    """``unsilent checkpoint study``."""

    example_arguments = "train-resnet --trials 20"

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        floors = 2 * asked[FloorOptions].replicas + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"

    def fault_free_seconds(self, result: Any) -> float:
        return float(max(one.seconds for one in result.resumes))

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        from unsilent.studies.checkpoint.study import measure_floors, replica_spec, run_study

        fault_free = asked[FloorOptions]
        path = fault_free.floor or Path(default_store("noise", replica_spec(spec).identity()))
        with self.display(asked, "replica") as watcher:
            floors = measure_floors(spec, fault_free.replicas, path, self.execution_options(asked).jobs, watcher)
        options = asked[CheckpointAnalysisOptions]
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_study(
                spec, self.budget(asked), executor, store, floors, options,
                observer=observer, command=self.command_line(asked),
            )  # fmt: skip


COMMAND = CheckpointStudyVerb(CHECKPOINT_STUDY).command

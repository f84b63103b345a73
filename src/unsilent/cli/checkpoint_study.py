"""``unsilent checkpoint study WORKLOAD``: what a dry run of it says besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.options import Asked
from unsilent.report.text import count_text
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY
from unsilent.studies.checkpoint.spec import FloorOptions


class CheckpointStudyVerb(CampaignVerb):
    """``unsilent checkpoint study``."""

    example_arguments = "train-resnet --trials 20"

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        floors = 2 * asked[FloorOptions].replicas + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"

    def fault_free_seconds(self, result: Any) -> float:
        return float(max(one.seconds for one in result.resumes))


COMMAND = CheckpointStudyVerb(CHECKPOINT_STUDY).command

"""``unsilent training WORKLOAD``: what a dry run of it says besides, and what the name of its store follows from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.options import Asked
from unsilent.report.text import count_text
from unsilent.studies.training.kind import TRAINING
from unsilent.studies.training.spec import ReferenceRunOptions


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


COMMAND = TrainingVerb(TRAINING).command

"""``unsilent coverage TRAINING`` and ``unsilent inference-coverage WORKLOAD``: what dry runs of them say besides."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.cli.campaign import CampaignVerb
from unsilent.options import Asked
from unsilent.report.text import count_text
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE
from unsilent.studies.coverage.inference.spec import InferenceCoverageSpec
from unsilent.studies.coverage.kind import COVERAGE
from unsilent.studies.coverage.spec import CoverageBudget


class TrainingCoverageVerb(CampaignVerb):
    """Of a training: the recording of the golden run, and fault-free runs."""

    example_arguments = "train-resnet --trials 20"

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        budget = asked[CoverageBudget]
        runs = budget.clean_runs + 3 * budget.changed_runs
        yield f"after the trials, up to {count_text(runs, 'fault-free run')} would run, unless stored already"
        yield "the time estimate does not include fault-free runs; a trial draws faults until one is of its class"


class InferenceCoverageVerb(CampaignVerb):
    """Of inference: clean samples."""

    example_arguments = "digits-cnn --trials 50"

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        spec = asked[InferenceCoverageSpec]
        samples = count_text(3 * spec.clean_samples, "clean sample")
        yield f"before the trials, {samples} would be judged, unless stored already"
        yield f"the time estimate is of trials that draw {spec.tries:,} faults; most trials draw far fewer"


TRAINING_COMMAND = TrainingCoverageVerb(COVERAGE).command
INFERENCE_COMMAND = InferenceCoverageVerb(INFERENCE_COVERAGE).command

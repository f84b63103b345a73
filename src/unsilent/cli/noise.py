"""``unsilent noise WORKLOAD``: what a dry run of it says besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unsilent.cli.campaign import CampaignVerb
from unsilent.options import Asked
from unsilent.studies.noise.kind import NOISE, make_noise_question


class NoiseVerb(CampaignVerb):
    """``unsilent noise``."""

    example_arguments = "train-resnet --replicas 5"

    def trial_numbers_by_stratum(self, asked: Asked, spec: Any, result: Any) -> Mapping[tuple[str, int | None], range]:
        counts: dict[tuple[str, int | None], range] = {}
        for replica in make_noise_question(asked).planned_runs(result):
            key = (str(replica.switches), None)
            counts[key] = range(max(replica.number + 1, len(counts.get(key, ()))))
        return counts

    def fault_free_seconds(self, result: Any) -> float:
        return float(result.run_seconds)

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        yield "if runs differ, some steps run again to find the first operation that differs"
        yield "the time estimate does not include steps that run again"


COMMAND = NoiseVerb(NOISE).command

"""``unsilent coverage WORKLOAD``: what it adds to other campaigns: the recording of the golden run, and fault-free runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unsilent.cli.campaign import Verb
from unsilent.options import OptionValues
from unsilent.report.text import count_text
from unsilent.studies.coverage.spec import CoverageAnalysisOptions, CoverageBudget


class CoverageVerb(Verb):
    """``unsilent coverage``."""

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        runs = asked["clean_runs"] + 3 * asked["changed_runs"]
        yield f"after the trials, up to {count_text(runs, 'fault-free run')} would run, unless stored already"
        yield "the time estimate does not include fault-free runs; a trial draws faults until one is of its class"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.studies.coverage.study import run_coverage

        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_coverage(
                spec, asked.make_dataclass(CoverageBudget), executor, store, asked.make_dataclass(CoverageAnalysisOptions),
                observer=observer, command=self.command_line(asked),
            )  # fmt: skip

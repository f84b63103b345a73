"""``unsilent noise WORKLOAD``: what it adds to other campaigns: loops that are explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unsilent.cli.campaign import Verb
from unsilent.errors import UsageError
from unsilent.options import PRECISION_PANEL, WORKLOAD_PANEL, Option, OptionValues
from unsilent.studies.noise.kind import make_noise_question

EXPLAIN_OPTIONS = ("explain", "control", "runs", "steps", "deadline", "as_json", "plain", "quiet", "config")
"""Options that ``--explain`` and ``--control`` have."""


@dataclass(frozen=True)
class NoiseCommandOptions:
    """What is done instead of a report."""

    explain: Annotated[
        str | None, Option("Find what makes runs of this training loop differ: file.py:loop.", WORKLOAD_PANEL)
    ] = None
    control: Annotated[
        str | None,
        Option(
            "Check whether runs of this training loop end with the same bits on this machine: file.py:loop.",
            WORKLOAD_PANEL,
        ),
    ] = None
    runs: Annotated[int | None, Option(
        "Number of runs that --explain and --control compare.", PRECISION_PANEL,
        default_text="3")] = None  # fmt: skip


class NoiseVerb(Verb):
    """``unsilent noise``."""

    further_option_classes = (NoiseCommandOptions,)

    def main(self, asked: OptionValues) -> int:
        loops = [asked[name] for name in ("explain", "control") if asked[name] is not None]
        if loops:
            return self.run_loop_comparison(asked, loops)
        if self.script_arguments:
            raise UsageError(
                "arguments after -- are for a script and need --explain or --control; "
                "add --explain or --control, or remove the arguments"
            )
        asked.reject_if_given(
            ("runs",), "--runs needs --explain or --control, and --replicas sets the number of replicas"
        )
        return super().main(asked)

    def run_loop_comparison(self, asked: OptionValues, loops: list[str]) -> int:
        """What makes runs of a loop differ, or whether they do; the exit code."""
        if "workload" in asked.given_values or len(loops) > 1:
            raise UsageError(
                "more than one workload or loop is given; give one of WORKLOAD, --explain FILE.py:LOOP and --control FILE.py:LOOP"
            )
        others = [name for name in asked.given_values if name not in EXPLAIN_OPTIONS]
        asked.reject_if_given(others, "not available with --explain or --control, which run the loop unchanged")
        from unsilent.cli.explain_noise import explain_loop

        shown = {name: asked[name] for name in ("runs", "steps", "deadline", "as_json", "plain", "quiet")}
        return explain_loop(loops[0], control=asked["control"] is not None, arguments=self.script_arguments, **shown)

    def check(self, asked: OptionValues, spec: Any) -> None:
        super().check(asked, spec)
        make_noise_question(asked)

    def trial_numbers_by_stratum(
        self, asked: OptionValues, spec: Any, result: Any
    ) -> Mapping[tuple[str, int | None], range]:
        counts: dict[tuple[str, int | None], range] = {}
        for replica in make_noise_question(asked).planned_runs(result):
            key = (str(replica.switches), None)
            counts[key] = range(max(replica.number + 1, len(counts.get(key, ()))))
        return counts

    def fault_free_seconds(self, result: Any) -> float:
        return float(result.run_seconds)

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        yield "if runs differ, some steps run again to find the first operation that differs"
        yield "the time estimate does not include steps that run again"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.cli.progress import make_observer
        from unsilent.studies.noise.study import run_noise

        execution = self.execution_options(asked)
        observer = make_observer(quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"], noun="replica")
        with observer:
            return run_noise(
                make_noise_question(asked), store, jobs=execution.jobs, deadline=execution.deadline,
                executor=execution.executor, address=execution.ray,
                observer=observer, command=self.command_line(asked),
            )  # fmt: skip

"""``unsilent pvf WORKLOAD``: what it adds to other campaigns: precision, gates for continuous integration, failures in time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.cli.campaign import Running, Verb
from unsilent.cli.options import FIT
from unsilent.options import OUTPUT, Asked, Option
from unsilent.studies.pvf.spec import CampaignSpec, PvfBudget

if TYPE_CHECKING:
    from unsilent.studies.pvf.records import Gate


@dataclass(frozen=True)
class PvfOutput:
    """What is made of the result."""

    assertion: Annotated[tuple[str, ...], Option(
        "Exit 1 unless the upper limit holds, like 'top_mlp<=0.01'.", OUTPUT, "assert", repeated=True)] = ()  # fmt: skip
    fit_per_bit: Annotated[float | None, FIT] = None


class PvfVerb(Verb):
    """``unsilent pvf``."""

    more = (PvfOutput,)

    def check(self, asked: Asked, spec: Any) -> None:
        from unsilent.studies.pvf.analysis import check_rate

        super().check(asked, spec)
        self.gates(asked)
        if asked["fit_per_bit"] is not None:
            check_rate(asked["fit_per_bit"], spec.transient)

    def gates(self, asked: Asked) -> list[Gate]:
        """What must hold; raises ``UsageError``."""
        from unsilent.studies.pvf.records import Gate

        return [Gate.parse(text) for text in asked["assertion"]]

    def command(self, asked: Asked) -> str:
        return asked.command("pvf", PvfBudget, CampaignSpec)  # reading is added where the store is read

    def numbers(self, asked: Asked, spec: Any, result: Any) -> Mapping[tuple[str, int | None], range]:
        if asked.make(PvfBudget).precision is None:
            return super().numbers(asked, spec, result)
        most = self.budget(asked).numbers(None)
        return {(target.group or target.name, flips): most for target in result.targets for flips in spec.flips}

    def foreseen(self, asked: Asked) -> Iterator[str]:
        if asked.make(PvfBudget).precision is not None:
            yield "how many trials a target gets is decided during the campaign, from their outcomes: these are the most"

    @contextmanager
    def running(self, asked: Asked, spec: Any) -> Iterator[Running]:
        with super().running(asked, spec) as (executor, observer):
            for gate in self.gates(asked):
                gate.check(spec, executor.describe())
            yield executor, observer

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        from unsilent.outcomes.tallies import Question
        from unsilent.studies.pvf.study import run_pvf

        with self.running(asked, spec) as (executor, observer):
            return run_pvf(
                spec, self.budget(asked), executor, store, asked.make(Question), observer,
                precision=asked.make(PvfBudget).precision, command=self.command(asked),
            )  # fmt: skip

    def show(self, asked: Asked, result: Any, page: Path, path: Path) -> int:
        from unsilent.cli.reporting import show_report
        from unsilent.studies.pvf.report import report

        failures = [line for gate in self.gates(asked) for line in gate.failures(result)]
        output = report(result, asked["fit_per_bit"])
        show_report(output, page, asked["as_json"], asked["plain"], {"Store": path}, failed_assertions=failures)
        for line in (*(f"assertion failed: {failure}" for failure in failures), *result.short):
            print(f"unsilent: {line}", file=sys.stderr)
        return 1 if failures or result.short else 0

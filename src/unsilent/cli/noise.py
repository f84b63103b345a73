"""``unsilent noise WORKLOAD``: what it adds to other campaigns: loops that are explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unsilent.cli.campaign import Verb
from unsilent.errors import UsageError
from unsilent.options import PRECISION, RUNS, Asked, Option
from unsilent.studies.noise.kind import question

OF_EXPLAINING = ("explain", "control", "runs", "steps", "deadline", "as_json", "plain", "quiet", "config")
"""Options that ``--explain`` and ``--control`` have."""


@dataclass(frozen=True)
class NoiseOutput:
    """What is done instead of a report."""

    explain: Annotated[str | None, Option("Say what makes runs of this loop differ: file.py:loop.", RUNS)] = None
    control: Annotated[str | None, Option("Say whether runs of this loop end in the same bits here.", RUNS)] = None
    runs: Annotated[int | None, Option(
        "Runs that --explain and --control compare.", PRECISION, usual="as many as they need")] = None  # fmt: skip


class NoiseVerb(Verb):
    """``unsilent noise``."""

    more = (NoiseOutput,)

    def main(self, asked: Asked) -> int:
        loops = [asked[name] for name in ("explain", "control") if asked[name] is not None]
        if loops:
            return self.explained(asked, loops)
        if self.script:
            raise UsageError("what follows -- are the arguments of a script; give them with --explain or --control")
        asked.refuse(("runs",), "--runs belongs to --explain and --control; of replicas say --replicas")
        return super().main(asked)

    def explained(self, asked: Asked, loops: list[str]) -> int:
        """What makes runs of a loop differ, or whether they do; the exit code."""
        if "workload" in asked.given or len(loops) > 1:
            raise UsageError("give one thing to look at: WORKLOAD, --explain FILE.py:LOOP or --control FILE.py:LOOP")
        others = [name for name in asked.given if name not in OF_EXPLAINING]
        asked.refuse(others, "--explain and --control compare runs of a loop as it is")
        from unsilent.cli.explain_noise import explain_loop

        shown = {name: asked[name] for name in ("runs", "steps", "deadline", "as_json", "plain", "quiet")}
        return explain_loop(loops[0], control=asked["control"] is not None, arguments=self.script, **shown)

    def check(self, asked: Asked, spec: Any) -> None:
        super().check(asked, spec)
        question(asked)

    def numbers(self, asked: Asked, spec: Any, result: Any) -> Mapping[tuple[str, int | None], range]:
        counts: dict[tuple[str, int | None], range] = {}
        for replica in question(asked).wanted(result):
            key = (str(replica.switches), None)
            counts[key] = range(max(replica.number + 1, len(counts.get(key, ()))))
        return counts

    def seconds(self, result: Any) -> float:
        return float(result.run_seconds)

    def foreseen(self, asked: Asked) -> Iterator[str]:
        yield "steps at which runs part are run again, to see which operation does it: these are not counted"

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        from unsilent.cli.progress import make_observer
        from unsilent.studies.noise.study import run_noise

        means = self.means(asked)
        observer = make_observer(quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"], noun="replica")
        with observer:
            return run_noise(
                question(asked), store, jobs=means.jobs, deadline=means.deadline, executor=means.executor, address=means.ray,
                observer=observer, command=self.command(asked),
            )  # fmt: skip

"""``unsilent training WORKLOAD``: what it adds to other campaigns: noise floors, the guard, examples, published injections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unsilent.cli.campaign import Verb
from unsilent.cli.paths import default_store
from unsilent.errors import UsageError, unknown
from unsilent.options import FAULTS, OUTPUT, Asked, Option
from unsilent.report.text import counted
from unsilent.studies.training.spec import ComparisonOptions, Reading

CLASSES = (
    "masked", "immediate-nan", "short-term-nan", "slow-degrade", "sharp-degrade", "sharp-slow-degrade", "low-test",
)  # fmt: skip
OF_INJECTIONS = ("file", "data", "output", "as_json", "plain", "quiet", "config")
"""Options that a published injection has."""


@dataclass(frozen=True)
class TrainingOutput:
    """What is done instead of a report."""

    example: Annotated[str | None, Option(f"Show one instance, run again: {', '.join(CLASSES)}.", OUTPUT)] = None
    file: Annotated[Path | None, Option("Replay a published injection (with --data).", FAULTS)] = None


class TrainingVerb(Verb):
    """``unsilent training``."""

    more = (TrainingOutput,)
    unresolved = ("horizon",)

    def main(self, asked: Asked) -> int:
        if asked["file"] is None:
            return super().main(asked)
        from unsilent.cli.injection import replay_csv

        others = [name for name in asked.given if name not in OF_INJECTIONS]
        asked.refuse(others, "a published injection says what is corrupted")
        if asked["data"] is None:
            raise UsageError("--file replays an injection in the published training; give its images: --data CIFAR.npz")
        shown = {name: asked[name] for name in ("data", "output", "as_json", "plain", "quiet")}
        return replay_csv(asked["file"], **shown)

    def check(self, asked: Asked, spec: Any) -> None:
        super().check(asked, spec)
        if asked["example"] is not None and asked["example"] not in CLASSES:
            raise unknown("class of outcomes", asked["example"], CLASSES)

    def named(self, asked: Asked, spec: Any) -> dict[str, Any]:
        return {**super().named(asked, spec), "horizon": asked["horizon"]}

    def foreseen(self, asked: Asked) -> Iterator[str]:
        floors = 2 * asked["replicas"] + 1
        yield f"before them {counted(floors, 'fault-free run')} for the noise floors, where they are not stored yet"
        if asked["guard"]:
            yield "trials that end differently are run again under the guard, which is not counted here"

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        from unsilent.cli.progress import make_observer
        from unsilent.studies.training.judging import replica_spec
        from unsilent.studies.training.study import example, find_floors, run_training

        path = asked["floor"] or Path(default_store("noise", replica_spec(spec).identity()))
        with make_observer(
            quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"], noun="replica"
        ) as watcher:  # before trials, which take their time
            floors, spec = find_floors(spec, asked.make(ComparisonOptions), path, asked["jobs"], watcher)
        budget, reading = self.budget(asked), asked.make(Reading)
        with self.running(asked, spec) as (executor, observer):
            result = run_training(
                spec, budget, executor, store, floors, reading,
                guard=asked["guard"], observer=observer, command=self.command(asked),
            )  # fmt: skip
            wanted = asked["example"]
            return result if wanted is None else example(wanted, executor, store, reading, observer=observer)

    def show(self, asked: Asked, result: Any, page: Path, path: Path) -> int:
        from unsilent.cli.replay import show_replay

        return (
            super().show(asked, result, page, path)
            if asked["example"] is None
            else show_replay(result, asked["as_json"])
        )

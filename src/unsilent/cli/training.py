"""``unsilent training WORKLOAD``: what it adds to other campaigns: noise floors, the guard, examples, published injections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unsilent.cli.campaign import Verb
from unsilent.cli.paths import default_store
from unsilent.errors import UsageError, unknown_name_error
from unsilent.options import FAULTS_PANEL, OUTPUT_PANEL, Option, OptionValues
from unsilent.report.text import count_text
from unsilent.studies.training.spec import ReferenceRunOptions, TrainingAnalysisOptions

CLASSES = (
    "masked", "immediate-nan", "short-term-nan", "slow-degrade", "sharp-degrade", "sharp-slow-degrade", "low-test",
)  # fmt: skip
OF_INJECTIONS = ("file", "data", "output", "as_json", "plain", "quiet", "config")
"""Options that a published injection has."""


@dataclass(frozen=True)
class TrainingCommandOptions:
    """What is done instead of a report."""

    example: Annotated[
        str | None,
        Option(f"Run one trial of this outcome class again and show it: {', '.join(CLASSES)}.", OUTPUT_PANEL),
    ] = None
    file: Annotated[
        Path | None, Option("Replay a published injection from this file (needs --data).", FAULTS_PANEL)
    ] = None


class TrainingVerb(Verb):
    """``unsilent training``."""

    further_option_classes = (TrainingCommandOptions,)
    fields_unknown_in_dry_run = ("horizon",)

    def main(self, asked: OptionValues) -> int:
        if asked["file"] is None:
            return super().main(asked)
        from unsilent.cli.published_injection import replay_injection_csv

        others = [name for name in asked.given_values if name not in OF_INJECTIONS]
        asked.reject_if_given(others, "--file replays a published injection, which already defines the fault")
        if asked["data"] is None:
            raise UsageError(
                "--file replays a published injection, which needs the images of its training; add --data CIFAR.npz"
            )
        shown = {name: asked[name] for name in ("data", "output", "as_json", "plain", "quiet")}
        return replay_injection_csv(asked["file"], **shown)

    def check(self, asked: OptionValues, spec: Any) -> None:
        super().check(asked, spec)
        if asked["example"] is not None and asked["example"] not in CLASSES:
            raise unknown_name_error("class of outcomes", asked["example"], CLASSES)

    def default_store_identity(self, asked: OptionValues, spec: Any) -> dict[str, Any]:
        return {**super().default_store_identity(asked, spec), "horizon": asked["horizon"]}

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        floors = 2 * asked["replicas"] + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"
        if asked["guard"]:
            yield "trials that differ from the golden run beyond noise run again under the guard"
            yield "the time estimate does not include runs under the guard"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.cli.progress import make_observer
        from unsilent.studies.training.judging import replica_spec
        from unsilent.studies.training.study import floors_and_horizon, replay_example, run_training

        path = asked["floor"] or Path(default_store("noise", replica_spec(spec).identity()))
        with make_observer(
            quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"], noun="replica"
        ) as watcher:  # before trials, which take their time
            floors, spec = floors_and_horizon(
                spec, asked.make_dataclass(ReferenceRunOptions), path, asked["jobs"], watcher
            )
        budget, reading = self.budget(asked), asked.make_dataclass(TrainingAnalysisOptions)
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            result = run_training(
                spec, budget, executor, store, floors, reading,
                guard=asked["guard"], observer=observer, command=self.command_line(asked),
            )  # fmt: skip
            wanted = asked["example"]
            return result if wanted is None else replay_example(wanted, executor, store, reading, observer=observer)

    def show(self, asked: OptionValues, result: Any, page: Path, path: Path) -> int:
        from unsilent.cli.replay import show_replay

        return (
            super().show(asked, result, page, path)
            if asked["example"] is None
            else show_replay(result, asked["as_json"])
        )

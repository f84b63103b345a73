"""``unsilent checkpoint study WORKLOAD``: what it adds to other campaigns: noise floors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unsilent.cli.campaign import Verb
from unsilent.cli.paths import default_store
from unsilent.options import EXECUTION_PANEL, PRECISION_PANEL, Option, OptionValues
from unsilent.report.text import count_text


@dataclass(frozen=True)
class FloorOptions:
    """The fault-free runs that a resume is compared with."""

    replicas: Annotated[int, Option("Fault-free runs of each noise floor.", PRECISION_PANEL)] = 20
    floor: Annotated[Path | None, Option(
        "File that stores the fault-free runs.", EXECUTION_PANEL,
        default_text="unsilent-noise-….sqlite in the current folder")] = None  # fmt: skip


class CheckpointStudyVerb(Verb):
    """``unsilent checkpoint study``."""

    further_option_classes = (FloorOptions,)

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        floors = 2 * asked["replicas"] + 1
        yield f"before the trials, {count_text(floors, 'fault-free run')} for the noise floors would run, unless stored already"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.campaigns.driver import run_campaign
        from unsilent.cli.progress import make_observer
        from unsilent.replicas import ReplicaSpec, ReplicaStore, Switches
        from unsilent.replicas.noise_floor_records import store_noise_floors
        from unsilent.replicas.noise_floors import run_noise_floors

        replicas = ReplicaSpec(spec.workload, spec.options, spec.data, spec.init, spec.steps)
        path = asked["floor"] or Path(default_store("noise", replicas.identity()))
        quiet, plain = asked["quiet"], asked["plain"] or asked["as_json"]
        with (
            make_observer(quiet=quiet, plain=plain, noun="replica") as watcher,
            ReplicaStore(path, write=True) as opened,
        ):
            floors = run_noise_floors(
                replicas, opened, Switches.parse("impl"), asked["replicas"], jobs=asked["jobs"], observer=watcher
            )
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            run_campaign(spec, self.budget(asked), executor, store, observer=observer, command=self.command_line(asked))
        store_noise_floors(store, floors)
        return store.analyse(**vars(asked.make_dataclass(self.kind.analysis_options)))

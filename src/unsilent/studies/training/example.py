"""Runs a stored example of a fault: one for each class of outcomes.

`FILE` holds the training, its noise floors and the faults; ``tools/training_examples.py`` makes it.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.campaigns.spec import TrialId
from unsilent.faults import Fault
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas.noise_floor_records import NoiseFloors, parse_noise_floor
from unsilent.replicas.noise_floors import hash_of_losses
from unsilent.report.shown import Shown
from unsilent.studies.training.fault_sampler import SampledFault
from unsilent.studies.training.judging import TrainingJudge
from unsilent.studies.training.records import ExampleCurve
from unsilent.studies.training.runner import TrainingRunner
from unsilent.studies.training.spec import InjectionPoint, TrainingBaseline, TrainingRow, TrainingSpec
from unsilent.workloads.model_fitting import Progress

FILE = Path(__file__).with_name("examples.json")
CLASSES = (
    "masked", "immediate-nan", "short-term-nan", "slow-degrade", "sharp-degrade", "sharp-slow-degrade", "low-test",
)  # fmt: skip
"""Classes that have an example; ``masked`` includes both masked classes."""
EXAMPLE_TRIAL = TrialId("example", None, 0)
"""Trial that stands for the run with the fault."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredExample:
    """A stored fault, its class, its training, and the noise floors that judge it."""

    outcome_class: str
    spec: TrainingSpec
    floors: NoiseFloors
    injection: InjectionPoint
    faults: tuple[Fault, ...]


@dataclass(frozen=True, eq=False, repr=False)
class TrainingExample(Shown):
    """The result of an example: the fault-free run, the faulty run and its class."""

    REPORT = "unsilent.studies.training.example_report:report"
    stored: StoredExample
    outcome: TrainingOutcome
    baseline: TrainingBaseline
    row: TrainingRow
    curve: ExampleCurve

    @property
    def has_stored_class(self) -> bool:
        """Whether the faulty run ended in the stored class."""
        return class_name(self.outcome) == self.stored.outcome_class

    @property
    def has_stored_twin(self) -> bool:
        """Whether the losses of the fault-free run are bit-identical to the stored ones."""
        return hash_of_losses(np.array(self.baseline.losses)) == self.stored.floors.implementation.twin_losses_hash


def class_name(outcome: TrainingOutcome) -> str:
    """The name of an outcome as used in `CLASSES`."""
    return "masked" if outcome.masked else str(outcome)


def read_example(name: str) -> StoredExample:
    """The stored example of a class; raises ``UsageError`` if there is none."""
    if name not in CLASSES:
        raise unknown_name_error("class of outcomes", name, CLASSES)
    record = json.loads(FILE.read_text("utf-8"))
    examples = record["examples"]
    if name not in examples:
        raise UsageError(
            f"no fault that ends in {name} is stored: a search of candidates came upon none; "
            f"choose {', '.join(stored_class for stored_class in CLASSES if stored_class in examples)}"
        )
    spec = TrainingSpec(record["workload"], tuple(record["options"].items()))
    floors = NoiseFloors(*(parse_noise_floor(json.dumps(floor), None, None) for floor in record["floors"]))
    faults = tuple(map(Fault.from_json, examples[name]["faults"]))
    return StoredExample(name, spec, floors, InjectionPoint(**examples[name]["injection"]), faults)


def run_example(name: str, progress: Progress | None = None) -> TrainingExample:
    """Run the training of an example with and without its fault, and judge the outcome.

    Raises ``UsageError`` for a class without an example, and ``InjectionError`` if the fault does not fit the training.
    """
    stored = read_example(name)
    with closing(TrainingRunner(stored.spec, progress)) as runner:
        baseline = runner.establish_baseline()
        row = runner.run_faults(EXAMPLE_TRIAL, SampledFault(stored.injection, stored.faults))
    judge = TrainingJudge(baseline, stored.floors, Thresholds())
    judged = judge.judge(row)
    curve = replace(judge.example_curve(row, judged), trial="with the fault")
    return TrainingExample(stored, judged.outcome, baseline, row, curve)

"""What is asked of campaigns of ``unsilent training`` beside their spec, and how the spec is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from unsilent.campaigns.options import Budget
from unsilent.errors import UsageError, unknown
from unsilent.options import CONFIDENCE, INTERNAL, MEANS, OUTPUT, PRECISION, Asked, Option
from unsilent.outcomes.training import Thresholds
from unsilent.studies.training.spec import MOMENTS, TrainingSpec

OF_MEMORY = ("phases", "accelerator", "value")
"""Options that say where in operations faults are."""


def read_thresholds(given: Any) -> Thresholds:
    """``gap=0.05`` and the like, or a mapping, in place of defaults; raises ``UsageError``."""
    usual = Thresholds()
    texts = [given] if isinstance(given, str) else given
    found = {}
    for name, number in given.items() if isinstance(given, Mapping) else (text.partition("=")[::2] for text in texts):
        kinds = {part.name: type(getattr(usual, part.name)) for part in fields(Thresholds)}
        if name not in kinds:
            raise unknown("threshold", name, kinds)
        try:
            found[name] = kinds[name](str(number))
        except ValueError:
            noun = "a whole number" if kinds[name] is int else "a number"
            text = f"{name}={number}".rstrip("=")
            raise UsageError(f"--threshold {text!r}: expected {noun}, like {name}={getattr(usual, name)}") from None
    return Thresholds(**found)


def write_thresholds(thresholds: Any) -> list[str]:
    """The reverse, of those that are not the defaults."""
    return [
        f"{name}={value:.15g}" for name, value in asdict(thresholds).items() if value != getattr(Thresholds(), name)
    ]


@dataclass(frozen=True)
class TrainingBudget(Budget):
    """How many trials; a campaign is not split over machines, since the guard's trials follow from all others."""

    trials: Annotated[int, Option("Faulty runs, of each target with --per.", PRECISION)] = 200
    shard: Annotated[tuple[int, int], INTERNAL] = (1, 1)


@dataclass(frozen=True)
class Reading:
    """How a store is read: what may change without a trial being run again.

    ``margin``: how far held-out accuracy must be below the worst fault-free replica for a convergence failure.
    """

    thresholds: Annotated[Thresholds, Option(
        "Of the classes, like gap=0.05; repeat for more. See docs/training.md.", PRECISION, "threshold", unasked=(),
        read=read_thresholds, write=write_thresholds, repeated=True)] = field(default_factory=Thresholds)  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95
    margin: Annotated[float, Option(
        "How far below the worst fault-free run a convergence failure is (--per).", PRECISION)] = 0.02  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a share between 0 and 1, like 0.95")
        if not 0 <= self.margin < 1:
            raise UsageError(f"margin is {self.margin}; expected a share from 0 to below 1")


@dataclass(frozen=True)
class ComparisonOptions:
    """What faulty runs are compared with: fault-free runs, and the same faults under the guard."""

    horizon: Annotated[int | None, Option(
        "Take a run for masked after so many steps inside the fault-free band.", PRECISION,
        usual="never")] = None  # fmt: skip
    replicas: Annotated[int, Option(
        "Fault-free runs of each noise floor: implementation noise, and other seeds.", PRECISION)] = 20  # fmt: skip
    noise: Annotated[str, Option("What differs between those of the first, as for unsilent noise.", PRECISION)] = "impl"
    floor: Annotated[Path | None, Option(
        "Where fault-free runs are kept.", OUTPUT, usual="unsilent-noise-….sqlite here")] = None  # fmt: skip
    guard: Annotated[bool, Option(
        "Run every different trial again under the guard, and say what it saved.", MEANS)] = False  # fmt: skip


def resolve(asked: Asked) -> TrainingSpec:
    """What was asked, checked as far as that is possible without the training; raises ``UsageError``."""
    from unsilent.faults.hardware.presets import PRESETS

    if asked["per"] is not None:
        asked.refuse(OF_MEMORY, "--per strikes parameters and optimizer state, not operations")
        for name, _ in asked["faults"]:
            if name in PRESETS:
                raise UsageError(
                    f"--fault {name} is of an operation, and --per strikes memory; name one like bitflip or zero"
                )
    else:
        asked.refuse(("margin",), "--margin is of convergence failures, which --per counts")
        asked.refuse(("moment",), "--moment is of faults in memory, which --per strikes")
    if asked["moment"] not in MOMENTS:
        raise unknown("moment", asked["moment"], MOMENTS)
    for name, least in (("steps", 1), ("horizon", 2), ("seed", 0), ("init", 0)):
        if asked[name] is not None and asked[name] < least:
            raise UsageError(f"--{name} is {asked[name]}; expected {least} or more")
    return asked.make(TrainingSpec)

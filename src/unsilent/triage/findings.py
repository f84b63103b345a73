"""Queries on an incident, and their findings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from unsilent.basics.options import WORKLOAD_PANEL, Option, check_count, options_of
from unsilent.events.event_kinds import join_names
from unsilent.incidents.showing import step_range, step_range_text
from unsilent.report.text import listed


@dataclass(frozen=True)
class Blanks:
    """Values for the blanks of a query; a blank that is not filled means no restriction."""

    rank: Annotated[int | None, Option("Look at this rank alone.", WORKLOAD_PANEL)] = None
    tensor: Annotated[str | None, Option("Look at this tensor alone, by its name.", WORKLOAD_PANEL)] = None
    steps: Annotated[tuple[int, int] | None, Option(
        "First and last step that are looked at, such as 80..95.", WORKLOAD_PANEL, metavar="A..B", parser=step_range,
        formatter=step_range_text)] = None  # fmt: skip
    host: Annotated[str | None, Option("The host of a device.", WORKLOAD_PANEL)] = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("--rank", self.rank, 0)

    @property
    def given(self) -> dict[str, Any]:
        """The filled blanks by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def words(self) -> list[str]:
        """The filled blanks as words of a command line."""
        fields = options_of(Blanks)
        return [
            word
            for name, value in self.given.items()
            for word in (fields[name].flag, *fields[name].format_value(value))
        ]

    def covers(self, other: Blanks) -> bool:
        """Whether a query with these blanks also looks at everything that ``other`` looks at."""
        if self.steps and not (other.steps and self.steps[0] <= other.steps[0] and other.steps[1] <= self.steps[1]):
            return False
        return all(getattr(other, name) == value for name, value in self.given.items() if name != "steps")

    def contain(self, finding: Finding) -> bool:
        """Whether the place of a finding lies within what these blanks select."""
        first, last = self.steps or (0, 2**62)
        return (
            (self.rank is None or self.rank in finding.ranks)
            and (self.tensor is None or self.tensor in finding.tensor.split())
            and (finding.step is not None and first <= finding.step <= last)
        )


class Outcome(Enum):
    """The outcome of a query."""

    NOTHING = "nothing found"
    DIFFERS = "differs"
    LOCALISED = "localised"
    UNANSWERED = "not answered"


class FindingKind(Enum):
    """The kind of anomaly that a query found."""

    GRADIENT = "a rank's own gradient"
    CHANGED_BITS = "bits of the state changed between two steps"
    UNLIKE_PARAMETERS = "parameters of a rank differ from the others"
    NONFINITE = "values that are not finite"
    ONSET = "a series left its own past"
    BATCH = "the batch by itself"
    STATE = "the state of a rank"
    COMMON_STATE = "the state that ranks have alike"
    SETTINGS = "settings that differ"
    CHECKPOINT_FILE = "a checkpoint changed on the disk"
    CHECKPOINT_VALUES = "values of a checkpoint"
    ABSENT_RANK = "a rank that did not enter a collective"
    UNLIKE_COLLECTIVES = "ranks called different collectives"
    LATE_RANK = "a rank that is late"
    LOGGED_ERROR = "an error in a log"
    TRANSIENT = "transient, says the recorded verdict"
    DEVICE = "the device, says the recorded verdict"
    CHECKPOINT = "the checkpoint, says the recorded verdict"
    NUMERICS = "the dtype, says the recorded verdict"
    BENIGN = "benign, says the recorded verdict"
    DATA = "data or software, says the recorded verdict"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to a query.

    Attributes:
        outcome: ``NOTHING``: nothing unusual was found; ``LOCALISED``: something was found in a step, in ranks that differ from
            others, or in values that are wrong by themselves; ``UNANSWERED``: nothing could be read.
        text: Sentence on the finding, or on what was examined.
        kind: Kind of the anomaly; ``None`` if there is none.
        ranks, tensor, step: Place of the finding, as far as it is known.
        numbers: Numbers that support the finding, by name.
        missing: Sentences on parts that could not be read.
    """

    outcome: Outcome
    text: str
    kind: FindingKind | None = None
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    step: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place of the finding as a text, like ``step 90, rank 1, gradient fc.weight l2``."""
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {listed(map(str, self.ranks))}" if self.ranks else ""
        return ", ".join(filter(None, (f"step {self.step:,}" if self.step is not None else "", ranks, self.tensor)))


def placed(text: str, ranks: list[int], several: str, is_told_apart: bool = True, **more: Any) -> Finding:
    """A finding in a step, which counts as localised if one rank alone has it.

    Args:
        several: Sentence for the case that several ranks have it.
        is_told_apart: Whether another rank was examined, or the finding is wrong by itself.
    """
    if len(ranks) == 1 and is_told_apart:
        return Finding(outcome=Outcome.LOCALISED, text=text, ranks=tuple(ranks), **more)
    why = several if len(ranks) > 1 else "there is no other rank to tell it from"
    return Finding(outcome=Outcome.DIFFERS, text=f"{text}; {why}", ranks=tuple(ranks), **more)


@dataclass(frozen=True)
class Query:
    """A template with its blanks filled."""

    template: str
    blanks: Blanks = Blanks()

    @property
    def name(self) -> str:
        """Template and blanks as they are typed on a command line."""
        return join_names(self.template, shlex.join(self.blanks.words))

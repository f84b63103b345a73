"""The command ``unsilent incident show DIR``, which shows what was recorded at the first alarm of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import OUTPUT_PANEL, Option, Request, check_count
from unsilent.basics.sizes import parse_whole_number
from unsilent.command import AFTER_ALARM, Command

if TYPE_CHECKING:
    from unsilent.incidents.shown_incident import ShownIncident

NO_FOLDER = "no folder was given; give that of an incident, or that of the job's events"


def step_range(text: Any) -> tuple[int, int]:
    """The first and the last step of a range ``A..B``.

    Raises ``UsageError`` for any other text.
    """
    first, dots, last = str(text).partition("..")
    ends = parse_whole_number(first), parse_whole_number(last)
    if not dots or ends[0] is None or ends[1] is None or ends[0] > ends[1]:
        raise UsageError(f"--steps is {text!r}; expected the first and the last step, such as 80..95")
    return ends[0], ends[1]


def step_range_text(steps: tuple[int, int]) -> tuple[str]:
    """A range of steps as it is typed, ``80..95``."""
    return (f"{steps[0]}..{steps[1]}",)


@dataclass(frozen=True)
class ShowOptions:
    """Options that select an incident and some of its series."""

    folder: Annotated[Path, Option(
        "Folder of an incident, or of the events of a job with one incident.", "", metavar="DIR",
        missing_error=NO_FOLDER)]  # fmt: skip
    series: Annotated[str | None, Option(
        "Series to show, such as 'gradient fc.weight *'; a pattern.", OUTPUT_PANEL, metavar="GLOB")] = None  # fmt: skip
    rank: Annotated[int | None, Option("Show the series of this rank alone.", OUTPUT_PANEL)] = None
    steps: Annotated[tuple[int, int] | None, Option(
        "First and last step of the series, such as 80..95.", OUTPUT_PANEL, metavar="A..B", parser=step_range,
        formatter=step_range_text)] = None  # fmt: skip

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("--rank", self.rank, 0)


def show(request: Request) -> ShownIncident:
    """Show what was recorded of the first alarm of a run.

    Verdicts, alarms, the ranks and their devices, checkpoints, and the series around the alarm: those of the tensors that it
    names, or those that --series selects.
    """
    from unsilent.incidents.shown_incident import read_shown

    options = request[ShowOptions]
    return read_shown(options.folder, options.series, options.rank, options.steps)


COMMAND = Command(
    "incident show", AFTER_ALARM, "unsilent incident show runs/incidents/90-0a1b2c3d --rank 1 --steps 80..95",
    (ShowOptions,), show, has_report=True,
)  # fmt: skip

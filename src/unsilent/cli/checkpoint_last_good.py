"""``unsilent checkpoint last-good DIR``: the newest checkpoint that verifies, and is older than a fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.options import WORKLOAD_PANEL, Asked, Option
from unsilent.cli.checkpoint_arguments import print_lines, whole_checkpoint
from unsilent.command import AFTER_ALARM, Command, DisplayOptions

if TYPE_CHECKING:
    from unsilent.checkpoints.last_good import LastGood

NO_FOLDER = "no folder was given; give the folder that checkpoints are in, like runs/"
HELP = """Find the newest checkpoint below a folder that is still as its manifest says.

Exit code: 1 where none is, 0 where one was found.
"""


@dataclass(frozen=True)
class LastGoodOptions:
    """Options for the checkpoints that are looked at."""

    folder: Annotated[Path, Option(
        "Folder with checkpoints, also in its folders.", "", parser=whole_checkpoint, metavar="DIR",
        missing_error=NO_FOLDER)]  # fmt: skip
    before_step: Annotated[int | None, Option(
        "Only one of an earlier step, such as that of an alarm.", WORKLOAD_PANEL)] = None  # fmt: skip


def last_good(asked: Asked) -> LastGood | int:
    """Verify checkpoints from the newest on, until one is as its manifest says."""
    from unsilent.checkpoints.last_good import last_good_checkpoint

    options, display = asked[LastGoodOptions], asked[DisplayOptions]
    result = last_good_checkpoint(options.folder, before_step=options.before_step)
    if result.good is None and not display.as_json:
        print_lines(display.plain, result.headline())
        return result.exit_code
    return result


COMMAND = Command(
    "checkpoint last-good", AFTER_ALARM, HELP, "unsilent checkpoint last-good runs --before-step 812", (LastGoodOptions,),
    last_good, has_report=True,
)  # fmt: skip

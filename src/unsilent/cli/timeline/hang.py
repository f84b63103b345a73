"""``unsilent timeline hang DIR…``: find the rank that never entered a collective."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.options import Option, Request
from unsilent.command import EXPLAIN, Command, Result

NO_DUMPS = "no folder was given; give one with dumps of the flight recorder, like dumps/"


@dataclass(frozen=True)
class HangOptions:
    """Options of ``unsilent timeline hang``."""

    dumps: Annotated[tuple[Path, ...], Option(
        "Dumps of one job, or folders with them, named NAME_RANK (pickle), NAME_RANK.json or flight-rankRANK.json.", "",
        metavar="DIR", missing_error=NO_DUMPS, is_repeatable=True)] = ()  # fmt: skip


def hang(request: Request) -> Result:
    """Find the rank that never entered a collective, from dumps of PyTorch's flight recorder.

    The exit code is 1 if a rank was missing from a collective or collectives differ, otherwise 0.
    """
    from unsilent.timeline.hang import find_hang

    return find_hang(request[HangOptions].dumps)


COMMAND = Command("timeline hang", EXPLAIN, "unsilent timeline hang dumps", (HangOptions,), hang, has_report=True)

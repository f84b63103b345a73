"""The kinds of campaigns that this program makes. A store names one of them by its application id, never a module to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.sqlite_file import application_of
from unsilent.studies.noise.kind import NOISE
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.training.kind import TRAINING

KINDS: list[Kind[Any, Any, Any]] = [PVF, TRAINING, NOISE]


def find_kind_of_store(path: Path) -> Kind[Any, Any, Any] | None:
    """The kind of a store; None for a file that is no store of a registered kind."""
    application = application_of(path)
    return next((kind for kind in KINDS if kind.application_id == application), None)


def kind_of_store(path: Path) -> Kind[Any, Any, Any]:
    """The kind of a store; pvf's where it is none, whose store says what the file is."""
    return find_kind_of_store(path) or PVF

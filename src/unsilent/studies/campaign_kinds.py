"""All kinds of campaigns: the built-in ones, and those that installed packages register.

A store names its kind by an application id, never by a module to import. Another package registers a kind as an entry point of
the group ``unsilent.kinds``, by the name of the kind. It is imported if its command is requested, or for a store that is not of a
built-in kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.entry_points import KINDS as GROUP
from unsilent.basics.entry_points import installed_parts, load_part, wrong_part_error
from unsilent.basics.errors import StoreError
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.sqlite_file import application_of
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE
from unsilent.studies.coverage.kind import COVERAGE
from unsilent.studies.noise.kind import NOISE
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.training.kind import TRAINING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINDS: list[Kind[Any, Any, Any]] = [PVF, TRAINING, NOISE, CHECKPOINT_STUDY, COVERAGE, INFERENCE_COVERAGE]
"""Kinds of this package."""


def installed_kinds() -> dict[str, EntryPoint]:
    """Entry points of the kinds that other packages register, by name.

    None of them is imported. A package cannot replace a built-in kind.
    """
    return installed_parts(GROUP, {kind.name for kind in KINDS})


def load_installed_kind(entry: EntryPoint) -> Kind[Any, Any, Any]:
    """Import the kind that another package registers.

    Raises ``UsageError`` if it cannot be imported or is not a `Kind` of that name.
    """
    kind = load_part("study", entry)
    if not isinstance(kind, Kind) or kind.name != entry.name:
        description = f"the kind {kind.name}" if isinstance(kind, Kind) else f"a {type(kind).__name__}"
        raise wrong_part_error(entry, description, "a Kind of that name")
    return kind


def find_kind_of_store(path: Path) -> Kind[Any, Any, Any] | None:
    """The kind of campaign in a store; None if the file is not a store of a registered kind."""
    application = application_of(path)
    known = next((kind for kind in KINDS if kind.application_id == application), None)
    if known is not None or not application:
        return known
    others = map(load_installed_kind, installed_kinds().values())
    return next((kind for kind in others if kind.application_id == application), None)


def first_kind(words: Iterable[str]) -> Kind[Any, Any, Any] | None:
    """The kind of the first path in ``words`` that is a store; None if there is none."""
    return next((kind for word in words if (kind := find_kind_of_store(Path(word))) is not None), None)


def kind_of_store(path: Path) -> Kind[Any, Any, Any]:
    """The kind of campaign in a store.

    A file without an application id counts as a store of ``unsilent pvf``, whose own checks report the problem. Raises
    ``StoreError`` for a file with an unknown id.
    """
    kind = find_kind_of_store(path)
    if kind is None and application_of(path):
        raise StoreError(f"{path} {not_a_store()}")
    return kind or PVF


def not_a_store() -> str:
    """The end of an error message for a file that is not a store of a registered kind."""
    *names, last = dict.fromkeys([*(kind.command_words for kind in KINDS), *installed_kinds()])
    verbs = f"{', '.join(names)} or {last}" if names else last
    return f"is not a store of unsilent {verbs}, or nothing was stored in it yet; check the name"

"""Prepares the campaign of a card to run again: finds its files by content, and reads its options.

A card may come from an untrusted source. It can select files only by their content, cannot import modules, and cannot determine
where results are written.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.options import options_of
from unsilent.campaigns.spec import Baseline, differences
from unsilent.campaigns.stored_command import given_options
from unsilent.faults.fault_texts import with_function_file
from unsilent.outcomes.pvf_options import PvfAnalysisOptions
from unsilent.studies.pvf.card import PvfCard
from unsilent.studies.pvf.file_hashes import content_hash, files_in, named_files
from unsilent.studies.pvf.spec import PvfBaseline, PvfBudget, PvfSpec
from unsilent.workloads.zoo import ZOO

CLASSES = (PvfSpec, PvfBudget, PvfAnalysisOptions)
"""Classes of the options that a card contains."""


def find_contents(folder: Path, wanted: str, known: Path, is_folder: bool = False) -> Path | None:
    """Find the file or folder with a given content hash inside a folder; None if there is none.

    Candidates with the known name come first; all must have the same ending.
    """
    inside = [path for path in folder.rglob("*") if path.is_dir()] if is_folder else list(files_in(folder))
    alike = sorted(path for path in inside if path.suffix == known.suffix)
    by_name = sorted(alike, key=lambda path: path.name != known.name)
    return next((path for path in by_name if content_hash(path) == wanted), None)


def card_options(card: PvfCard, name: str, folder: Path | None, known_fields: Collection[str]) -> dict[str, Any]:
    """The options of a card's command as texts, by field, with the files found in a folder.

    Raises ``UsageError`` if a file is not found or the command cannot be run.

    Args:
        card: The card of the campaign to run again.
        name: Name of the card in error messages.
        folder: Folder to search for files; None to search nowhere.
        known_fields: Fields with known values, whose files are not needed.
    """
    known = named_files(card.spec)
    files = {option: path for option, path in known.items() if option not in known_fields}
    options = {option: text for option, text in _command_options(card, name).items() if option not in PvfSpec.FILES}
    if "fault" in options:  # the file of a function is found by its content, not by its path in the command
        options["fault"] = card.spec.fault
    if card.spec.workload not in ZOO and "workload" not in {*known, *known_fields}:
        raise UsageError(
            f"{name} names the workload {card.spec.workload}, which is neither built in nor a file; name it on the command line"
        )
    if files and folder is None:
        raise UsageError(f"the campaign of {name} needs files; give the folder that has them: --find DIR")
    options["workload"] = card.spec.workload
    for option, path in files.items():
        if folder is not None:
            present_path = _found(card, name, folder, option, path)
            options[option] = _option_text(card.spec, option, present_path)
    return options


def _option_text(spec: PvfSpec, option: str, present_path: Path) -> str:
    """The text of an option, with its file or folder replaced by the one that was found."""
    if option == "fault":
        return with_function_file(spec.fault, str(present_path))
    if option != "workload":
        return str(present_path)
    named = spec.workload
    place, _, function = named.rpartition(":")
    if named.startswith("hf:"):
        return f"hf:{present_path}"
    return f"{present_path}:{function}" if place.endswith(".py") else str(present_path)


def comparison_text(card: PvfCard, name: str, spec: PvfSpec, baseline: PvfBaseline) -> str:
    """A sentence on whether a campaign is that of a card, and on what differs."""
    if baseline.campaign == card.campaign:
        return f"the campaign is that of {name}: the same faults are injected"
    keys = sorted(key for key, _ in differences((card.spec, cast(Baseline, card)), (spec, baseline)))
    return f"this is not the campaign of {name}, as these differ: {', '.join(keys)}; compare estimates and intervals, not trials"


def _command_options(card: PvfCard, name: str) -> dict[str, Any]:
    try:
        words = shlex.split(card.command)
    except ValueError:
        raise UsageError(f"the campaign of {name} cannot be run: its command cannot be read") from None
    if words[:2] != ["unsilent", "pvf"]:
        what = "a Python call" if card.command.startswith("unsilent.") else "no unsilent pvf"
        raise UsageError(
            f"the campaign of {name} cannot be run again: its command is {what}; ask its author for the workload"
        )
    return dict(given_options(words, options_of(*CLASSES)))


def _found(card: PvfCard, name: str, folder: Path, option: str, path: Path) -> Path:
    if option not in card.files:
        raise UsageError(f"{name} has no hash of {path.name}, so it cannot be found; name the file on the command line")
    is_folder = option == "workload" and card.spec.workload.startswith("hf:")
    present_path = find_contents(folder, card.files[option], path, is_folder)
    if present_path is None:
        flag = options_of(PvfSpec)[option].flag
        raise UsageError(
            f"no file in {folder} has the content of {path.name} (SHA-256 {card.files[option][:16]}…) as in {name}; "
            f"give {flag} to use another one"
        )
    return present_path

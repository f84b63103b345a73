"""Detection of file types, so that a command can refuse a file and name the command for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unsilent.basics.errors import UsageError

CHECKPOINT_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".h5", ".keras", ".npz")
NOUNS = {
    "store": "the store of a campaign", "card": "a card", "events": "events of a monitored training",
    "injection": "a published injection by its name", "checkpoint": "a checkpoint by its name",
}  # fmt: skip

STORE_WANTED = {
    "checkpoint": "unsilent checkpoint inspect for it, and give the store of a campaign here",
    "events": "unsilent report for them, and give the store of a campaign here",
    "card": "unsilent report for it, and give the store of a campaign here",
    "injection": "unsilent replay-injection for it, and give the store of a campaign here",
}
"""Messages that refuse other files if a store is required."""


def sort_of_file(path: Path) -> str:
    """The type of a file, a key of `NOUNS`; empty if it has none of these types."""
    from unsilent.events.event_files import has_events
    from unsilent.studies.campaign_kinds import find_kind_of_store
    from unsilent.studies.pvf.card import is_card

    if has_events(path) and not (path.is_dir() and not any(path.glob("*.jsonl"))):
        return "events"
    if not path.exists():
        return ""
    if path.suffix.lower() == ".csv":
        return "injection"
    if find_kind_of_store(path) is not None:
        return "store"
    if is_card(path):
        return "card"
    return "checkpoint" if path.suffix.lower() in CHECKPOINT_ENDINGS and path.is_file() else ""


def refuse_other_files(path: Path, verbs: Mapping[str, str]) -> None:
    """Raise ``UsageError`` for a file of these types.

    ``verbs`` are the commands that read each type.
    """
    if (sort := sort_of_file(path)) in verbs:
        raise UsageError(f"{path} is {NOUNS[sort]}; use {verbs[sort]}")

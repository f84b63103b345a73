"""Corrupting a checkpoint in one call, as the command `unsilent checkpoint` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import read_plain
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import DrawOptions, corruptible, draw_faults
from unsilent.checkpoints.editing import apply_edit, refuse_interrupted
from unsilent.checkpoints.hdf5_corrupter.sequence import repeat_sequence
from unsilent.checkpoints.injection_file import (
    MOST_BYTES,
    for_checkpoint,
    injection_json,
    read_injection,
    with_same_bits,
)
from unsilent.faults.lists.hdf5_corrupter import is_sequence
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.receipts import Receipt
from unsilent.faults.record import Fault

FaultsAndNotes = tuple[Sequence[Fault], Sequence[str]]


@dataclass(frozen=True)
class CheckpointEdit:
    """The record of one change to a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        receipt: The faults with the words before and after.
        bytes_changed: Number of bytes that were written, including checksums.
        undo_record: File with the previous bytes; None if nothing was changed.
        injection: The injection as JSON values, to be saved and replayed.
        notes: Sentences for the user on how an injection was interpreted.
    """

    path: Path
    receipt: Receipt
    bytes_changed: int
    undo_record: Path | None
    injection: dict[str, Any]
    notes: tuple[str, ...] = ()


def corrupt(
    path: str | Path,
    at: Sequence[str] = (),
    *,
    section: Sequence[str] = (),
    fault: str | FaultModel = "bitflip",
    options: DrawOptions | None = None,
    crc: str = "stale",
    dry_run: bool = False,
) -> CheckpointEdit:
    """Draw faults for a checkpoint and change it in place.

    Args:
        path: A file or folder.
        at: Names or globs of tensors, with an optional index (``fc.weight[3,5]``); none: all tensors of the model.
        section: Sections to corrupt; none: all sections that ``at`` selects.
        fault: Fault model or its text.
        options: Law, probability, forbidden results and seed.
        crc: ``stale`` or ``fixed``: checksums that cover a changed byte.
        dry_run: Change nothing.

    Raises:
        UsageError: no tensor is selected, or the file cannot be edited; the file is unchanged then.
    """
    options = options or DrawOptions()
    model = fault if isinstance(fault, FaultModel) else fault_model(fault)

    def draw(checkpoint: Checkpoint) -> FaultsAndNotes:
        return draw_faults(checkpoint, corruptible(checkpoint, at, section), model, options), ()

    details = {"fault": model.text, "seed": options.seed, "law": options.law}
    return _edit(path, draw, crc, dry_run, details)


def corrupt_by_settings(
    path: str | Path, settings: str | Path, *, seed: int = 0, crc: str = "stale", dry_run: bool = False
) -> CheckpointEdit:
    """Corrupt a checkpoint as hdf5_corrupter would with a given settings file.

    Args:
        path: A file or folder; ``hdf5_file`` of the settings is not used.
        settings: The YAML file.
        seed: Seed of the draw.
        crc: ``stale`` or ``fixed``: checksums that cover a changed byte.
        dry_run: Change nothing.

    Raises:
        UsageError: the settings or the checkpoint are damaged or do not fit; the checkpoint is unchanged then.
    """
    from unsilent.checkpoints.hdf5_corrupter.settings import read_settings
    from unsilent.checkpoints.hdf5_corrupter.tries import draw_tries

    injector_settings = read_settings(settings)
    details = {"settings": Path(settings).name, "seed": seed}
    return _edit(path, lambda checkpoint: draw_tries(checkpoint, injector_settings, seed), crc, dry_run, details)


def replay(
    path: str | Path,
    injection: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
    same_bits: bool = False,
    seed: int = 0,
    crc: str = "stale",
    dry_run: bool = False,
) -> CheckpointEdit:
    """Repeat a saved injection in a checkpoint.

    Args:
        path: A file or folder.
        injection: A file that `corrupt` was saved to, a list of fault records, or a sequence saved by hdf5_corrupter.
        names: Names of the injection's tensors, layers or sections -> names in this checkpoint.
        axes: Names of the injection's tensors -> order of their axes in this checkpoint, as in ``numpy.transpose``:
            ``{"model/fc.weight": (1, 0)}``.
        same_bits: Whether to write the same words as the injection; otherwise its changes are applied to the current words.
        seed: Seed of the elements that a sequence of hdf5_corrupter leaves open.
        crc: ``stale`` or ``fixed``: checksums that cover a changed byte.
        dry_run: Change nothing.

    Raises:
        UsageError: the injection does not fit; the file is unchanged then.
    """
    content, replayed = read_plain(injection, MOST_BYTES, f"the injection {injection}"), Path(injection).name
    if is_sequence(content):
        if same_bits:
            raise UsageError(f"{injection} does not hold the bits before and after; leave out --same-bits")
        if axes:
            raise UsageError(f"{injection} is a sequence of hdf5_corrupter, whose indices are those of this checkpoint; "
                             "leave out --axes")  # fmt: skip

        def repeat(checkpoint: Checkpoint) -> FaultsAndNotes:
            return repeat_sequence(checkpoint, content, str(injection), names or {}, seed)

        return _edit(path, repeat, crc, dry_run, {"replayed": replayed, "seed": seed})
    saved, notes = for_checkpoint(read_injection(injection), names or {}, axes or {})

    def faults(checkpoint: Checkpoint) -> FaultsAndNotes:
        return (with_same_bits(checkpoint, saved) if same_bits else [entry.fault for entry in saved]), notes

    return _edit(path, faults, crc, dry_run, {"replayed": replayed})


def _edit(
    path: str | Path, faults: Callable[[Checkpoint], FaultsAndNotes], crc: str, dry_run: bool, details: dict[str, Any]
) -> CheckpointEdit:
    with Checkpoint(path) as checkpoint:
        refuse_interrupted(checkpoint.path)
        drawn, notes = faults(checkpoint)
        patches, receipt = checkpoint.plan(drawn, crc)
        saved = injection_json(receipt, checkpoint=checkpoint.path.name, crc=crc, **details)
        record = None if dry_run else apply_edit(checkpoint.path, patches, saved)
        changed = sum(len(p.after) for p in patches)
        return CheckpointEdit(checkpoint.path, receipt, changed, record, saved, tuple(notes))

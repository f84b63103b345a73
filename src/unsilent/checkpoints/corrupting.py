"""Corrupting a checkpoint in one call: draw or read faults, plan, edit in place; `unsilent checkpoint` does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import DrawOptions, corruptible, draw_faults
from unsilent.checkpoints.editing import apply_edit, refuse_interrupted
from unsilent.checkpoints.injection_file import injection_json, read_injection, with_same_bits
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.receipts import Receipt
from unsilent.faults.record import Fault


@dataclass(frozen=True)
class CheckpointEdit:
    """What one call changed.

    Attributes:
        path: The checkpoint.
        receipt: The faults with the words before and after.
        bytes_changed: Bytes that were written, checksums included.
        undo_record: Where the bytes before are; None where nothing was changed.
        injection: The injection as JSON values, to be saved and replayed.
    """

    path: Path
    receipt: Receipt
    bytes_changed: int
    undo_record: Path | None
    injection: dict[str, Any]


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
        at: Names or globs of tensors, with an index if wanted (``fc.weight[3,5]``); none: the model's.
        section: Sections to corrupt; none: all that ``at`` selects.
        fault: Fault model or its text.
        options: Law, probability, forbidden results and seed.
        crc: ``stale`` or ``fixed``: checksums that cover a changed byte.
        dry_run: Change nothing.

    Raises:
        UsageError: nothing fits, or the file cannot be edited; it is as before then.
    """
    options = options or DrawOptions()
    model = fault if isinstance(fault, FaultModel) else fault_model(fault)

    def draw(checkpoint: Checkpoint) -> Sequence[Fault]:
        return draw_faults(checkpoint, corruptible(checkpoint, at, section), model, options)

    details = {"fault": model.text, "seed": options.seed, "law": options.law}
    return _edit(path, draw, crc, dry_run, details)


def replay(
    path: str | Path,
    injection: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    same_bits: bool = False,
    crc: str = "stale",
    dry_run: bool = False,
) -> CheckpointEdit:
    """Repeat a saved injection in a checkpoint.

    Args:
        path: A file or folder.
        injection: A file that `corrupt` was saved to, or a list of fault records.
        names: What tensors, layers or sections of the injection are called here.
        same_bits: Write the words that the injection left; else do the same to the words that are there.
        crc: ``stale`` or ``fixed``: checksums that cover a changed byte.
        dry_run: Change nothing.

    Raises:
        UsageError: the injection does not fit; the file is as before then.
    """
    saved = read_injection(injection, names)

    def faults(checkpoint: Checkpoint) -> Sequence[Fault]:
        return with_same_bits(checkpoint, saved) if same_bits else [one.fault for one in saved]

    return _edit(path, faults, crc, dry_run, {"replayed": Path(injection).name})


def _edit(
    path: str | Path, faults: Callable[[Checkpoint], Sequence[Fault]], crc: str, dry_run: bool, details: dict[str, Any]
) -> CheckpointEdit:
    with Checkpoint(path) as checkpoint:
        refuse_interrupted(checkpoint.path)
        patches, receipt = checkpoint.plan(faults(checkpoint), crc)
        saved = injection_json(receipt, checkpoint=checkpoint.path.name, crc=crc, **details)
        record = None if dry_run else apply_edit(checkpoint.path, patches, saved)
        return CheckpointEdit(checkpoint.path, receipt, sum(len(p.after) for p in patches), record, saved)

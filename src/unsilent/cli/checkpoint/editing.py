"""``unsilent checkpoint corrupt|replay|undo``: inject faults into checkpoint files, and undo them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, FAULTS_PANEL, OUTPUT_PANEL, Option, Request, check_count
from unsilent.cli.checkpoint.arguments import CHECKPOINT
from unsilent.cli.tables import show_result
from unsilent.command import FILES, Command, DisplayOptions

if TYPE_CHECKING:
    from unsilent.checkpoints.corrupting import CheckpointEdit


@dataclass(frozen=True)
class EditOptions:
    """Options shared by the commands that edit a checkpoint."""

    crc: Annotated[str, Option(
        "Checksums in the file that cover a changed byte: stale (left, as by a fault in storage) or fixed (made to fit, as by a "
        "fault in memory before saving).", FAULTS_PANEL, metavar="stale|fixed")] = "stale"  # fmt: skip
    seed: Annotated[int, Option("Seed of the random draws.", FAULTS_PANEL)] = 0
    save: Annotated[
        Path | None,
        Option("Write the injection that was made to this file, for unsilent checkpoint replay.", OUTPUT_PANEL),
    ] = None
    dry_run: Annotated[bool, Option("Show what would change; change nothing.", EXECUTION_PANEL)] = False


@dataclass(frozen=True)
class CorruptOptions:
    """Options of ``unsilent checkpoint corrupt``."""

    path: Annotated[Path, CHECKPOINT]
    at: Annotated[
        tuple[str, ...],
        Option(
            "Tensors to corrupt, by name or glob; an index, counted from 0, selects one element: 'fc.weight[3,5]'. Can be given "
            "more than once; faults are drawn from all of them together.",
            FAULTS_PANEL,
            default_text="all tensors of the model",
            is_repeatable=True,
        ),
    ] = ()
    section: Annotated[tuple[str, ...], Option(
        "Corrupt this section: model, optimizer, scheduler, rng or other.", FAULTS_PANEL, is_repeatable=True)] = ()  # fmt: skip
    fault: Annotated[str, Option(
        "Fault model, as listed by unsilent faults, with count or rate, and bits: bitflip:bits=exponent,count=10, "
        "bitflip:rate=1e-6. Bit 0 is the lowest.", FAULTS_PANEL)] = "bitflip"  # fmt: skip
    flips: Annotated[int | None, Option(
        "Number of flips (or elements) to draw.", FAULTS_PANEL, default_text="1, or what --fault says")] = None  # fmt: skip
    law: Annotated[
        str,
        Option(
            "How elements are drawn: per-element (each element alike) or per-tensor (each tensor alike).", FAULTS_PANEL
        ),
    ] = "per-element"
    probability: Annotated[float, Option("Probability with which each drawn element is corrupted.", FAULTS_PANEL)] = 1.0
    keep_finite: Annotated[bool, Option("Draw again where a number would become NaN or infinite.", FAULTS_PANEL)] = (
        False
    )
    keep_sign: Annotated[bool, Option("Draw again where a number would change its sign.", FAULTS_PANEL)] = False
    settings: Annotated[Path | None, Option(
        "Draw by these YAML settings of hdf5_corrupter, instead of by the options above.", FAULTS_PANEL)] = None  # fmt: skip


def corrupt(request: Request) -> int:
    """Draw faults and change the checkpoint in place; it can be undone."""
    from unsilent.checkpoints.corrupting import corrupt, corrupt_by_settings
    from unsilent.checkpoints.drawing import DrawOptions
    from unsilent.faults.models import fault_model

    asks, edits = request[CorruptOptions], request[EditOptions]
    drawing = DrawOptions(asks.law, asks.probability, asks.keep_finite, asks.keep_sign, edits.seed)
    how: dict[str, Any] = {"crc": edits.crc, "dry_run": edits.dry_run}
    if asks.settings is not None:
        if asks != CorruptOptions(asks.path, settings=asks.settings):
            raise UsageError(f"--settings {asks.settings} says what is drawn; leave out --at, --section, --fault, --flips, "
                             "--law, --probability, --keep-finite and --keep-sign")  # fmt: skip
        return _show_edit(corrupt_by_settings(asks.path, asks.settings, seed=edits.seed, **how), request)
    model = fault_model(asks.fault)
    if asks.flips is not None:
        if model.has_explicit_count:
            raise UsageError(
                f"--flips and the {model.pattern.text} of --fault both set the number of flips; give only one"
            )
        check_count("--flips", asks.flips, 1)
        model = model.with_count(asks.flips)
    edit = corrupt(asks.path, asks.at, section=asks.section, fault=model, options=drawing, **how)
    return _show_edit(edit, request)


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``unsilent checkpoint replay``."""

    path: Annotated[Path, CHECKPOINT]
    injection: Annotated[Path, Option(
        "An injection saved by corrupt, a list of fault records, or a sequence saved by hdf5_corrupter.", "",
        missing_error="no injection was named; give the file that unsilent checkpoint corrupt --save wrote")]  # fmt: skip
    rename: Annotated[tuple[str, ...], Option(
        "OLD=NEW: the tensor, layer or section OLD of the injection is called NEW in this checkpoint. Repeat for several.",
        FAULTS_PANEL, "map", is_repeatable=True, metavar="OLD=NEW")] = ()  # fmt: skip
    axes: Annotated[
        tuple[str, ...],
        Option(
            "OLD=1,0: the tensor OLD of the injection is transposed in this checkpoint: its axes are there in this order, as in "
            "numpy.transpose(OLD, (1, 0)). Repeat for several.",
            FAULTS_PANEL,
            is_repeatable=True,
            metavar="OLD=AXES",
        ),
    ] = ()
    same_bits: Annotated[bool, Option(
        "Write the bits that the injection produced; an error if the bits before differ.", FAULTS_PANEL)] = False  # fmt: skip


def replay(request: Request) -> int:
    """Repeat a saved injection in the same or another checkpoint, also of another format."""
    from unsilent.checkpoints.corrupting import replay

    asks, edits = request[ReplayOptions], request[EditOptions]
    names = dict(pair.partition("=")[::2] for pair in asks.rename)
    if not all(names.values()):
        raise UsageError(f"--map is {' '.join(asks.rename)}; expected OLD=NEW, like --map layer1=encoder.layer1")
    orders = dict(_order_of_axes(text) for text in asks.axes)
    edit = replay(
        asks.path, asks.injection, names=names, axes=orders, same_bits=asks.same_bits, seed=edits.seed, crc=edits.crc,
        dry_run=edits.dry_run,
    )  # fmt: skip
    return _show_edit(edit, request)


def _order_of_axes(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = text.partition("=")
    if not name or not re.fullmatch(r"\d{1,2}(,\d{1,2})*", numbers):
        raise UsageError(f"--axes is {text}; expected OLD=AXES, like --axes model/fc.weight=1,0")
    return name, tuple(int(number) for number in numbers.split(","))


@dataclass(frozen=True)
class UndoOptions:
    """Options of ``unsilent checkpoint undo``."""

    path: Annotated[Path, CHECKPOINT]
    everything: Annotated[bool, Option("Undo all edits, not only the last one.", EXECUTION_PANEL, "all")] = False


def undo(request: Request) -> int:
    """Undo the last edit, which restores the checkpoint byte for byte."""
    from unsilent.checkpoints.editing import undo_edit

    options = request[UndoOptions]
    done = undo_edit(options.path, options.everything)
    changed = sum(len(patch.after) for edit in done for patch in edit.patches)
    fields = {"edits": [edit.number for edit in done], "bytes": changed}
    noun = "edit" if len(done) == 1 else "edits"
    line = f"{len(done)} {noun} of {options.path} undone: {changed:,} bytes restored and read again"
    show_result(request, "unsilent/checkpoint-undo/1", "checkpoint undo", fields, line)
    return 0


def _show_edit(edit: CheckpointEdit, request: Request) -> int:
    """Save and print the changes that a command made."""
    from unsilent.basics.plainfiles import replace_file
    from unsilent.report.text import count_text

    save, dry_run = request[EditOptions].save, request[EditOptions].dry_run
    receipt, record = edit.receipt, edit.undo_record
    if save is not None:
        try:
            replace_file(save, json.dumps(edit.injection, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {save}: {error.strerror}; the checkpoint was changed, and its undo record holds the injection"
            ) from None
    fields = {
        "results": receipt.to_json(), "bytes": edit.bytes_changed, "changed_bits": receipt.changed_bits,
        "undo_record": record and str(record), "dry_run": dry_run, "notes": list(edit.notes),
    }  # fmt: skip
    counts_text = f"{count_text(receipt.changed_bits, 'bit')} of {count_text(receipt.requested_elements, 'element')}"
    where = f"{count_text(len({hit.fault.site for hit in receipt.applied_faults}), 'tensor')} of {edit.path}"
    hits = [f"  {hit}" for hit in receipt.applied_faults[:10]]
    if len(receipt.applied_faults) > 10:
        hits.append(f"  and {len(receipt.applied_faults) - 10:,} more tensors")
    notes = [f"Note: {note}" for note in edit.notes]
    if record is not None:
        notes.append(f"Undo it with: unsilent checkpoint undo {edit.path}")
    lines = (f"{'Would change' if dry_run else 'Changed'} {counts_text} in {where}", *hits, *notes)
    show_result(request, "unsilent/checkpoint-corrupt/1", "checkpoint corrupt", fields, *lines)
    return 0


CORRUPT = Command(
    "checkpoint corrupt", FILES, "unsilent checkpoint corrupt epoch-1.pt --flips 3",
    (CorruptOptions, EditOptions, DisplayOptions), corrupt,
)  # fmt: skip
REPLAY = Command(
    "checkpoint replay", FILES, "unsilent checkpoint replay other.safetensors injection.json",
    (ReplayOptions, EditOptions, DisplayOptions), replay,
)  # fmt: skip
UNDO = Command("checkpoint undo", FILES, "unsilent checkpoint undo epoch-1.pt", (UndoOptions, DisplayOptions), undo)

"""Report on a checkpoint's content: sections, tensors, dtypes, shapes, and values that are not finite or very large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.basics.printable import escape_unprintable
from unsilent.basics.sizes import human_bytes
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.names import SECTIONS
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.faults.codecs import CODECS
from unsilent.report.model import Column, Report, Section, Table, TableRow
from unsilent.report.text import count_text

EXTREME = 1e6
"""Magnitude above which a number counts as extreme."""


@dataclass(frozen=True)
class Values:
    """Counts of elements of a tensor that are not finite or very large, and its largest magnitude.

    Attributes:
        nonfinite: Number of elements that are NaN or infinite.
        extreme: Number of finite elements that are larger in magnitude than `EXTREME`.
        largest: Largest magnitude among the finite ones; None where there is none.
    """

    nonfinite: int
    extreme: int
    largest: float | None


def summarise(checkpoint: Checkpoint, tensor: StoredTensor, progress: Callable[[int], object]) -> Values | None:
    """Counts over all elements of a tensor of floating point; None for others, and where there are none."""
    codec = CODECS.get(tensor.dtype)
    if codec is None or codec.kind != "float" or not tensor.is_readable or not tensor.numel:
        return None
    nonfinite = extreme = 0
    largest: float | None = None
    for part in checkpoint.content(tensor):
        words = np.frombuffer(part, codec.word_dtype)
        numbers = codec.decode(words) if codec.numpy_dtype is None else words.view(codec.numpy_dtype)
        finite = np.abs(numbers[np.isfinite(numbers)])
        nonfinite += numbers.size - finite.size
        with np.errstate(over="ignore"):  # float16 holds no number as large
            extreme += int(np.count_nonzero(finite > EXTREME))
        if finite.size:
            largest = max(float(finite.max()), largest or 0.0)
        progress(len(part))
    return Values(nonfinite, extreme, largest)


def inspection_report(
    checkpoint: Checkpoint,
    selected: Sequence[StoredTensor],
    values: dict[str, Values | None],
    undo_note: str = "",
) -> Report:
    """The report of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        selected: Tensors and numbers that are shown.
        values: Values by name, from `summarise`.
        undo_note: A sentence on edits that can be undone.
    """
    tensors = [t for t in selected if not t.is_number and not t.is_object]
    objects = [t.name for t in selected if t.is_object]
    numbers = [t for t in selected if t.is_number]
    size = sum(t.nbytes for t in tensors)
    known = {name: v for name, v in values.items() if v is not None}
    bad = [name for name, v in known.items() if v.nonfinite]
    far = [name for name, v in known.items() if v.extreme]
    # Integers cannot be NaN or infinite, so they need not be read.
    unread = [t.name for t in tensors if t.name not in known and t.numel and not (_is_integer(t) and t.is_readable)]
    findings = [f"`{name}` has {known[name].nonfinite:,} values that are NaN or infinite" for name in bad[:10]] + [
        f"`{name}` has {known[name].extreme:,} values beyond ±{EXTREME:g}" for name in far[:10]
    ]
    for names, noun, description in (
        (unread, "tensor", "with values that were not read"),
        (objects, "object", "not read"),
        (list(map(escape_unprintable, checkpoint.unread_files)), "file", "of the folder not read"),
    ):
        if names:
            names_text = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
            findings.append(f"{count_text(len(names), noun)} {description}: {names_text}")
    claim = _claim(known, len(unread))
    elements = count_text(sum(t.numel for t in tensors), "element")
    headline = f"{count_text(len(tensors), 'tensor')} with {elements} ({human_bytes(size)}){claim}."
    present = [s for s in SECTIONS if any(t.section == s for t in selected)]
    sections = [_section(s, [t for t in tensors if t.section == s], known) for s in present]
    if numbers:
        rows = tuple(TableRow((t.name, str(t.value), "yes" if not t.reason_not_editable else "no")) for t in numbers)
        heads = (
            Column("number", left_aligned=True),
            Column("value", left_aligned=True),
            Column("can be edited", priority=1),
        )
        text = "Numbers that are no tensors, such as learning rates and counters."
        sections.append(Section("Numbers", text, (Table(heads, rows, title="Numbers"),)))
    machine = (Column("name"), Column("section"), Column("dtype"), Column("shape"), Column("elements", "number"),
               Column("nonfinite", "number"), Column("extreme", "number"), Column("largest", "number"), Column("value", "number"),
               Column("obstacle"))  # fmt: skip
    estimates = Table(machine, tuple(_machine_row(t, known) for t in selected))
    return Report(
        "unsilent/checkpoint-inspect/1", "checkpoint", f"{checkpoint.path.name}: {checkpoint.format}", headline, estimates,
        findings=tuple(findings), sections=tuple(s for s in sections if s is not None),
        facts=(("file", str(checkpoint.path)), ("format", checkpoint.format)),
        notes=(undo_note,) if undo_note else (),
        further_json={"command": "checkpoint inspect", "format": checkpoint.format, "unread_files": checkpoint.unread_files},
    )  # fmt: skip


def _is_integer(tensor: StoredTensor) -> bool:
    """Whether its dtype has no NaN, no infinity and no field of bits that could be one."""
    return tensor.dtype.startswith(("int", "uint", "bool", "bits", "quint"))


def _claim(known: dict[str, Values], unread: int) -> str:
    """Sentence on the values that were read, and on how many tensors that is."""
    bad = sum(1 for v in known.values() if v.nonfinite)
    far = sum(1 for v in known.values() if v.extreme)
    if bad or far:
        return f"; tensors with values that are NaN or infinite: {bad:,}, with values beyond ±{EXTREME:g}: {far:,}"
    if not known:
        return "; no values were read" if unread else "; no floating-point values"
    whose = f" in the {len(known):,} of {len(known) + unread:,} tensors that were read" if unread else ""
    return f"; no value{whose} is NaN, infinite or beyond ±{EXTREME:g}"


def _machine_row(tensor: StoredTensor, known: dict[str, Values]) -> TableRow:
    v = known.get(tensor.name)
    counts = (v.nonfinite, v.extreme, v.largest) if v else (None, None, None)
    return TableRow((
        tensor.name, tensor.section, tensor.dtype, str(list(tensor.shape)), tensor.numel, *counts, tensor.value,
        tensor.reason_not_editable or None,
    ))  # fmt: skip


def _section(name: str, tensors: list[StoredTensor], known: dict[str, Values]) -> Section | None:
    """One section's tensors as a table; None where it has none."""
    if not tensors:
        return None
    heads = [
        Column("tensor", left_aligned=True), Column("dtype", left_aligned=True, priority=1), Column("shape", left_aligned=True),
        Column("not finite", "number"), Column("extreme", "number"), Column("largest", "number", digits=".3g", priority=2),
    ]  # fmt: skip
    note = any(t.reason_not_editable for t in tensors)
    if note:
        heads.append(Column("cannot be edited because", left_aligned=True, priority=3))
    rows = []
    for tensor in tensors:
        v = known.get(tensor.name)
        cells: list[object] = [tensor.name.partition("/")[2], tensor.dtype, "×".join(map(str, tensor.shape)) or "one"]
        cells += [v.nonfinite, v.extreme, v.largest] if v else [None, None, None]
        if note:
            cells.append(tensor.reason_not_editable)
        rows.append(TableRow(tuple(cells), emphasised=bool(v and (v.nonfinite or v.extreme))))  # type: ignore[arg-type]
    elements = sum(math.prod(t.shape) for t in tensors)
    title = f"{name.capitalize()}: {len(tensors):,} tensors, {elements:,} elements"
    return Section(title, "", (Table(tuple(heads), tuple(rows), title=title, sortable=True),))

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
from unsilent.report.model import Column, Getter, Report, Section, Table
from unsilent.report.text import count_text

EXTREME = 1e6
"""Magnitude above which a number counts as extreme."""


@dataclass(frozen=True)
class Values:
    """Counts of elements of a tensor that are not finite or very large, and its largest magnitude.

    Attributes:
        nonfinite: Number of elements that are NaN or infinite.
        extreme: Number of finite elements that are larger in magnitude than `EXTREME`.
        largest: Largest magnitude of the finite elements; None if there are none.
    """

    nonfinite: int
    extreme: int
    largest: float | None


def summarise(checkpoint: Checkpoint, tensor: StoredTensor, progress: Callable[[int], object]) -> Values | None:
    """The counts over all elements of a floating-point tensor; None for other tensors and empty ones."""
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
        with np.errstate(over="ignore"):  # float16 cannot represent a number as large
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
    """The report on a checkpoint's content.

    Args:
        checkpoint: The checkpoint.
        selected: Tensors and numbers to show.
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
    findings = [f"`{name}` has {count_text(known[name].nonfinite, 'NaN or infinite value')}" for name in bad[:10]] + [
        f"`{name}` has {count_text(known[name].extreme, 'value')} beyond ±{EXTREME:g}" for name in far[:10]
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
        heads = (
            Column.text("number", "name"),
            Column.text("value", lambda number: str(number.value)),
            Column("can be edited", of=lambda number: "no" if number.reason_not_editable else "yes", priority=1),
        )
        lead = "Numbers that are not tensors, such as learning rates and counters."
        sections.append(Section("Numbers", lead, (Table.of(numbers, heads, "Numbers"),)))
    machine = (
        *map(Column, ("name", "section", "dtype")),
        Column("shape", of=lambda tensor: str(list(tensor.shape))),
        Column.count("elements", "numel"),
        *(Column.count(field, _value_of(known, field)) for field in ("nonfinite", "extreme", "largest")),
        Column.count("value"),
        Column("obstacle", of=lambda tensor: tensor.reason_not_editable or None),
    )
    estimates = Table.of(selected, machine)
    return Report(
        "unsilent/checkpoint-inspect/1", "checkpoint", f"{checkpoint.path.name}: {checkpoint.format}", headline, estimates,
        findings=tuple(findings), sections=tuple(s for s in sections if s is not None),
        facts=(("file", str(checkpoint.path)), ("format", checkpoint.format)),
        notes=(undo_note,) if undo_note else (),
        further_json={"command": "checkpoint inspect", "format": checkpoint.format, "unread_files": checkpoint.unread_files},
    )  # fmt: skip


def _is_integer(tensor: StoredTensor) -> bool:
    """Whether the tensor's dtype has no NaN and no infinity."""
    return tensor.dtype.startswith(("int", "uint", "bool", "bits", "quint"))


def _claim(known: dict[str, Values], unread: int) -> str:
    """A sentence on the values that were read, and on the number of tensors read."""
    bad = sum(1 for v in known.values() if v.nonfinite)
    far = sum(1 for v in known.values() if v.extreme)
    if bad or far:
        bad_text, far_text = count_text(bad, "tensor"), count_text(far, "tensor")
        return f"; {bad_text} with NaN or infinite values, {far_text} with values beyond ±{EXTREME:g}"
    if not known:
        return "; no values were read" if unread else "; no floating-point values"
    whose = f" in the {len(known):,} of {len(known) + unread:,} tensors that were read" if unread else ""
    return f"; no value{whose} is NaN, infinite or beyond ±{EXTREME:g}"


def _value_of(known: dict[str, Values], field: str) -> Getter:
    """A function that returns a field of a tensor's values; None if they were not read."""
    return lambda tensor: getattr(known.get(tensor.name), field, None)


def _section(name: str, tensors: list[StoredTensor], known: dict[str, Values]) -> Section | None:
    """A table of one section's tensors; None if the section has none."""
    if not tensors:
        return None
    heads = [
        Column.text("tensor", lambda tensor: tensor.name.partition("/")[2]),
        Column.text("dtype", priority=1),
        Column.text("shape", lambda tensor: "×".join(map(str, tensor.shape)) or "scalar"),
        Column.count("not finite", _value_of(known, "nonfinite")),
        Column.count("extreme", _value_of(known, "extreme")),
        Column("largest", "number", digits=".3g", priority=2, of=_value_of(known, "largest")),
    ]
    if any(tensor.reason_not_editable for tensor in tensors):
        heads.append(Column.text("cannot be edited because", "reason_not_editable", 3))
    unusual = {name for name, values in known.items() if values.nonfinite or values.extreme}
    elements = sum(math.prod(t.shape) for t in tensors)
    title = f"{name.capitalize()}: {len(tensors):,} tensors, {elements:,} elements"
    table = Table.of(tensors, heads, title, lambda tensor: tensor.name in unusual, sortable=True)
    return Section(title, "", (table,))

"""Injection files: one line of JSON with the faults, and the bits of each element before and after.

The line has ``faults`` in the format of ``unsilent export``, so the same file is a list of faults for a campaign on a live model:
a site ``file:model/fc.weight`` is ``param:fc.weight`` in that campaign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import parse_json, read_lines
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.faults.codecs import Array
from unsilent.faults.fault_json import read_fault
from unsilent.faults.naming import site_in_file
from unsilent.faults.receipts import Receipt
from unsilent.faults.record import Fault, hex_words

MOST_BYTES = 48 * 2**20
"""Largest size of an injection file: about 60 bytes for each element. An edit has fewer than 800,000 elements, or 200,000 faults
of one element."""


@dataclass(frozen=True)
class SavedInjection:
    """One fault of an injection, with the elements' bits before and after if the file has them."""

    fault: Fault
    before: Array | None = None
    after: Array | None = None


def injection_json(receipt: Receipt, **more: Any) -> dict[str, Any]:
    """The content of an injection file, with further fields from ``more``."""
    hits = receipt.applied_faults
    before = [hex_words(hit.before, hit.fault.codec) for hit in hits]
    after = [hex_words(hit.after, hit.fault.codec) for hit in hits]
    return {**more, "faults": [hit.fault.to_json() for hit in hits], "before": before, "after": after}


def read_injection(path: str | Path) -> list[SavedInjection]:
    """The faults of an injection file, or of any list of fault records in JSON lines, in the file's order.

    Raises ``UsageError`` if it is not such a file, or if a record is damaged.
    """
    lines = read_lines(path, MOST_BYTES, MOST_BYTES, f"the injection {path}")
    result: list[SavedInjection] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = parse_json(line)
            except (ValueError, RecursionError):
                raise UsageError(
                    f"{path} line {number} is no JSON; expected a fault record, or faults, in each line"
                ) from None
            result += _of_line(value, f"{path} line {number}")
    if not result:
        raise UsageError(f"{path} holds no fault; expected an injection saved by unsilent checkpoint corrupt")
    return result


def with_axes(saved: SavedInjection, axes: Sequence[int]) -> SavedInjection:
    """The injection for a tensor stored as ``numpy.transpose(tensor, axes)``, with the elements' positions changed.

    Args:
        saved: Injection for a tensor of n axes.
        axes: int[n]; for example ``(1, 0)`` for the transposed weight of a linear layer.

    Raises:
        UsageError: the axes are not 0 to n - 1, each once.
    """
    fault = saved.fault
    if sorted(axes) != list(range(len(fault.shape))):
        raise UsageError(
            f"axes {','.join(map(str, axes))} do not fit {fault.site}, which is {fault.dtype}{list(fault.shape)}; expected "
            f"each of 0 to {len(fault.shape) - 1} once"
        )
    shape = tuple(fault.shape[axis] for axis in axes)

    def moved(places: Array) -> Array:
        index = np.unravel_index(places, fault.shape)
        return np.ravel_multi_index(tuple(index[axis] for axis in axes), shape) if axes else places

    elements = moved(fault.elements)
    operands = moved(fault.operands) if fault.operation == "copy_from" else fault.operands
    order = np.argsort(elements)
    before, after = (None if words is None else words[order] for words in (saved.before, saved.after))
    fault = replace(fault, shape=shape, elements=elements[order], operands=operands[order])
    return SavedInjection(fault, before, after)


def with_same_bits(checkpoint: Checkpoint, saved: Sequence[SavedInjection]) -> list[Fault]:
    """Faults that write the same bits as a saved injection did.

    Raises ``UsageError`` if the bits before differ from the injection's, or if the injection does not have them.
    """
    result = []
    for fault, before, after in ((entry.fault, entry.before, entry.after) for entry in saved):
        if before is None or after is None:
            raise UsageError(f"the injection has no words before and after for {fault.site}; leave out --same-bits")
        tensor = checkpoint.tensor(fault.site)
        if (tensor.dtype, tensor.shape) != (fault.dtype, fault.shape):
            raise UsageError(
                f"{tensor.name} is {tensor.dtype}{list(tensor.shape)}; the injection is for {fault.dtype}{list(fault.shape)}"
            )
        if not np.array_equal(checkpoint.read(tensor, fault.elements), before):
            raise UsageError(f"{tensor.name} has other bits than when the injection was saved; leave out --same-bits")
        result.append(replace(fault, operation="set", operands=after, held=None))
    return result


def _of_line(value: Any, where: str) -> list[SavedInjection]:
    records = value.get("faults", [value]) if isinstance(value, dict) else value
    if not isinstance(records, list):
        raise UsageError(f"{where} has no list of faults; expected fault records")
    try:
        faults = [read_fault(record) for record in records]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if not isinstance(value, dict) or "before" not in value:
        return [SavedInjection(fault) for fault in faults]
    words = {side: _words_from_text(value.get(side), faults, side, where) for side in ("before", "after")}
    return [SavedInjection(*entry) for entry in zip(faults, words["before"], words["after"], strict=True)]


def _words_from_text(value: Any, faults: Sequence[Fault], side: str, where: str) -> list[Array]:
    """Parse the bits of every fault's elements from hexadecimal text."""
    result = []
    try:
        for fault, texts in zip(faults, value, strict=True):
            numbers = [int(text, 16) for text in texts]
            if len(numbers) != len(fault) or any(not 0 <= n < 1 << fault.codec.bits for n in numbers):
                raise ValueError
            result.append(np.array(numbers, fault.codec.word_dtype))
    except (TypeError, ValueError):
        raise UsageError(f"{where}: {side} does not fit its faults; expected a word in hex for every element") from None
    return result


def for_checkpoint(
    saved: Sequence[SavedInjection], names: Mapping[str, str], axes: Mapping[str, Sequence[int]]
) -> tuple[list[SavedInjection], list[str]]:
    """Rename tensors and permute axes of an injection so that it fits a checkpoint; sites get the form ``file:…``.

    Args:
        saved: Injection from `read_injection`.
        names: Names of its tensors (``model/fc.weight``, or a part of the name) -> names in the checkpoint.
        axes: Names, like the keys of ``names`` -> order of the axes in the checkpoint; see `with_axes`.

    Returns:
        The injection, and notes on names that it does not have: a map may cover a whole model, and the faults only a part of it.
    """
    names_in_file = [site_in_file(entry.fault.site).removeprefix("file:") for entry in saved]
    notes = [
        f"{option} names {', '.join(unused)[:200]}, where the injection has no fault"
        for option, value in (("--map", names), ("--axes", axes))
        if (unused := [part for part in value if not any(_known_part(name, (part,)) for name in names_in_file)])
    ]
    return [_elsewhere(entry, names, axes) for entry in saved], notes


def _elsewhere(saved: SavedInjection, names: Mapping[str, str], axes: Mapping[str, Sequence[int]]) -> SavedInjection:
    """The injection with a tensor's name and axis order in a checkpoint."""
    name = site_in_file(saved.fault.site).removeprefix("file:")
    part = _known_part(name, axes)
    saved = saved if part is None else with_axes(saved, axes[part])
    return replace(saved, fault=replace(saved.fault, site=f"file:{renamed(name, names)}"))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The name with its beginning replaced according to ``names``; the longest match is used."""
    part = _known_part(name, names)
    return name if part is None else names[part] + name[len(part) :]


def _known_part(name: str, parts: Iterable[str]) -> str | None:
    """The longest of ``parts`` that is the tensor, or a layer or section that contains it; None if there is none."""
    known = (part for part in parts if name == part or name.startswith((f"{part}.", f"{part}/")))
    return max(known, key=len, default=None)

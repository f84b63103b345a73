"""Reading what a store file says: files come from anywhere, so nothing in them is believed before it is checked."""

from __future__ import annotations

import json
import math
import shlex
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import accumulate
from typing import Any, Protocol, TypeGuard, TypeVar

from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow
from unsilent.errors import UsageError
from unsilent.faults.naming import parse_site
from unsilent.outcomes.base import Outcome
from unsilent.printable import clean

T = TypeVar("T")
R = TypeVar("R", bound="HasTrial")
MOST_SAMPLES = 10**7
MOST_NOTES = MOST_FLIPS = 1000
LEAST_SHARE = 1e-30
MOST_TRIALS = 10**12
MOST_THREADS = 4096
MOST_UNPACKED = 2**29
"""Bytes that compressed cells may come to in one pass over a store, like 200,000 trials of 2,600 samples."""
UNPACKED_PER_BYTE = 32
"""The same, for each byte of a larger file."""
EQUAL = 2
"""Outcomes that an earlier trial had as well take no memory; of them so many times as much is read."""
KEPT, SHORT = 1000, 10_000
"""Outcomes that are remembered, and the compressed bytes of each at most."""
LONGEST_SHOWN = 80
_CODES = bytes(Outcome)


class Damaged(ValueError):
    """What was read is not what this program writes; the message says which part."""


class HasTrial(Protocol):
    """A row of a campaign of any kind."""

    @property
    def trial(self) -> TrialId: ...


class Allowance:
    """What one pass over a store may read and unpack, so that a small file cannot fill the memory.

    Args:
        size: of the file in bytes. No pass reads more than that: where it does, cells are reached twice.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._unpacked = max(MOST_UNPACKED, UNPACKED_PER_BYTE * size)
        self._known: dict[bytes, bytes] = {}

    def read(self, *cells: Any) -> None:
        """Count texts and blobs of a row; raises ``Damaged``."""
        self._left -= sum(len(cell) for cell in cells if isinstance(cell, str | bytes))
        if self._left < 0:
            raise Damaged("its rows come to more than the file holds")

    def unpack(self, blob: Any, most: int) -> bytes:
        """The content of a compressed cell, of at most ``most`` bytes. Raises ``Damaged``."""
        if not isinstance(blob, bytes):
            raise Damaged("an array is not stored as bytes")
        opened = zlib.decompressobj()
        try:
            content = opened.decompress(blob, most + 1)
        except zlib.error as error:
            raise Damaged(f"an array cannot be unpacked: {error}") from None
        if len(content) > most or not opened.eof or opened.unused_data:
            raise Damaged("an array is cut or too long")
        self._count(len(content))
        return content

    def codes(self, blob: Any, samples: Sequence[int]) -> bytes:
        """The outcomes of a trial with these samples in each batch, checked; most trials end alike, and share them."""
        known = self._known.get(blob) if isinstance(blob, bytes) else None
        if known is not None:
            self._count(len(known) // EQUAL)
            return known
        found = self.unpack(blob, sum(samples))
        _check_codes(found, samples)
        if len(self._known) < KEPT and len(blob) < SHORT:
            self._known[blob] = found
        return found

    def _count(self, size: int) -> None:
        self._unpacked -= size
        if self._unpacked < 0:
            raise Damaged(
                f"its arrays come to more than {MOST_UNPACKED >> 20} MiB, and to more than {UNPACKED_PER_BYTE} times the file"
            )


def _check_codes(codes: bytes, samples: Sequence[int]) -> None:
    """Raise ``Damaged`` unless there is an outcome for each sample, and batches are spared whole."""
    if len(codes) != sum(samples) or codes.translate(None, _CODES):
        raise Damaged(f"it has outcomes that do not fit {sum(samples)} samples")
    if Outcome.SPARED in codes:
        ends = list(accumulate(samples))
        left = [codes.count(Outcome.SPARED, end - n, end) - n for n, end in zip(samples, ends, strict=True)]
        if not any(left) or any(rest not in (0, -n) for rest, n in zip(left, samples, strict=True)):
            raise Damaged("it spares all batches, or part of one")


def stored_json(value: Any) -> str:
    """JSON as a cell holds it: a name that is no valid text stays one, and is refused before it is stored."""
    return json.dumps(value, default=str, ensure_ascii=False)


def parsed(kind: type[T], text: Any, what: str) -> T:
    """A record from its JSON; raises ``Damaged``, which names ``what``."""
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(text, str):
        raise Damaged(f"its {what} is no text")
    try:
        return TypeAdapter(kind).validate_json(text)
    except (ValidationError, RecursionError, ValueError) as error:
        raise Damaged(f"its {what} cannot be read: {shown(str(error).splitlines()[-1].strip())}") from None


def read_spec(text: Any) -> CampaignSpec:
    """A spec from a store; raises ``Damaged``."""
    found = parsed(CampaignSpec, text, "spec")
    if not 1 <= len(found.flips) <= MOST_FLIPS or not 1 <= found.threads <= MOST_THREADS:
        raise Damaged("its spec has no number of flips or too many, or an impossible number of threads")
    return found


def read_description(text: Any) -> Description:
    """A description from a store; raises ``Damaged``."""
    found = parsed(Description, text, "description")
    if not found.targets or not found.tensors or not found.samples:
        raise Damaged("its description names no target, tensor or sample")
    if min(found.samples) < 1 or sum(found.samples) > MOST_SAMPLES:
        raise Damaged("its description has an impossible number of samples")
    if not all(LEAST_SHARE <= t.share <= 1 + 1e-9 and t.bits_by_width for t in found.targets):
        raise Damaged("its description has a target without a share")
    if len(found.notes) > MOST_NOTES:
        raise Damaged("its description has more notes than a campaign makes")
    if any(t.elements < 1 or t.width not in (8, 16, 32, 64) for t in found.tensors):
        raise Damaged("its description has a tensor of an impossible size")
    for tensor in found.tensors:
        try:
            parse_site(tensor.site)
        except UsageError as error:
            raise Damaged(f"its description has a tensor of no site: {error}") from None
    return found


def read_round(text: Any, strata: Set[str]) -> list[CellPlan]:
    """What a look decided; ``strata``: names there are. Raises ``Damaged``."""
    found = parsed(list[CellPlan], text, "rounds")
    for plan in found:
        numbers = [*plan.start.values(), *plan.first.values(), plan.look]
        if not plan.start or not set(plan.start) <= strata or not set(plan.first) <= set(plan.start):
            raise Damaged("its rounds speak of targets that there are not")
        if plan.first and not set(plan.start) == set(plan.first) == set(plan.centre):
            raise Damaged("its rounds leave out a stratum")
        if not all(0 <= n < MOST_TRIALS for n in numbers) or not all(0 <= c <= 1 for c in plan.centre.values()):
            raise Damaged("its rounds have impossible numbers")
    return found


def read_trial(target: Any, flips: Any, k: Any, targets: Set[str], counts: Collection[int | None]) -> TrialId:
    """A trial that its campaign has: of one of its ``targets``, with one of its numbers of flips. Raises ``Damaged``."""
    if not isinstance(target, str) or not is_whole(k) or not (flips is None or is_whole(flips)):
        raise Damaged(f"trial {shown(target)}/{shown(k)} has columns of other types")
    trial = TrialId(target, flips, k)
    if target not in targets or flips not in counts or not 0 <= k < MOST_TRIALS:
        raise Damaged(f"its campaign has no trial {shown(str(trial))}")
    return trial


def ascending(rows: Iterable[R]) -> Iterator[R]:
    """The rows as they come; raises ``Damaged`` where a trial does not come after the one before it."""
    last: tuple[str, int, int] | None = None
    for row in rows:
        trial = row.trial
        place = (trial.target, trial.flips or 0, trial.k)
        if last is not None and place <= last:
            raise Damaged(f"trial {shown(str(trial))} is there twice")
        last = place
        yield row


def read_row(trial: TrialId, values: Sequence[Any], samples: Sequence[int], allowance: Allowance) -> TrialRow:
    """A trial from its other columns; ``samples``: of each batch. Raises ``Damaged``."""
    faults, packed, incorrect, severity, error, seconds, worker = values
    what = f"trial {shown(str(trial))}"
    allowance.read(faults, packed, error)
    right = (
        isinstance(error, str) and is_whole(incorrect) and is_whole(worker) and is_real(severity) and is_real(seconds)
    )
    if not right or not (0 <= seconds < math.inf and 0 <= incorrect <= len(samples)):
        raise Damaged(f"{what} has columns of other types, or impossible numbers")
    check_faults(faults, what)
    try:
        codes = allowance.codes(packed, samples)
    except Damaged as wrong:
        raise Damaged(f"{what}: {wrong}") from None
    return TrialRow(trial, faults, codes, incorrect, float(severity), error, float(seconds), worker)


def check_faults(text: Any, what: str) -> None:
    """Raise ``Damaged`` unless a cell holds faults as JSON: a list of objects, or one object (a digest)."""
    from pydantic_core import from_json

    try:
        found = from_json(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    faults = [found] if isinstance(found, dict) else found
    if not isinstance(faults, list) or not all(isinstance(fault, dict) for fault in faults):
        raise Damaged(f"{what} has a fault that cannot be read")


def read_budget(trials: Any, command: Any) -> tuple[int, str]:
    """How many trials were asked, and with which command. Raises ``Damaged``."""
    if not is_whole(trials) or not 0 <= trials < MOST_TRIALS or not isinstance(command, str):
        raise Damaged("how many trials were asked is no number, or the command is no text")
    try:
        shlex.split(command)
    except ValueError:
        raise Damaged("the command that made it cannot be read") from None
    if not command.isprintable():
        raise Damaged("the command that made it cannot be read")
    return trials, command


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a cell holds a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    """Whether a cell holds a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The beginning of what a file says, on one line, whatever it says."""
    return clean(value if isinstance(value, str) else repr(value))[:LONGEST_SHOWN]

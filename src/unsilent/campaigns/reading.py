"""Reading what a store file says: files come from anywhere, so nothing in them is believed before it is checked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence, Set
from itertools import accumulate
from typing import Any, TypeVar

from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow
from unsilent.errors import UsageError
from unsilent.faults.naming import parse_site
from unsilent.outcomes.base import Outcome

T = TypeVar("T")
MOST_SAMPLES = 10**8
MOST_TRIALS = 10**12


class Damaged(ValueError):
    """What was read is not what this program writes; the message says which part."""


def parsed(kind: type[T], text: Any, what: str) -> T:
    """A record from its JSON; raises ``Damaged``, which names ``what``."""
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(text, str):
        raise Damaged(f"its {what} is no text")
    try:
        return TypeAdapter(kind).validate_json(text)
    except (ValidationError, RecursionError, ValueError) as error:
        raise Damaged(f"its {what} cannot be read: {str(error).splitlines()[-1].strip()[:80]}") from None


def read_spec(text: Any) -> CampaignSpec:
    """A spec from a store; raises ``Damaged``."""
    return parsed(CampaignSpec, text, "spec")


def read_description(text: Any) -> Description:
    """A description from a store; raises ``Damaged``."""
    found = parsed(Description, text, "description")
    if not found.targets or not found.tensors or not found.samples:
        raise Damaged("its description names no target, tensor or sample")
    if min(found.samples) < 1 or sum(found.samples) > MOST_SAMPLES:
        raise Damaged("its description has an impossible number of samples")
    if not all(math.isfinite(t.share) and 0 < t.share <= 1 + 1e-9 and t.bits_by_width for t in found.targets):
        raise Damaged("its description has a target without a share")
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


def read_row(values: tuple[Any, ...], samples: Sequence[int]) -> TrialRow:
    """A trial from its columns; ``samples``: of each batch. Raises ``Damaged``."""
    target, flips, k, faults, packed, incorrect, severity, error, seconds, worker = values
    right = (
        all(isinstance(v, str) for v in (target, faults, error))
        and all(isinstance(v, int) for v in (k, incorrect, worker))
        and isinstance(flips, (int, type(None)))
        and all(isinstance(v, (int, float)) for v in (severity, seconds))
        and isinstance(packed, bytes)
    )
    if not right:
        raise Damaged(f"trial {str(target)[:40]}/{k} has columns of other types")
    unpacker = zlib.decompressobj()
    whole = sum(samples)
    codes = unpacker.decompress(packed, whole + 1)  # never more than it may be, whatever the blob holds
    if len(codes) != whole or max(codes) >= len(Outcome):
        raise Damaged(f"trial {target[:40]}/{k} has outcomes that do not fit {whole} samples")
    if Outcome.SPARED in codes:
        ends = list(accumulate(samples))
        left = [codes.count(Outcome.SPARED, end - n, end) - n for n, end in zip(samples, ends, strict=True)]
        if not any(left) or any(rest not in (0, -n) for rest, n in zip(left, samples, strict=True)):
            raise Damaged(f"trial {target[:40]}/{k} spares all batches, or part of one")
    return TrialRow(TrialId(target, flips, k), faults, codes, incorrect, float(severity), error, float(seconds), worker)

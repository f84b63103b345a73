"""Whether the batch of the step is wrong by itself, or unlike those of other ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unsilent.recovery.step_replay import FAR_FROM_OTHERS
from unsilent.report.text import count_text, listed, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.tensor_summaries import TensorSummary

IGNORED_LABELS = (-1, -100)
"""Labels that programs use for a label that does not count."""
LEAST_ELEMENTS = 8
"""Fewer may be alike by chance."""


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Elements that are not finite, magnitudes far from those of other ranks, negative labels, one value in all elements."""
    batches, missing = bundle.batches(blanks.rank)
    if not any(one.tensors for one in batches.values()):
        return Finding(outcome=Outcome.UNANSWERED, text="no batch is recorded that can be read", missing=missing)
    everybody, _ = bundle.batches()
    found: dict[int, list[tuple[str, str]]] = {}
    for rank, batch in batches.items():
        for name, one in batch.tensors.items():
            peers = [
                other.tensors[name] for number, other in everybody.items() if number != rank and name in other.tensors
            ]
            usual = statistics.median_low([peer.largest for peer in peers]) if peers else 0.0
            if one.nonfinite:
                found.setdefault(rank, []).append((name, f"{count_text(one.nonfinite, 'element')} not finite"))
            elif one.is_number and one.elements > 1 and usual > 0 and one.largest / usual > FAR_FROM_OTHERS:
                found.setdefault(rank, []).append(
                    (name, f"{number_text(one.largest / usual)} times as large as in other ranks")
                )
            elif not one.is_number and one.low < 0 and one.low not in IGNORED_LABELS:
                found.setdefault(rank, []).append((name, f"a whole number of {one.low:g}"))
            elif _is_constant(one) and peers and all(peer.low < peer.high for peer in peers):
                found.setdefault(rank, []).append((name, f"{one.low:g} in all elements, unlike in other ranks"))
            elif values := _other_constants(one, peers):
                found.setdefault(rank, []).append((name, f"{one.low:g}, and {listed(values, 3)} in other ranks"))
    step = bundle.incident.step
    if found:
        rank = min(found)
        text = f"the batch has, by tensor: {listed((f'{name}: {what}' for name, what in found[rank]), 3)}"
        several = "batches of several ranks have something of the kind"
        return placed(
            text, sorted(found), several, kind=FindingKind.BATCH, tensor=found[rank][0][0], step=step,
            missing=missing,
        )  # fmt: skip
    ranges = {
        f"{name}, rank {rank}": one.largest for rank, batch in batches.items() for name, one in batch.tensors.items()
    }
    compared = (
        "and not far from those of other ranks"
        if len(everybody) > 1
        else "with no other rank to compare magnitudes with"
    )
    text = f"batches of {count_text(len(batches), 'rank')} have finite elements, {compared}; labels were not checked"
    return Finding(outcome=Outcome.NOTHING, text=text, numbers=ranges, missing=missing)


def _other_constants(one: TensorSummary, peers: Sequence[TensorSummary]) -> list[str]:
    """Values of other ranks in all elements, where this has another one and is not like most ranks; else nothing."""
    every = [one, *peers]
    if not peers or not all(each.is_number and each.elements and each.low == each.high for each in every):
        return []
    alike = sum(each.low == one.low for each in every)
    return [] if 2 * alike > len(every) else [f"{value:g}" for value in dict.fromkeys(each.low for each in peers)]


def _is_constant(one: TensorSummary) -> bool:
    return one.is_number and one.elements >= LEAST_ELEMENTS and one.low == one.high

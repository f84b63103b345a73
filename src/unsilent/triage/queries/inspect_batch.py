"""Query for wrong values in the batch of the step, and for batches unlike those of other ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unsilent.recovery.step_replay import FAR_FROM_OTHERS
from unsilent.report.text import count_text, listed, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.tensor_summaries import TensorSummary

IGNORED_LABELS = (-1, -100)
"""Values that programs use for ignored labels."""
LEAST_ELEMENTS = 8
"""Least number of elements; fewer may be equal by chance."""


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find batch tensors with wrong values or values unlike those of other ranks.

    Looks at elements that are not finite, large magnitudes, negative labels and constant tensors.
    """
    batches, missing = bundle.batches(blanks.rank)
    if not any(batch.tensors for batch in batches.values()):
        return Finding(outcome=Outcome.UNANSWERED, text="no batch is recorded that can be read", missing=missing)
    everybody, _ = bundle.batches()
    unusual: dict[int, list[tuple[str, str]]] = {}
    for rank, batch in batches.items():
        for name, tensor in batch.tensors.items():
            peers = [
                peer_batch.tensors[name]
                for number, peer_batch in everybody.items()
                if number != rank and name in peer_batch.tensors
            ]
            # The lower median, so that one of two peers that is too large itself does not hide this one.
            usual = statistics.median_low([peer.largest for peer in peers]) if peers else 0.0
            if tensor.nonfinite:
                unusual.setdefault(rank, []).append((name, f"{count_text(tensor.nonfinite, 'element')} not finite"))
            elif tensor.is_number and tensor.elements > 1 and usual > 0 and tensor.largest / usual > FAR_FROM_OTHERS:
                unusual.setdefault(rank, []).append(
                    (name, f"{number_text(tensor.largest / usual)} times as large as in other ranks")
                )
            elif not tensor.is_number and tensor.low < 0 and tensor.low not in IGNORED_LABELS:
                unusual.setdefault(rank, []).append((name, f"the negative whole number {tensor.low:g}"))
            elif _is_constant(tensor) and peers and all(peer.low < peer.high for peer in peers):
                unusual.setdefault(rank, []).append((name, f"{tensor.low:g} in all elements, unlike in other ranks"))
            elif values := _other_constants(tensor, peers):
                unusual.setdefault(rank, []).append((name, f"{tensor.low:g}, and {listed(values, 3)} in other ranks"))
    step = bundle.incident.step
    if unusual:
        rank = min(unusual)
        text = f"unusual in the batch: {listed((f'{name}: {text}' for name, text in unusual[rank]), 3)}"
        several = "batches of several ranks look wrong"
        return placed(
            text, sorted(unusual), several, kind=FindingKind.BATCH, tensor=unusual[rank][0][0], step=step,
            missing=missing,
        )  # fmt: skip
    ranges = {
        f"{name}, rank {rank}": tensor.largest
        for rank, batch in batches.items()
        for name, tensor in batch.tensors.items()
    }
    compared = (
        "with magnitudes not far from those of other ranks"
        if len(everybody) > 1
        else "with no other rank to compare magnitudes with"
    )
    text = (
        f"all elements in batches of {count_text(len(batches), 'rank')} are finite, {compared}; labels were not checked"
    )
    return Finding(outcome=Outcome.NOTHING, text=text, numbers=ranges, missing=missing)


def _other_constants(tensor: TensorSummary, peers: Sequence[TensorSummary]) -> list[str]:
    """Values of other ranks' constant tensors, if a rank's constant tensor differs from most of them."""
    every = [tensor, *peers]
    if not peers or not all(each.is_number and each.elements and each.low == each.high for each in every):
        return []
    alike = sum(each.low == tensor.low for each in every)
    return [] if 2 * alike > len(every) else [f"{value:g}" for value in dict.fromkeys(each.low for each in peers)]


def _is_constant(tensor: TensorSummary) -> bool:
    return tensor.is_number and tensor.elements >= LEAST_ELEMENTS and tensor.low == tensor.high

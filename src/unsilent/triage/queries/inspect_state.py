"""Query for parameters and moments that are not finite, extreme, or unlike those of other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unsilent.report.text import count_text, listed, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.tensor_summaries import RecordedTensors, TensorSummary

EXTREME = 1e4
"""Least extreme ratio of an element to the root mean square of others; moments of healthy trainings reach hundreds."""
LEAST_ELEMENTS = 4
LEAST_ALIKE = 0.5
"""Least share of tensors with equal bits for ranks that count as replicas."""


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find the first state tensor that is not finite, has an extreme element, or differs between ranks."""
    states, missing = bundle.states(blanks.rank)
    everybody, _ = bundle.states()
    chosen = {
        rank: {
            name: tensor
            for name, tensor in state.tensors.items()
            if blanks.tensor is None or blanks.tensor in name.split("/")
        }
        for rank, state in states.items()
    }
    count = sum(map(len, chosen.values()))
    if not count:
        subject = f"no tensor {blanks.tensor} is" if blanks.tensor and states else "no state is"
        return Finding(outcome=Outcome.UNANSWERED, text=f"{subject} recorded that can be read", missing=missing)
    step = bundle.incident.step
    unusual = {
        rank: texts for rank, tensors in chosen.items() if (texts := [*filter(None, map(_unusual, tensors.items()))])
    }
    if unusual:
        rank = min(unusual)
        name, text = unusual[rank][0]
        digest = chosen[rank][name].digest
        alike = sorted(
            number
            for number, state in everybody.items()
            if name in state.tensors and state.tensors[name].digest == digest
        )
        # A device that computes wrongly corrupts a state again if steps are executed again on it.
        if (since := _since(bundle, rank)) is not None:
            return Finding(
                outcome=Outcome.DIFFERS, kind=FindingKind.STATE, ranks=(rank,), tensor=name, step=step, missing=missing,
                text=f"{text}; it may come from steps that were executed again on the same device, from step {since} on",
            )  # fmt: skip
        if len(alike) > 1:
            return Finding(
                outcome=Outcome.LOCALISED, text=f"{text}, with the same bits in {len(alike)} ranks", ranks=tuple(alike),
                kind=FindingKind.COMMON_STATE, tensor=name, step=step, missing=missing,
            )  # fmt: skip
        return placed(
            text, sorted(unusual), "states of several ranks look wrong", kind=FindingKind.STATE,
            tensor=name, step=step, missing=missing,
        )  # fmt: skip
    unlike = {rank: names for rank, names in _unlike(everybody).items() if rank in chosen and names & set(chosen[rank])}
    if unlike:
        rank = min(unlike)
        names = sorted(unlike[rank] & set(chosen[rank]))
        return placed(
            f"bits of {listed(names, 3)} differ between ranks", sorted(unlike),
            "which of them is right is not known", kind=FindingKind.STATE, tensor=names[0], step=step, missing=missing,
        )  # fmt: skip
    read = f"{count_text(count, 'tensor')} of {count_text(len(states), 'rank')}"
    text = f"{read} are finite, without an element far beyond the others"
    return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)


def _since(bundle: Bundle, rank: int) -> int | None:
    """The step from which the state of a rank was computed again, or None if it is the original state."""
    parts, _ = bundle.parts(rank)
    return parts[rank].state_since if rank in parts else None


def _unusual(named: tuple[str, TensorSummary]) -> tuple[str, str] | None:
    name, tensor = named
    if tensor.nonfinite:
        return name, f"{name} has {count_text(tensor.nonfinite, 'element')} not finite"
    if (
        tensor.is_number
        and tensor.elements >= LEAST_ELEMENTS
        and tensor.others > 0
        and tensor.largest / tensor.others > EXTREME
    ):
        return (
            name,
            f"an element of {name} is {number_text(tensor.largest / tensor.others)} times the root mean square of the others",
        )
    return None


def _unlike(states: Mapping[int, RecordedTensors]) -> dict[int, set[str]]:
    """Tensors whose bits differ between replicas, by rank.

    Only ranks in the minority are given, unless no value has a majority.
    """
    common = [
        name for name in next(iter(states.values())).tensors if all(name in state.tensors for state in states.values())
    ]
    digests = {name: {rank: state.tensors[name].digest for rank, state in states.items()} for name in common}
    differing = [name for name, by_rank in digests.items() if len(set(by_rank.values())) > 1]
    if len(states) < 2 or len(differing) > (1 - LEAST_ALIKE) * len(common):
        return {}
    result: dict[int, set[str]] = {}
    for name in differing:
        counts = Counter(digests[name].values())
        usual, most = counts.most_common(1)[0]
        for rank, digest in digests[name].items():
            if digest != usual or 2 * most <= len(states):
                result.setdefault(rank, set()).add(name)
    return result

"""Query for what is new in the newest checkpoint: values that are not finite or extreme, tensors that came or went."""

from __future__ import annotations

from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.inspection import Values, summarise
from unsilent.report.text import listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The newest checkpoint from before the alarm against the one before it."""
    missing: list[str] = []
    read: list[tuple[str, int | None, dict[str, Values | None]]] = []
    for saved in reversed(bundle.incident.checkpoints):
        if len(read) == 2 or (saved.step is not None and saved.step > bundle.incident.training_step):
            continue
        try:
            with Checkpoint(Path(saved.path)) as checkpoint:
                tensors = {
                    name: summarise(checkpoint, tensor, lambda _: None) for name, tensor in checkpoint.tensors.items()
                }
            read.append((saved.path, saved.step, tensors))
        except UsageError as error:
            missing.append(f"{saved.path}: {error}")
    if len(read) < 2:
        text = f"two checkpoints are compared, and {len(read)} of those that the incident names can be read"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=tuple(missing))
    (new, step, now), (old, _, before) = read
    worse = [name for name, tensor in now.items() if tensor and _bad(tensor) > _bad(before.get(name))]
    changed = sorted(set(now) ^ set(before))
    if worse or changed:
        texts = [
            *(f"{name}: values not finite or extreme" for name in worse),
            *(f"{name}: in one of them" for name in changed),
        ]
        return Finding(
            outcome=Outcome.DIFFERS, text=f"{new} against {old}: {listed(texts, 3)}", step=step,
            kind=FindingKind.CHECKPOINT_VALUES, tensor=(worse or changed)[0], missing=tuple(missing),
        )  # fmt: skip
    text = f"{new} has no more values that are not finite or extreme than {old}, in {len(now):,} tensors and numbers"
    return Finding(outcome=Outcome.NOTHING, text=text, missing=tuple(missing))


def _bad(values: Values | None) -> int:
    return values.nonfinite + values.extreme if values else 0

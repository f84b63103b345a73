"""Queries on saved checkpoints: whether their files changed, and how the last two differ."""

from __future__ import annotations

from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.inspection import Values, summarise
from unsilent.checkpoints.manifest import read_manifest, verify
from unsilent.report.text import count_text, listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome


def verify_checkpoints(bundle: Bundle, blanks: Blanks) -> Finding:
    """Compare the recorded checkpoints with their manifests.

    Finds the newest one that does not match, and the newest intact one before the alarm.
    """
    incident = bundle.incident
    good: list[tuple[str, int | None]] = []
    bad: list[tuple[str, str, int | None]] = []
    missing = []
    for saved in reversed(incident.checkpoints):
        if saved.step is not None and blanks.steps and not blanks.steps[0] <= saved.step <= blanks.steps[1]:
            continue
        try:
            manifest = read_manifest(Path(saved.manifest))
            problems = verify(Path(saved.path), manifest)
        except UsageError as error:
            missing.append(f"{saved.path}: {error}")
            continue
        if problems:
            bad.append((saved.path, problems[0], saved.step))
        else:
            good.append((saved.path, saved.step))
    if not good and not bad:
        text = "the incident names no checkpoint that is still there"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=tuple(missing))
    older = next((path for path, step in good if step is not None and step < incident.training_step), None)
    last_good = f"the newest one from before step {incident.training_step} that is as it was written: {older or 'none'}"
    if bad:
        path, problem, step = bad[0]
        return Finding(
            outcome=Outcome.DIFFERS, text=f"{path} is not as it was written: {problem}; {last_good}",
            kind=FindingKind.CHECKPOINT_FILE, tensor=path, step=step, missing=tuple(missing),
        )  # fmt: skip
    text = f"{count_text(len(good), 'checkpoint')} verified ({listed(path for path, _ in good)}); {last_good}"
    return Finding(outcome=Outcome.NOTHING, text=text, missing=tuple(missing))


def compare_checkpoints(bundle: Bundle, blanks: Blanks) -> Finding:
    """Compare the last two checkpoints from before the alarm.

    Looks for values that are not finite or extreme, and for tensors that only one of them has.
    """
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

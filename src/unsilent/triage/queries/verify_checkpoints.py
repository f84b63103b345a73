"""Whether the checkpoints that the job saved last are still as it wrote them."""

from __future__ import annotations

from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.manifest import read_manifest, verify
from unsilent.report.text import count_text, listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The newest one that is not, and the newest one from before the alarm that is. Nothing is changed on the disk."""
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

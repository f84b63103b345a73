"""Search for the newest checkpoint in a folder that matches its manifest and is older than a fault.

Checkpoints are ordered by their step, which is read from the manifest, else from the state, else from the last number in the
name. Checkpoints without a step come after these, ordered by the time of their last change. They are verified from the newest on
until one matches its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UsageError
from unsilent.basics.options import check_count, check_path
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.known import all_formats
from unsilent.checkpoints.hashes import Progress, no_progress
from unsilent.checkpoints.manifest import manifest_path, read_manifest
from unsilent.checkpoints.replacing import verify_with_own_manifest
from unsilent.checkpoints.verified_saving import ENDINGS
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, escape_unprintable, listed, time_text

VERIFIED, OLDER = "verified", "not verified: older"
AT_FAULT, UNKNOWN_STEP = "not verified: not before the fault", "not verified: its step is not known"
NO_MANIFEST = "not verified: it has no manifest"
_MANIFEST = ".manifest.json"
_STEPS = ("other/step", "other/global_step")
"""Names of the numbers ``step`` and ``global_step`` of a state."""
_NUMBER = re.compile(r"\d{1,15}")
_SOURCES = {"manifest": "from its manifest", "state": "from its state", "name": "from its name", "": "not known"}


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """One checkpoint in a folder, and the verdict on it.

    Attributes:
        path: File or folder of the checkpoint.
        step: Number of steps after which it was saved; None if it is unknown.
        step_from: Source of the step: ``manifest``, ``state``, ``name`` or empty.
        written: Time of the last change of its file or folder, in seconds since 1970.
        verdict: Result of the verification, or that it was not verified.
    """

    path: Path
    step: int | None
    step_from: str
    written: float
    verdict: str = OLDER

    @property
    def shown_name(self) -> str:
        """Path of the checkpoint with unprintable characters escaped."""
        return escape_unprintable(str(self.path))


@dataclass(frozen=True, repr=False)
class LastGood(Shown):
    """The checkpoints of a folder, among them the last good one, from which a training can continue.

    Attributes:
        folder: The folder that was searched.
        before_step: Step that a good checkpoint must be older than; None: no limit.
        checkpoints: All checkpoints that were found, the newest first.
    """

    folder: Path
    before_step: int | None
    checkpoints: tuple[FoundCheckpoint, ...] = field(default=())

    @property
    def good(self) -> FoundCheckpoint | None:
        """The newest checkpoint that matches its manifest; None if there is none."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.verdict == VERIFIED), None)

    @property
    def not_before(self) -> list[FoundCheckpoint]:
        """The checkpoints that were rejected because their step is `before_step` or later."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.verdict == AT_FAULT]

    @property
    def exit_code(self) -> int:
        """The command's exit code: 1 if there is no good checkpoint, else 0."""
        return int(self.good is None)

    def headline(self) -> str:
        """A sentence with the good checkpoint, or with the reason why there is none."""
        good, where = self.good, escape_unprintable(str(self.folder))
        before_text = "" if self.before_step is None else f" before step {self.before_step}"
        if good is not None:
            step = "its step is not known" if good.step is None else f"step {good.step}, {_SOURCES[good.step_from]}"
            return f"{good.shown_name} is the newest checkpoint{before_text} that verifies ({step})"
        if not self.checkpoints:
            return f"No checkpoint was found below {where}"
        tried = [checkpoint for checkpoint in self.checkpoints if checkpoint.verdict not in (AT_FAULT, UNKNOWN_STEP)]
        if not tried:
            return f"No checkpoint below {where} is known to be older than step {self.before_step}"
        reasons = [
            f"{checkpoint.shown_name}{'' if checkpoint.step is None else f' (step {checkpoint.step})'}: {checkpoint.verdict}"
            for checkpoint in tried[:3]
        ]
        further = f"; and {len(tried) - 3} more" if len(tried) > 3 else ""
        return f"No checkpoint below {where}{before_text} verifies. {'; '.join(reasons)}{further}"

    def report(self) -> Report:
        """The report, with a row for each checkpoint, newest first."""
        findings, unknown = [], [checkpoint for checkpoint in self.checkpoints if checkpoint.step is None]
        if self.not_before:
            names = listed(checkpoint.shown_name for checkpoint in self.not_before)
            findings.append(f"written at step {self.before_step} or later: {names}")
        if unknown:
            findings.append(
                f"{count_text(len(unknown), 'checkpoint')} {'has' if len(unknown) == 1 else 'have'} no known step, and "
                f"{'is' if len(unknown) == 1 else 'are'} listed after those with one, by the time of the last change"
                + ("" if self.before_step is None else "; whether they are older than the fault is not known")
            )
        columns = (
            Column.text("checkpoint", "shown_name"), Column.count("step"),
            Column.text("step from", lambda checkpoint: checkpoint.step_from or "not known"),
            Column.text("changed last", lambda checkpoint: time_text(checkpoint.written), priority=1), Column.text("verdict"),
        )  # fmt: skip
        table, good = Table.of(self.checkpoints, columns), self.good
        rows = [
            {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "step_from": checkpoint.step_from,
             "written": checkpoint.written,
             "before_step": None if checkpoint.step is None or self.before_step is None else checkpoint.step < self.before_step,
             "verdict": checkpoint.verdict}
            for checkpoint in self.checkpoints
        ]  # fmt: skip
        values = {
            "checkpoint": good and str(good.path),
            "step": good and good.step,
            "step_from": good and good.step_from,
        }
        return Report(
            "unsilent/checkpoint-last-good/1", "checkpoint last-good", "Last good checkpoint", self.headline(), table,
            findings=tuple(findings), sections=(Section("Checkpoints", "The newest first.", (table,)),),
            further_json={**values, "results": rows},
        )  # fmt: skip


@names_arguments
def last_good_checkpoint(
    folder: str | Path, *, before_step: int | None = None, progress: Progress = no_progress
) -> LastGood:
    """The newest checkpoint in a folder or its subfolders that matches its manifest.

    Args:
        folder: Folder with checkpoints, also in subfolders: files, and folders such as ``checkpoint-100`` of a Trainer.
        before_step: First step from which no checkpoint is good, for example the step in which a fault was noticed.
        progress: Called with numbers of hashed bytes.

    Raises:
        UsageError: the folder does not exist, or is a checkpoint itself.
    """
    root = check_path("folder", folder).expanduser()
    if before_step is not None:
        check_count("--before-step", before_step, 0)
    if not root.is_dir():
        raise UsageError(f"{root} is no folder; give the folder that checkpoints are in")
    if manifest_path(root).exists():
        raise UsageError(f"{root} is a checkpoint itself; give the folder that it is in")
    newest_first = sorted(map(_dated_checkpoint, _checkpoints_below(root)), key=_age)
    result, is_found = [], False
    for checkpoint in newest_first:
        verdict = OLDER
        if before_step is not None and (checkpoint.step is None or checkpoint.step >= before_step):
            verdict = UNKNOWN_STEP if checkpoint.step is None else AT_FAULT
        elif not is_found:
            verdict = _verdict(checkpoint.path, progress)
            is_found = verdict == VERIFIED
        result.append(replace(checkpoint, verdict=verdict))
    return LastGood(root, before_step, tuple(result))


def _age(checkpoint: FoundCheckpoint) -> tuple[bool, int, float, str]:
    return checkpoint.step is None, -(checkpoint.step or 0), -checkpoint.written, str(checkpoint.path)


def _checkpoints_below(root: Path) -> Iterator[Path]:
    """Yield the files and folders in a folder that are complete checkpoints, not parts of one.

    Names that begin with a dot belong to drafts and are skipped.
    """
    with CheckpointFiles(root) as files:
        names = [PurePosixPath(name) for name in files.all_names()]
    manifested = {name.with_name(name.name.removesuffix(_MANIFEST)) for name in names if name.name.endswith(_MANIFEST)}
    present = {*names, *(folder for name in names for folder in name.parents)}
    # A killed save may have moved a folder away; verifying the checkpoint puts it back.
    result = {name for name in manifested if name in present or name.with_name(f".{name.name}.old") in present}
    with_manifests = {folder for name in manifested for folder in name.parents}
    folders = {folder for name in names for folder in name.parents} - with_manifests - {PurePosixPath()}
    result |= {folder for folder in folders if _has_format(root / folder)}
    result |= {name for name in names if name.suffix in ENDINGS}
    for name in sorted(result):
        if not any(part.startswith(".") for part in name.parts) and not result & set(name.parents):
            yield root / name


def _has_format(folder: Path) -> bool:
    """Whether the files of a folder form one checkpoint."""
    try:
        with CheckpointFiles(folder) as files:
            return any(known.matches(files) for known in all_formats())
    except UsageError:
        return False


def _dated_checkpoint(path: Path) -> FoundCheckpoint:
    step, step_from = _step_of(path)
    try:
        written = path.stat().st_mtime
    except OSError:  # moved away by a save that was killed
        written = 0.0
    return FoundCheckpoint(path, step, step_from, written)


def _step_of(path: Path) -> tuple[int | None, str]:
    """The step of a checkpoint, and the source of that number."""
    try:
        manifest = read_manifest(manifest_path(path))
        if manifest.step is not None:
            return manifest.step, "manifest"
        numbers = manifest.numbers
    except UsageError:
        try:
            with Checkpoint(path) as checkpoint:  # reads a pickle without unpickling it
                numbers = {name: checkpoint.tensors[name].value for name in _STEPS if name in checkpoint.tensors}
        except UsageError:
            numbers = {}
    for name in _STEPS:
        step = numbers.get(name)
        if type(step) is int and step >= 0:
            return step, "state"
    in_name = _NUMBER.findall(path.name.removesuffix(path.suffix))
    return (int(in_name[-1]), "name") if in_name else (None, "")


def _verdict(path: Path, progress: Progress) -> str:
    try:
        problems, _ = verify_with_own_manifest(path, progress)
    except UsageError as error:
        return f"not verified: {error}" if manifest_path(path).exists() else NO_MANIFEST
    return f"not as its manifest says: {problems[0]}" if problems else VERIFIED

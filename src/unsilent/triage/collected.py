"""The parts that were collected from a job, and how to record the missing ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unsilent.events.incident_folder import Incident
from unsilent.report.model import Column, Report, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text
from unsilent.triage import parts

CHECKPOINTS = "checkpoints"
SERIES = "rank0/series.npz, and the batch and state of a step"
COMMANDS = {
    SERIES: "unsilent run --events job/events.jsonl --on-alarm replay train.py",
    parts.TIMELINE_FILE: "unsilent timeline record -o job/traces train.py",
    parts.FLIGHT_FOLDER: "unsilent timeline record -o job/traces train.py; of a job that hangs: see docs/howto/find-hang.md",
    parts.LOG_FILE: "torchrun --log-dir job/logs --redirects 3 … train.py",
    CHECKPOINTS: "unsilent checkpoint manifest job/CHECKPOINT",
    parts.CONFIGURATION_FILE: "save the settings of the job as job/config.json; --earlier FILE gives those of an earlier job",
}
"""Commands that create parts of an incident in the folder of a job, `job`."""
HOW_TO_RECORD = [
    *(f"to get {part}: {command}" for part, command in COMMANDS.items()), "then: unsilent triage collect job -o DIR",
]  # fmt: skip


@dataclass(frozen=True)
class CollectedPart:
    """An optional part of the incident, with its source.

    Attributes:
        name: Name of its file or folder.
        source: Source of the part; empty if nothing was collected.
        problem: Reason why nothing, or not everything, was collected.
    """

    name: str
    source: str = ""
    problem: str = ""


@dataclass(frozen=True, repr=False)
class Collected(Shown):
    """The incident that was written, and the parts that were collected.

    Attributes:
        job, folder: Folder that was searched, and folder of the incident.
        incident: Incident that was written.
        is_new: Whether no alarm had written an incident.
    """

    job: Path
    folder: Path
    incident: Incident
    is_new: bool
    parts: tuple[CollectedPart, ...]

    def report(self) -> Report:
        """Report with a row for each part, and how to record the missing ones."""
        rows = [{"part": part.name, "from": part.source, "problem": part.problem} for part in self.parts]
        problems = [f"{part.name}: {part.problem}" for part in self.parts if part.problem]
        absent = [SERIES] * self.is_new + [part.name for part in self.parts if not part.source and not part.problem]
        how = [f"to get {name}: {COMMANDS[name]}" for name in absent]
        taken = count_text(sum(bool(part.source) for part in self.parts), "optional part")
        kind = f"A new incident of step {self.incident.step:,}" if self.is_new else f"A copy of {self.incident.since}"
        headline = f"{kind} with {taken} was written; next: unsilent triage {self.folder}"
        if self.is_new and not any(part.source for part in self.parts):
            headline = (
                f"{self.job} holds no files that debugging queries read; how to record such files is listed below"
            )
        columns = (Column.text("part"), Column.text("from"))
        return Report(
            "unsilent/triage-collect/1", "triage collect", "Collected incident", headline, Table.of(rows, columns),
            findings=(*problems, *how),
            further_json={"folder": str(self.folder), "step": self.incident.step, "is_new": self.is_new, "results": rows},
        )  # fmt: skip

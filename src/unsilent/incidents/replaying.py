"""The command ``unsilent incident replay DIR``, which executes the recorded step of an alarm again."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, WORKLOAD_PANEL, Option, Request, check_count
from unsilent.command import AFTER_ALARM, Command
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown

if TYPE_CHECKING:
    from unsilent.recovery.evidence import Evidence, Execution

NO_FOLDER = "no folder was given; give that of an incident, such as incidents/90-0a1b2c3d"
NO_CODE = "the folder has no code; give a function that returns step, model and optimizer with --code FILE.py:NAME"


@dataclass(frozen=True)
class ReplayOptions:
    """Options for executing the step of an incident again."""

    folder: Annotated[Path, Option("Folder of an incident.", "", metavar="DIR", missing_error=NO_FOLDER)]
    code: Annotated[
        str | None, Option("FILE.py:NAME of a function that returns step, model and optimizer.", WORKLOAD_PANEL)
    ] = None
    rank: Annotated[
        int | None, Option("Rank whose state and batch are used; by default the suspected one.", WORKLOAD_PANEL)
    ] = None
    device: Annotated[str, Option("auto, cpu or cuda[:i].", EXECUTION_PANEL)] = "auto"

    def __post_init__(self) -> None:
        if self.code is None:
            raise UsageError(NO_CODE)
        if self.rank is not None:
            check_count("--rank", self.rank, 0)


@dataclass(frozen=True, repr=False)
class IncidentReplay(Shown):
    """Executions of the recorded step of an incident."""

    folder: Path
    evidence: Evidence

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if something was found, else 0."""
        return int(bool(self._findings()))

    def report(self) -> Report:
        """Report with a row for each execution."""
        columns = (
            Column.text(
                "execution",
                lambda execution: "with each operation checked" if execution.dtype else "as it was recorded",
            ),
            Column.text("same as the first", lambda execution: _yes_or_no(execution.is_equal)),
            Column.text("finite", lambda execution: _yes_or_no(not execution.has_alarm or bool(execution.overflowed))),
            Column.text("digest", lambda execution: execution.digest or "-"),
        )
        counts = Counter(self.evidence.executions)
        times = Column.count("times", lambda execution: counts[execution])
        table = Table.of(list(counts), (*columns, times))
        findings = self._findings()
        evidence = self.evidence
        return Report(
            "unsilent/incident-replay/1", "incident replay", f"Step {evidence.step} of rank {evidence.rank}, executed again",
            findings[0] if findings else self._clean(), table, findings=tuple(findings[1:]),
            sections=(Section("Executions", "Each begins with the recorded state and batch.", (table,)),),
            facts=(("Folder", str(self.folder)), ("Device", evidence.device)),
            further_json={"evidence": asdict(evidence)},
        )  # fmt: skip

    @property
    def _repeats(self) -> list[Execution]:
        return [execution for execution in self.evidence.executions if not execution.dtype]

    def _findings(self) -> list[str]:
        evidence, repeats = self.evidence, self._repeats
        checked = [execution for execution in evidence.executions if execution.dtype]
        result = [f"The step was not executed again: {evidence.problem}"] if evidence.problem else []
        if differing := sum(execution.is_equal is False for execution in repeats):
            result.append(
                f"{differing} of {len(repeats)} executions on {evidence.device} gave other bits than the first one"
            )
        if any(execution.is_equal is False for execution in checked):
            result.append(
                f"An operation that was computed twice from the same inputs on {evidence.device} had two results"
            )
        result += [
            f"{execution.overflowed} is the first operation with finite inputs whose result is finite only in float64"
            for execution in checked
            if execution.overflowed
        ]
        if evidence.batch_problem:
            result.append(evidence.batch_problem[0].upper() + evidence.batch_problem[1:])
        if alarms := sum(execution.has_alarm for execution in repeats):
            result.append(f"{alarms} of {len(repeats)} executions came to elements that are not finite")
        return result

    def _clean(self) -> str:
        bound = self.evidence.tolerance
        alike = "the same bits" if bound == 0 else f"the same values, within {bound:.2g},"
        return f"{len(self._repeats)} executions on {self.evidence.device} gave {alike} as the first one, all of them finite"


def _yes_or_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def replay(request: Request) -> IncidentReplay:
    """Execute the recorded step of an alarm again, from the state and the batch in the folder of an incident.

    All results of the step are compared, and each operation is checked by a second execution and in float64. Random numbers have
    seed 0. The exit code is 1 if executions differ, if an operation overflows or differs when it is repeated, or if a result is
    not finite, otherwise 0.
    """
    from unsilent.incidents.recorded_steps import replay_incident

    options = request[ReplayOptions]
    assert options.code is not None
    evidence = replay_incident(options.folder, options.code, options.device, options.rank)
    return IncidentReplay(options.folder, evidence)


COMMAND = Command(
    "incident replay", AFTER_ALARM, "unsilent incident replay incidents/90-0a1b2c3d --code train.py:step",
    (ReplayOptions,), replay, has_report=True,
)  # fmt: skip

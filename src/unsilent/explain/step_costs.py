"""Costs of determinism: time of a loop's steps with each source pinned, relative to none pinned."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.explain.results import Machine
from unsilent.explain.running import DEADLINE, Launcher, Notify, check_limits
from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text, listed

SCHEMA = "unsilent/explain-cost/1"
UNTIMED, TIMED = 1, 2
"""Number of untimed steps in each turn (kernels and threads change), and of timed steps."""
RUNS, ROUNDS, FEWEST = 3, 10, 6
"""Number of runs, of rounds in each run, and of all rounds below which a median has no 95 % interval."""
FREE = "free"
"""Name of the mode that pins nothing."""
CPU, WALL = "CPU time", "wall time"
PINS = {
    "seeds": "global generators seeded at every step",
    "kernels": "deterministic algorithms of torch, new memory not filled",
    "kernels+memory": "deterministic algorithms of torch, new memory filled",
    "threads": "one thread",
    "cudnn-benchmark": "cuDNN chooses kernels without measuring them",
    "tf32": "no TF32",
    "all": "all of these",
}
"""Descriptions of the pins, by source."""
TURNS = "In every round, each source has its turn of steps within the same run."
ONE_THREAD = "the loop runs with one thread"
NO_CUDA = "the loop uses no CUDA device"
OVERRIDDEN = "the loop sets it itself during a step"
_AT_START = "set when the process starts, so it cannot be switched between steps of one run"
_IN_LOOP = "what fixing it costs depends on what the loop does instead"
NEVER_MEASURED = {
    "order of sets (hash, addresses)": _AT_START,
    "instruction sets of torch, oneDNN and MKL": _AT_START,
    "order of data and of folders, generators of the loop": _IN_LOOP,
    "clock, process id, random numbers of the system": _IN_LOOP,
}


@dataclass(frozen=True, repr=False)
class StepCosts(Shown):
    """The measured costs of pinning each source.

    Attributes:
        rounds: CPU and wall-clock seconds of a step in each round, by mode.
        unmeasured: Why sources were not measured, by name.
        refused: Operations without a deterministic form; they ran in their usual form.
        steps: Number of optimizer updates in all runs.
        seconds: Duration of the command in seconds.
    """

    ref: str
    runs: int
    rounds: tuple[Mapping[str, tuple[float, float]], ...]
    unmeasured: Mapping[str, str]
    refused: tuple[str, ...]
    steps: int
    machine: Machine
    seconds: float
    arguments: tuple[str, ...] = ()

    def ratio(self, source: str, measure: str = CPU) -> Interval:
        """Median ratio of the times of a step with the source pinned and without pins, with its interval."""
        from unsilent.statistics.intervals import median_interval

        at = (CPU, WALL).index(measure)
        return median_interval([times[source][at] / times[FREE][at] for times in self.rounds])

    @property
    def estimates(self) -> list[Estimate]:
        """The ratios of CPU time and wall time for each source."""
        rows: list[Estimate] = []
        for source in (name for name in PINS if name in self.rounds[0]):
            rows += measured({"source": source}, {m: self.ratio(source, m) for m in (CPU, WALL)}, "round")
        return rows

    def report(self) -> Report:
        """Report on the ratios by source, and on sources that were not measured."""
        rows = [row | {"pinned by": PINS[str(row["source"])]} for row in rows_across(self.estimates, "measure")]
        columns = [Column.text("source"), Column(CPU, "estimate"), Column(WALL, "estimate"), Column.text("pinned by")]
        left_out = [Column.text("source"), Column.text("not measured")]
        last = "all" if "all" in self.rounds[0] else rows[-1]["source"]
        every, pinned = self.ratio(str(last)), "all sources below" if last == "all" else f"{last} alone"
        missing = [{"source": name, "not measured": why} for name, why in {**self.unmeasured, **NEVER_MEASURED}.items()]
        notes = [
            "ratios above 1: steps take longer with the source pinned; brackets are 95 % intervals of the median over rounds",
            "wall time also depends on other programs; with fewer threads CPU time falls while wall time may rise",
            "the CPU time of processes that the loop starts, such as workers of a data loader, is not counted",
            f"{count_text(self.steps, 'step')} in {duration_text(self.seconds)}",
        ]
        if self.refused:
            notes.insert(0, f"torch has no deterministic form of {listed(self.refused)}; it ran as it is")
        return Report(
            schema=SCHEMA,
            report_type="What determinism costs",
            title=f"Steps of {self.ref}",
            headline=f"With {pinned} pinned, a step takes {every.estimate:.2f} times the CPU time "
            f"(95 % interval {every.low:.2f} to {every.high:.2f})",
            findings=(
                f"{count_text(len(self.rounds), 'round')} of timing in {count_text(self.runs, 'run')} with "
                f"{count_text(self.machine.threads, 'thread')}; in a round, each source is pinned for "
                f"{count_text(UNTIMED + TIMED, 'step')}, and the last {TIMED} are timed",
            ),
            estimates=machine_table(self.estimates, ("source", "measure", "")),
            sections=(
                Section("Time of a step, pinned / free", TURNS, (Table.of(rows, columns),)),
                Section("Not measured", "", (Table.of(missing, left_out, plain_line_format="not measured: {0}: {1}"),)),
            ),
            notes=tuple(notes),
            further_json={
                "command": "explain", "seed": None, "seconds": self.seconds, "store": None,
                "spec": {"loop": self.ref, "runs": self.runs, "threads": self.machine.threads, "cost": True,
                         "arguments": list(self.arguments)},
                "versions": dict(self.machine.versions), "rounds": len(self.rounds), "not_measured": missing,
                "without_deterministic_form": list(self.refused),
            },
        )  # fmt: skip


def measure_step_costs(
    ref: str,
    *,
    runs: int = RUNS,
    steps: int | None = None,
    deadline: float = DEADLINE,
    arguments: Sequence[str] = (),
    notify: Notify = lambda text: None,
) -> StepCosts:
    """Time the steps of a loop with each source pinned.

    Arguments are those of `explain_run_differences`.

    Raises:
        UsageError: The loop makes too few steps; see also `explain_run_differences`.
    """
    if runs < 1:
        raise UsageError(f"--runs is {runs}; expected at least 1")
    check_limits(steps, deadline)
    begun = time.perf_counter()
    with Launcher(ref, steps, deadline, notify, arguments) as launcher:
        timed_runs = [launcher.run((), number, log_operations=False, time_rounds=ROUNDS) for number in range(runs)]
        machine = launcher.machine
    every = [times for run in timed_runs for times in run["rounds"]]
    rounds = [{name: (seconds[0], seconds[1]) for name, seconds in times.items()} for times in every]
    steps_made = sum(run["steps"] for run in timed_runs)
    if len(rounds) < FEWEST:
        raise UsageError(
            f"{count_text(runs, 'run')} of {ref!r} made {count_text(steps_made, 'step')}, enough for "
            f"{count_text(len(rounds), 'round')} of timing; expected {FEWEST} rounds or more, of up to "
            f"{(1 + len(PINS)) * (UNTIMED + TIMED)} steps each: let the loop make more steps, or raise --runs"
        )
    unmeasured = {name: why for run in timed_runs for name, why in run["unmeasured"].items()}
    if FREE in unmeasured or not rounds[0].keys() - {FREE} - unmeasured.keys():
        raise UsageError(
            f"{ref!r} sets deterministic algorithms, threads or cuDNN's switches in every step; set none of them in the loop"
        )
    rounds = [{name: seconds for name, seconds in times.items() if name not in unmeasured} for times in rounds]
    refused = sorted({name for run in timed_runs for name in run["refused"]})
    return StepCosts(
        ref, runs, tuple(rounds), unmeasured, tuple(refused), steps_made, machine,
        time.perf_counter() - begun, tuple(arguments),
    )  # fmt: skip

"""Repeated execution of tests with known results, and the number of mismatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UnsilentError, UsageError, kind_and_line, wrong_value_error
from unsilent.engine.device_placement import environment, resolve_device
from unsilent.report.shown import Shown
from unsilent.selftest.known_answers import known_answers
from unsilent.selftest.mismatch import Mismatch, Test
from unsilent.selftest.recording import load_recording

MISMATCH_EXIT_CODE = 17
"""Exit code after a wrong result. A monitor uses the same code for a confirmed fault."""


@dataclass
class OperationCount:
    """Counts of executions and wrong results for one operation in one dtype, and the first wrong result."""

    operation: str
    dtype: str
    executions: int = 0
    wrong: int = 0
    first_wrong: int | None = None
    mismatch: Mismatch | None = None

    @property
    def seen_from(self) -> int | None:
        """The number n such that a failure in one of n executions would be detected with 95 % probability.

        ``None`` if there are too few executions.
        """
        return self.executions // 3 or None  # (1 - 3/n)^n < e^-3 < 5 %


@dataclass(frozen=True, repr=False)
class SelfTest(Shown):
    """The result of a self-test of a device.

    Attributes:
        device: Device as it was given.
        model: Name of the device's model.
        seconds: Duration in seconds.
        counts: A row for each operation and dtype.
        missing: Operations in dtypes that torch does not implement on this device.
    """

    REPORT = "unsilent.selftest.report:selftest_report"
    device: str
    model: str
    seconds: float
    counts: tuple[OperationCount, ...]
    missing: tuple[str, ...] = ()

    @property
    def executions(self) -> int:
        """The number of executions of all operations."""
        return sum(count.executions for count in self.counts)

    @property
    def mismatches(self) -> list[OperationCount]:
        """The counts of the operations that had a wrong result."""
        return [count for count in self.counts if count.wrong]

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 17 if a result was wrong, else 0."""
        return MISMATCH_EXIT_CODE if self.mismatches else 0


@names_arguments
def run_selftest(
    device: str = "auto",
    minutes: float = 1.0,
    step: str | Path | None = None,
    code: str | None = None,
    *,
    observer: Any = None,
) -> SelfTest:
    """Execute operations with known results, and a recorded step if one is given, until the time is over.

    Args:
        device: ``auto``, ``cpu`` or ``cuda:0``.
        minutes: Duration in minutes. Each operation is executed at least once.
        step: File written by `record_step` or `record_training`.
        code: ``file.py:name``, the code of a recorded step that is not built in.
        observer: Receives reports of progress.

    Raises:
        UsageError: There is no such device, the recording cannot be used, or ``code`` is missing for its step.
        UnsilentError: An operation raised an exception.
    """
    if not (isinstance(minutes, Real) and minutes >= 0):
        raise wrong_value_error("--minutes", minutes, "a number, 0 or more")
    if code is not None and step is None:
        raise UsageError("--code is given without --step; name the recording that it belongs to, or leave it out")
    device = resolve_device(device)
    recorded = [] if step is None else [load_recording(step, device, code)]
    tests, missing = known_answers(device)
    began = time.monotonic()

    def is_over() -> bool:
        spent = time.monotonic() - began
        if observer is not None:
            observer.loading("self-test", min(spent, 60 * minutes), 60 * minutes)
        return spent >= 60 * minutes

    counts = execute_tests([*tests, *recorded], is_over)
    return SelfTest(device, environment(device), time.monotonic() - began, counts, tuple(missing))


def execute_tests(tests: Sequence[Test], is_over: Callable[[], bool]) -> tuple[OperationCount, ...]:
    """Execute all tests in turn, and stop after the first complete round that ends after the time is over."""
    counts = tuple(OperationCount(test.operation, test.dtype) for test in tests)
    while True:
        for test, count in zip(tests, counts, strict=True):
            try:
                result = test.execute()
            except RuntimeError as error:
                raise UnsilentError(
                    f"{test.operation} in {test.dtype} raised {kind_and_line(error)}; see the log of the device's driver"
                ) from None
            count.executions += 1
            if result is not None:
                count.wrong += 1
                if count.mismatch is None:
                    count.mismatch, count.first_wrong = result, count.executions
        if is_over():
            return counts

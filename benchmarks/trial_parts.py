"""What a trial of a fault in a parameter consists of: CPU time by part, for trials of one sample.

Times are exclusive: what an operation takes inside of the walk along the tape counts as operation. Wrapped functions cost a
little themselves, so parts add up to slightly more than an undisturbed trial, whose time is in the last column.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from unsilent.campaigns.spec import TrialId
from unsilent.engine import cached, sampled_trials, tape_replay, walk
from unsilent.sites import parameters
from unsilent.studies.pvf import runner as runners
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.spec import PvfSpec

WORKLOADS = ("cifar-resnet32", "chargpt", "dlrm")
PARTS: dict[str, list[tuple[Any, str]]] = {
    "drawing": [(runners.TrialRunner, "_draw")],
    "operations": [(tape_replay.Replayer, "apply")],
    "plain runs": [(cached.CachedEngine, "_run")],
    "injecting": [(parameters.ParameterInjection, "__enter__"), (parameters.ParameterInjection, "__exit__")],
    "judging": [(sampled_trials, "classify")],
    "walking the tape": [(walk.Walk, "_visit_all"), (sampled_trials, "walk_together")],
    "rows": [(runners, "make_row")],
    "storing": [(PvfStore, "add_rows")],
    "proofs": [(runners.TrialRunner, "verify_restored_state")],
}


class ExclusiveTimes:
    """CPU seconds by part, without those of parts inside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys([*PARTS, "other"], 0.0)
        self._open, self._since = ["other"], time.process_time()

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """What runs inside counts as this part; inside of a proof everything is proof."""
        part = "proofs" if "proofs" in self._open else part
        self._change(lambda: self._open.append(part))
        try:
            yield
        finally:
            self._change(self._open.pop)

    def _change(self, how: Callable[[], object]) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        how()
        self._since = time.process_time()

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, measured."""

        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            with self.measured(part):
                return function(*given, **named)

        return call


def parts_of(spec: PvfSpec, trials: int) -> tuple[dict[str, float], float]:
    """CPU milliseconds of a trial by part, and of a trial that nothing measures."""
    runner = runners.TrialRunner(spec)
    baseline = runner.establish_baseline()
    names = [TrialId(t.name, 1, k) for k in range(trials) for t in baseline.targets]
    size = runner.max_trials_together
    chunks = [names[i : i + size] for i in range(0, len(names), size)]
    with tempfile.TemporaryDirectory() as folder, PvfStore(Path(folder) / "s.sqlite", write=True) as store:
        store.bind_campaign(spec, baseline)

        def run(chunk: list[TrialId]) -> None:
            store.add_rows(list(runner.run_all(chunk)))

        half = len(chunks) // 2
        run(chunks[0])
        start = time.process_time()
        for chunk in chunks[1:half]:
            run(chunk)
        whole = (time.process_time() - start) / sum(map(len, chunks[1:half]))
        with ExitStack() as stack:
            times = ExclusiveTimes()
            for part, places in PARTS.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, times.wrapped(getattr(owner, name), part)))
            for chunk in chunks[half:]:
                run(chunk)
            times._change(lambda: None)
    count = sum(map(len, chunks[half:]))
    return {part: 1e3 * seconds / count for part, seconds in times.seconds.items()}, 1e3 * whole


def main(rounds: int, device: str) -> None:
    """Print a line for each workload."""
    torch.set_num_threads(1)
    files = {k: os.environ.get(f"UNSILENT_CIFAR_{k.upper()}") for k in ("weights", "data")}
    print(
        f"{'ms a trial of one sample':26}" + "".join(f"{part:>18}" for part in (*PARTS, "other", "sum", "undisturbed"))
    )
    for name in WORKLOADS:
        own = files if name.startswith("cifar") else {}
        if own and not all(own.values()):
            print(f"{name:26} needs UNSILENT_CIFAR_WEIGHTS and UNSILENT_CIFAR_DATA; skipped")
            continue
        spec = PvfSpec(name, strata="bits", samples=1, device=device, **own)
        parts, whole = parts_of(spec, 40 * rounds)
        print(f"{name:26}" + "".join(f"{value:18.3f}" for value in (*parts.values(), sum(parts.values()), whole)))

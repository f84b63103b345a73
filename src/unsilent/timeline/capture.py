"""Records some steps of a training program with the profiler, without changing the program.

A step ends with the step of the optimizer that stepped first in the program. The profiler already runs in the step before the
first recorded one, so that starting it lengthens no recorded step. An error in recording is reported once, and the program
continues without recording.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import statistics
import time
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.autograd.profiler import profile as AnyProfile
from torch.optim import Optimizer
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from unsilent.basics.errors import kind_and_line
from unsilent.timeline.anchors import measure_offset

CLOCK_KEY = "unsilent_clock"
"""Key in a trace: list of Unix seconds, offset of the rank's clock (its time minus that of rank 0) and its error bound."""
UNSETTLED = 2
"""Number of first steps, which take longer than others whether they are recorded or not."""
FEWEST_TIMED = 3


class Recorder:
    """Records some steps of one rank and writes their trace.

    Args:
        folder: Folder for the trace.
        steps: Number of steps to record.
        warmup: Number of steps before the recorded ones, at least `UNSETTLED`.
        say: Shows a line to the user.

    Attributes:
        ended: Number of steps so far.
        recorded: Number of these steps in the trace.
        has_failed: Whether an error ended the recording.
        rank: Number of this process in the job.
    """

    def __init__(self, folder: Path, steps: int, warmup: int, say: Callable[[str], None]) -> None:
        self._folder, self._steps, self._warmup, self._say = folder, steps, warmup, say
        self._process = os.getpid()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._depth = 0  # of calls of the step of a class in that of its subclass
        self._profiler: profile | None = None
        self._anchors: list[tuple[float, float, float]] = []
        self._can_compare = True
        self._last: float | None = None
        self._times: tuple[list[float], list[float]] = (
            [],
            [],
        )  # for steps that are not recorded, and for those that are
        self._plain_hook: Any = None
        self._plain_prepare: Any = None
        self.ended, self.recorded, self.has_failed = 0, 0, False
        self._has_stopped = False
        self.rank, self._world_size = int(os.environ.get("RANK", "0")), 1

    def start(self) -> None:
        """Count the steps of all optimizers that are used from now on."""
        plain, self._plain_hook = Optimizer.profile_hook_step, Optimizer.__dict__["profile_hook_step"]

        def hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            with_hooks, after = plain(step), torch.compiler.disable(self._after)  # if the script compiles its step

            @wraps(step)
            def counted(optimizer: Optimizer, *args: Any, **named: Any) -> Any:
                self._depth += 1
                try:
                    result = with_hooks(optimizer, *args, **named)
                finally:
                    self._depth -= 1
                after(optimizer)
                return result

            return counted

        Optimizer.profile_hook_step = staticmethod(hook_step)  # type: ignore[method-assign, assignment]
        prepare: Any = AnyProfile._prepare_trace
        self._plain_prepare = prepare

        def prepare_trace(profile: AnyProfile) -> Any:
            if self._profiler is not None and os.getpid() == self._process:
                self._try(_refuse_own_profiler)  # two at once abort the process
            return prepare(profile)

        AnyProfile._prepare_trace = prepare_trace  # type: ignore[method-assign]

    def stop(self) -> None:
        """Undo the changes to torch, and write the recorded steps if the program ended early."""
        Optimizer.profile_hook_step = self._plain_hook  # type: ignore[method-assign]
        AnyProfile._prepare_trace = self._plain_prepare  # type: ignore[method-assign]
        self._has_stopped = True  # classes of optimizers that were used meanwhile go on calling `_after`
        if self._profiler is not None:
            self._try(lambda: self._finish(compare=False))  # other ranks may not be there any more

    def cost_text(self) -> str:
        """Sentence on how much longer recorded steps took than other steps."""
        plain, recorded = self._times
        if len(plain) < FEWEST_TIMED:
            return "too few steps without recording were timed to say what recording cost"
        with_it, without = statistics.median(recorded), statistics.median(plain)
        longer = f"{100 * (with_it / without - 1):.2g} % longer" if with_it > without else "no longer"
        return (
            f"a recorded step took {1e3 * with_it:.3g} ms, a step without recording {1e3 * without:.3g} ms "
            f"(medians of {len(recorded):,} and {len(plain):,}): {longer}"
        )

    def _after(self, optimizer: Optimizer) -> None:
        """Count a finished step of an optimizer."""
        if self._depth or self.has_failed or self._has_stopped or os.getpid() != self._process:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._try(self._count)

    def _count(self) -> None:
        now = time.perf_counter()
        is_recorded = self._profiler is not None and self.ended >= self._warmup
        self.ended += 1
        self.recorded += is_recorded
        if (
            self._last is not None
            and self.ended > UNSETTLED
            and len(self._times[is_recorded]) < self._steps + self._warmup
        ):
            self._times[is_recorded].append(now - self._last)
        if self.ended == self._warmup - 1:
            self._begin()
        elif self.recorded == self._steps and self._profiler is not None:
            self._finish()
        elif self._profiler is not None:
            self._profiler.step()
        else:
            self._last = now
            return
        # The start and the end of the profiler belong to no step, and the step in which it warms up is not like others.
        self._last = time.perf_counter() if self.ended != self._warmup - 1 else None

    def _begin(self) -> None:
        if torch._C._autograd._profiler_enabled():
            _refuse_own_profiler()
        self.rank, self._world_size = group_place() or (self.rank, 1)
        self._compare("begin")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()

        def action(step: int) -> ProfilerAction:
            return ProfilerAction.RECORD if step >= self._warmup else ProfilerAction.WARMUP

        profiler = profile(activities=activities, schedule=action, record_shapes=True)
        profiler.step_num = self.ended  # `ProfilerStep#k` is the step with k others before it
        profiler.start()
        self._profiler = profiler

    def _finish(self, compare: bool = True) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        flight = self._flight_record()
        if not self.recorded:
            return
        if compare:
            self._compare("end")
        self._folder.mkdir(parents=True, exist_ok=True)
        if flight:
            (self._folder / f"flight-rank{self.rank}.json").write_bytes(flight)
        self._write(profiler)

    def _write(self, profiler: profile) -> None:
        """Write the trace file with the measured clock offsets as its first key.

        The file is replaced atomically, so that no reader sees half of it.
        """
        target = self._folder / f"trace-rank{self.rank}.json.gz"
        plain, packed = target.with_suffix(".tmp.json"), target.with_suffix(".tmp")
        try:
            profiler.export_chrome_trace(str(plain))
            with open(plain, "rb") as exported, gzip.open(packed, "wb", compresslevel=4) as file:
                space, brace, rest = exported.read(64).partition(b"{")
                if space.strip() or not brace:
                    raise RuntimeError("the profiler wrote no JSON object")
                file.write(f'{{"{CLOCK_KEY}": {json.dumps(self._anchors)},'.encode() + rest)
                shutil.copyfileobj(exported, file)
            os.replace(packed, target)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _compare(self, label: str) -> None:
        """Measure the offset of this rank's clock, and report a failure to the user."""
        if not self._can_compare or self._world_size == 1:
            return
        try:
            store = distributed.distributed_c10d._get_default_store()
            self._anchors.append(measure_offset(store, label, self.rank, self._world_size))
        except Exception as error:
            self._can_compare = False
            self._say(f"the clock of rank {self.rank} was not compared with that of rank 0: {kind_and_line(error)}")

    def _flight_record(self) -> bytes:
        """The flight recorder's dump of collectives, or no bytes if this build of torch has none."""
        names = ["_dump_nccl_trace_json"] * torch.cuda.is_available() + [
            "_dump_fr_trace_json"
        ]  # gloo has the second one
        with contextlib.suppress(Exception):  # they are not a public interface
            c10d = torch._C._distributed_c10d
            dump = next(getattr(c10d, name) for name in names if hasattr(c10d, name))()
            return dump if isinstance(dump, bytes) else str(dump).encode()
        return b""

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            profiler, self._profiler, self.has_failed = self._profiler, None, True
            if profiler is not None:
                with contextlib.suppress(Exception):
                    profiler.stop()
            self._say(f"cannot record: {kind_and_line(error)}; the program goes on without it")


def _refuse_own_profiler() -> None:
    raise RuntimeError("the script runs a profiler of its own, and only one can run")


def group_place() -> tuple[int, int] | None:
    """Rank of this process and number of ranks in the default process group, or None without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()

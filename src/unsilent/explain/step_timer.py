"""Times the steps of a running loop, with each source of nondeterminism switched off in turn.

Steps take turns within one run: in each round every mode has a few steps, in shuffled order. A step lasts from one update of the
first optimizer to its next one, so that other optimizers of the loop belong to it. Code around an update may restore settings:
the mode is set again when a module is called, and a source whose settings are no longer in force at the end of a step counts as
not measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from unsilent.explain.optimizer_steps import OptimizerStepCounter, StepLimitReached
from unsilent.explain.step_costs import FREE, NO_CUDA, ONE_THREAD, OVERRIDDEN, TIMED, UNTIMED
from unsilent.explain.switching import Mode, seed_generators, switched

SETTLING = 3
"""Number of steps before the first round."""
NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"


def modes_of(threads: int, cuda: bool) -> tuple[dict[str, Mode], dict[str, str]]:
    """Modes by the source that they pin, and reasons why other sources cannot be measured.

    The mode that pins nothing is the first.
    """
    free = Mode(tune=cuda, tf32=True if cuda else None)
    modes = {
        FREE: free,
        "seeds": free._replace(seeds=True),
        "kernels": free._replace(deterministic=True, fill=False),
        "kernels+memory": free._replace(deterministic=True),
    }
    every, unmeasured = modes["kernels+memory"]._replace(seeds=True), {}
    if threads > 1:
        modes["threads"], every = free._replace(threads=1), every._replace(threads=1)
    else:
        unmeasured["threads"] = ONE_THREAD
    if cuda:
        modes |= {"cudnn-benchmark": free._replace(tune=False), "tf32": free._replace(tf32=False)}
        every = every._replace(tune=False, tf32=False)
    else:
        unmeasured |= {"cudnn-benchmark": NO_CUDA, "tf32": NO_CUDA}
    return modes | {"all": every}, unmeasured


class StepTimer(OptimizerStepCounter):
    """Times steps while it is active, and ends the loop after a number of rounds.

    Args:
        rounds: Number of rounds after which `StepLimitReached` is raised.
        limit: Number of updates after which it is raised; ``None`` for no limit.

    Attributes:
        rounds: CPU and wall-clock seconds of a step in each round, by mode.
        unmeasured: Why sources were not measured, by name.
        refused: Operations without a deterministic form, according to torch's warnings.
    """

    def __init__(self, rounds: int, limit: int | None = None) -> None:
        super().__init__(limit)
        self.rounds: list[dict[str, tuple[float, float]]] = []
        self.unmeasured: dict[str, str] = {}
        self.refused: set[str] = set()
        self._planned, self._turns = rounds, self._take_turns()
        self._mode: Mode | None = None
        self._show, self._warnings = warnings.showwarning, warnings.catch_warnings()

    def __enter__(self) -> StepTimer:
        self._show = warnings.showwarning
        self._warnings.__enter__()
        warnings.filterwarnings("default", f".*{NO_DETERMINISTIC_FORM}")  # no error, whatever the program sets
        warnings.showwarning = self._note
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._mode = None
        self._turns.close()
        self._warnings.__exit__(*raised)

    def _call(self, module: nn.Module, args: Any) -> None:
        super()._call(module, args)
        if self._mode is not None and not self._mode.is_set:
            self._mode.set(warn_only=True)

    def _note(self, message: Any, *args: Any, **more: Any) -> None:
        name, separator, _ = str(message).partition(NO_DETERMINISTIC_FORM)
        if separator:
            self.refused.add(name.strip())
        else:
            self._show(message, *args, **more)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizers[0] and next(self._turns, self) is self:
            self.done += 1
            raise StepLimitReached
        super()._end(optimizer, args, kwargs)

    def _take_turns(self) -> Generator[None]:
        """Generator that is resumed at the end of each step, and switches between the modes."""
        for _ in range(SETTLING - 1):  # one is over
            yield
        modes, self.unmeasured = modes_of(torch.get_num_threads(), torch.cuda.is_initialized())
        mix = np.random.Generator(np.random.PCG64(0))
        for _ in range(self._planned):
            seconds = {}
            for name in map(str, mix.permutation(list(modes))):
                self._mode = mode = modes[name]
                with switched(mode):
                    for _ in range(UNTIMED):
                        yield
                    begun = _clocks()
                    for _ in range(TIMED):
                        if mode.seeds:
                            seed_generators(self.done)
                        yield
                        if not mode.is_set:
                            self.unmeasured[name] = OVERRIDDEN
                    cpu, wall = (after - before for before, after in zip(begun, _clocks(), strict=True))
                seconds[name] = (cpu / TIMED, wall / TIMED)
            self.rounds.append(seconds)


def _clocks() -> tuple[float, float]:
    """CPU time of this process and wall time in seconds, read after all GPU work is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()

"""Monitors the models that a program trains, without changes to the program.

Optimizers are noted when they are made. At the first backward pass the modules that own their parameters are looked up among all
objects of the process, and a `Monitor` is made of both before that pass begins. This needs no hook on all modules, which would
make `torch.compile` compile everything again. If the program makes further optimizers later, the monitor ends, and a new one for
all optimizers that still exist begins at the next backward pass. A monitor ends when the program has dropped its model and
optimizers. In a child that the program forks, nothing is monitored.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.events.sinks import Sink
from unsilent.guard.monitored import is_monitored
from unsilent.launch.rerun_loops import RerunLoops
from unsilent.monitor import backward_hooks
from unsilent.monitor.actions import MonitorStop
from unsilent.monitor.monitor import Monitor
from unsilent.monitor.settings import EXECUTE_AGAIN, MonitorSettings
from unsilent.sites.modules import parameters_of, unwrapped

LOGGER = "unsilent.monitor"
SHORT = 10
"""Monitors that saw fewer backward passes count as short-lived."""
MOST_SHORT = 3
"""Number of short-lived monitors in a row after which new optimizers are no longer monitored."""
_log = logging.getLogger(LOGGER)


class AutomaticMonitor(backward_hooks.BackwardListener):
    """Creates a monitor for the optimizers that a program makes, and a new one if it makes more.

    Args:
        settings: Settings of the monitor.
        notes: Sentences that the monitor logs.
        compatibility: Value of the monitor's setting.
        sinks: Sinks of the monitor.

    Attributes:
        backward_passes: Number of backward passes seen so far.
        monitors: Monitors made so far.
        failed: Whether an internal error ended the monitoring.
        is_program_monitored: Whether the program has a monitor of its own.
        refused: The user's error with which the program was stopped.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        notes: Sequence[str] = (),
        compatibility: bool = False,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._sinks = sinks
        self._settings, self._notes, self._compatibility = settings, tuple(notes), compatibility
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._monitor: weakref.ref[Monitor] | None = None  # hooks of the optimizers keep the monitor alive
        self._stops: list[MonitorStop] = []
        self._process = os.getpid()
        self._plain_init: Any = None
        self._has_new, self._gave_up = False, False
        self._first_pass, self._short = 0, 0
        self.backward_passes, self.monitors, self.failed, self.is_program_monitored = 0, 0, False, False
        self.refused: UsageError | None = None
        self._loops = RerunLoops(self._open_monitor)

    def start(self) -> None:
        """Wait for optimizers and the first backward pass."""
        plain = self._plain_init = Optimizer.__init__

        @functools.wraps(plain)
        def init(optimizer: Optimizer, *args: Any, **named: Any) -> None:
            plain(optimizer, *args, **named)
            self._note(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        backward_hooks.add_listener(self)
        if self._settings.on_alarm in EXECUTE_AGAIN:
            self._loops.start()

    def stop(self, wait: bool = True) -> None:
        """End the monitor and remove all hooks from torch.

        ``wait``: wait for other ranks, which end as well. Raises `MonitorStop`.
        """
        backward_hooks.remove_listener(self)
        self._loops.stop()
        Optimizer.__init__ = self._plain_init  # type: ignore[method-assign]
        self._gave_up = True
        self._close(wait)

    def before_backward(self, tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        self.backward_passes += 1
        self._raise_stop()
        if self._has_new and not self._gave_up:
            self._has_new = False
            try:
                self._attach()
            except UsageError as error:
                self.refused = error
                raise
            except Exception as error:
                self._fail("cannot monitor the training", error)

    def _open_monitor(self) -> Monitor | None:
        return None if self._monitor is None or os.getpid() != self._process else self._monitor()

    def _raise_stop(self) -> None:
        """Raise the stop found in the last step of a training whose optimizers the program has deleted."""
        if self._stops:
            raise self._stops.pop()

    def _note(self, optimizer: Optimizer) -> None:
        """Note a new optimizer, and close the monitor of earlier ones to free their memory."""
        if self._gave_up:
            return
        self._raise_stop()
        if self._monitor is not None:
            self._short = self._short + 1 if self.backward_passes - self._first_pass < SHORT else 0
            if self._short >= MOST_SHORT:
                self._gave_up = True
                _log.warning("new optimizers are made every few steps; only those made so far are monitored")
                return
            self._close()
        self._optimizers.append(weakref.ref(optimizer))
        self._has_new = True

    def _attach(self) -> None:
        gc.collect()  # so that models and optimizers of an earlier training are gone
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        if any(map(is_monitored, optimizers)):
            self._gave_up = self.is_program_monitored = True
            _log.info("the program has a monitor of its own; no other one is made")
        elif optimizers:
            model = trained_model(optimizers)
            monitor = Monitor(
                model, optimizers, settings=self._settings, sinks=self._sinks, notes=self._notes,
                compatibility=self._compatibility,
            )  # fmt: skip
            monitor.stops = self._stops
            self._monitor = weakref.ref(monitor)
            self._first_pass = self.backward_passes
            self._notes = ()  # they are logged once
            self.monitors += 1

    def _close(self, wait: bool = True) -> None:
        monitor, self._monitor = self._open_monitor(), None
        self._raise_stop()
        try:
            if monitor is not None:
                monitor.close(wait)
        except MonitorStop:
            raise
        except Exception as error:
            self._fail("cannot end the monitor", error)

    def _fail(self, problem: str, error: Exception) -> None:
        """Log an internal error; the program goes on, without a monitor."""
        self._gave_up = self.failed = True
        if self._settings.strict:
            raise error
        _log.error("%s: %s; the program goes on without it", problem, kind_and_line(error), exc_info=error)


def trained_model(optimizers: Sequence[Optimizer]) -> nn.Module:
    """The module with the parameters of the optimizers.

    If there are several such modules, a new module with these as children.
    """
    trained = set(map(id, parameters_of(optimizers)))
    roots = _outermost_modules(trained)
    if len(roots) == 1:
        return roots[0]
    bundle = nn.Module()
    for root in map(unwrapped, roots):
        name = type(root).__name__
        same = sum(key.partition("-")[0] == name for key in bundle._modules)
        bundle._modules[f"{name}-{same + 1}" if same else name] = root
    return bundle


def _outermost_modules(trained: set[int]) -> list[nn.Module]:
    """Modules with trained parameters that are not children of another module.

    A module is left out if the others have all of its parameters.

    Args:
        trained: Identities of the parameters.
    """
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in o.__dict__]
    children = {id(child) for module in modules for child in module._modules.values()}
    outermost = [(module, _identities(module)) for module in modules if id(module) not in children]
    roots = []
    for module, parameters in sorted(outermost, key=lambda pair: -len(pair[1] & trained)):
        if parameters & trained:
            roots.append(module)
            trained = trained - parameters
    return roots


def _identities(module: nn.Module) -> set[int]:
    """The ``id`` of each parameter, also for classes that override ``parameters``."""
    return {id(parameter) for parameter in nn.Module.parameters(module)}

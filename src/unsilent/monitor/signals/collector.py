"""Collects the signals of a training in one rank, from some of the tensors in each step.

    with SignalCollector(model, [optimizer]) as collector:
        ...                                   # forward, backward, optimizer.step()
        signals = collector.take_row().read(len(collector.series))

Everything is computed on the device of the tensors and copied to the host in one piece. Gradients are read while they are local
to the rank: at the end of a backward pass (as accumulated so far), or as each one arrives if ranks reduce them (then for each
micro-batch alone). The training is not changed: it ends with the same bits as without a collector. A backward pass that reaches
none of the parameters (for example a pass of another model in the program) does not belong to a step.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from unsilent.basics.closing import Closing
from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NORM_INPUT_GRADIENT, NUMBER, UPDATE, VALUE, Series
from unsilent.guard.magnitudes import ReusedSum, local_tensor, norms_and_largest
from unsilent.monitor.backward_hooks import BackwardListener, add_listener, bind_to_this_thread, remove_listener
from unsilent.monitor.sampling import SampleIntervals
from unsilent.monitor.signals import layers
from unsilent.monitor.signals.forward_hook import ForwardHook, is_transformed
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.signals.state_watch import StateWatch, UpdateSizes
from unsilent.monitor.signals.step_ends import StepEnds
from unsilent.monitor.signals.trained_parameters import (
    TrainedParameters,
    are_reduced,
    frozen_parameters,
    is_sharded,
)
from unsilent.monitor.signals.turns import OptimizerTurns, TrainedParameter, ValueTurns
from unsilent.monitor.step_checks import StepChecks
from unsilent.sites.modules import named_modules, unwrapped

TIMED = 16
"""Number of steps of which one has its checks timed: timing them costs as much as the checks."""
LONGEST_CHECK = 2e-4
"""Longest time of a check in seconds; a longer one was interrupted by another program and is not representative."""
LARGEST_LOSS = 1e12
"""Limit for scaled losses: if losses below it cannot overflow by scaling, an infinite loss was infinite before."""
_collectors: weakref.WeakSet[SignalCollector] = weakref.WeakSet()
"""Open collectors, for `watch_gradient`."""


class SignalCollector(BackwardListener, Closing):
    """Reads the signals of a training; a context manager that removes its hooks.

    Args:
        model: Model that is trained; wrappers (DDP, a compiled module) are looked through.
        optimizers: Optimizers that train it.
        values: Tensors to read by name, ``MODULE:input``, ``MODULE:output`` or ``MODULE:gradient``.
        fingerprint: Whether bits of the state are compared between steps.
        full_fingerprint: Whether all fingerprints are taken in each step.
        on_error: Function that gets an error in a hook; ``None`` to raise errors.
        on_end: Called when the next step begins and the row, now complete, was not taken; also after each step that is not read.
            If ``None``, a row collects all signals until it is taken.
        before_step: Called before each step of an optimizer, after the collector's own reading.
        after_step: Called after each optimizer step that is read.
        checks: Gets the loss of each step that is not read, and norms of gradients before clipping.

    Attributes:
        series: Series that are read; names of `watch_gradient` and new parameters are added.
        step: Number of the present row.
        backwards: Backward passes of this model so far.
        seconds: Seconds spent on ``gradients``, ``values`` and ``state``.
        is_off: Whether reading has ended.
        next_read: Number of the first row that is read; rows before it are only counted. If 0, all rows are read.
        reads_all: Whether the row that follows a row that is read is read as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        values: Sequence[str] = (),
        fingerprint: bool = True,
        full_fingerprint: bool = False,
        on_error: Callable[[Exception], None] | None = None,
        on_end: Callable[[], None] | None = None,
        before_step: Callable[[Optimizer], None] | None = None,
        after_step: Callable[[Optimizer], None] | None = None,
        checks: StepChecks | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self.series: list[Series] = []
        self._intervals = SampleIntervals(1, 1, 1)
        self.step, self.backwards, self.is_off = 0, 0, False
        self.next_read, self.reads_all = 0, True
        self.seconds = {"gradients": 0.0, "values": 0.0, "state": 0.0, "checks": 0.0}
        self._checks = checks
        self._first_clipped: list[Tensor] = []
        self._on_error, self._on_end, self._is_timed = on_error, on_end, False
        self._then_before_step, self._then_after_step = before_step, after_step
        self._ends, self._is_single = StepEnds(len(optimizers)), len(optimizers) == 1
        self._hooks: list[Any] = []
        self._value_hooks: list[Callable[[], Any]] = []
        self._attached: list[Any] = []
        self._slots: dict[tuple[str, str], int] = {}
        self._values = ValueTurns()
        self._expected: frozenset[tuple[str, str]] = frozenset()
        self._scale: Tensor | None = None
        self._arrived: list[tuple[Sequence[int], Tensor]] = []
        self._gradients_before: list[tuple[int, int] | None] = []
        self._loss_and_scaled: tuple[Tensor | None, bool] = None, False
        self._has_stepped = self._was_scaled = self._has_gradient = False
        self._row = SignalRow(0)
        self._next_row: SignalRow | None = None
        self._parameters: list[TrainedParameter] = []
        self._written: Tensor | None = None
        self._version_before: tuple[int, int] | None = None
        self._is_one_enough = True
        self._groups = {id(optimizer): OptimizerTurns() for optimizer in optimizers}
        self._places: dict[str, tuple[OptimizerTurns, int]] = {}
        self._optimizers = optimizers
        self._trained = TrainedParameters(self.model, optimizers)
        watched = layers.named_values(self.model, values)
        self._add_new_parameters()
        parameters = [trained.parameter for trained in self._parameters]
        self._arrive_one_by_one = are_reduced(parameters)
        self._loss = self._add_series(Series(LOSS, "", NUMBER))
        self._updates, self._sums = UpdateSizes(), ReusedSum()
        self._state = StateWatch(
            self._trained.of_optimizer if fingerprint else [[] for _ in optimizers],
            optimizers,
            frozen_parameters(self.model, optimizers) if fingerprint else [],
            full_fingerprint,
            has_replicas=self._arrive_one_by_one and not any(map(is_sharded, parameters)),
        )
        for name, layer in named_modules(self.model):
            if layers.is_norm_layer(layer):
                self._hook(layers.hook_input_gradient, layer, key=(NORM_INPUT_GRADIENT, name))
        for name, module, part in watched:
            self._hook(layers.hook_value, module, part, key=(VALUE, name))
        if self._arrive_one_by_one:
            self._hook_gradients()
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._begin_row()
        self._thread = threading.get_ident()
        # Last: from here on backward passes call this collector.
        add_listener(self, self._thread)
        _collectors.add(self)

    def close(self) -> None:
        """Remove all hooks.

        Must not be called from a hook, as torch iterates over its hooks then.
        """
        self.is_off = True
        remove_listener(self)
        _collectors.discard(self)
        for hook in (*self._hooks, *self._attached):
            hook.remove()
        self._hooks.clear()
        self._attached.clear()

    @property
    def intervals(self) -> SampleIntervals:
        """Sampling intervals, which decide what is read in each step."""
        return self._intervals

    @intervals.setter
    def intervals(self, intervals: SampleIntervals) -> None:
        self._intervals = intervals
        self._begin_row()

    def _begin_row(self) -> None:
        """Choose the values that may be read in the row that begins, and attach their hooks.

        Also called when the intervals change.
        """
        is_near = self.step + 1 >= self.next_read
        if is_near:
            self._expected = self._values.may_come(self.step, self._intervals.values)
        if is_near != bool(self._attached):
            self._attach_value_hooks(is_near)

    def _attach_value_hooks(self, is_wanted: bool) -> None:
        """Attach or remove the hooks that read values inside the model.

        A module with a hook is called more slowly.
        """
        for handle in self._attached:
            handle.remove()
        self._attached = [attach() for attach in self._value_hooks] if is_wanted else []

    @property
    def is_reading(self) -> bool:
        """Whether signals of the current row are read."""
        return self.step >= self.next_read

    # -- calls in the course of a step --------------------------------------------------------------------------

    def before_backward(self, tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        """Read the loss when a backward pass begins."""
        if self.is_off:
            return
        if not (self._is_single and self.step < self.next_read):
            self._end_row(self._ends.is_over)
        if self.step < self.next_read:
            begun = time.perf_counter() if self.step % TIMED == TIMED - 1 else 0.0  # the first ones are slow
            if not self._is_single:
                self._ends.begin_pass()
                self._scale = None if scale is None else scale.detach().to(torch.float64, copy=True)
            loss = tensors[0].detach() if len(tensors) == 1 and tensors[0].numel() == 1 else None
            self._loss_and_scaled, self._has_gradient = (loss, scale is not None), False
            if self._written is not None:
                self._version_before = _version(self._written.grad)
            else:
                self._gradients_before = [_version(trained.parameter.grad) for trained in self._parameters]
            if begun:
                self.seconds["checks"] += TIMED * min(LONGEST_CHECK, time.perf_counter() - begun)
            return
        with self.timed("gradients"):
            self._ends.begin_pass()
            self._arrived, self._has_gradient = [], False
            self._gradients_before = [_version(trained.parameter.grad) for trained in self._parameters]
            self._scale = None if scale is None else scale.detach().to(torch.float64, copy=True)
            if len(tensors) == 1 and tensors[0].numel() == 1 and tensors[0].is_floating_point():
                self._put_loss(tensors[0].detach().reshape(1))

    def after_backward(self) -> None:
        """Read the gradients at the end of a backward pass, unless hooks have read them."""
        if self.is_off:
            return
        if self.step < self.next_read:
            begun = time.perf_counter() if self.step % TIMED == TIMED - 1 else 0.0
            (loss, is_scaled), self._loss_and_scaled = self._loss_and_scaled, (None, False)
            if (
                self._has_gradient
                or (self._written is not None and _version(self._written.grad) != self._version_before)
                or self._has_written_another()
            ):
                self._was_scaled = is_scaled
                if self._checks is not None and loss is not None:
                    self._checks.add_loss(self.step, loss, is_scaled)
            if begun:
                self.seconds["checks"] += TIMED * min(LONGEST_CHECK, time.perf_counter() - begun)
            if self._is_single:
                self._ends.has_pass = True
            else:
                self._ends.end_pass(is_own=True)  # not checked: one row more or less only changes a number
                for slots, values in self._arrived:  # values of a forward pass in a row that is read
                    self._row.add(slots, values, is_scaled=self._was_scaled)
                self._arrived = []
            self.backwards += 1
            self._has_stepped = False
            return
        with self.timed("gradients"):
            arrived, self._arrived = self._arrived, []
            is_own = self._has_gradient or self._first_written() is not None
            self._ends.end_pass(is_own)
            if not is_own:
                return
            self.backwards += 1
            self._has_stepped, self._was_scaled = False, self._scale is not None
            if not self._arrive_one_by_one:
                due = [trained for group in self._groups.values() for trained in group.due(self.intervals.gradients)]
                self._read_gradients(due)
                arrived += self._arrived
                self._arrived = []
            for slots, values in arrived:
                self._row.add(slots, values, is_scaled=self._was_scaled and slots != (self._loss,))

    def after_clipping(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Pass the norm of the clipped gradients to the checks of each step."""
        if self._checks is None or self.is_off:
            return
        begun = time.perf_counter() if self.step % TIMED == TIMED - 1 else 0.0  # the first ones are slow
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            first: Tensor | None
            for first in self._first_clipped:
                if first.grad is gradient:
                    break
            else:
                first = self._find_first_clipped(gradient)
            if first is not None:
                local = norm if type(norm) is Tensor else getattr(norm, "_local_tensor", norm)
                self._checks.add_norm(self.step, (id(first), len(parameters)), local, self._was_scaled)
            break
        if begun:
            self.seconds["checks"] += TIMED * min(LONGEST_CHECK, time.perf_counter() - begun)

    def _find_first_clipped(self, gradient: Tensor) -> Tensor | None:
        """The trained parameter that has this gradient, or None if there is none."""
        for trained in self._parameters:
            if trained.parameter.grad is gradient:
                self._first_clipped.append(trained.parameter)
                return trained.parameter
        return None

    def after_scaler_update(self) -> None:
        """End the step after an update of the loss scaler.

        If the optimizer step was skipped, all values except the loss are discarded.
        """
        if self.is_off or not self._was_scaled:
            return
        if not self._has_stepped:
            self._row.discard_values(except_for=self._loss)
        self._was_scaled = False
        self._end_row(self._ends.has_pass)

    @property
    def steps_of_optimizers(self) -> list[int]:
        """Number of steps of each optimizer so far."""
        return [group.steps for group in self._groups.values()]

    @property
    def rows_per_step(self) -> int:
        """Approximate number of rows of signals between two steps of the slowest optimizer."""
        fewest = min((group.steps for group in self._groups.values() if group.steps), default=1)
        return 1 if len(self._groups) == 1 else max(1, round(self.step / fewest))

    @property
    def has_pass(self) -> bool:
        """Whether a backward pass of this model has ended in the current step."""
        return self._ends.has_pass

    @property
    def is_complete(self) -> bool:
        """Whether all optimizers have made their steps after the backward pass."""
        return self._ends.is_complete

    @property
    def is_over(self) -> bool:
        """Whether any optimizer has made its step after the backward pass."""
        return self._ends.is_over

    def hook_failed(self, error: Exception) -> None:
        """Handle an error that was raised by a hook around a backward pass."""
        with self.timed("gradients"):
            raise error

    def start_at(self, step: int, steps_of_optimizers: Sequence[int]) -> None:
        """Continue with a row of this number after the training went back.

        Bits are not compared with earlier ones.
        """
        self.step = step
        for group, steps in zip(self._groups.values(), steps_of_optimizers, strict=True):
            group.steps = steps
        self._values.go_back(step)
        self._begin_row()
        self._row, self._next_row = SignalRow(step), None
        self._ends.begin_row()
        self._state.forget()
        self._updates.forget()

    def forget_update(self) -> None:
        """Forget the copies of parameters, as the next optimizer step is skipped."""
        self._updates.forget()

    @property
    def state_names(self) -> list[str]:
        """Names of the parameters and optimizer tensors whose bits are compared."""
        return self._state.names

    def take_row(self) -> SignalRow:
        """The signals since the last row, whose copy to the CPU may still be under way; a new row begins."""
        row = self._row
        row.begin_copy()
        self.step += 1
        self._row, self._next_row = self._next_row or SignalRow(self.step), None
        self._begin_row()
        self._ends.begin_row()
        return row

    def skip_row(self) -> None:
        """End a row that is not read, and begin the next one."""
        self.step += 1
        self._row.step = self.step
        if self._attached or self.step + 1 >= self.next_read:
            self._begin_row()
        if self._is_single:
            self._ends.has_pass = False
        else:
            self._ends.begin_row()

    def _end_row(self, is_over: bool) -> None:
        """Report the end of the row if it is over."""
        if is_over and self._on_end is not None:
            self._on_end()

    @property
    def _forward_step(self) -> int:
        """Number of the row to which values of a forward pass belong.

        While optimizers make their steps, it is the next row.
        """
        return self.step + (self._on_end is not None and self._ends.is_over)

    # -- series ------------------------------------------------------------------------------------------------

    def watch(self, view: Tensor, name: str) -> None:
        """Read the gradient of this tensor as the value ``name:gradient``."""
        if is_transformed() or self.is_off:
            return
        with self.timed("values"):
            key = (VALUE, f"{name}:gradient")
            if key not in self._slots:
                self._values.add(key)
                self._add_tensor(*key, view)
            if self._is_due(*key):
                view.register_hook(functools.partial(self._gradient_arrived, key))

    def _add_series(self, series: Series) -> int:
        self.series.append(series)
        return len(self.series) - 1

    def _add_tensor(self, feature: str, name: str, tensor: Tensor | None = None) -> int:
        """Add the two series of a tensor, and return the number of the first."""
        elements, dimensions = (1, 0) if tensor is None else (tensor.numel(), tensor.ndim)
        slot = self._add_series(Series(feature, name, L2, elements, dimensions))
        self._add_series(Series(feature, name, LARGEST, elements, dimensions))
        self._slots[feature, name] = slot
        return slot

    def _add_new_parameters(self) -> None:
        for number, name, parameter in self._trained.find_new():
            tensor = local_tensor(parameter)
            slots = [self._add_tensor(feature, name, tensor) for feature in (GRADIENT, UPDATE)]
            trained = TrainedParameter(parameter, *slots)
            group = self._groups[id(self._optimizers[number])]
            self._places[name] = group, group.add(trained, len(self._parameters))
            self._parameters.append(trained)

    def _is_due(self, feature: str, name: str) -> bool:
        """Whether a tensor is to be read in the current step."""
        if (self.step if feature == GRADIENT else self._forward_step) < self.next_read:
            return False
        if feature == GRADIENT:
            group, place = self._places[name]
            return group.is_due(place, self.intervals.gradients)
        return self._values.is_due((feature, name), self._forward_step, self.intervals.values)

    def _read_gradients(self, parameters: Sequence[TrainedParameter]) -> None:
        """Read the gradients of those parameters that have one."""
        gradients = [(trained.gradient, trained.parameter.grad) for trained in parameters]
        read = [(slots, gradient) for slots, gradient in gradients if gradient is not None]
        if read:
            values = norms_and_largest([local_tensor(gradient) for _, gradient in read])
            self._put(_pairs([slot for slot, _ in read]), values)

    def _first_written(self) -> Tensor | None:
        """The first parameter whose gradient the backward pass has changed, or None."""
        for trained, version in zip(self._parameters, self._gradients_before, strict=False):
            if _version(trained.parameter.grad) != version:
                return trained.parameter
        return None

    def _has_written_another(self) -> bool:
        """Whether a backward pass changed some gradient although it did not change the watched one.

        Only one parameter is checked as long as each pass reaches it. The first pass that does not reach it belongs to another
        model or reaches other parameters. It counts as a pass of another model, and from then on all parameters are checked.
        """
        if self._written is not None:
            self._written, self._is_one_enough = None, False
            return False
        written = self._first_written()
        if self._is_one_enough:
            self._written = written
        return written is not None

    # -- hooks of optimizers -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the state before an optimizer step; called by a hook of the optimizer."""
        if is_dynamo_compiling() or self.is_off:
            return
        if not (self._is_single and self.step < self.next_read):
            self._end_row(self._ends.has_made_step(id(optimizer)))
        self._has_stepped = True
        if (thread := threading.get_ident()) != self._thread:
            self._thread = thread
            bind_to_this_thread(self)
        if self.step >= self.next_read:
            self._read_before_step(optimizer)
        else:
            self._has_gradient = True  # during a backward pass: the pass is one of this model
        if self._then_before_step is not None:
            self._then_before_step(optimizer)

    def _read_before_step(self, optimizer: Optimizer) -> None:
        """Compare the bits of the state with those after the last step, and copy parameters to measure updates."""
        with self.timed("state"):
            group = self._groups[id(optimizer)]
            if self._ends.is_in_pass:  # a step for each gradient that arrives
                self._has_gradient = self._has_gradient or any(
                    trained.parameter.grad is not None for trained in group.parameters
                )
                if not self._arrive_one_by_one:
                    self._read_gradients(group.due(self.intervals.gradients))
            self._state.compare(self._row, optimizer)
            self._add_new_parameters()
            due = group.due_part(self.intervals.state)
            self._updates.remember([(trained.update, trained.parameter) for trained in due])

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the state after an optimizer step; called by a hook of the optimizer.

        Ends a step that is not read.
        """
        if is_dynamo_compiling():
            return
        if self.step >= self.next_read:
            if not self.is_off:
                self._read_after_step(optimizer)
            if self._then_after_step is not None:
                self._then_after_step(optimizer)
        elif not self.is_off:
            if self.step + 1 >= self.next_read:
                self._take_state(optimizer)
            self._groups[id(optimizer)].steps += 1
            if not self._is_single:
                self._ends.end_step(id(optimizer))
            if self._on_end is not None and (self._is_single or self._ends.is_complete):
                self._on_end()

    def _read_after_step(self, optimizer: Optimizer) -> None:
        """Read the updates, and take fingerprints if the next step is read as well."""
        with self.timed("state"):
            slots, sizes = self._updates.take()
            if slots:
                self._row.add(_pairs(slots), sizes)
            group = self._groups[id(optimizer)]
            if self.reads_all:
                self._take_state(optimizer)
            group.steps += 1
            self._ends.end_step(id(optimizer))

    def _take_state(self, optimizer: Optimizer) -> None:
        """Take fingerprints of the state, which are compared in the next row."""
        with self.timed("state"):
            self._state.take(self._row, optimizer, self._groups[id(optimizer)].steps, self.intervals.state)

    # -- hooks of modules and gradients --------------------------------------------------------------------------

    def _hook(self, make: Callable[..., Any], *where: Any, key: tuple[str, str]) -> None:
        self._values.add(key)
        self._add_tensor(*key)
        reader = layers.Reader(
            is_wanted=lambda: self._is_due(*key),
            report=functools.partial(self._value_arrived, key),
            report_gradient=functools.partial(self._gradient_arrived, key),
            protect=functools.partial(ForwardHook, self, is_expected=lambda: key in self._expected),
        )
        self._value_hooks.append(functools.partial(make, *where, reader))

    def _hook_gradients(self) -> None:
        """Attach hooks that read each gradient when it arrives.

        Parameters of sharded modules get theirs as soon as they exist as a whole.
        """
        hooked: set[int] = set()

        def hook(name: str, parameter: Tensor) -> None:
            if parameter.requires_grad and id(parameter) not in hooked:
                hooked.add(id(parameter))
                key = (GRADIENT, name)
                self._hooks.append(parameter.register_hook(functools.partial(self._parameter_gradient_arrived, key)))

        named = [pair for parameters in self._trained.of_optimizer for pair in parameters]
        names = {id(parameter): name for name, parameter in named}
        for name, parameter in named:
            hook(name, parameter)
        for module in self.model.modules():
            sharded = {k: names[id(p)] for k, p in module._parameters.items() if id(p) in names and is_sharded(p)}
            if sharded:
                pre_hook = ForwardHook(self, _whole_parameters_hook(sharded, hook))
                self._hooks.append(module.register_forward_pre_hook(pre_hook))

    def _parameter_gradient_arrived(self, key: tuple[str, str], gradient: Tensor) -> None:
        self._has_gradient = True
        if self._is_due(*key):
            self._gradient_arrived(key, gradient)

    def _value_arrived(self, key: tuple[str, str], value: Tensor) -> None:
        """Read one value of a forward pass."""
        slot, step = self._slots[key], self._forward_step
        self._values.note(key, step)
        is_next = step > self.step >= self.next_read  # nothing else is kept if the row is not read
        if is_next and self._next_row is None:
            self._next_row = SignalRow(step)
        row = self._next_row if is_next and self._next_row is not None else self._row
        row.add((slot, slot + 1), norms_and_largest([local_tensor(value)]))

    def _gradient_arrived(self, key: tuple[str, str], *parts: Tensor) -> None:
        """Read one gradient, the sum of its parts.

        Called by a hook, so it raises no errors. Gradients of torch.autograd.grad are left out.
        """
        if is_transformed() or self.is_off or not self._ends.is_in_pass:
            return
        with self.timed("gradients" if key[0] == GRADIENT else "values"):
            slot = self._slots[key]
            if key[0] != GRADIENT:
                self._values.note(key, self.step)
            self._put((slot, slot + 1), norms_and_largest([local_tensor(self._sums.take(parts))]))

    def _put_loss(self, loss: Tensor) -> None:
        """Add a loss to the row.

        A loss that may be infinite only because a loss scaler has multiplied it is left out.
        """
        value = loss.to(torch.float64)
        if self._scale is not None:
            scale = self._scale.to(value.device)
            largest = torch.finfo(loss.dtype).max / scale
            # A Python number would be sent to the device, which waits for it.
            infinity = value.new_full((), torch.inf)
            infinite = torch.where(largest < LARGEST_LOSS, -infinity, infinity)
            value = torch.where(value.isinf(), infinite, value / scale)
            self._row.leave_out_minus_infinity(self._loss)
        self._arrived.append(((self._loss,), value))

    def _put(self, slots: Sequence[int], values: Tensor) -> None:
        """Add values of a backward pass, divided by the factor of the loss scaler.

        They count only if the pass turns out to be one of this model.
        """
        self._arrived.append((slots, values if self._scale is None else values / self._scale.to(values.device)))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Context that measures the time of a block, unless it is inside another one, and handles its errors."""
        begun, is_inner, self._is_timed = time.perf_counter(), self._is_timed, True
        try:
            yield
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
        finally:
            self._is_timed = is_inner
            if not is_inner:
                self.seconds[part] += time.perf_counter() - begun


def watch_gradient(tensor: Tensor, name: str) -> Tensor:
    """A view of a tensor whose gradient the monitor of this process reads.

    To be used inside ``forward``.

    Only the gradient through the view is read, not the gradient that reaches the tensor in other ways. The view is made without a
    monitor as well, so that a training has the same bits with and without one.

    >>> import torch
    >>> float(watch_gradient(torch.ones(2), "attention").sum())
    2.0
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)
    for collector in list(_collectors):
        collector.watch(view, name)
    return view


def _version(gradient: Tensor | None) -> tuple[int, int] | None:
    """A key that changes when a gradient is written to or replaced, or None without a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


def _pairs(slots: Sequence[int]) -> list[int]:
    """Numbers of the series of L2 norms, followed by those of largest magnitudes."""
    return [*slots, *(slot + 1 for slot in slots)]


def _whole_parameters_hook(sharded: dict[str, str], hook: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def before(module: nn.Module, *_: Any) -> None:
        for key, name in sharded.items():
            parameter = module._parameters.get(key)
            if parameter is not None and not is_sharded(parameter):
                hook(name, parameter)

    return before

"""Collects the signals of one rank of a training while it runs, a part of the tensors in each step.

    with SignalCollector(model, [optimizer]) as collector:
        ...                                   # forward, backward, optimizer.step()
        signals = collector.take_row().read(len(collector.series))

Everything is computed on the device of the tensors and copied to the host in one piece. Gradients are read where they are local
to the rank: at the end of a backward pass, or as each one arrives where ranks reduce them.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NORM_INPUT_GRADIENT, NUMBER, UPDATE, VALUE, Series
from unsilent.monitor.backward_hooks import add_listener, remove_listener
from unsilent.monitor.signals import layers
from unsilent.monitor.signals.magnitudes import local_tensor, norms_and_largest
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.signals.state_watch import StateWatch
from unsilent.sites.modules import named_parameters

_collectors: weakref.WeakSet[SignalCollector] = weakref.WeakSet()
"""Those that are open, for `watch_gradient`."""


class Intervals:
    """How many steps it takes until every tensor was read.

    Attributes:
        gradients: Of gradients and values inside the model.
        state: Of updates and fingerprints.
    """

    def __init__(self, gradients: int = 1, state: int = 1) -> None:
        self.gradients, self.state = gradients, state


class SignalCollector:
    """Reads signals; a context manager that removes its hooks.

    Args:
        model: What is trained; wrappers (DDP, a compiled module) are looked through.
        optimizers: What trains it.
        values: Tensors that are named, ``MODULE:input``, ``MODULE:output`` or ``MODULE:gradient``.
        fingerprint: Whether bits of the state are compared between steps.
        full_fingerprint: All of them in each step.
        on_error: What an error in a hook is passed to; None: errors are raised.

    Attributes:
        series: What is read; grows by names of `watch_gradient` that are new.
        intervals: Which part of it in each step.
        step: Number of the present row.
        backwards: Backward passes so far.
        seconds: That were spent on ``gradients`` and on ``state``.
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
    ) -> None:
        self.model = unwrapped(model)
        self.series: list[Series] = []
        self.intervals, self.step = Intervals(), 0
        self.seconds = {"gradients": 0.0, "state": 0.0}
        self._on_error = on_error
        self._hooks: list[Any] = []
        self._slots: dict[tuple[str, str], tuple[int, ...]] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self._scale: Tensor | None = None
        self._parameters = _trained_parameters(self.model, optimizers)
        self._row = SignalRow(0)
        self._has_stepped, self.backwards = False, 0
        self._arrive_one_by_one = _are_reduced(self._parameters)
        for name, parameter in self._parameters:
            self._add_tensor(GRADIENT, name, local_tensor(parameter))
        self._loss = self._add_series(Series(LOSS, "", NUMBER))
        for name, layer in layers.norm_layers(self.model):
            self._hook(layers.hook_input_gradient, layer, key=(NORM_INPUT_GRADIENT, name))
        for name, module, part in layers.named_values(self.model, values):
            self._hook(layers.hook_value, module, part, key=(VALUE, name))
        for name, parameter in self._parameters:
            self._add_tensor(UPDATE, name, local_tensor(parameter))
        sharded = any(_is_sharded(parameter) for _, parameter in self._parameters)
        replicas = self._arrive_one_by_one and not sharded
        self._state = StateWatch(self._parameters, optimizers, fingerprint, full_fingerprint, replicas)
        if self._arrive_one_by_one:
            self._hook_gradients()
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        add_listener(self)
        _collectors.add(self)

    def close(self) -> None:
        """Remove all hooks."""
        remove_listener(self)
        _collectors.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what is called on the way through a step ---------------------------------------------------------------

    def before_backward(self, tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        """A backward pass begins; reads its loss."""
        with self._timed("gradients"):
            self._has_stepped = False
            self.backwards += 1
            self._scale = None if scale is None else scale.detach().to(torch.float64, copy=True)
            if len(tensors) == 1 and tensors[0].numel() == 1 and tensors[0].is_floating_point():
                self._put((self._loss,), tensors[0].detach().reshape(1).to(torch.float64))

    def after_backward(self) -> None:
        """It has ended; reads gradients unless they arrive one by one."""
        if self._arrive_one_by_one:
            return
        with self._timed("gradients"):
            due = [(n, p.grad) for n, p in self._parameters if p.grad is not None and self._is_due(GRADIENT, n)]
            if due:
                slots = [self._slots[GRADIENT, name] for name, _ in due]
                values = norms_and_largest([local_tensor(gradient) for _, gradient in due])
                self._put([s for s, _ in slots] + [s for _, s in slots], values)

    def start_at(self, step: int) -> None:
        """The training went back: the next row has this number, and bits are not compared with those before."""
        self.step = step
        self._row = SignalRow(step)
        self._state.forget()

    def forget_update(self) -> None:
        """The optimizer step that is about to be made is left out."""
        self._state.forget_parameters()

    @property
    def state_names(self) -> list[str]:
        """Names of parameters and of the tensors of optimizers, whose bits are compared."""
        return self._state.names

    def after_scaler_update(self) -> None:
        """If the loss scaler has left the update out, what was read means nothing."""
        if not self._has_stepped:
            self._row.discard_values()

    def take_row(self) -> SignalRow:
        """The signals since the last row, on their way to the host; a new row begins."""
        row = self._row
        row.begin_copy()
        self.step += 1
        self._row = SignalRow(self.step)
        return row

    # -- series ------------------------------------------------------------------------------------------------

    def watch(self, tensor: Tensor, name: str) -> Tensor:
        """A view of a tensor whose gradient is read as the value ``name``."""
        key = (VALUE, f"{name}:gradient")
        if key not in self._slots:
            self._add_tensor(*key, tensor)
        if not tensor.requires_grad or not self._is_due(*key):
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(functools.partial(self._arrived, key))
        return view

    def _add_series(self, series: Series) -> int:
        self.series.append(series)
        return len(self.series) - 1

    def _add_tensor(self, feature: str, name: str, tensor: Tensor | None = None) -> None:
        elements, dimensions = (1, 0) if tensor is None else (tensor.numel(), tensor.ndim)
        self._turns[feature, name] = sum(key[0] == feature for key in self._turns)
        self._slots[feature, name] = tuple(
            self._add_series(Series(feature, name, statistic, elements, dimensions)) for statistic in (L2, LARGEST)
        )

    def _is_due(self, feature: str, name: str) -> bool:
        interval = self.intervals.state if feature == UPDATE else self.intervals.gradients
        return interval == 1 or (self._turns[feature, name] + self.step) % interval == 0

    # -- hooks of optimizers -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to make its step: bits of the state should be those after the step before."""
        with self._timed("state"):
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._state.compare(self._row)
            self._state.remember_parameters(
                [(n, p) for n, p in self._parameters if id(p) in own and self._is_due(UPDATE, n)]
            )
        self._has_stepped = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """It has made its step; reads updates and fingerprints."""
        with self._timed("state"):
            names, sizes = self._state.updates()
            if names:
                slots = [self._slots[UPDATE, name] for name in names]
                self._row.add([s for s, _ in slots] + [s for _, s in slots], sizes)
            self._state.take(self._row, self.step, self.intervals.state)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Adds up the time of a block, and passes on its errors."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
        finally:
            self.seconds[part] += time.perf_counter() - begun

    # -- hooks -------------------------------------------------------------------------------------------------

    def _hook(self, make: Callable[..., Any], *where: Any, key: tuple[str, str]) -> None:
        self._add_tensor(*key)
        self._hooks.append(make(*where, lambda: self._is_due(*key), functools.partial(self._arrived, key)))

    def _hook_gradients(self) -> None:
        """Have each gradient reported as it arrives; of sharded modules as soon as their whole parameters exist."""
        hooked: set[int] = set()

        def hook(name: str, parameter: Tensor) -> None:
            if parameter.requires_grad and id(parameter) not in hooked:
                hooked.add(id(parameter))
                self._hooks.append(parameter.register_hook(functools.partial(self._gradient_arrived, (GRADIENT, name))))

        names = {id(parameter): name for name, parameter in self._parameters}
        for name, parameter in self._parameters:
            hook(name, parameter)
        for module in self.model.modules():
            sharded = {k: names[id(p)] for k, p in module._parameters.items() if id(p) in names and _is_sharded(p)}
            if sharded:
                self._hooks.append(module.register_forward_pre_hook(_whole_parameters_hook(sharded, hook)))

    def _gradient_arrived(self, key: tuple[str, str], gradient: Tensor) -> None:
        if self._is_due(*key):
            self._arrived(key, gradient)

    def _arrived(self, key: tuple[str, str], tensor: Tensor) -> None:
        """Read one tensor now; what is called from a hook raises nothing."""
        if torch.compiler.is_compiling():
            return
        is_scaled = key[0] != VALUE or key[1].endswith(":gradient")
        with self._timed("gradients"):
            values = norms_and_largest([local_tensor(tensor)])
            if is_scaled:
                self._put(self._slots[key], values)
            else:
                self._row.add(self._slots[key], values)

    def _put(self, slots: Sequence[int], values: Tensor) -> None:
        """Values that a loss scaler has multiplied."""
        self._row.add(slots, values if self._scale is None else values / self._scale.to(values.device))


def watch_gradient(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, whose gradient the monitor of this process reads under a name; to be used inside ``forward``.

    >>> import torch
    >>> float(watch_gradient(torch.ones(2), "attention").sum())
    2.0
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for collector in list(_collectors):
            tensor = collector.watch(tensor, name)
    return tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and of a compiled module."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    result: dict[int, tuple[str, Tensor]] = {}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if parameter.is_floating_point():
                name = names.get(id(parameter), f"optimizer {number}, parameter {place}")
                result.setdefault(id(parameter), (name, parameter))
    return list(result.values())


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "_local_tensor")


def _are_reduced(parameters: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether gradients may be those of all ranks at the end of a backward pass."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several or any(_is_sharded(parameter) for _, parameter in parameters)


def _whole_parameters_hook(sharded: dict[str, str], hook: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def before(module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            for key, name in sharded.items():
                parameter = module._parameters.get(key)
                if parameter is not None and not _is_sharded(parameter):
                    hook(name, parameter)

    return before

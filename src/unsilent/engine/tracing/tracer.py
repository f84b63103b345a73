"""A dispatch mode that sees the outputs of every operation in a run, under the names that faults use.

Modes are stacked, and the mode that was entered last is called first. The tracer is entered innermost, so it gets every
result after the modes around it have injected their faults. It only reads results, below all modes, so that no mode
counts its work and autograd does not see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsilent.basics.nested import tensors_in
from unsilent.sites.calls import OUTSIDE, OperationNamer
from unsilent.sites.corrupting import has_plain_memory
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.modules import named_parameters
from unsilent.sites.operands import first_tensor_list, gives_uninitialised, is_view, operation_name, written_by
from unsilent.sites.training.step_operation_names import (
    OperationOccurrence,
    StepOperationNamer,
    current_node,
    model_inside_wrapper,
    next_number,
)
from unsilent.sites.training.updates import UpdateTracker, local

UNOWNED, UPDATE = "(backward)", "(update)"
"""Names of backward kernels of nodes without an operation of the run, and of update operations without a parameter."""
ACCUMULATED = "accumulated"
_WORKSPACE = {
    "mkldnn_rnn_layer": 3,
    "_cudnn_rnn": 3,
    "miopen_rnn": 3,
    "cudnn_batch_norm": 3,
    "batch_norm_with_update": 3,
}
"""Number of the output that a kernel keeps for its own backward and does not write completely."""


class OutputKey(NamedTuple):
    """The name of one output of an operation; see `unsilent.basics.fault_trace.TraceRow`."""

    name: str
    kernel: str
    phase: str
    micro_step: int
    output: int


See = Callable[[OutputKey, Tensor], None]
"""Function that is called with every output at once, before it can be overwritten; it must not keep the tensor."""


class Tracer(DispatchMode):
    """Calls a function with every output of a run.

    Must be entered inside all other modes.

    Args:
        model: Model with the modules and parameters that give the names.
        see: Function that is called with every output.
        training: Whether the run is a training step, with the names of `Step`; if not, it is an evaluation with the
            names of `OperationInjector`.

    Attributes:
        entered: Whether the tracer was ever entered.
    """

    def __init__(self, model: nn.Module, see: See, training: bool) -> None:
        self._calls: OperationNamer = StepOperationNamer(model) if training else OperationNamer(model)
        super().__init__(self._calls)
        self._updates = UpdateTracker(model_inside_wrapper(model))
        self._parameters = {
            name: p for name, p in named_parameters(model_inside_wrapper(model)) if p.requires_grad and p.is_leaf
        }
        self._see, self._training = see, training
        self.entered = False

    def _around(self, stack: ExitStack) -> None:
        self.entered = True
        self._nodes: dict[int, OperationOccurrence] = {}
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._first, self._behind = next_number(), False
        super()._around(stack)
        if self._training:
            stack.enter_context(self._updates)
            for name, parameter in self._parameters.items():
                self._watch(stack, name, parameter)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._nodes = {}

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._training and self._updates.active and current_node() is None and not torch.is_grad_enabled():
            return self._update(func, args, kwargs)
        key = self._key(func)  # before the call: the number of the next node changes
        result = func(*args, **kwargs)
        for number, tensor in computed_outputs(func, args, kwargs, result):
            self._tell(key._replace(output=number), tensor)
        return result

    def _key(self, func: Any) -> OutputKey:
        """The name of the next operation, which is not part of an optimizer's update."""
        if not isinstance(self._calls, StepOperationNamer):
            return OutputKey(self._calls.next_name(func), "", "fwd", 0, 0)
        node = current_node()
        if node is None or torch.is_grad_enabled():
            met = self._calls.next_occurrence(func, again=node is not None)
            if (number := next_number() - 1) >= self._first:
                self._nodes.setdefault(number, met)  # unless an earlier operation has that number
            self._behind = self._behind and met.name.startswith(f"{OUTSIDE}#")
            phase = "recomputed" if met.occurrence else "outside" if self._behind and node is None else "fwd"
            return OutputKey(met.name, "", phase, met.micro_step, 0)
        self._calls.mark_backward()
        self._behind = True
        met = self._nodes.get(node._sequence_nr(), OperationOccurrence(UNOWNED, self._calls.current_micro_step, 0))
        if met.name == UNOWNED and (parameter := getattr(node, "variable", None)) is not None:
            met = met._replace(name=next((n for n, p in self._parameters.items() if p is parameter), UNOWNED))
        return OutputKey(
            met.name, self._count(met.name, operation_name(func), met.micro_step), "bwd", met.micro_step, 0
        )

    def _update(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of an optimizer's update.

        An operation on lists gives one output for each entry, named by its parameter.
        """
        work = self._updates.name_operations(func, args, kwargs)
        result = func(*args, **kwargs)
        self._updates.assign_results(work, result)
        if gives_uninitialised(func) or is_view(func, args, kwargs, result):
            return result
        step = self._calls.current_micro_step if isinstance(self._calls, StepOperationNamer) else 0
        names = {work_item.entry: work_item.name for work_item in work}
        unowned = "" if names else f"{UPDATE}#{self._count(UPDATE, operation_name(func), 0)}"
        outputs = list(_returned_tensors(func, args, kwargs, result))
        entries = first_tensor_list(args)
        for i, tensor in enumerate(outputs):
            number, entry = (i, None) if entries is None else divmod(i, len(entries))
            name = names.get(entry) or unowned or f"{UPDATE}#{operation_name(func)}[{entry}]"
            self._tell(OutputKey(name, "", "update", step, number), tensor)
        return result

    def _watch(self, stack: ExitStack, name: str, parameter: nn.Parameter) -> None:
        """Report the gradient of a parameter each time a backward pass has added to it.

        This may happen without an operation.
        """

        def added(p: Tensor) -> None:
            assert isinstance(self._calls, StepOperationNamer)
            if p.grad is not None:
                k = self._count(name, ACCUMULATED, step := self._calls.current_micro_step)
                self._tell(OutputKey(name, k.removesuffix(".0"), "bwd", step, 0), p.grad)

        had = parameter._post_accumulate_grad_hooks
        handle = parameter.register_post_accumulate_grad_hook(added)

        def forget() -> None:
            handle.remove()
            if had is None and not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # torch leaves an empty dictionary

        stack.callback(forget)

    def _count(self, name: str, kernel: str, step: int) -> str:
        k = self._counts[name, kernel, step]
        self._counts[name, kernel, step] = k + 1
        return f"{kernel}.{k}"

    def _tell(self, key: OutputKey, tensor: Tensor) -> None:
        tensor = local(tensor)
        if is_traceable_wrapper_subclass(tensor) or tensor.is_meta or tensor.is_quantized:
            return
        if not has_plain_memory(tensor) or not tensor.numel():
            return
        with no_dispatch():
            self._see(key, tensor.detach())


def computed_outputs(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[int, Tensor]]:
    """The tensors that an operation computes, by output number.

    Views, uninitialised memory and scratch memory are left out.
    """
    if gives_uninitialised(func) or is_view(func, args, kwargs, result):
        return
    workspace = _WORKSPACE.get(operation_name(func))
    for number, tensor in enumerate(_returned_tensors(func, args, kwargs, result)):
        if number != workspace:
            yield number, tensor


def _returned_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Iterator[Tensor]:
    """The tensors that an operation returns, or those that it writes if it returns nothing."""
    output = list(tensors_in(result))
    yield from output or written_by(func, args, kwargs)

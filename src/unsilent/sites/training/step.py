"""A training step with faults in operations (forward, backward, update), collectives and memory.

One dispatch mode, active only in this step, sees operations with their real operands: those of the modules that faults name, of
the update or of the corrupted backward node, or all operations of the step if their names require this. It changes only values
with a fault: without faults the step gives the same bits. Each fault must be applied exactly once; otherwise an error lists the
available sites. Results of a faulty step are not undone; use a snapshot of the training's state for this.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import set_checkpoint_early_stop

from unsilent.basics.errors import InjectionError, UsageError, unknown_name_error
from unsilent.faults import Fault
from unsilent.faults.receipts import AppliedFault, Receipt
from unsilent.faults.unresolved_fault import UnresolvedFault, faults_in_step
from unsilent.sites.calling import AimedFault, OperationCall, corrupted_call
from unsilent.sites.calls import OUTSIDE
from unsilent.sites.corrupting import corruptible
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.landing import FaultOrDraw, Landings
from unsilent.sites.modules import named_tensors
from unsilent.sites.operands import exchanged, listed_operand_number, operands_of, output_of
from unsilent.sites.threads import SharedContext
from unsilent.sites.training.collectives import CollectiveNamer, payload_argument, received
from unsilent.sites.training.gradients import BackwardOperation, GradientInjector
from unsilent.sites.training.step_faults import PlannedFault, StepFaults, as_list, watched_modules
from unsilent.sites.training.step_operation_names import (
    OperationOccurrence,
    StepOperationNamer,
    before_backward,
    current_node,
    model_inside_wrapper,
    next_number,
)
from unsilent.sites.training.updates import (
    UpdateOperation,
    UpdateTracker,
    current_gradients,
    local,
    optimizer_state_names,
    state_of,
)

# Only a weak reference is held, so that a fault does not keep memory alive that the step would free. The memory itself
# is corrupted: every node that saved it sees the corruption, as with a real bit flip.


class SavedActivation(NamedTuple):
    """A weak reference to a saved tensor: its memory, dtype, shape and strides."""

    memory: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> SavedActivation:
        """Make a weak reference to a tensor."""
        memory = StorageWeakRef(tensor.untyped_storage())
        offset = int(tensor.storage_offset())
        return cls(memory, tensor.dtype, tensor.device, offset, tuple(tensor.shape), tuple(tensor.stride()))

    def tensor(self) -> Tensor | None:
        """The tensor, or None if its memory has been freed."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        again = torch.empty(0, dtype=self.dtype, device=self.device)
        return again.set_(storage, self.offset, self.shape, self.stride)


Moment = Literal["start", "update", "end"]
NOUNS = {"param": "parameter", "optim": "state of an optimizer", "gradient": "parameter with a gradient"}


class StepInjection(DispatchMode):
    """Injects faults into one training step: forward passes, backward passes and the update.

    Args:
        model: Model whose modules and parameters give the names.
        faults: Faults of this step, resolved or to be drawn; faults of other ranks are ignored.
        optimizers: Optimizers whose state ``optim:`` faults corrupt.
        number: Number of this step; faults that do not act in it are ignored (None: all act).
        moment: Moment of faults in memory (``param:``, ``optim:``): at the ``start`` of the step, at the ``update`` (after the
            backward pass, before the first update of an optimizer), or at the ``end``. Faults in a ``gradient:`` always act
            before the update.
        whole_step: Whether all operations are observed from the beginning. Needed for other dispatch modes that are entered in
            the step and must see the corrupted operations.

    Attributes:
        applied_faults: Faults that were applied so far.
        names: Operations that ran, by kind of site; with faults, only until all faults were applied.

    Raises:
        UsageError: on entry if the memory of a fault does not exist, on exit if an operation did not run.
        InjectionError: on exit if a fault was not applied exactly once, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: FaultOrDraw | Sequence[FaultOrDraw] = (),
        optimizers: Optimizer | Sequence[Optimizer] = (),
        number: int | None = None,
        moment: Moment = "start",
        whole_step: bool = False,
    ) -> None:
        super().__init__()
        self._moment: Moment = moment
        self._whole_step = whole_step
        wanted: list[FaultOrDraw] = as_list(faults, (Fault, UnresolvedFault))
        rank, ranks = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _is_distributed() else (0, 1)
        )
        self._model, self._optimizers = model_inside_wrapper(model), tuple(as_list(optimizers, (Optimizer,)))
        self._wanted = (wanted if number is None else faults_in_step(wanted, number)), rank, ranks
        self._clear()

    def _clear(self) -> None:
        self._landings, self._plans = Landings(), StepFaults(*self._wanted)
        self.names: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def _start(self) -> None:
        self._clear()
        self._calls = StepOperationNamer(self._model, self._moved)
        self._updates = UpdateTracker(self._model, self._before_update, self._moved)
        self._collectives = CollectiveNamer()
        self._calls.mode = self
        self._watched = None if self._whole_step else watched_modules(self._plans.all, self._calls.module_names)
        self._calls.follow_backward(None if self._starts_active else self._backward_begins)
        self._updates.names_are_wanted = self._starts_active or bool(self._plans.faults_in_stage("optim"))
        self._updated = self._corrupting = self._sees_node = False
        self._gradients: dict[int, GradientInjector] = {}
        self._named: dict[str, GradientInjector] = {}
        self._pending: tuple[GradientInjector, Any] | None = None
        self._saved: list[tuple[PlannedFault, SavedActivation]] = []
        self._sent: list[Any] = []
        self._worked: list[UpdateOperation] = []
        self._entered_here: list[bool] = []
        self._depth = int(torch._C._len_torch_dispatch_stack())

    @property
    def applied_faults(self) -> list[AppliedFault]:
        """The faults that were applied so far."""
        return self._landings.applied_faults

    @property
    def receipt(self) -> Receipt:
        """The record of all applied faults."""
        return Receipt(tuple(self.applied_faults))

    def _around(self, stack: ExitStack) -> None:
        self._start()
        stack.enter_context(self._updates)
        if self._starts_active or self._watched:  # not needed for faults in memory or in an update
            stack.enter_context(self._calls)
            stack.enter_context(before_backward(self._before_backward))
        stack.enter_context(_RECOMPUTATION_TO_ITS_END)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_NOTHING_COMPILED)
        if self._moment == "start":
            self._corrupt_memory()

    def __exit__(self, *raised: Any) -> None:
        self._calls.follow_backward(None)
        if not self._starts_active:
            self._leave()  # if an optimizer raised an error
        super().__exit__(*raised)
        error = raised[1]
        if self._moment == "end" and error is None:
            self._corrupt_memory()
        for gradients in self._gradients.values():
            gradients.detach()
        self._gradients, self._named, self._pending = {}, {}, None
        self._saved, self._sent = [], []
        for plan in self._plans.all if error is None else ():
            if not self._landings.has_landed(plan.wanted):
                raise self._missed(plan)
            if ambiguous := self._plans.ambiguity_error(plan):
                raise ambiguous
            if plan.site.layer in self._calls.ambiguous_modules and (
                plan.wanted.occurrence or plan.site.phase.startswith("grad")
            ):
                raise InjectionError(
                    f"{plan.wanted.site}: repeated calls of {plan.site.layer!r} cannot be distinguished here (nested "
                    "checkpointing?), so the fault may have hit another of these calls"
                )

    # -- choice of the observed operations -------------------------------------------------------------------------

    @property
    def _starts_active(self) -> bool:
        return self._watched is None

    def _moved(self, begins: bool) -> None:
        """Start or stop observing operations when a module call or an update begins or ends.

        A mode that is entered at the beginning of a call or an update is left at its end. So modes that other code enters and
        leaves in between, and states that compiled code restores, are not changed, and a backward pass may call modules in its
        own threads.
        """
        if self._starts_active:
            return
        self._settle()
        if begins:
            inside = self._calls.module in (self._watched or ())
            enters = (inside or self._has_update_faults()) and not self._is_done and not self._is_there
            self._entered_here.append(enters)
            if enters:
                self._enter_below()
        elif self._entered_here.pop():
            self._leave()

    @property
    def _is_there(self) -> bool:
        """Whether this mode sees the operations of the current thread."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def _enter_below(self) -> None:
        """Enter the stack of dispatch modes below the modes that were entered during this step."""
        above = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack() - self._depth)]
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def _leave(self) -> None:
        """Remove this mode, and no other, from the stack of dispatch modes."""
        above = []
        while self._is_there and (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the current operation belongs to a module that no fault names."""
        if self._starts_active or self._updates.active or self._sees_node:
            return False
        return self._calls.module not in (self._watched or ())

    def _has_update_faults(self) -> bool:
        return self._updates.active and bool(self._plans.faults_in_stage("optim"))

    @property
    def _is_done(self) -> bool:
        """Whether all faults have been applied."""
        plans = self._plans
        return bool(plans.all) and self._landings.count == len(plans.all) and not plans.module_only_names

    def _before_backward(self, builds_graph: bool) -> None:
        self._settle()
        if not self._starts_active and not builds_graph:  # with a graph, its operations are forward operations as well
            self._backward_begins()

    def _backward_begins(self) -> None:
        self._calls.mark_backward()
        self._corrupt_saved()

    def _see_node(self, operations: bool) -> None:
        """Start or stop observing the operations of one backward node, in any thread."""
        if operations and not self._is_there:
            self._enter_below()
            self._sees_node = True
        elif self._sees_node and not operations:
            self._leave()
            self._sees_node = False

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plans = self._plans
        if self._corrupting or self._is_done or self._is_elsewhere:
            return func(*args, **kwargs)
        call = func, args, kwargs
        self._settle()
        if (collective := self._collectives.next_name(func)) is not None:
            return self._collective(collective, call)
        node = current_node()
        if self._updates.active and node is None and not torch.is_grad_enabled():  # not in a closure of the optimizer
            return func(*args, **call[2]) if plans.all and not plans.faults_in_stage("optim") else self._update(call)
        if node is not None and not torch.is_grad_enabled():
            return self._backward(node, call)
        return self._forward(self._calls.next_occurrence(func, again=node is not None), call)

    # -- operations ------------------------------------------------------------------------------------------------

    def _forward(self, met: OperationOccurrence, call: OperationCall) -> Any:
        self.names["fwd"][met.name] = None
        self._plans.bind_operation(met, call)
        self._expect(met, call)
        aims = [AimedFault(p.site, p.wanted) for p in self._plans.faults_at_operation("fwd", met.name) if p.acts(met)]
        result = corrupted_call(call, aims, self._landings) if aims else call[0](*call[1], **call[2])
        if self._pending:
            self._pending = (self._pending[0], result)
        for plan in self._plans.faults_at_operation("saved", met.name):
            if plan.acts(met):
                self._keep(plan, call, result)
        return result

    def _backward(self, node: Any, call: OperationCall) -> Any:
        self._calls.mark_backward()
        self._corrupt_saved()
        result = call[0](*call[1], **call[2])
        if (injector := self._gradients.get(node._sequence_nr())) and injector.has_operand_faults:
            injector.add_operation(BackwardOperation(*call, result))
        return result

    def _update(self, call: OperationCall) -> Any:
        self._worked = work = self._updates.name_operations(*call)
        self.names["optim"].update(dict.fromkeys(operation.name for operation in work))
        aims = [
            AimedFault(*p, operation.entry)
            for operation in work
            for p in self._plans.faults_at_operation("optim", operation.name)
        ]
        result = corrupted_call(call, aims, self._landings)
        self._updates.assign_results(work, result)
        return result

    def _collective(self, name: str, call: OperationCall) -> Any:
        self.names["comm"][name] = None
        func, args, kwargs = call
        plans = self._plans.faults_at_operation("comm", name)
        for plan in plans:
            if plan.site.operand == "in":
                number, written = payload_argument(func, args, kwargs)
                corrupted = self._corrupt(plan, operands_of(args, kwargs)[number], not written)
                if corrupted is not None and not written:
                    args, kwargs = exchanged((args, kwargs), number, corrupted)
                    self._sent.append(corrupted)  # the collective may still read it afterwards
        result = func(*args, **kwargs)
        for plan in plans:
            if plan.site.operand == "out" and (out := received(func, args, kwargs, result)) is not None:
                self._corrupt(plan, out, False)
        return result

    # -- gradients -------------------------------------------------------------------------------------------------

    def _expect(self, met: OperationOccurrence, call: OperationCall) -> None:
        """Prepare faults in the gradients of an operation that is about to run."""
        plans = [
            p for p in self._plans.faults_at_operation("grad", met.name) if (p.wanted.micro_step or 0) == met.micro_step
        ]
        plans = [p for p in plans if not self._landings.has_landed(p.wanted)]
        if not plans or not torch.is_grad_enabled():
            return
        if met.occurrence and (known := self._named.get(met.name)):
            known.add_recomputed_operands(*call[1:])
            return
        wanted = [(p.site, p.wanted) for p in plans]
        gradients = GradientInjector(met.name, next_number() - 1, call, wanted, self._landings)
        self._pending = gradients, None

    def _settle(self) -> None:
        """Attach the prepared gradient faults to the autograd node of the previous operation."""
        if self._pending is None:
            return
        gradients, result = self._pending
        self._pending = None
        if gradients.attach(result, self._see_node):
            self._gradients[gradients.number] = gradients
            self._named[gradients.name] = gradients

    # -- memory ----------------------------------------------------------------------------------------------------

    def _keep(self, plan: PlannedFault, call: OperationCall, result: Any) -> None:
        func, args, kwargs = call
        if plan.site.operand.startswith("out"):
            tensor = output_of(func, args, kwargs, result, int(plan.site.operand.partition(".")[2] or 0), None)
        else:
            number, tensors = listed_operand_number(func, args, plan.site.operand, None), operands_of(args, kwargs)
            tensor = tensors[number] if number is not None and number < len(tensors) else None
        if tensor is None or not corruptible(tensor):
            self._landings.refuse(plan.wanted, f"the operation has no {plan.site.operand} tensor that can be corrupted")
        else:
            self._saved.append((plan, SavedActivation.of(tensor)))

    def _corrupt_saved(self) -> None:
        """Corrupt saved activations when the backward pass begins."""
        activations, self._saved = self._saved, []
        for plan, place in activations:
            tensor = place.tensor()
            if tensor is None:
                self._landings.refuse(plan.wanted, "it is not saved for the backward pass")
            else:
                self._corrupt(plan, tensor, False)

    def _before_update(self) -> None:
        """Handle the start of an optimizer step: the first one ends the backward pass."""
        if self._updated:
            return
        self._updated = self._corrupting = True
        try:
            self._corrupt_memory("gradient")
            if self._moment == "update":
                self._corrupt_memory()
        finally:
            self._corrupting = False

    def _corrupt_memory(self, *kinds: str) -> None:
        """Corrupt parameters and optimizer state, or the given kinds of memory."""
        plans = [plan for kind in kinds or ("param", "state") for plan in self._of(kind)]
        parameters = named_tensors(self._model) if plans else {}
        for plan in plans:
            site = plan.site
            if site.kind == "param":
                tensor, known = parameters.get(site.name), list(parameters)
            elif site.kind == "gradient":
                there = current_gradients(self._model)
                tensor, known = there.get(site.name), list(there)
            elif not self._optimizers:
                raise UsageError(
                    f"{plan.wanted.site} is optimizer state, but no optimizer was given; give optimizers=[…]"
                )
            else:
                tensor = state_of(self._optimizers, self._model, site.name, site.operand)
                known = optimizer_state_names(self._optimizers, self._model)
            if tensor is None:
                name = f"{site.name}/{site.operand}" if site.operand else site.name
                raise unknown_name_error(NOUNS[site.kind], name, known)
            self._corrupt(plan, tensor, False)
            if not self._landings.has_landed(plan.wanted):
                raise self._missed(plan)

    def _of(self, where: str) -> list[PlannedFault]:
        return [plan for plans in self._plans.faults_in_stage(where).values() for plan in plans]

    # -- shared by all stages --------------------------------------------------------------------------------------

    def _corrupt(self, plan: PlannedFault, tensor: Tensor, copy: bool) -> Tensor | None:
        corrupted = self._landings.corrupt(plan.site, plan.wanted, local(tensor), copy)
        return None if corrupted is None else corrupted.tensor

    def _missed(self, plan: PlannedFault) -> InjectionError | UsageError:
        """The error for a fault that was not applied."""
        names = self.names
        if not self._starts_active and not names["fwd"]:  # list the other modules that ran
            module_name = plan.site.name.partition("#")[0]
            ran = {f"{module}#": None for module in (OUTSIDE, *self._calls.called_modules) if module != module_name}
            names = defaultdict(dict, names) | {"fwd": ran}
        return self._plans.missed_error(
            plan, self._landings, names, self._calls.current_micro_step + 1, self._calls.has_run_backward
        )


def _run_eagerly(stack: ExitStack) -> None:
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(warnings.catch_warnings())  # a compiled module would warn about our hooks
    warnings.filterwarnings("ignore", message=".*global hooks on modules", category=UserWarning)


_NOTHING_COMPILED = SharedContext(_run_eagerly)
_RECOMPUTATION_TO_ITS_END = SharedContext(lambda stack: stack.enter_context(set_checkpoint_early_stop(False)))
"""Context in which recomputation is not stopped early, so that all its operations run."""


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

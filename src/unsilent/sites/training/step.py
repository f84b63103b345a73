"""One training step with faults in it: operations forward, backward and of the update, collectives, and memory.

One dispatch mode, active for this step only, sees every operation with its real operands. It changes nothing but what a fault
names: with no fault the step gives the same bits. Each fault lands exactly once; one that does not is an error, which says what
there is. What a faulty step has computed stays: a snapshot of the training's state undoes it, nothing here does.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import set_checkpoint_early_stop

from unsilent.errors import InjectionError, UsageError, unknown
from unsilent.faults import Fault
from unsilent.faults.drawn import Draw
from unsilent.faults.moments import acting
from unsilent.faults.receipts import Hit, Receipt
from unsilent.sites.calling import Aim, Call, corrupted_call
from unsilent.sites.corrupting import corruptible
from unsilent.sites.landing import Landings, Wanted
from unsilent.sites.modes import Mode
from unsilent.sites.modules import named_tensors
from unsilent.sites.operands import argument_number, exchanged, operands_of, output_of
from unsilent.sites.training.collectives import Collectives, payload, received
from unsilent.sites.training.gradients import Gradients, Ran
from unsilent.sites.training.names import Met, StepCalls, before_backward, current_node, inner, next_number
from unsilent.sites.training.plans import Plan, Plans, as_list
from unsilent.sites.training.saved_activation import SavedActivation
from unsilent.sites.training.updates import Updates, Work, gradients_there, local, state_of, states_there

Moment = Literal["start", "update", "end"]
NOUNS = {"param": "parameter", "optim": "state of an optimizer", "gradient": "parameter with a gradient"}


class Step(Mode):
    """Active around one training step: forward passes, backward passes and the update.

    Args:
        model: whose modules and parameters give the names. faults: what is to happen in this step, resolved or to be drawn; those
            of other ranks are left out. optimizers: whose state ``optim:`` faults corrupt. number: of this step; faults that do
            not act in it are left out (None: all act). moment: when faults in memory (``param:``, ``optim:``) corrupt: at the
            ``start`` of the step, between the backward pass and the first ``update`` of an optimizer, or at the ``end``. Those
            in a ``gradient:`` corrupt before the update.

    Attributes:
        hits: what landed so far. names: operations that were met, by kind of site; where faults are wanted, until all landed.

    Raises:
        UsageError: on entry for memory that is not there, on exit for an operation that did not run. InjectionError: on exit,
            where a fault did not land exactly once, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Wanted | Sequence[Wanted] = (),
        optimizers: Optimizer | Sequence[Optimizer] = (),
        number: int | None = None,
        moment: Moment = "start",
    ) -> None:
        super().__init__()
        self._moment: Moment = moment
        wanted: list[Wanted] = as_list(faults, (Fault, Draw))
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _distributed() else (0, 1)
        self._model, self._optimizers = inner(model), tuple(as_list(optimizers, (Optimizer,)))
        self._wanted = (wanted if number is None else acting(wanted, number)), rank, ranks
        self._start()

    def _start(self) -> None:
        self._landings, self._plans = Landings(), Plans(*self._wanted)
        self.names: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._calls, self._updates, self._collectives = (
            StepCalls(self._model),
            Updates(self._model, self._before_update),
            Collectives(),
        )
        self._updated = self._corrupting = False
        self._gradients: dict[int, Gradients] = {}
        self._named: dict[str, Gradients] = {}
        self._pending: tuple[Gradients, Any] | None = None
        self._kept: list[tuple[Plan, SavedActivation]] = []
        self._sent: list[Any] = []
        self._worked: list[Work] = []

    @property
    def hits(self) -> list[Hit]:
        """What landed so far."""
        return self._landings.hits

    @property
    def receipt(self) -> Receipt:
        """Proof of what landed."""
        return Receipt(tuple(self.hits))

    def _around(self, stack: ExitStack) -> None:
        self._start()
        stack.enter_context(self._calls)
        stack.enter_context(self._updates)
        stack.enter_context(before_backward(self._settle))
        stack.enter_context(set_checkpoint_early_stop(False))  # what is run again is to be met to its end
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())  # a compiled module would complain of our hooks
            warnings.filterwarnings("ignore", message=".*global hooks on modules", category=UserWarning)
        if self._moment == "start":
            self._corrupt_memory()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        error = raised[1]
        if self._moment == "end" and error is None:
            self._corrupt_memory()
        for gradients in self._gradients.values():
            gradients.detach()
        self._gradients, self._named, self._pending = {}, {}, None
        self._kept, self._sent = [], []
        for plan in self._plans.all if error is None else ():
            if not self._landings.has(plan.wanted):
                raise self._missed(plan)
            if ambiguous := self._plans.ambiguous(plan):
                raise ambiguous
            if plan.site.layer in self._calls.unclear and (
                plan.wanted.occurrence or plan.site.phase.startswith("grad")
            ):
                raise InjectionError(
                    f"{plan.wanted.site}: calls of {plan.site.layer!r} that are run again cannot be distinguished here (nested "
                    "checkpointing?); another may have been hit"
                )

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plans = self._plans
        if self._corrupting or (plans.all and self._landings.count == len(plans.all) and not plans.alone):
            return func(*args, **kwargs)  # nothing is left to do
        call = func, args, kwargs
        self._settle()
        if (collective := self._collectives.meet(func)) is not None:
            return self._collective(collective, call)
        node = current_node()
        if self._updates.active and node is None and not torch.is_grad_enabled():  # no closure of the optimizer's
            return func(*args, **call[2]) if plans.all and not plans.of("optim") else self._update(call)
        if node is not None and not torch.is_grad_enabled():
            return self._backward(node, call)
        return self._forward(self._calls.meet(func, again=node is not None), call)

    # -- operations ------------------------------------------------------------------------------------------------

    def _forward(self, met: Met, call: Call) -> Any:
        self.names["fwd"][met.name] = None
        self._plans.meet(met, call)
        self._expect(met, call)
        aims = [Aim(p.site, p.wanted) for p in self._plans.at("fwd", met.name) if p.acts(met)]
        result = corrupted_call(call, aims, self._landings) if aims else call[0](*call[1], **call[2])
        if self._pending:
            self._pending = (self._pending[0], result)
        for plan in self._plans.at("saved", met.name):
            if plan.acts(met):
                self._keep(plan, call, result)
        return result

    def _backward(self, node: Any, call: Call) -> Any:
        self._calls.backward()
        self._corrupt_kept()
        result = call[0](*call[1], **call[2])
        if (mine := self._gradients.get(node._sequence_nr())) and mine.watched:
            mine.remember(Ran(*call, result))
        return result

    def _update(self, call: Call) -> Any:
        self._worked = work = self._updates.work(*call)
        self.names["optim"].update(dict.fromkeys(one.name for one in work))
        aims = [Aim(*p, one.entry) for one in work for p in self._plans.at("optim", one.name)]
        result = corrupted_call(call, aims, self._landings)
        self._updates.made(work, result)
        return result

    def _collective(self, name: str, call: Call) -> Any:
        self.names["comm"][name] = None
        func, args, kwargs = call
        plans = self._plans.at("comm", name)
        for plan in plans:
            if plan.site.operand == "in":
                number, written = payload(func, args, kwargs)
                corrupted = self._corrupt(plan, operands_of(args, kwargs)[number], not written)
                if corrupted is not None and not written:
                    args, kwargs = exchanged((args, kwargs), number, corrupted)
                    self._sent.append(corrupted)  # it may still be read when this returns
        result = func(*args, **kwargs)
        for plan in plans:
            if plan.site.operand == "out" and (out := received(func, args, kwargs, result)) is not None:
                self._corrupt(plan, out, False)
        return result

    # -- gradients -------------------------------------------------------------------------------------------------

    def _expect(self, met: Met, call: Call) -> None:
        """Get ready for the backward of an operation whose gradients faults name, and which is about to get its node."""
        plans = [p for p in self._plans.at("grad", met.name) if (p.wanted.micro_step or 0) == met.micro_step]
        plans = [p for p in plans if not self._landings.has(p.wanted)]
        if not plans or not torch.is_grad_enabled():
            return
        if met.occurrence and (known := self._named.get(met.name)):
            known.called_again(*call[1:])
            return
        wanted = [(p.site, p.wanted) for p in plans]
        gradients = Gradients(met.name, next_number() - 1, call, wanted, self._landings)
        self._pending = gradients, None

    def _settle(self) -> None:
        """The operation before has its node by now."""
        if self._pending is None:
            return
        gradients, result = self._pending
        self._pending = None
        if gradients.attach(result):
            self._gradients[gradients.number] = gradients
            self._named[gradients.name] = gradients

    # -- memory ----------------------------------------------------------------------------------------------------

    def _keep(self, plan: Plan, call: Call, result: Any) -> None:
        func, args, kwargs = call
        if plan.site.operand.startswith("out"):
            tensor = output_of(func, args, kwargs, result, int(plan.site.operand.partition(".")[2] or 0), None)
        else:
            number, tensors = argument_number(func, args, plan.site.operand, None), operands_of(args, kwargs)
            tensor = tensors[number] if number is not None and number < len(tensors) else None
        if tensor is None or not corruptible(tensor):
            self._landings.refuse(plan.wanted, f"the operation has no {plan.site.operand} tensor that can be corrupted")
        else:
            self._kept.append((plan, SavedActivation.of(tensor)))

    def _corrupt_kept(self) -> None:
        """What was kept until the backward pass begins."""
        kept, self._kept = self._kept, []
        for plan, place in kept:
            tensor = place.tensor()
            if tensor is None:
                self._landings.refuse(plan.wanted, "it is not saved for the backward pass")
            else:
                self._corrupt(plan, tensor, False)

    def _before_update(self) -> None:
        """Told of each optimizer that begins its step: the first one ends the backward pass."""
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
        """Parameters and state of optimizers, or gradients."""
        parameters = named_tensors(self._model)
        for plan in (plan for kind in kinds or ("param", "state") for plan in self._of(kind)):
            site = plan.site
            if site.kind == "param":
                tensor, known = parameters.get(site.name), list(parameters)
            elif site.kind == "gradient":
                there = gradients_there(self._model)
                tensor, known = there.get(site.name), list(there)
            elif not self._optimizers:
                raise UsageError(f"{plan.wanted.site} is state of an optimizer, and none was given: optimizers=[…]")
            else:
                tensor = state_of(self._optimizers, self._model, site.name, site.operand)
                known = states_there(self._optimizers, self._model)
            if tensor is None:
                asked = f"{site.name}/{site.operand}" if site.operand else site.name
                raise unknown(NOUNS[site.kind], asked, known)
            self._corrupt(plan, tensor, False)
            if not self._landings.has(plan.wanted):
                raise self._missed(plan)

    def _of(self, where: str) -> list[Plan]:
        return [plan for plans in self._plans.of(where).values() for plan in plans]

    # -- what all share --------------------------------------------------------------------------------------------

    def _corrupt(self, plan: Plan, tensor: Tensor, copy: bool) -> Tensor | None:
        corrupted = self._landings.corrupt(plan.site, plan.wanted, local(tensor), copy)
        return None if corrupted is None else corrupted.tensor

    def _missed(self, plan: Plan) -> InjectionError | UsageError:
        """The error of a fault that did not land."""
        return self._plans.missed(plan, self._landings, self.names, self._calls.micro_step + 1, self._calls.went_back)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

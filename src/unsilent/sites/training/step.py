"""One training step with faults in it: operations forward, backward and of the update, collectives, and memory.

One dispatch mode, active for this step only, sees every operation with its real operands. It changes nothing but what a fault
names: with no fault the step gives the same bits. Each fault lands exactly once; one that does not is an error, which says what
there is. What a struck step has computed stays: a snapshot of the training's state undoes it, nothing here does.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.errors import InjectionError, UsageError, unknown
from unsilent.faults.moments import acting
from unsilent.faults.naming import PHASES, SiteName, parse_site
from unsilent.faults.receipts import Hit, Receipt
from unsilent.sites.calling import Aim, Call, struck_call
from unsilent.sites.landing import Landings, Wanted
from unsilent.sites.modes import Mode
from unsilent.sites.operands import argument_number, exchanged, gives_uninitialised, gives_views, operands_of, output_of
from unsilent.sites.striking import strikeable
from unsilent.sites.training.collectives import Collectives, payload, received
from unsilent.sites.training.gradients import Gradients, Ran
from unsilent.sites.training.kept import Kept
from unsilent.sites.training.names import Met, StepCalls, before_backward, current_node, inner, next_number
from unsilent.sites.training.updates import Updates, Work, local, state_of, states_there


class Plan(NamedTuple):
    """A fault and its site taken apart."""

    site: SiteName
    wanted: Wanted

    def acts(self, met: Met) -> bool:
        """Whether it means this time that the operation is called."""
        return (self.wanted.micro_step or 0) == met.micro_step and (self.wanted.occurrence or 0) == met.occurrence


class Step(Mode):
    """Active around one training step: forward passes, backward passes and the update.

    Args:
        model: whose modules and parameters give the names. faults: what is to happen in this step, resolved or to be drawn; those
            of other ranks are left out. optimizers: whose state ``optim:`` faults strike. number: of this step; faults that do
            not act in it are left out (None: all act).

    Attributes:
        hits: what landed so far. names: operations that were met, by kind of site; where faults are wanted, until all landed.

    Raises:
        UsageError: on entry for memory that is not there, on exit for an operation that did not run. InjectionError: on exit,
            where a fault did not land exactly once, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Sequence[Wanted] = (),
        optimizers: Sequence[Optimizer] = (),
        number: int | None = None,
    ) -> None:
        super().__init__()
        faults = faults if number is None else acting(faults, number)
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _distributed() else (0, 1)
        for fault in faults:
            if fault.rank >= ranks:
                raise UsageError(f"{fault.site} is for rank {fault.rank}; there are ranks 0 to {ranks - 1}")
        self._model, self._optimizers = inner(model), tuple(optimizers)
        self._plans = [Plan(parse_site(f.site), f) for f in faults if f.rank == rank]
        self._start()

    def _start(self) -> None:
        self._landings = Landings()
        self._bound: dict[str, dict[str, None]] = {}
        self.names: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._calls, self._updates, self._collectives = StepCalls(self._model), Updates(self._model), Collectives()
        self._mine: defaultdict[str, defaultdict[str, list[Plan]]] = defaultdict(lambda: defaultdict(list))
        for plan in self._plans:
            self._mine[_channel(plan.site)][plan.site.name].append(plan)
        self._alone = {p.site.name for p in self._plans if p.site.kind in ("op", "saved") and "#" not in p.site.name}
        self._gradients: dict[int, Gradients] = {}
        self._named: dict[str, Gradients] = {}
        self._pending: tuple[Gradients, Any] | None = None
        self._kept: list[tuple[Plan, Kept]] = []
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
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())  # a compiled module would complain of our hooks
            warnings.filterwarnings("ignore", message=".*global hooks on modules", category=UserWarning)
        self._strike_memory()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for gradients in self._gradients.values():
            gradients.detach()
        self._gradients, self._named, self._pending = {}, {}, None
        self._kept, self._sent = [], []
        if error is None:
            for plan in self._plans:
                if not self._landings.has(plan.wanted):
                    raise self._missed(plan)
                if len(several := self._bound.get(plan.site.name, {})) > 1:
                    names = ", ".join(f"op:{name}" for name in list(several)[:6])
                    raise UsageError(
                        f"{len(several)} operations of {plan.site.name!r} can be struck; name one: {names}"
                    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._plans and self._landings.count == len(self._plans) and not self._alone:
            return func(*args, **(kwargs or {}))  # nothing is left to do
        call = func, args, kwargs or {}
        self._settle()
        if (collective := self._collectives.meet(func)) is not None:
            return self._collective(collective, call)
        if self._updates.active:
            return func(*args, **call[2]) if self._plans and not self._mine["optim"] else self._update(call)
        node = current_node()
        if node is not None and not torch.is_grad_enabled():
            return self._backward(node, call)
        return self._forward(self._calls.meet(func, again=node is not None), call)

    # -- operations ------------------------------------------------------------------------------------------------

    def _forward(self, met: Met, call: Call) -> Any:
        self.names["fwd"][met.name] = None
        self._bind(met, call[0])
        self._expect(met, call)
        aims = [Aim(p.site, p.wanted) for p in self._meant("fwd", met.name) if p.acts(met)]
        result = struck_call(call, aims, self._landings) if aims else call[0](*call[1], **call[2])
        if self._pending:
            self._pending = (self._pending[0], result)
        for plan in self._meant("saved", met.name):
            if plan.acts(met):
                self._keep(plan, call, result)
        return result

    def _bind(self, met: Met, func: Any) -> None:
        """Remember which operations a site means that names a module alone: its only one."""
        module = met.name.partition("#")[0]
        if module in self._alone and not (gives_views(func) or gives_uninitialised(func)):
            self._bound.setdefault(module, {})[met.name] = None

    def _meant(self, channel: str, name: str) -> list[Plan]:
        """The faults at an operation, those included that name its module alone."""
        mine, module = self._mine[channel], name.partition("#")[0]
        found = mine.get(name, [])
        return found + mine[module] if module in mine and next(iter(self._bound.get(module, ())), "") == name else found

    def _backward(self, node: Any, call: Call) -> Any:
        self._calls.backward()
        self._strike_kept()
        result = call[0](*call[1], **call[2])
        if (mine := self._gradients.get(node._sequence_nr())) and mine.watched:
            mine.remember(Ran(*call, result))
        return result

    def _update(self, call: Call) -> Any:
        self._worked = work = self._updates.work(*call)
        self.names["optim"].update(dict.fromkeys(one.name for one in work))
        aims = [Aim(*p, one.entry) for one in work for p in self._mine["optim"].get(one.name, ())]
        result = struck_call(call, aims, self._landings)
        self._updates.made(work, result)
        return result

    def _collective(self, name: str, call: Call) -> Any:
        self.names["comm"][name] = None
        func, args, kwargs = call
        plans = self._mine["comm"].get(name, ())
        for site, wanted in plans:
            if site.operand == "in":
                number, written = payload(func, args, kwargs)
                struck = self._strike(wanted, operands_of(args, kwargs)[number], not written)
                if struck is not None and not written:
                    args, kwargs = exchanged((args, kwargs), number, struck)
                    self._sent.append(struck)  # it may still be read when this returns
        result = func(*args, **kwargs)
        for site, wanted in plans:
            if site.operand == "out" and (out := received(func, args, kwargs, result)) is not None:
                self._strike(wanted, out, False)
        return result

    # -- gradients -------------------------------------------------------------------------------------------------

    def _expect(self, met: Met, call: Call) -> None:
        """Get ready for the backward of an operation whose gradients faults name, and which is about to get its node."""
        plans = [p for p in self._meant("grad", met.name) if (p.wanted.micro_step or 0) == met.micro_step]
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
        if tensor is None or not strikeable(tensor):
            self._landings.refuse(plan.wanted, f"the operation has no {plan.site.operand} tensor that can be struck")
        else:
            self._kept.append((plan, Kept.of(tensor)))

    def _strike_kept(self) -> None:
        """What was kept until the backward pass begins."""
        kept, self._kept = self._kept, []
        for plan, place in kept:
            tensor = place.tensor()
            if tensor is None:
                self._landings.refuse(plan.wanted, "nobody keeps it for the backward pass")
            else:
                self._strike(plan.wanted, tensor, False)

    def _strike_memory(self) -> None:
        """Parameters and state of optimizers, before the step begins."""
        parameters = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        for kind in ("param", "state"):
            for name, plans in self._mine[kind].items():
                for site, wanted in plans:
                    if kind == "param":
                        tensor, known = parameters.get(name), list(parameters)
                    else:
                        tensor = state_of(self._optimizers, self._model, name, site.operand)
                        known = states_there(self._optimizers, self._model)
                    if tensor is None:
                        asked = name if kind == "param" else f"{name}/{site.operand}"
                        raise unknown("parameter" if kind == "param" else "state of an optimizer", asked, known)
                    self._strike(wanted, tensor, False)
                    if not self._landings.has(wanted):
                        raise self._missed(Plan(site, wanted))

    # -- what all share --------------------------------------------------------------------------------------------

    def _strike(self, wanted: Wanted, tensor: Tensor, copy: bool) -> Tensor | None:
        struck = self._landings.strike(wanted, local(tensor), copy)
        return None if struck is None else struck.tensor

    def _missed(self, plan: Plan) -> InjectionError | UsageError:
        """The error of a fault that did not land."""
        site, wanted = plan
        if why := self._landings.why(wanted):
            return InjectionError(f"{wanted.site} was not hit: {why}")
        channel = _channel(site)
        there = self.names[channel if channel in ("optim", "comm") else "fwd"]
        if "#" not in site.name and site.kind in ("op", "saved") and channel != "optim":
            there = dict.fromkeys(name.partition("#")[0] for name in there)
        if site.name not in there:
            return unknown(
                {"optim": "operation of the update", "comm": "collective"}.get(channel, "operation"), site.name, there
            )
        if channel == "grad":
            can = [p for p in PHASES[1:3] if p != site.phase]
            why = f"no gradient was computed for it (frozen, or not part of a backward pass); try {' or '.join(can)}"
        else:
            why = f"it did not run at micro-step {wanted.micro_step or 0}, occurrence {wanted.occurrence or 0}"
        return InjectionError(f"{wanted.site} was not hit: {why}")


def _channel(site: SiteName) -> str:
    """Where in a step a site is met."""
    if site.kind == "op":
        return "grad" if site.phase.startswith("grad") else site.phase
    return "state" if site.kind == "optim" else site.kind


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

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
from unsilent.faults import Fault
from unsilent.faults.drawn import Draw
from unsilent.faults.naming import PHASES, SiteName, parse_site
from unsilent.sites.addresses import flat_elements
from unsilent.sites.memory import dtype_name
from unsilent.sites.modes import Mode
from unsilent.sites.operands import argument_number, exchanged, operands_of, output_of, same_place, written_by
from unsilent.sites.receipts import Hit, Receipt
from unsilent.sites.striking import copied, corrupt, misfit, plain, strikeable
from unsilent.sites.training.collectives import Collectives, payload, received
from unsilent.sites.training.gradients import Gradients, Ran
from unsilent.sites.training.kept import Kept
from unsilent.sites.training.names import Met, StepCalls, current_node, inner, next_number
from unsilent.sites.training.updates import Updates, local, state_of, states_there

Wanted = Fault | Draw
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


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
            of other ranks are left out. optimizers: whose state ``optim:`` faults strike.

    Attributes:
        hits: what landed so far. names: operations that were met, by kind of site.

    Raises:
        UsageError: on entry for memory that is not there, on exit for an operation that did not run. InjectionError: on exit,
            where a fault did not land exactly once, with the reason.
    """

    def __init__(self, model: nn.Module, faults: Sequence[Wanted] = (), optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__()
        rank = torch.distributed.get_rank() if _distributed() else 0
        self._model, self._optimizers = inner(model), tuple(optimizers)
        self._plans = [Plan(parse_site(f.site), f) for f in faults if f.rank == rank]
        self._hooks = ExitStack()
        self._start()

    def _start(self) -> None:
        self.hits: list[Hit] = []
        self.names: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._calls, self._updates, self._collectives = StepCalls(self._model), Updates(self._model), Collectives()
        self._mine: defaultdict[str, defaultdict[str, list[Plan]]] = defaultdict(lambda: defaultdict(list))
        for plan in self._plans:
            self._mine[_channel(plan.site)][plan.site.name].append(plan)
        self._landed: set[int] = set()
        self._misfits: dict[int, str] = {}
        self._gradients: dict[int, Gradients] = {}
        self._named: dict[str, Gradients] = {}
        self._pending: tuple[Gradients, Any] | None = None
        self._kept: list[tuple[Plan, Kept]] = []
        self._sent: list[Any] = []

    @property
    def receipt(self) -> Receipt:
        """Proof of what landed."""
        return Receipt(tuple(self.hits))

    def __enter__(self) -> Step:
        self._start()
        with ExitStack() as stack:
            stack.enter_context(self._calls)
            stack.enter_context(self._updates)
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())  # a compiled module would complain of our hooks
                warnings.filterwarnings("ignore", message=".*global hooks on modules", category=UserWarning)
            self._strike_memory()
            super().__enter__()
            self._hooks = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.close()
        for gradients in self._gradients.values():
            gradients.detach()
        self._gradients, self._named, self._pending = {}, {}, None
        self._kept, self._sent = [], []
        if error is None:
            for plan in self._plans:
                if id(plan.wanted) not in self._landed:
                    raise self._missed(plan)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = func, args, kwargs or {}
        self._settle()
        if (collective := self._collectives.meet(func)) is not None:
            return self._collective(collective, call)
        if self._updates.active:
            return self._update(call)
        node = current_node()
        if node is not None and not torch.is_grad_enabled():
            return self._backward(node, call)
        return self._forward(self._calls.meet(func, again=node is not None), call)

    # -- operations ------------------------------------------------------------------------------------------------

    def _forward(self, met: Met, call: Call) -> Any:
        self.names["fwd"][met.name] = None
        self._expect(met, call)
        plans = [p for p in self._mine["fwd"].get(met.name, ()) if p.acts(met)]
        result = self._run(call, [(plans, None)])
        if self._pending:
            self._pending = (self._pending[0], result)
        for plan in self._mine["saved"].get(met.name, ()):
            if plan.acts(met):
                self._keep(plan, call, result)
        return result

    def _backward(self, node: Any, call: Call) -> Any:
        self._calls.backward()
        self._strike_kept()
        result = call[0](*call[1], **call[2])
        if (mine := self._gradients.get(node._sequence_nr())) and mine.watched:
            mine.remember(Ran(*call, result))
        return result

    def _update(self, call: Call) -> Any:
        work = self._updates.work(*call)
        self.names["optim"].update(dict.fromkeys(one.name for one in work))
        struck = [(plans, one.entry) for one in work if (plans := self._mine["optim"].get(one.name))]
        result = self._run(call, struck)
        self._updates.made(work, result)
        return result

    def _run(self, call: Call, struck: Sequence[tuple[Sequence[Plan], int | None]]) -> Any:
        """An operation with faults in its operands and outputs, each with the entry of its lists that it means."""
        func, args, kwargs = call
        plans = [(*plan, entry) for some, entry in struck for plan in some]
        for site, wanted, entry in plans:
            if not site.operand.startswith("out"):
                args, kwargs = self._operand(call=(func, args, kwargs), site=site, wanted=wanted, entry=entry)
        result = func(*args, **kwargs)
        for site, wanted, entry in plans:
            if site.operand.startswith("out"):
                out = output_of(func, args, kwargs, result, int(site.operand.partition(".")[2] or 0), entry)
                if out is None:
                    self._refuse(wanted, "that output cannot be struck: a view, empty, or not there")
                else:
                    self._strike(wanted, out, False)
        return result

    def _operand(
        self, call: Call, site: SiteName, wanted: Wanted, entry: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a struck one among them: a copy, or in place where the operation writes it."""
        func, args, kwargs = call
        number, tensors = argument_number(func, args, site.operand, entry), operands_of(args, kwargs)
        if number is None or number >= len(tensors):
            self._refuse(wanted, f"the operation has no {site.operand} tensor operand")
            return args, kwargs
        old = tensors[number]
        in_place = any(plain(t) and plain(old) and same_place(old, t) for t in written_by(func, args, kwargs))
        new = self._strike(wanted, old, not in_place)
        return (args, kwargs) if new is None or in_place else exchanged((args, kwargs), number, new)

    def _collective(self, name: str, call: Call) -> Any:
        self.names["comm"][name] = None
        func, args, kwargs = call
        plans = self._mine["comm"].get(name, ())
        for site, wanted in plans:
            if site.operand == "in":
                number, written = payload(func, args, kwargs)
                new = self._strike(wanted, operands_of(args, kwargs)[number], not written)
                if new is not None and not written:
                    args, kwargs = exchanged((args, kwargs), number, new)
                    self._sent.append(new)  # it may still be read when this returns
        result = func(*args, **kwargs)
        for site, wanted in plans:
            if site.operand == "out" and (out := received(func, args, kwargs, result)) is not None:
                self._strike(wanted, out, False)
        return result

    # -- gradients -------------------------------------------------------------------------------------------------

    def _expect(self, met: Met, call: Call) -> None:
        """Get ready for the backward of an operation whose gradients faults name, and which is about to get its node."""
        plans = [p for p in self._mine["grad"].get(met.name, ()) if (p.wanted.micro_step or 0) == met.micro_step]
        plans = [p for p in plans if id(p.wanted) not in self._landed]
        if not plans or not torch.is_grad_enabled():
            return
        if met.occurrence and (known := self._named.get(met.name)):
            known.called_again(*call[1:])
            return
        wanted = [(p.site, p.wanted) for p in plans]
        gradients = Gradients(met.name, next_number() - 1, call, wanted, self._strike, self._refuse)
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
            self._refuse(plan.wanted, f"the operation has no {plan.site.operand} tensor that can be struck")
        else:
            self._kept.append((plan, Kept.of(tensor)))

    def _strike_kept(self) -> None:
        """What was kept until the backward pass begins."""
        kept, self._kept = self._kept, []
        for plan, place in kept:
            tensor = place.tensor()
            if tensor is None:
                self._refuse(plan.wanted, "nobody keeps it for the backward pass")
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
                    if id(wanted) not in self._landed:
                        raise self._missed(Plan(site, wanted))

    # -- what all share --------------------------------------------------------------------------------------------

    def _strike(self, wanted: Wanted, tensor: Tensor, copy: bool) -> Tensor | None:
        """Apply a fault to a tensor or to a copy of it."""
        tensor = local(tensor)
        found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        why = "" if strikeable(tensor) else f"found {found} without memory of its own, or of a dtype without a codec"
        if not why and isinstance(wanted, Fault):
            why = misfit(tensor, wanted)
        if why or id(wanted) in self._landed:
            self._refuse(wanted, why or "it was met twice")
            return None
        shape = tuple(tensor.shape)
        if isinstance(wanted, Fault):
            faults: Sequence[Fault] = [wanted]
        else:
            elements = None if wanted.index is None else flat_elements(wanted.index, wanted.site, shape)
            faults = wanted.resolved(dtype_name(tensor.dtype), shape, elements)
        struck = copied(tensor) if copy else tensor
        self.hits += [corrupt(struck, fault) for fault in faults]
        self._landed.add(id(wanted))
        return struck

    def _refuse(self, wanted: Wanted, why: str) -> None:
        self._misfits[id(wanted)] = why

    def _missed(self, plan: Plan) -> InjectionError | UsageError:
        """The error of a fault that did not land."""
        site, wanted = plan
        if why := self._misfits.get(id(wanted)):
            return InjectionError(f"{wanted.site} was not hit: {why}")
        channel = _channel(site)
        there = self.names[channel if channel in ("optim", "comm") else "fwd"]
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

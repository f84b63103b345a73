"""The faults of one training step by stage and site, and errors for faults that were not applied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unsilent.basics.errors import InjectionError, UsageError, unknown_name_error
from unsilent.faults.naming import PHASES, SiteName, is_cast, parse_site
from unsilent.sites.calling import OperationCall
from unsilent.sites.landing import FaultOrDraw, Landings
from unsilent.sites.operands import gives_uninitialised, gives_views, operands_of
from unsilent.sites.training.step_operation_names import OperationOccurrence

_FORWARD = ("fwd", "saved")
_GRADIENT = "grad"
_RUN_AGAIN = (*_FORWARD,)
"""Phases in which a fault can have an occurrence."""
_NOUNS = {"optim": "operation of the update", "comm": "collective"}


class PlannedFault(NamedTuple):
    """A fault with its parsed site; ``site.name`` is an operation even if the fault names only a module."""

    site: SiteName
    wanted: FaultOrDraw

    def acts(self, met: OperationOccurrence) -> bool:
        """Whether the fault acts in this run of the operation."""
        return (self.wanted.micro_step or 0) == met.micro_step and (self.wanted.occurrence or 0) == met.occurrence


class StepFaults:
    """The faults of a step, by stage and site.

    Args:
        faults: Resolved and unresolved faults; faults of other ranks are ignored.
        rank: Rank of this process.
        ranks: Number of ranks.

    Raises:
        UsageError: a fault has a rank that does not exist, or an occurrence or micro-step that its site does not have.
    """

    def __init__(self, faults: Iterable[FaultOrDraw], rank: int, ranks: int) -> None:
        self.all: list[PlannedFault] = []
        for fault in faults:
            if any(fault is plan.wanted for plan in self.all):
                raise UsageError(f"{fault.site} is given twice as the same object; make a separate fault for each")
            if fault.rank >= ranks:
                raise UsageError(f"{fault.site} is for rank {fault.rank}; expected 0 to {ranks - 1}")
            if fault.rank == rank:
                self.all.append(PlannedFault(parse_site(fault.site), fault))
        self._by: defaultdict[str, defaultdict[str, list[PlannedFault]]] = defaultdict(lambda: defaultdict(list))
        for plan in self.all:
            where = step_stage(plan.site)
            if plan.wanted.occurrence and where not in _RUN_AGAIN:
                raise UsageError(
                    f"{plan.wanted.site} has occurrence {plan.wanted.occurrence}, but only forward operations have one; leave it "
                    "out"
                )
            if plan.wanted.micro_step and where not in (*_FORWARD, _GRADIENT):
                raise UsageError(
                    f"{plan.wanted.site} has micro_step {plan.wanted.micro_step}, but it occurs only once in a step; leave it out"
                )
            self._by[where][plan.site.name].append(plan)
        alone = [p for p in self.all if p.site.kind in ("op", "saved") and "#" not in p.site.name]
        self.module_only_names = {p.site.name for p in alone if step_stage(p.site) != "optim"}
        self._bound: dict[tuple[bool, str], dict[str, None]] = {}
        self._casts: dict[str, dict[str, None]] = {}

    def faults_in_stage(self, where: str) -> Mapping[str, Sequence[PlannedFault]]:
        """The faults of one stage, by name."""
        return self._by[where]

    def faults_at_operation(self, where: str, name: str) -> list[PlannedFault]:
        """The faults at an operation, including those that name only its module."""
        plans, module = self._by[where], name.partition("#")[0]
        result = list(plans.get(name, ()))
        if module in plans and next(iter(self._bound.get((where == _GRADIENT, module), ())), "") == name:
            result += [PlannedFault(p.site._replace(name=name), p.wanted) for p in plans[module]]
        return result

    def bind_operation(self, met: OperationOccurrence, call: OperationCall) -> None:
        """Register an operation before it runs, for sites that name only its module."""
        module = met.name.partition("#")[0]
        if module not in self.module_only_names or gives_views(call[0]) or gives_uninitialised(call[0]):
            return
        if is_cast(met.name):
            self._casts.setdefault(module, {})[met.name] = None
            return
        self._bound.setdefault((False, module), {})[met.name] = None
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands_of(call[1], call[2])):
            self._bound.setdefault((True, module), {})[met.name] = None

    def ambiguity_error(self, plan: PlannedFault) -> UsageError | None:
        """The error for a module name that matches several operations or only casts; None if it is unambiguous."""
        module = plan.site.name
        bound = self._bound.get((step_stage(plan.site) == _GRADIENT, module), {})
        casts = self._casts.get(module, {}) if (False, module) not in self._bound else {}
        if module not in self.module_only_names or (len(bound) < 2 and not casts):
            return None
        several = list(casts or bound)
        names = ", ".join(f"op:{name}" for name in several[:6]) + (", …" if len(several) > 6 else "")
        if casts:
            return UsageError(f"the only operations in {module!r} itself are casts; name one: {names}")
        return UsageError(f"{len(several)} operations of {module!r} can be corrupted; name one: {names}")

    def missed_error(
        self,
        plan: PlannedFault,
        landings: Landings,
        names: Mapping[str, Iterable[str]],
        micro_steps: int,
        backward: bool,
    ) -> InjectionError | UsageError:
        """The error for a fault that was not applied.

        ``names``: names of the operations that ran, by stage. ``micro_steps``: number of micro-steps. ``backward``: whether a
        backward pass ran.
        """
        site, wanted, where = plan.site, plan.wanted, step_stage(plan.site)
        if error := self.ambiguity_error(plan):
            return error
        if why := landings.why(wanted):
            return InjectionError(f"{wanted.site} was not hit: {why}")
        if where in ("param", "state", "gradient"):
            return InjectionError(f"{wanted.site} was not hit: no optimizer began a step")
        if error := _absent(site, where, list(names[where if where in _NOUNS else "fwd"])):
            return error
        if (wanted.micro_step or 0) >= micro_steps:
            there = "the step had only micro-step 0"
            if micro_steps > 1:
                there = f"the step had micro-steps 0 to {micro_steps - 1}"
            why = f"it is for micro-step {wanted.micro_step}; {there}"
        elif where == _GRADIENT and not backward:
            why = "no backward pass ran in the step"
        elif where == _GRADIENT:
            can = [p for p in PHASES[1:3] if p != site.phase]
            reasons = (
                "frozen, not part of the backward pass, or hidden by saved-tensor hooks or a dispatch mode of yours"
            )
            why = f"no gradient was computed for it ({reasons}); try {' or '.join(can)}"
        else:
            call = f"call {wanted.occurrence or 0} in micro-step {wanted.micro_step or 0}"
            why = f"there was no {call} (both are counted from 0)"
        return InjectionError(f"{wanted.site} was not hit: {why}")


def watched_modules(plans: Sequence[PlannedFault], modules: Collection[str]) -> frozenset[str] | None:
    """The modules whose operations must be observed for these faults; None: all operations of the step.

    The name of an operation depends only on its module. All operations must be observed for a fault outside ``modules`` (another
    operation, or a collective) and for a recomputed operation, and without faults, because then the names are needed.
    """
    names: set[str] = set()
    for plan in plans:
        stage, module = step_stage(plan.site), plan.site.name.partition("#")[0]
        if stage in (*_FORWARD, _GRADIENT):
            if plan.wanted.occurrence or module not in modules:
                return None
            names.add(module)
        elif stage == "comm":
            return None
    return frozenset(names) if plans else None


def step_stage(site: SiteName) -> str:
    """The stage of a training step that a site belongs to."""
    if site.kind == "op":
        return _GRADIENT if site.phase.startswith("grad") else site.phase
    return "state" if site.kind == "optim" else site.kind


def _absent(site: SiteName, where: str, there: list[str]) -> UsageError | None:
    """The error for an operation name that did not occur, with the nearest names; None if it occurred."""
    owner, mark, _ = site.name.partition("#")
    owners = dict.fromkeys(name.partition("#")[0] for name in there)
    if site.name in (there if mark else owners if where != "optim" else ()):
        return None
    of_owner = [name for name in there if name.partition("#")[0] == owner]
    if where == "optim" and not mark and of_owner:
        names = ", ".join(f"op:{name}/optim" for name in of_owner[:6]) + (", …" if len(of_owner) > 6 else "")
        return UsageError(f"{len(of_owner)} operations update {owner!r}; name one: {names}")
    if where == "optim" and not of_owner:
        return unknown_name_error("parameter with an update in this step (frozen, or no gradient?)", owner, owners)
    if mark and of_owner:
        return unknown_name_error(_NOUNS.get(where, "operation"), site.name, of_owner)
    if where == "comm":
        return unknown_name_error(_NOUNS[where], site.name, there)
    return unknown_name_error("module with operations in this step", owner, owners)


def as_list(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """A list of one or several values of these types."""
    return [value] if isinstance(value, kinds) else list(value)

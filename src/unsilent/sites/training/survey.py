"""What can be struck in a training step: one fault-free step is watched, and tells its sites with their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.errors import unknown
from unsilent.faults import Region
from unsilent.faults.naming import OPERANDS, SiteName
from unsilent.sites.addresses import Address
from unsilent.sites.calling import Call
from unsilent.sites.memory import dtype_name
from unsilent.sites.operands import gives_views, operand_number, operands_of, operation_name, output_of, struck_output
from unsilent.sites.striking import strikeable
from unsilent.sites.training.collectives import payload
from unsilent.sites.training.kept import Kept
from unsilent.sites.training.names import Met, next_number
from unsilent.sites.training.step import Step
from unsilent.sites.training.updates import local, state_of, states_there

PRODUCTS = ("convolution", "addmm", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
"""Operations of two factors: each gradient is made of the gradient from above and of the other factor, and both can be struck."""


class StepSurvey(Step):
    """Active around one fault-free step, of which it changes no bit; afterwards `regions` says what there is.

    Args:
        model, optimizers: as of `Step`.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__(model, (), optimizers)
        self._found: dict[SiteName, Region] = {}
        self._ahead: dict[int, dict[SiteName, Region]] = {}
        self._alive: list[tuple[SiteName, Kept]] = []
        self._owned: set[int] = set()

    def regions(self, *addresses: str) -> tuple[Region, ...]:
        """What addresses select together, in the order of the step: ``op:layer1.*/grad_wt/out``, ``optim:*``, ``comm:*``.

        Raises ``UsageError`` for an address that selects nothing, with what there is.
        """
        chosen: dict[SiteName, Region] = {}
        for text in addresses or ("op:*/*/out",):
            address = Address.parse(text)
            known = [site for site in self._found if site.kind == address.kind]
            if address.kind == "op":
                sites = address.operations(known)
            else:
                names = {site.text.removeprefix(f"{site.kind}:"): site for site in known}
                if not names:
                    raise unknown("kind of site in this step", address.kind, {site.kind for site in self._found})
                sites = [names[name] for name in address.matching(names)]
            chosen |= {site: self._found[site] for site in sites}
        return tuple(region for site, region in self._found.items() if site in chosen)

    def _around(self, stack: ExitStack) -> None:
        super()._around(stack)
        self._found = {}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._tell(SiteName("param", name), local(tensor))
        for text in states_there(self._optimizers, self._model):
            name, _, entry = text.rpartition("/")
            self._tell(SiteName("optim", name, "", entry), state_of(self._optimizers, self._model, name, entry))

    def _tell(self, site: SiteName, tensor: Tensor | None) -> None:
        if tensor is not None and site not in self._found and strikeable(tensor):
            self._found[site] = _region(site, tensor)

    def _forward(self, met: Met, call: Call) -> Any:
        number = next_number() - 1
        owner = number not in self._owned  # an operation that makes no node meets the number of the one before
        self._owned.add(number)
        result = super()._forward(met, call)
        func, args, kwargs = call
        if met.occurrence or gives_views(func):
            return result
        out = struck_output(func, args, kwargs, result)
        self._tell(SiteName("op", met.name, "fwd", "out"), out)
        tensors = operands_of(args, kwargs)
        factors = [tensors[n] for o in OPERANDS[1:3] if (n := operand_number(func, o)) < len(tensors)]
        for operand, tensor in zip(OPERANDS[1:], factors, strict=False):
            self._tell(SiteName("op", met.name, "fwd", operand), tensor)
            if torch.is_grad_enabled() and strikeable(tensor):
                self._alive.append((SiteName("saved", met.name, "", operand), Kept.of(tensor)))
        if owner and torch.is_grad_enabled() and out is not None:
            self._expected(met.name, func, number, factors, out)
        return result

    def _expected(self, name: str, func: Any, number: int, factors: Sequence[Tensor], out: Tensor) -> None:
        """The gradients that this operation will hand back if its node is reached."""
        sites = self._ahead.setdefault(number, {})
        for phase, factor in zip(("grad_in", "grad_wt"), factors, strict=False):
            if not factor.requires_grad:
                continue
            there = {"out": factor}
            if operation_name(func) in PRODUCTS and len(factors) == 2:
                there |= (
                    {"first": out, "second": factors[1]} if phase == "grad_in" else {"first": factors[0], "second": out}
                )
            for operand, tensor in there.items():
                site = SiteName("op", name, phase, operand)
                sites[site] = _region(site, tensor)

    def _backward(self, node: Any, call: Call) -> Any:
        for site, kept in self._alive:  # what somebody keeps when the backward pass begins
            self._tell(site, kept.tensor())
        self._alive = []
        for site, region in self._ahead.pop(node._sequence_nr(), {}).items():
            self._found.setdefault(site, region)
        return super()._backward(node, call)

    def _update(self, call: Call) -> Any:
        result = super()._update(call)
        for one in self._worked:
            self._tell(SiteName("op", one.name, "optim", "out"), output_of(*call, result, 0, one.entry))
        return result

    def _collective(self, name: str, call: Call) -> Any:
        sent = operands_of(*call[1:])[payload(*call)[0]]
        self._tell(SiteName("comm", name, "", "in"), sent)
        return super()._collective(name, call)

    def __exit__(self, *error: Any) -> None:
        self._ahead, self._alive = {}, []
        super().__exit__(*error)


def _region(site: SiteName, tensor: Tensor) -> Region:
    return Region(site.text, dtype_name(tensor.dtype), tuple(tensor.shape))

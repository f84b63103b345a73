"""Survey of the corruptible sites of a training step, with dtypes and shapes, in one fault-free step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import unknown_name_error
from unsilent.faults import Region
from unsilent.faults.naming import OPERANDS, SiteName
from unsilent.sites.addresses import Address
from unsilent.sites.calling import OperationCall
from unsilent.sites.corrupting import corruptible
from unsilent.sites.landing import Landings
from unsilent.sites.memory import dtype_name
from unsilent.sites.modules import named_tensors
from unsilent.sites.operands import (
    PRODUCTS,
    corruptible_output,
    gives_views,
    operand_number,
    operands_of,
    operation_name,
    output_of,
)
from unsilent.sites.training.collectives import payload_argument
from unsilent.sites.training.gradients import GradientInjector
from unsilent.sites.training.step import SavedActivation, StepInjection
from unsilent.sites.training.step_operation_names import OperationOccurrence, next_number
from unsilent.sites.training.updates import current_gradients, local, optimizer_state_names, state_of

Shaped = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class SurveyedGradients(GradientInjector):
    """The gradients that one operation returns, with dtypes and shapes, without its operands."""

    def __init__(
        self, name: str, number: int, call: OperationCall, tell: Callable[[SiteName, Tensor | Shaped | None], None]
    ) -> None:
        super().__init__(name, number, call, (), Landings())
        self._tell, self._tensors = tell, []
        tensors = operands_of(*call[1:])
        self._roles = [operand_number(call[0], operand) for operand in OPERANDS[1:]]
        product = operation_name(call[0]) in PRODUCTS
        self._factors = [_dtype_and_shape(tensors[n]) for n in self._roles[:2]] if product else []

    def _hand_back(self, computed: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        above = next((_dtype_and_shape(t) for t in incoming if t is not None), None)
        for place, at in self._places.items():
            gradient, number = computed[at], self._roles.index(place) if place in self._roles else place
            if gradient is None:
                continue
            phase = "grad_wt" if number else "grad_in"
            self._tell(SiteName("op", self.name, phase, "out" if number < 2 else f"out.{number - 1}"), gradient)
            if self._factors and above is not None and number < 2:
                pair = (self._factors[0], above) if number else (above, self._factors[1])
                for operand, region in zip(OPERANDS[1:3], pair, strict=True):
                    self._tell(SiteName("op", self.name, phase, operand), region)
        self.detach()


class StepSurvey(StepInjection):
    """Records the corruptible sites of one fault-free training step, for `select_regions`.

    Args:
        model: Model whose modules and parameters give the names.
        optimizers: Optimizers whose state is surveyed.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__(model, (), optimizers)
        self._regions: dict[SiteName, Region] = {}
        self._alive: list[tuple[SiteName, SavedActivation]] = []

    @property
    def kinds(self) -> set[str]:
        """Kinds of sites in the step: ``op``, ``param``, ``optim`` and so on."""
        return {site.kind for site in self._regions}

    def select_regions(self, *addresses: str) -> tuple[Region, ...]:
        """The regions that addresses like ``op:layer1.*/grad_wt/out`` and ``optim:*`` select, in the step's order.

        Raises ``UsageError`` for an address that selects nothing, with the available sites.
        """
        chosen: dict[SiteName, Region] = {}
        for text in addresses or ("op:*/*/out",):
            address = Address.parse(text)
            known = [site for site in self._regions if site.kind == address.kind]
            if address.kind == "op":
                sites = address.operations(known)
            else:
                names = {site.text.removeprefix(f"{site.kind}:"): site for site in known}
                if not names:
                    raise unknown_name_error("kind of site in this step", address.kind, self.kinds)
                sites = [names[name] for name in address.matching(names)]
            chosen |= {site: self._regions[site] for site in sites}
        return tuple(region for site, region in self._regions.items() if site in chosen)

    def _around(self, stack: ExitStack) -> None:
        super()._around(stack)
        self._regions = {}
        for name, tensor in named_tensors(self._model).items():
            self._tell(SiteName("param", name), local(tensor))
        for text in optimizer_state_names(self._optimizers, self._model):
            name, _, entry = text.rpartition("/")
            self._tell(SiteName("optim", name, "", entry), state_of(self._optimizers, self._model, name, entry))

    def _before_update(self) -> None:
        for name, tensor in current_gradients(self._model).items():
            self._tell(SiteName("gradient", name), tensor)
        super()._before_update()

    def _tell(self, site: SiteName, value: Tensor | Shaped | None) -> None:
        if value is None or site in self._regions:
            return
        if isinstance(value, Tensor):
            if not corruptible(value):
                return
            value = _dtype_and_shape(value)
        self._regions[site] = Region(site.text, *value)

    def _forward(self, met: OperationOccurrence, call: OperationCall) -> Any:
        number = next_number() - 1
        result = super()._forward(met, call)
        func, args, kwargs = call
        if met.occurrence or gives_views(func):
            return result
        self._tell(SiteName("op", met.name, "fwd", "out"), corruptible_output(func, args, kwargs, result))
        tensors = operands_of(args, kwargs)
        for operand in OPERANDS[1:3]:
            if (place := operand_number(func, operand)) < len(tensors):
                self._tell(SiteName("op", met.name, "fwd", operand), tensors[place])
                if torch.is_grad_enabled() and corruptible(tensors[place]):
                    self._alive.append((SiteName("saved", met.name, "", operand), SavedActivation.of(tensors[place])))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self._pending = SurveyedGradients(met.name, number, call, self._tell), result
        return result

    def _backward(self, node: Any, call: OperationCall) -> Any:
        for site, activation in self._alive:  # activations that are still referenced when the backward pass begins
            self._tell(site, activation.tensor())
        self._alive = []
        return super()._backward(node, call)

    def _update(self, call: OperationCall) -> Any:
        result = super()._update(call)
        for operation in self._worked:
            self._tell(SiteName("op", operation.name, "optim", "out"), output_of(*call, result, 0, operation.entry))
        return result

    def _collective(self, name: str, call: OperationCall) -> Any:
        sent = operands_of(*call[1:])[payload_argument(*call)[0]]
        self._tell(SiteName("comm", name, "", "in"), sent)
        return super()._collective(name, call)

    def __exit__(self, *error: Any) -> None:
        self._alive = []
        super().__exit__(*error)


def _dtype_and_shape(tensor: Tensor) -> Shaped:
    return dtype_name(tensor.dtype), tuple(tensor.shape)

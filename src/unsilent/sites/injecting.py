"""`inject`: inject a fault in one line of Python.

``with unsilent.inject(model, "param:fc.weight[3,5]", bit=30) as receipt:`` corrupts a parameter,
``with unsilent.inject(model, "op:conv1/grad_wt", "random", optimizers=[optimizer]) as step:`` an operation of a training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.options import check_count
from unsilent.faults import FAULT_MODELS, Fault, FaultModel, fault_model
from unsilent.faults.fault_texts import function_file
from unsilent.faults.hardware.presets import PRESETS, preset
from unsilent.faults.mixtures import asked_fault_model
from unsilent.faults.naming import PHASES, kind_of, site_in_memory
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.addresses import Address
from unsilent.sites.landing import FaultOrDraw
from unsilent.sites.parameters import ParameterInjection, Parameters
from unsilent.sites.training.step import StepInjection

_ELSEWHERE = {
    "input": "corrupt the input tensor before you pass it to the model: unsilent.sites.corrupted_copy",
    "kv": "corrupt them in a campaign: unsilent pvf WORKLOAD --at kv:*",
    "file": "corrupt the checkpoint: unsilent checkpoint corrupt FILE",
}
_DEFAULTS = {"op": (PHASES[0], "out"), "saved": ("first",), "comm": ("in",)}
"""Default parts of an address, by kind of site, if the address leaves them out."""


@names_arguments
def inject(
    model: nn.Module,
    address_or_faults: str | FaultOrDraw | Sequence[FaultOrDraw],
    fault: str | FaultModel | None = None,
    *,
    bit: int | None = None,
    seed: int = 0,
    law: str = "per-element",
    optimizers: Optimizer | Sequence[Optimizer] = (),
    rank: int = 0,
    micro_step: int | None = None,
    occurrence: int | None = None,
) -> ParameterInjection | StepInjection:
    """A context manager that injects faults into a model, or into one training step of it.

    Args:
        model: Any module; it is not copied, and no hook or wrapper remains afterwards.
        address_or_faults: An address (``"param:layer1.*"``, ``"op:layer1.0.conv1/grad_wt"``,
            ``"optim:fc.weight/exp_avg"``) for which a fault is drawn, or faults (resolved ones are replayed).
        fault: Fault model for an address, default ``"bitflip"`` (one uniformly drawn bit), or ``"FILE.py:NAME"``, a function
            of the old bits; for operations also a published preset (``"N16_RD"``), which determines the corrupted operand.
        bit: Bit position (0 = least significant) to flip in *every* addressed element, instead of a draw with ``fault``.
        seed: Seed of the draw.
        law: Sampling law of the draw.
        optimizers: Optimizers whose state ``optim:`` corrupts.
        rank: Rank in which the fault acts.
        micro_step: Number of the forward pass in a step with several forward passes, from 0.
        occurrence: Number of the time that the site is reached, from 0.

    Returns:
        ParameterInjection | StepInjection: A `ParameterInjection` for ``param:``. It corrupts on entry and returns a `Receipt`;
        on exit it restores all bits and verifies them. A `StepInjection` for ``op:``, ``saved:``, ``comm:`` and ``optim:``, and
        for ``param:`` with ``optimizers`` (because they write parameters), to be entered around one step or one evaluation. The
        results of the step stay corrupted. The ``receipt`` lists the applied faults; the exit raises an error unless all faults
        were applied.

    Raises:
        UsageError: the address matches nothing, or the fault does not fit it.
        InjectionError: on entry if a fault was not written as intended, on exit if the bits were not restored.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the first argument of inject is {type(model).__name__}; expected a torch.nn.Module: inject(model, address)"
        )
    check_count("seed", seed, 0)
    if bit is not None:
        check_count("bit", bit, 0)
    chosen = _several(optimizers)
    if not all(isinstance(optimizer, Optimizer) for optimizer in chosen):
        raise wrong_value_error("optimizers", optimizers, "an optimizer of torch, or several")
    if fault is not None and bit is not None:
        raise UsageError(
            "give fault= or bit=, not both; bit=30 is short for flipping bit 30 of every addressed element"
        )
    if not isinstance(address_or_faults, str):
        faults = _several(address_or_faults)
        if not faults or not all(isinstance(item, Fault | UnresolvedFault) for item in faults):
            raise wrong_value_error(
                "address_or_faults", address_or_faults, "an address like 'param:fc.weight', or faults"
            )
        if fault is not None or bit is not None:
            raise UsageError("the faults are already given; leave out fault= and bit=")
        faults = [
            replace(listed, site=site_in_memory(listed.site)) if isinstance(listed, Fault) else listed
            for listed in faults
        ]
        resolved = [listed for listed in faults if isinstance(listed, Fault) and kind_of(listed.site) == "param"]
        # The memory of parameters is corrupted at once; everything else is corrupted while a step runs.
        if len(resolved) == len(faults):
            return Parameters(model).inject(resolved, strict=True)
        return StepInjection(model, faults, chosen)
    kind = kind_of(address_or_faults)
    if kind in _ELSEWHERE:
        raise UsageError(f"inject does not corrupt {kind}: sites; {_ELSEWHERE[kind]}")
    if kind != "param" or chosen:
        moment = {"rank": rank, "micro_step": micro_step, "occurrence": occurrence}
        return StepInjection(model, [_draw(address_or_faults, fault, bit, seed, law, moment)], chosen)
    parameters = Parameters(model)
    regions = parameters.select(address_or_faults)
    if bit is not None:
        drawn = fault_model(f"bitflip:bits={bit}")
        # The count is 1 if no tensor has the bit, so that the draw raises the error.
        drawn = drawn.with_count(max(1, drawn.capacity(regions)))
    else:
        drawn = fault if isinstance(fault, FaultModel) else _parse_single_model(fault or "bitflip")
    return parameters.inject(drawn.draw(regions, np.random.default_rng(seed), law), strict=True)


def _parse_single_model(text: str) -> FaultModel:
    """Parse one fault model, which may be a function in a file; raises ``UsageError`` for a mixture."""
    model = asked_fault_model(text)
    if not isinstance(model, FaultModel):
        raise UsageError(f"inject got the mixture {text!r}; give one of its fault models, as one fault is injected")
    return model


def _several(value: Any) -> list[Any]:
    """The items of a collection as a list; any other value as a list of one item."""
    return list(value) if isinstance(value, Iterable) else [value]


def _draw(
    site: str, fault: str | FaultModel | None, bit: int | None, seed: int, law: str, moment: dict[str, Any]
) -> UnresolvedFault:
    """The fault to be drawn at an address inside a training step."""
    address = Address.parse(site)
    if any(c in address.glob for c in "*?"):
        raise UsageError(
            f"{site!r} can match several operations, whose shapes are not known yet; name one operation (see Step.names)"
        )
    stem, *rest = address.glob.split("/")
    known = [*FAULT_MODELS, *PRESETS]
    if isinstance(fault, str) and function_file(fault) is None and fault.partition(":")[0] not in known:
        raise unknown_name_error("fault model or preset", fault, known)
    if isinstance(fault, str) and fault in PRESETS:
        if address.kind != "op" or (rest and rest[0] == "optim"):
            raise UsageError(
                f"{fault} corrupts a forward or backward operation; expected op:MODULE/fwd, /grad_in or /grad_wt, found {site!r}"
            )
        if len(rest) > 1:
            raise UsageError(f"{fault} already chooses the operand; leave out '/{rest[1]}'")
        return preset(fault).fault_at_operation(
            f"op:{stem}", phase=rest[0] if rest else PHASES[0], seed=seed, index=address.index, **moment
        )
    rest += _DEFAULTS.get(address.kind, ())[len(rest) :]
    # all slots with this bit
    text = f"bitflip:bits={bit},rate=1" if bit is not None else fault or "bitflip"
    drawn = text if isinstance(text, FaultModel) else _parse_single_model(text)
    full_site = f"{address.kind}:{'/'.join((stem, *rest))}"
    return UnresolvedFault(full_site, drawn, seed, address.index, law, **moment)

"""Two networks layer by layer: how far each layer's outputs differ in the whole network, and given the original's inputs.

*Accumulated* differences include all that earlier layers did; for *local* ones, the deployed layer gets the inputs of the
original's. Layers are aligned by their path in the network, whatever wraps it, never by their number. The two networks run in
lock step (`unsilent.compare.lock_step`), so one pair of outputs is held at a time.

Layers are modules without children and modules with parameters of their own. What is computed between layers is seen in the
accumulated difference of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unsilent.compare.alignment import align, unreadable
from unsilent.compare.layer_records import LayerComparison, LayerRow
from unsilent.compare.lock_step import LayerCall, LayerCalls, WaitingPass
from unsilent.compare.noise_floor import floors_of
from unsilent.compare.quantised_products import LayerProbe
from unsilent.engine.digests import digest
from unsilent.errors import UsageError, kind_and_line
from unsilent.nested import map_tensors, tensors_in
from unsilent.protection.layer_watch import first_tensor
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.modules import mode_readers, reject_training_mode
from unsilent.sites.operands import gives_views, operation_name
from unsilent.workloads.base import call_model

ROUNDINGS = 64
"""Relative difference of a layer's outputs that other kernels may have, in units of the element type's rounding."""
NO_PAIRS = "no layer of the deployed network has the path of one of the original's, such as {!r}; names of modules have to agree"


def compare_layers(
    original: nn.Module,
    deployed: nn.Module,
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], Any] = call_model,
) -> LayerComparison:
    """How far each layer of the deployed network is from that of the original.

    Raises:
        UsageError: there is no batch, or a model is in training mode.
    """
    if not batches:
        raise UsageError("there is no batch to compare layers with; give at least one")
    for model in (original, deployed):
        reject_training_mode(mode_readers(model))
    if reason := unreadable(original) or unreadable(deployed):
        return LayerComparison((), unreadable=reason, batches=len(batches))
    pairs, unaligned = align(original, deployed)
    if not pairs:
        return LayerComparison((), unreadable=NO_PAIRS.format(next(iter(unaligned), "none")), batches=len(batches))
    comparing = _Comparing({name: other for name, (_, other) in pairs.items()})
    layers = {name: one for name, (one, _) in pairs.items()}
    for batch in batches:
        other = WaitingPass(comparing.deployed, partial(run, deployed, batch))
        with torch.no_grad(), other, LayerCalls(layers, partial(comparing.add, other)):
            run(original, batch)
    floors = floors_of(original, layers, batches[0], run)
    rows = tuple(replace(row, floor=floors.get(row.name)) for row in comparing.rows.values())
    missing = (*unaligned, *(name for name in comparing.missing if name not in comparing.rows))
    return LayerComparison(rows, missing, tuple(comparing.other_shapes), batches=len(batches))


class _Comparing:
    """Rows in the making."""

    def __init__(self, deployed: dict[str, nn.Module]) -> None:
        self.deployed = deployed
        self.rows: dict[str, LayerRow] = {}
        self.missing: dict[str, None] = {}
        self.other_shapes: dict[str, None] = {}
        self._has_operation = False

    def add(self, other: WaitingPass, call: LayerCall) -> None:
        """Compare one call of a layer with that of the deployed network."""
        theirs = other.reach(call.name)
        if theirs is None:
            self.missing[call.name] = None
            return
        if theirs.output.shape != call.output.shape:
            self.other_shapes[call.name] = None
            return
        if call.name not in self.rows:
            rounding = ROUNDINGS * torch.finfo(call.output.dtype).eps
            parameters = any(True for _ in call.module.parameters())
            self.rows[call.name] = LayerRow(
                call.name, type(call.module).__name__, rounding=rounding, has_parameters=parameters
            )
        row = self.rows[call.name]
        row.accumulated.add(call.output, theirs.output)
        if row.local is not None:
            self._add_local(row, call, theirs)

    def _add_local(self, row: LayerRow, call: LayerCall, theirs: LayerCall) -> None:
        if getattr(call.module, "inplace", False):
            row.local, row.local_problem = None, "it overwrites its inputs"
            return
        inputs, named = _copies((call.inputs, call.named_inputs), (theirs.inputs, theirs.named_inputs))
        probe = LayerProbe(call, theirs.module)
        try:
            # Modules such as attention compute otherwise while functions are watched.
            with probe if probe.is_for_product else nullcontext():
                output = first_tensor(theirs.module.forward(*inputs, **named))
        except Exception as error:  # whatever a module of the user's raises
            row.local, row.local_problem = None, kind_and_line(error)
            return
        if output is None or output.shape != call.output.shape:
            row.local, row.local_problem = None, "alone, it returns another shape"
            return
        assert row.local is not None
        row.local.add(call.output, output)
        row.noise = probe.noise(output, row.noise)
        if not self._has_operation and not row.local.has_same_bits:
            self._has_operation = True
            row.operation = differing_operation(call, theirs.module, inputs, named)


def _copies(inputs: Any, pattern: Any = None) -> Any:
    """Copies of inputs, one for each tensor however often it is given.

    With a pattern of as many tensors, they have the element types of those and are on their devices.
    """
    ours, others = list(tensors_in(inputs)), list(tensors_in(pattern))
    copies = {
        id(one): one.clone().to(other)
        for one, other in zip(ours, others if len(others) == len(ours) else ours, strict=True)
    }
    return map_tensors(inputs, lambda _, tensor: copies[id(tensor)])


class _Operations(DispatchMode):
    """The operations of a call, each by its name with a hash of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, int]] = []

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not gives_views(func):
            self.results.append((operation_name(func), digest(list(tensors_in(result)))))
        return result


def differing_operation(call: LayerCall, deployed: nn.Module, inputs: Any, named: Any) -> str:
    """The first operation of a deployed layer that has other results, or that the original's layer does not have."""
    runs = []
    for module, given, by_name in ((call.module, call.inputs, call.named_inputs), (deployed, inputs, named)):
        given, by_name = _copies((given, by_name))
        with _Operations() as operations:
            module.forward(*given, **by_name)
        runs.append(operations.results)
    known = set(runs[0])
    return next((name for name, result in runs[1] if (name, result) not in known), "")

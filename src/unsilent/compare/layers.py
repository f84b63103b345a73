"""Two networks layer by layer: how far each layer's outputs differ in the whole network, and given the original's inputs.

*Accumulated* differences include all that earlier layers did; for *local* ones, the deployed layer gets the inputs of the
original's. Layers are aligned by their path in the network, whatever wraps it, never by their number. The two networks run in
lock step (`unsilent.compare.lock_step`), so one pair of outputs is held at a time.

Layers are modules without children and modules with parameters of their own. What is computed between layers is seen in the
accumulated difference of the next one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.compare.lock_step import LayerCall, LayerCalls, WaitingPass
from unsilent.compare.noise_floor import FLOOR_BATCH, LayerFloor, floors_of
from unsilent.compare.quantised_products import LayerNoise, LayerProbe
from unsilent.compare.suspects import Suspect, find_suspects
from unsilent.engine.digests import digest, digest_all
from unsilent.errors import UsageError, kind_and_line
from unsilent.nested import map_tensors, tensors_in
from unsilent.protection.layer_watch import first_tensor
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.modules import mode_readers, named_modules, reject_training_mode
from unsilent.sites.operands import gives_views, operation_name
from unsilent.workloads.base import call_model

ROUNDINGS = 64
"""Relative difference of a layer's outputs that other kernels may have, in units of the element type's rounding."""
NO_PAIRS = "no layer of the deployed network has the path of one of the original's, such as {!r}; names of modules have to agree"
FLOORS = 4.0
"""Times its noise floor that a difference is, to be called more than noise."""


@dataclass
class Difference:
    """Sums over all outputs of a layer, in float64.

    Attributes:
        error: Sum of squared differences.
        original, deployed, product: Sums of squares of the two outputs, and of their products.
        digests: For each batch, a hash of the bits of both outputs; the order of elements matters.
    """

    error: float = 0.0
    original: float = 0.0
    deployed: float = 0.0
    product: float = 0.0
    digests: list[tuple[int, int]] = field(default_factory=list)

    def add(self, original: Tensor, deployed: Tensor) -> None:
        """Count the outputs of one batch."""
        hashes = digest([original]), digest([deployed])
        self.digests.append(hashes)
        one = original.double()
        square = float(one.square().sum())
        self.original += square
        if hashes[0] == hashes[1] and math.isfinite(square):
            self.deployed += square
            self.product += square
            return
        other = deployed.to(original.device).double()
        self.error += float((other - one).square().sum())
        self.deployed += float(other.square().sum())
        self.product += float((one * other).sum())

    @property
    def has_same_bits(self) -> bool:
        """Whether both outputs are identical bit for bit, element types included."""
        return all(one == other for one, other in self.digests)

    @property
    def hashes(self) -> tuple[int, int]:
        """Of the outputs of both models over all batches."""
        return digest_all([one for one, _ in self.digests]), digest_all([other for _, other in self.digests])

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the original's outputs; infinite where a number is not finite."""
        if self.error == 0:
            return 0.0
        share = math.sqrt(self.error / self.original) if self.original else math.inf
        return share if math.isfinite(share) else math.inf

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise ratio in dB; infinite where nothing differs."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)

    @property
    def cosine(self) -> float:
        """Of the angle between the outputs; NaN where one is all zeros or not finite."""
        norms = math.sqrt(self.original) * math.sqrt(self.deployed)
        return self.product / norms if norms and math.isfinite(norms) else math.nan


@dataclass
class LayerRow:
    """One layer of both networks.

    Attributes:
        name: Path of the module in the original, ``#2`` behind it for its second call.
        kind: Class of the original's module.
        accumulated: Of the two networks, each with its own earlier layers.
        local: Of the deployed layer, given the inputs of the original's; None where it could not be run alone.
        local_problem: Why it could not.
        operation: The first operation of the deployed layer, given the same inputs, whose result has other bits.
        floor: How far the original differs from itself; None where it was not measured.
        rounding: Relative difference that other kernels of the same layer may have.
        has_parameters: Whether the original's layer has any.
        noise: What the quantisation of this layer should cause, and what it does; None where it has no product.
    """

    name: str
    kind: str
    accumulated: Difference = field(default_factory=Difference)
    local: Difference | None = field(default_factory=Difference)
    local_problem: str = ""
    operation: str = ""
    floor: LayerFloor | None = None
    rounding: float = 0.0
    has_parameters: bool = False
    noise: LayerNoise | None = None

    @property
    def agrees_locally(self) -> bool:
        """Whether the layer alone differs by no more than its noise floor and the rounding of other kernels."""
        noise = max(self.rounding, FLOORS * self.floor.largest if self.floor else 0.0)
        return self.local is not None and self.local.relative <= noise

    @property
    def is_beyond_floor(self) -> bool:
        """Whether the accumulated difference is more than the original's own; any other bit where that is none."""
        if self.floor is None or self.floor.largest == 0:
            return not self.accumulated.has_same_bits
        return self.accumulated.relative > FLOORS * self.floor.largest


@dataclass(frozen=True)
class LayerComparison:
    """What `compare_layers` found.

    Attributes:
        rows: In the order in which the original runs them.
        unaligned: Layers of the original that have no counterpart, or did not run there.
        other_shapes: Layers whose outputs have other shapes.
        unreadable: Why layers could not be read at all; empty where they were.
        batches: Number of batches that were run.
    """

    rows: tuple[LayerRow, ...]
    unaligned: tuple[str, ...] = ()
    other_shapes: tuple[str, ...] = ()
    unreadable: str = ""
    batches: int = 0

    @property
    def differs_everywhere(self) -> bool:
        """Whether most convolutions and linear layers differ by themselves, as in a quantised or pruned network.

        Where there are none, other layers with parameters count.
        """
        alone = [row for row in self.rows if row.has_parameters and row.local is not None]
        rows = [row for row in alone if row.noise is not None] or alone
        return 2 * sum(not row.agrees_locally for row in rows) > len(rows)

    @property
    def first_difference(self) -> LayerRow | None:
        """The first layer whose outputs have other bits."""
        return next((row for row in self.rows if not row.accumulated.has_same_bits), None)

    @property
    def first_beyond_floor(self) -> LayerRow | None:
        """The first layer whose outputs differ by more than the noise floor; None where most layers differ by themselves."""
        return None if self.differs_everywhere else next((row for row in self.rows if row.is_beyond_floor), None)

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Layers that differ more than their quantisation explains, the most suspicious first."""
        noises = {row.name: row.noise for row in self.rows if row.noise is not None}
        return find_suspects(noises) if self.differs_everywhere else ()


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
        with (
            torch.no_grad(),
            WaitingPass(comparing.deployed, lambda batch=batch: run(deployed, batch)) as other,  # type: ignore[misc]
            LayerCalls(layers, lambda call, other=other: comparing.add(call, other)),  # type: ignore[misc]
        ):
            run(original, batch)
    floors = floors_of(original, layers, batches[FLOOR_BATCH], run, lambda: Difference())
    rows = tuple(replace(row, floor=floors.get(row.name)) for row in comparing.rows.values())
    missing = (*unaligned, *(name for name in comparing.missing if name not in comparing.rows))
    return LayerComparison(rows, missing, tuple(comparing.other_shapes), batches=len(batches))


def unreadable(model: nn.Module) -> str:
    """Why the layers of a model cannot be read; empty where they can."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return "layers of a network of torch.compile cannot be read: its graph calls no modules and fuses what they compute"
    if isinstance(model, torch.jit.ScriptModule):
        return "layers of a network of torch.jit cannot be read: it does not run hooks of its modules"
    return ""


def align(original: nn.Module, deployed: nn.Module) -> tuple[dict[str, tuple[nn.Module, nn.Module]], tuple[str, ...]]:
    """The layers of the original by name, each with its counterpart, and the names of those that have none."""
    modules = dict(named_modules(original))
    layers = {name: module for name, module in modules.items() if name and _is_layer(module)}
    theirs = {name: module for name, module in named_modules(deployed) if name}
    ours, other = max(
        (("", _prefix(layers, theirs)), (_prefix(theirs, layers), "")),
        key=lambda found: sum(other_name(name, *found) in theirs for name in layers),
    )
    pairs = {
        name: (module, theirs[partner])
        for name, module in layers.items()
        if (partner := other_name(name, ours, other)) in theirs
    }
    return pairs, tuple(name for name in layers if name not in pairs)


def other_name(name: str, prefix: str, other: str) -> str:
    """A path with another prefix, such as that of what wraps the network."""
    return other + name.removeprefix(prefix)


def _prefix(inner: dict[str, nn.Module], outer: dict[str, nn.Module]) -> str:
    """What most often stands before a path of ``inner`` to make one of ``outer``."""
    counts: Counter[str] = Counter()
    for name in outer:
        places = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
        counts.update(name[:place] for place in places if name[place:] in inner)
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _is_layer(module: nn.Module) -> bool:
    return not any(module.children()) or any(True for _ in module.parameters(recurse=False))


class _Comparing:
    """Rows in the making."""

    def __init__(self, deployed: dict[str, nn.Module]) -> None:
        self.deployed = deployed
        self.rows: dict[str, LayerRow] = {}
        self.missing: dict[str, None] = {}
        self.other_shapes: dict[str, None] = {}
        self._has_operation = False

    def add(self, call: LayerCall, other: WaitingPass) -> None:
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
        inputs, named = _as_given((call.inputs, call.named_inputs), (theirs.inputs, theirs.named_inputs))
        try:
            with LayerProbe(call, theirs.module) as probe:
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


def _as_given(inputs: Any, pattern: Any) -> Any:
    """Copies of inputs with the element type and on the device of others, as far as the two have the same number of tensors."""
    others = list(tensors_in(pattern))
    ours = list(tensors_in(inputs))
    likes = iter(others if len(others) == len(ours) else ours)
    return map_tensors(inputs, lambda _, tensor: tensor.clone().to(next(likes)))


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
        with _Operations() as operations:
            module.forward(*map_tensors(given, lambda _, t: t.clone()), **map_tensors(by_name, lambda _, t: t.clone()))
        runs.append(operations.results)
    known = set(runs[0])
    return next((name for name, result in runs[1] if (name, result) not in known), "")

"""Compares two networks layer by layer, in the whole network and with equal inputs for each layer.

*Accumulated* differences include the effects of earlier layers; for *local* differences, the deployed layer gets the inputs of
the original's layer. Layers are aligned by their path in the network, even if it is wrapped, never by their number. The two
networks run in lock step (`unsilent.compare.lock_step`), so one pair of outputs is held at a time.

Layers are modules without children and modules with parameters of their own. Computations between layers show in the accumulated
difference of the next layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import leaves_in, map_tensors, tensors_in
from unsilent.compare.adapters.names import describe
from unsilent.compare.alignment import align, unreadable
from unsilent.compare.layer_records import Difference, LayerComparison, LayerRow
from unsilent.compare.lock_step import LayerCall, LayerCalls, WaitingPass, output_tensors
from unsilent.compare.noise_floor import floors_of
from unsilent.compare.quantised_products import LayerProbe
from unsilent.engine.digests import digest
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.modules import mode_readers, reject_training_mode
from unsilent.sites.operands import gives_views, operation_name
from unsilent.workloads.base import call_model

ROUNDINGS = 64
"""Relative difference that other kernels may cause in a layer's outputs, in units of the element type's rounding."""
NO_PAIRS = "no layer of the deployed network has the path of one of the original's, such as {!r}; names of modules have to agree"

NOT_RUN = "the two networks could not be run layer by layer: {}"


def compare_layers(
    original: nn.Module,
    deployed: nn.Module,
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], Any] = call_model,
) -> LayerComparison:
    """Compare each layer of the deployed network with the original's layer.

    Raises:
        UsageError: there is no batch, or a model is in training mode.
    """
    if not batches:
        raise UsageError("there is no batch to compare layers with; give at least one")
    for model in (original, deployed):
        reject_training_mode(mode_readers(model))
    if reason := unreadable(original) or unreadable(deployed):
        return LayerComparison((), unreadable=reason, batches=len(batches))
    aligned = align(original, deployed)
    if not aligned.original:
        return LayerComparison((), unreadable=NO_PAIRS.format(next(iter(aligned.unaligned))), batches=len(batches))
    comparing = _Comparing(aligned.paths)
    try:
        for batch in batches:
            deployed_pass = WaitingPass(aligned.deployed, partial(run, deployed, batch))
            with torch.no_grad(), deployed_pass:
                with LayerCalls(aligned.original, partial(comparing.add, deployed_pass)):
                    answer = run(original, batch)
                comparing.add_answers(answer, *deployed_pass.finish())
    except Exception as error:  # any error that a user's network raises
        return LayerComparison((), unreadable=NOT_RUN.format(kind_and_line(error)), batches=len(batches))
    readable = [(name, layer) for name, layer in aligned.original if name not in comparing.problems]
    floors, floor_problems = floors_of(original, readable, batches[0], run)
    for name, row in comparing.rows.items():
        row.floor = floors.get(name)
    missing = (*aligned.unaligned, *(name for name in comparing.missing if name not in comparing.rows))
    return LayerComparison(
        tuple(comparing.rows.values()), missing, tuple(comparing.other_shapes), comparing.problems, aligned.added,
        tuple(comparing.further_calls), comparing.answers_differ, floor_problems, quantised=describe(deployed),
        batches=len(batches),
    )  # fmt: skip


class _Comparing:
    """Collects the comparison of layers while both networks run."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.rows: dict[str, LayerRow] = {}
        self.missing: dict[str, None] = {}
        self.other_shapes: dict[str, None] = {}
        self.problems: dict[str, str] = {}
        self.further_calls: dict[str, None] = {}
        self.answers_differ = False
        self._paths = paths
        self._has_operation = False

    def add(self, deployed_pass: WaitingPass, call: LayerCall) -> None:
        """Compare one call of a layer with the same call in the deployed network."""
        theirs = deployed_pass.reach(call.name)
        if theirs is None:
            self.missing[call.name] = None
            return
        try:
            self._add(call, theirs)
        except Exception as error:  # if a layer cannot be compared, the others still are
            self.rows.pop(call.name, None)
            self.problems[call.name] = kind_and_line(error)

    def add_answers(self, answer: Any, deployed_answer: Any, further_calls: list[str]) -> None:
        """Compare the outputs of both networks for one batch."""
        self.further_calls |= dict.fromkeys(further_calls)
        self.answers_differ |= _digest_of(answer) != _digest_of(deployed_answer)

    def _add(self, call: LayerCall, theirs: LayerCall) -> None:
        if call.name in self.problems:  # in an earlier batch
            return
        if type(theirs.module).__module__.startswith("torch.ao.nn.intrinsic"):
            self.problems[call.name] = f"{type(theirs.module).__name__} also computes what follows it"
            return
        if _shapes(theirs.outputs) != _shapes(call.outputs):
            self.other_shapes[call.name] = None
            return
        if call.name not in self.rows:
            rounding = ROUNDINGS * torch.finfo(call.outputs[0].dtype).eps
            self.rows[call.name] = LayerRow(
                self._name(call, theirs), type(call.module).__name__, rounding=rounding,
                has_parameters=any(True for _ in call.module.parameters()),
                has_only_vectors=_has_only_vectors(call.module) and _has_only_vectors(theirs.module),
            )  # fmt: skip
        row = self.rows[call.name]
        _add_all(row.accumulated, call.outputs, theirs.outputs)
        if row.local is not None:
            self._add_local(row, call, theirs)

    def _name(self, call: LayerCall, theirs: LayerCall) -> str:
        """The path for a call of a layer that is tied in only one of the networks.

        The path is that of the network in which the layer is not tied.
        """
        known = {row.name for row in self.rows.values()}
        paths = (self._paths.get(id(module)) for module in (call.module, theirs.module))
        return next((path for path in paths if path is not None and path not in known), call.name)

    def _add_local(self, row: LayerRow, call: LayerCall, theirs: LayerCall) -> None:
        if getattr(call.module, "inplace", False):
            row.local, row.local_problem = None, "it overwrites its inputs"
            return
        probe = LayerProbe(call, theirs.module)
        try:
            inputs, named = _copies((call.inputs, call.named_inputs), (theirs.inputs, theirs.named_inputs))
            # Modules such as attention compute in another way while functions are watched.
            with probe if probe.is_for_product else nullcontext():
                outputs = output_tensors(theirs.module.forward(*inputs, **named))
        except Exception as error:  # any error that a user's module raises
            row.local, row.local_problem = None, kind_and_line(error)
            return
        if _shapes(outputs) != _shapes(call.outputs):
            row.local, row.local_problem = None, "alone, it returns another shape"
            return
        assert row.local is not None
        _add_all(row.local, call.outputs, outputs)
        row.noise = probe.noise(outputs[0], row.noise)
        if not self._has_operation and not row.local.has_same_bits:
            self._has_operation = True
            row.operation = differing_operation(call, theirs.module, inputs, named)


def _digest_of(answer: Any) -> int:
    """Digest of the tensors in a network's output; the order of dict keys does not matter."""
    leaves = sorted(leaves_in(answer), key=lambda leaf: leaf[0])
    return digest([tensor for _, value in leaves for tensor in output_tensors(value)])


def _has_only_vectors(module: nn.Module) -> bool:
    return {parameter.ndim for parameter in module.parameters()} == {1}


def _shapes(outputs: Sequence[Tensor]) -> list[torch.Size]:
    return [output.shape for output in outputs]


def _add_all(difference: Difference, outputs: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for output, counterpart in zip(outputs, others, strict=True):
        difference.add(output, counterpart)


def _copies(inputs: Any, pattern: Any = None) -> Any:
    """Copies of inputs; a tensor that occurs several times is copied once.

    With a pattern of as many tensors, copies have the element types, quantisation and devices of the pattern's tensors.
    """
    ours, others = list(tensors_in(inputs)), list(tensors_in(pattern))
    copies = {
        id(tensor): _copy(tensor, counterpart)
        for tensor, counterpart in zip(ours, others if len(others) == len(ours) else ours, strict=True)
    }
    return map_tensors(inputs, lambda _, tensor: copies[id(tensor)])


def _copy(tensor: Tensor, pattern: Tensor) -> Tensor:
    if tensor.is_quantized and pattern.is_quantized:
        return tensor.clone()
    if tensor.is_quantized:
        return tensor.dequantize().to(pattern)
    if not pattern.is_quantized:
        return tensor.clone().to(pattern)
    with warnings.catch_warnings():  # PyTorch is about to drop quantised tensors
        warnings.simplefilter("ignore")
        scale, zero = pattern.q_scale(), pattern.q_zero_point()
        return torch.quantize_per_tensor(tensor.to(pattern.device), scale, zero, pattern.dtype)


class _Operations(DispatchMode):
    """Dispatch mode that records the operations of a call, by name with a hash of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, int]] = []

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not gives_views(func):
            plain = [tensor.dequantize() if tensor.is_quantized else tensor for tensor in tensors_in(result)]
            self.results.append((operation_name(func), digest(plain)))
        return result


def differing_operation(call: LayerCall, deployed: nn.Module, inputs: Any, named: Any) -> str:
    """Name of the first operation whose result differs between a deployed layer and the original's.

    This can be an operation that the original's layer does not have.
    """
    runs = []
    for module, positional, by_name in ((call.module, call.inputs, call.named_inputs), (deployed, inputs, named)):
        positional, by_name = _copies((positional, by_name))
        with _Operations() as operations:
            module.forward(*positional, **by_name)
        runs.append(operations.results)
    known = set(runs[0])
    return next((name for name, result in runs[1] if (name, result) not in known), "")

"""Random faults for the tensors of a checkpoint, drawn by fault model and sampling law."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint, fits
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.faults.codecs import Array, Codec
from unsilent.faults.models import FaultModel
from unsilent.faults.population import Population, Region
from unsilent.faults.record import Fault
from unsilent.sites.addresses import flat_elements

MOST_ROUNDS = 1000
"""Number of consecutive draws after which an error says that no more elements with an allowed result exist."""
INDEX_DTYPES = ("int64", "bool")
"""Dtypes of counters, positions and masks, which are corrupted only if they are named, as in a model's memory."""


@dataclass(frozen=True)
class DrawOptions:
    """Options for drawing faults from the selected tensors.

    Attributes:
        law: Sampling law, a key of `unsilent.faults.population.SAMPLING_LAWS`.
        probability: Probability that each drawn element is corrupted; 1: all of them.
        keep_finite: Whether to draw again if a finite number would become NaN or infinite.
        keep_sign: Whether to draw again if a number would change its sign.
        seed: Seed of the draw.
    """

    law: str = "per-element"
    probability: float = 1.0
    keep_finite: bool = False
    keep_sign: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise UsageError(f"the probability is {self.probability:g}; expected a number from 0 to 1")


def corruptible(checkpoint: Checkpoint, globs: Sequence[str] = (), sections: Sequence[str] = ()) -> list[Region]:
    """Corruptible regions of the selected tensors, except tensors that share bytes with an earlier one.

    A glob may end with an index (``model/fc.weight[3,5]``), like an address of a model's parameters. Without a glob, the tensors
    of the sections are selected (by default the model's, or all tensors if there is no model), but neither numbers nor integers
    that count or point. Raises ``UsageError`` if no editable tensor is selected.
    """
    if not globs and not sections and any(t.section == "model" for t in checkpoint.tensors.values()):
        sections = ("model",)
    parts = [_name_and_index(glob, checkpoint) for glob in globs]
    selected = checkpoint.select([glob for glob, _ in parts], sections)
    result, taken = [], _Bytes()
    for tensor in selected:
        usable = not tensor.reason_not_editable and tensor.numel > 0
        if not globs and (tensor.dtype in INDEX_DTYPES or tensor.is_number):
            usable = False
        if usable and taken.add(tensor):
            index = next((index for glob, index in parts if fits(tensor, glob)), None)
            elements = None if index is None else flat_elements(index, tensor.name, tensor.shape)
            result.append(Region(tensor.site, tensor.dtype, tensor.shape, elements))
    if not result:
        reasons = sorted({t.reason_not_editable for t in selected} - {""})
        why = f" ({'; '.join(reasons[:2])})" if reasons else ""
        raise UsageError(f"none of the {len(selected)} selected tensors of {checkpoint.path} can be edited{why}")
    return result


def without_shared_bytes(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The tensors, except those that share bytes with an earlier one."""
    taken = _Bytes()
    return [tensor for tensor in tensors if taken.add(tensor)]


def _name_and_index(glob: str, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The name pattern and the index in a glob: ``file:fc.weight[3,5]`` gives ``fc.weight`` and ``3,5``.

    A tensor name that itself contains a bracket is left unchanged.
    """
    text = glob.strip().removeprefix("file:")
    if text in checkpoint.tensors:
        return text, None
    name, bracket, index = text.partition("[")
    return name, index.removesuffix("]") if bracket else None


def draw_faults(
    checkpoint: Checkpoint, regions: Sequence[Region], model: FaultModel, options: DrawOptions
) -> tuple[Fault, ...]:
    """Draw faults for the regions from `corruptible`, at most one per tensor, in the order of the regions.

    With a probability or a rate, there may be no faults.

    Forbidden results are drawn again, so the count is as requested. Raises ``UsageError`` if too few elements have an allowed
    result.
    """
    rng = np.random.default_rng(options.seed)
    population = Population(regions)
    if not (options.keep_finite or options.keep_sign):
        drawn = list(model.draw(population, rng, options.law))
    else:
        drawn = _draw_allowed(checkpoint, model, population, rng, options)
    if options.probability < 1:
        chances = [rng.random(len(fault)) < options.probability for fault in drawn]
        drawn = [
            part
            for fault, keep in zip(drawn, chances, strict=True)
            if (part := _fault_of_elements(fault, keep)) is not None
        ]
    return tuple(drawn)


def _draw_allowed(
    checkpoint: Checkpoint, model: FaultModel, population: Population, rng: np.random.Generator, options: DrawOptions
) -> list[Fault]:
    """Draw faults until enough of them have allowed results.

    A fault model with a rate draws only once, so that it corrupts fewer elements.
    """
    result: dict[str, Fault] = {}
    wanted = 1 if model.pattern.single_event else model.count
    for _ in range(MOST_ROUNDS):
        have = sum(_count(fault, model) for fault in result.values())
        if wanted is not None and have >= (1 if model.pattern.single_event else wanted):
            break
        rest = model if wanted is None or model.pattern.single_event else model.with_count(wanted - have)
        for fault in rest.draw(population, rng, options.law):
            allowed = _mask_of_allowed_elements(checkpoint, fault, options)
            if model.pattern.single_event and not allowed.all():
                continue
            if (part := _fault_of_elements(fault, allowed)) is not None:
                result[fault.site] = _merged_fault(result.get(fault.site), part)
        if wanted is None:
            break
    else:
        rules = [name for name in ("keep_finite", "keep_sign") if getattr(options, name)]
        raise UsageError(
            f"{model.text} found only {have} of {wanted} {model.value.counted_noun} with an allowed result; ask for "
            f"fewer, for other bits, or without {' and '.join('--' + rule.replace('_', '-') for rule in rules)}"
        )
    order = [region.site for region in population.regions]
    return [result[site] for site in order if site in result]


def _count(fault: Fault, model: FaultModel) -> int:
    """The number of flips or elements in a fault, whichever the fault model counts."""
    return len(fault.bit_positions()) if model.value.counted_noun == "flips" else len(fault)


def _mask_of_allowed_elements(checkpoint: Checkpoint, fault: Fault, options: DrawOptions) -> NDArray[np.bool_]:
    """Mask of a fault's elements whose new values are allowed."""
    tensor = checkpoint.tensor(fault.site)
    before = checkpoint.read(tensor, fault.elements)
    source = checkpoint.read(tensor, fault.operands) if fault.operation == "copy_from" else None
    after = fault.apply(before, source)
    result = np.ones(len(fault), np.bool_)
    if options.keep_finite and tensor.codec.kind == "float":
        result &= np.isfinite(tensor.codec.decode(after)) | ~np.isfinite(tensor.codec.decode(before))
    if options.keep_sign and tensor.codec.signed:
        result &= _signs(before, tensor.codec) == _signs(after, tensor.codec)
    return result


def _signs(words: Array, codec: Codec) -> Array:
    return np.asarray(words >> words.dtype.type(codec.bits - 1))


def _fault_of_elements(fault: Fault, keep: NDArray[np.bool_]) -> Fault | None:
    """The fault restricted to some of its elements; None if none is left."""
    if keep.all() and keep.size:
        return fault
    return replace(fault, elements=fault.elements[keep], operands=fault.operands[keep]) if keep.any() else None


def _merged_fault(first: Fault | None, second: Fault) -> Fault:
    """Two faults of one tensor merged into one; the first has priority where both change the same element."""
    if first is None:
        return second
    elements, places = np.unique(np.concatenate([first.elements, second.elements]), return_index=True)
    return replace(first, elements=elements, operands=np.concatenate([first.operands, second.operands])[places])


class _Bytes:
    """The byte ranges that belong to the tensors added so far; used to find tied weights."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[int, int]]] = {}  # sorted, without overlap

    def add(self, tensor: StoredTensor) -> bool:
        """Add a tensor's byte ranges and return True, unless an earlier tensor has some of these bytes."""
        ranges = [(b.file, b.offset, b.offset + tensor.stored_size(b)) for b in tensor.blocks]
        if any(self._is_taken(*part) for part in ranges):
            return False
        for file, begin, end in ranges:
            bisect.insort(self._taken.setdefault(file, []), (begin, end))
        return True

    def _is_taken(self, file: str, begin: int, end: int) -> bool:
        """Whether any byte of a range belongs to an earlier tensor."""
        taken = self._taken.get(file, [])
        place = bisect.bisect_left(taken, (begin, begin))
        return any(first < end and begin < last for first, last in taken[max(0, place - 1) : place + 1])

"""Injections that are applied one after the other, each to the result of the earlier ones, and collected as faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.stored_tensors import Ints, StoredTensor
from unsilent.faults.codecs import Codec
from unsilent.faults.record import Fault


@dataclass
class _Hits:
    """Injections into one tensor, in rounds that hit each element at most once.

    A repeated hit starts a new round unless the two can be merged.
    """

    operation: str
    held: str | None
    rounds: list[dict[int, float]] = field(default_factory=list)

    def add(self, element: int, operand: float) -> None:
        for hits in self.rounds:
            if element not in hits:
                hits[element] = operand
                return
            if self.operation == "xor" and self.held is None:
                hits[element] = int(hits[element]) ^ int(operand)
                return
        self.rounds.append({element: operand})


class SuccessiveInjections:
    """Collects successive injections into a checkpoint without writing to it.

    Attributes:
        repeated: Number of injections into an element that an earlier one had hit.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._before: dict[tuple[str, int], int] = {}
        self._words: dict[tuple[str, int], int] = {}
        self._hits: dict[str, _Hits] = {}
        self.repeated = 0

    def read(self, tensor: StoredTensor, elements: Ints) -> None:
        """Read elements in advance, which is faster than reading each when it is needed."""
        words = self._checkpoint.read(tensor, elements).tolist()
        self._before.update(((tensor.name, e), word) for e, word in zip(elements.tolist(), words, strict=True))

    def word(self, tensor: StoredTensor, element: int) -> int:
        """The bits of an element as an integer, after the earlier injections."""
        key = (tensor.name, element)
        if key not in self._before:
            self.read(tensor, np.array([element]))
        return self._words.get(key, self._before[key])

    def inject(
        self, tensor: StoredTensor, element: int, operation: str, operand: float, held: str | None = None
    ) -> None:
        """Corrupt one element.

        All injections into a tensor have the same ``operation`` and ``held``, see `Fault`.
        """
        word = np.array([self.word(tensor, element)], tensor.codec.word_dtype)
        self.repeated += (tensor.name, element) in self._words
        after = _fault(tensor, operation, held, {element: operand}).apply(word)
        self._words[tensor.name, element] = int(after[0])
        self._hits.setdefault(tensor.name, _Hits(operation, held)).add(element, operand)

    def faults(self) -> list[Fault]:
        """The faults of all rounds, in the order in which they must be applied to each tensor."""
        tensors = [tensor for name, tensor in self._checkpoint.tensors.items() if name in self._hits]
        faults = []
        for tensor in tensors:
            hits = self._hits[tensor.name]
            faults += [_fault(tensor, hits.operation, hits.held, dict(sorted(each.items()))) for each in hits.rounds]
        return faults

    def not_finite(self) -> int:
        """The number of elements that became NaN or infinite."""
        result = 0
        for (name, element), word in self._words.items():
            layout = self._checkpoint.tensors[name].codec
            result += is_finite(self._before[name, element], layout) and not is_finite(word, layout)
        return result


def is_finite(word: int, layout: Codec) -> bool:
    """Whether a word is neither NaN nor infinite."""
    return layout.kind == "int" or word & ((1 << (layout.bits - 1)) - 1) < layout.smallest_nonfinite_word


def shortest_form_mask(word: int, layout: Codec, rng: np.random.Generator) -> int:
    """The bits that change if a random digit of ``bin(abs(value))`` is flipped and the sign is kept.

    This is how hdf5_corrupter corrupts integers.
    """
    value = word - (1 << layout.bits) if layout.signed and word >> (layout.bits - 1) else word
    flipped = abs(value) ^ (1 << int(rng.integers(max(abs(value).bit_length(), 1))))
    return word ^ ((-flipped if value < 0 else flipped) & ((1 << layout.bits) - 1))


def _fault(tensor: StoredTensor, operation: str, held: str | None, hits: dict[int, float]) -> Fault:
    fault = Fault(tensor.site, tensor.dtype, tensor.shape, np.array(list(hits)), operation, np.zeros(0), held=held)
    dtype = np.float64 if operation == "scale" else fault.corrupted_codec.word_dtype
    object.__setattr__(fault, "operands", np.array(list(hits.values()), dtype))
    return fault

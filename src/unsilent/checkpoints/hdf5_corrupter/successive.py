"""Injections that are made one after the other, each in what earlier ones left, gathered into faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.stored_tensors import Ints, StoredTensor
from unsilent.faults.codecs import Codec
from unsilent.faults.record import Fault


@dataclass
class _Hits:
    """Operands by element of every round of hits on one tensor. A second hit of an element begins a new round."""

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
    """Injections into the elements of a checkpoint; nothing of it is written.

    Attributes:
        repeated: How many hit an element that an earlier one had hit.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._before: dict[tuple[str, int], int] = {}
        self._words: dict[tuple[str, int], int] = {}
        self._hits: dict[str, _Hits] = {}
        self.repeated = 0

    def read(self, tensor: StoredTensor, elements: Ints) -> None:
        """Read elements all at once, which is faster than one by one when they are needed."""
        words = self._checkpoint.read(tensor, elements).tolist()
        self._before.update(((tensor.name, e), word) for e, word in zip(elements.tolist(), words, strict=True))

    def word(self, tensor: StoredTensor, element: int) -> int:
        """The word of an element, as earlier injections left it."""
        key = (tensor.name, element)
        if key not in self._before:
            self.read(tensor, np.array([element]))
        return self._words.get(key, self._before[key])

    def inject(
        self, tensor: StoredTensor, element: int, operation: str, operand: float, held: str | None = None
    ) -> None:
        """Corrupt an element; operation and ``held``, as in a `Fault`, are the same in all of a tensor."""
        word = np.array([self.word(tensor, element)], tensor.codec.word_dtype)
        self.repeated += (tensor.name, element) in self._words
        after = _fault(tensor, operation, held, {element: operand}).apply(word)
        self._words[tensor.name, element] = int(after[0])
        self._hits.setdefault(tensor.name, _Hits(operation, held)).add(element, operand)

    def faults(self) -> list[Fault]:
        """Faults of all rounds, one a tensor where no element was hit twice in a way that cannot be merged."""
        tensors = [tensor for name, tensor in self._checkpoint.tensors.items() if name in self._hits]
        faults = []
        for tensor in tensors:
            hits = self._hits[tensor.name]
            faults += [_fault(tensor, hits.operation, hits.held, dict(sorted(each.items()))) for each in hits.rounds]
        return faults

    def not_finite(self) -> int:
        """How many elements are now NaN or infinite and were not before."""
        result = 0
        for (name, element), word in self._words.items():
            layout = self._checkpoint.tensors[name].codec
            result += is_finite(self._before[name, element], layout) and not is_finite(word, layout)
        return result


def is_finite(word: int, layout: Codec) -> bool:
    """Whether a word is neither NaN nor infinite."""
    return layout.kind == "int" or word & ((1 << (layout.bits - 1)) - 1) < layout.smallest_nonfinite_word


def shortest_form_mask(word: int, layout: Codec, rng: np.random.Generator) -> int:
    """The bits that change where one digit of ``bin(abs(value))`` is flipped and the sign stays, as in integers there."""
    value = word - (1 << layout.bits) if layout.signed and word >> (layout.bits - 1) else word
    flipped = abs(value) ^ (1 << int(rng.integers(max(abs(value).bit_length(), 1))))
    return word ^ ((-flipped if value < 0 else flipped) & ((1 << layout.bits) - 1))


def _fault(tensor: StoredTensor, operation: str, held: str | None, hits: dict[int, float]) -> Fault:
    fault = Fault(tensor.site, tensor.dtype, tensor.shape, np.array(list(hits)), operation, np.zeros(0), held=held)
    dtype = np.float64 if operation == "scale" else fault.corrupted_codec.word_dtype
    object.__setattr__(fault, "operands", np.array(list(hits.values()), dtype))
    return fault

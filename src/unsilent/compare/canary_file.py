"""A file of canaries, with inputs, answers and facts on the model.

A whole file is checked before any part of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import leaves_in, parts_of
from unsilent.compare.canary_choice import CHOICES
from unsilent.outcomes.classify import has_nonfinite_values
from unsilent.outcomes.tensors import leaves
from unsilent.protection.hashed_file import Arrays, FileKind, restored, stored
from unsilent.sites.modules import named_tensors
from unsilent.workloads.batch_samples import count_samples
from unsilent.workloads.saved_files import state_dict_misfit

_FILE = FileKind("canaries", "unsilent/canaries/", 2, "a file of canaries", "unsilent canaries make")
_TEXTS = ("workload", "choice", "judge", "weights", "environment")
_MOST_ELEMENTS = 2**58
"""Most elements of a tensor whose shape is in a file: torch counts bytes in 64 bits."""


@dataclass(frozen=True, eq=False)
class CanaryBatch:
    """Inputs from one batch, and the model's answer to them.

    Attributes:
        batch: The inputs.
        answer: The tensors of the answer.
        nesting: The answer, with each tensor replaced by its number, see `nesting_of`.
    """

    batch: Any
    answer: list[Tensor]
    nesting: Any


@dataclass(frozen=True, eq=False)
class Canaries:
    """Stored inputs with a model's answers, and facts on the model.

    Attributes:
        workload: Name of the workload that they were made from, as given.
        choice: How the inputs were chosen, one of `CHOICES`.
        judge: Text of the rule that decides whether an answer differs.
        shapes: Shapes of the model's parameters and buffers, by name.
        dtypes: Floating-point types of the parameters and buffers.
        weights: Fingerprint of the values of the parameters and buffers.
        environment: Text on the device, the torch version and other conditions that bits depend on.
        parts: Inputs and answers, one part for each batch that inputs were taken from.
    """

    workload: str
    choice: str
    judge: str
    shapes: dict[str, list[int]]
    dtypes: list[str]
    weights: str
    environment: str
    parts: tuple[CanaryBatch, ...]

    @property
    def count(self) -> int:
        """Number of inputs."""
        return sum(count_samples(part.batch) for part in self.parts)

    def save(self, path: str | Path) -> None:
        """Write a file that `load_canaries` reads.

        Raises ``UsageError`` if it cannot be written.
        """
        arrays: Arrays = {}
        parts = [
            {
                "batch": stored(part.batch, f"{n}/", arrays),
                "answer": stored(part.answer, f"{n}/", arrays),
                "nesting": part.nesting,
            }
            for n, part in enumerate(self.parts)
        ]
        text = {name: getattr(self, name) for name in (*_TEXTS, "shapes", "dtypes")}
        try:
            _FILE.write(path, {**text, "parts": parts}, arrays)
        except TypeError as error:
            raise UsageError(f"the inputs of {self.workload} cannot be written as JSON ({error})") from None

    def check_architecture(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for a model whose parameters and buffers have other names or shapes."""
        known = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        if misfit := state_dict_misfit(named_tensors(model), known, "this one"):
            raise UsageError(
                f"the canaries are of a model of another architecture, which {misfit}; make canaries of this model"
            )


def load_canaries(path: str | Path) -> Canaries:
    """Read canaries from a file that `Canaries.save` wrote.

    Raises ``UsageError`` for any other file. Nothing in it is executed.
    """
    with _FILE.reading(path) as (text, arrays):
        texts, shapes, dtypes = {name: text[name] for name in _TEXTS}, text["shapes"], text["dtypes"]
        _expect(all(isinstance(text, str) for text in (*texts.values(), *dtypes)), "a name in it is no text")
        _expect(texts["choice"] in CHOICES, "its choice of inputs is unknown")
        _expect(isinstance(dtypes, list), "its dtypes are no list")
        _expect(all(_is_shape(shape) for shape in shapes.values()), "it states a shape that no tensor has")
        parts = tuple(_read_part(part, arrays) for part in text["parts"])
        _expect(bool(parts), "it holds no canary")
        return Canaries(**texts, shapes=shapes, dtypes=dtypes, parts=parts)


def nesting_of(output: Any) -> Any:
    """The structure of an output, with each tensor replaced by its number.

    It consists of dicts, lists, numbers and None.
    """
    numbers = count()

    def numbered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): numbered(part) for key, part in value.items()}
        if (parts := parts_of(value)) is not None:
            return [numbered(part) for _, part in parts]
        places = [next(numbers) for _ in leaves(value)]
        return places[0] if len(places) == 1 else places or None

    return numbered(output)


def nested(nesting: Any, tensors: Sequence[Tensor]) -> Any:
    """The object with the structure that `nesting_of` returned, and these tensors in it."""
    if isinstance(nesting, dict):
        return {key: nested(part, tensors) for key, part in nesting.items()}
    if isinstance(nesting, list):
        return [nested(part, tensors) for part in nesting]
    return None if nesting is None else tensors[nesting]


def _read_part(known: Any, arrays: Arrays) -> CanaryBatch:
    """Inputs and answers from the JSON of one part of a file.

    Raises the errors that `FileKind.reading` explains.
    """
    batch, answer, nesting = restored(known["batch"], arrays), restored(known["answer"], arrays), known["nesting"]
    _expect(
        isinstance(answer, list) and all(isinstance(tensor, Tensor) for tensor in answer),
        "an answer is no list of tensors",
    )
    _expect(bool(answer) and count_samples(batch) > 0, "it holds no canary")
    _expect(not has_nonfinite_values(answer), "an answer has NaN or infinity")
    places = [place for _, place in leaves_in(nesting) if place is not None]
    is_whole = all(type(place) is int for place in places) and places == list(range(len(answer)))
    _expect(is_whole, "the nesting of an answer does not name each of its tensors once")
    return CanaryBatch(batch, answer, nesting)


def _is_shape(shape: Any) -> bool:
    """Whether a tensor of this shape can exist."""
    if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
        return False
    return bool(prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS)


def _expect(is_so: bool, problem: str) -> None:
    """Raise ``ValueError`` with the problem of a file unless the condition holds."""
    if not is_so:
        raise ValueError(problem)

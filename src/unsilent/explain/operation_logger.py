"""Logs every torch operation of a run: its name, the user's line, and hashes of its inputs and outputs.

It only reads. Names of modules are not used, as a user's loop may create any models: an operation is identified by its name, its
line and the step. Steps are counted by the updates of optimizers. A forked process (a data loader's worker) is not watched: its
data is noted when it arrives in this process.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsilent.engine.digests import digest, digest_all, digest_given, own_generator
from unsilent.engine.tape import flatten, words_of_storage
from unsilent.engine.tracing.tracer import computed_outputs
from unsilent.explain.operation_records import BACKWARD, DRAWS, OWN, PACKED, UPDATE
from unsilent.explain.optimizer_steps import OptimizerStepCounter
from unsilent.explain.user_frames import NOWHERE, UserFrameFinder
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.operands import gives_uninitialised, operands_of, operation_name, written_by
from unsilent.sites.training.step_operation_names import current_node, next_number

_BUFFER = 1 << 20
"""Size in bytes of the buffer for records that are not written yet."""
_NODES = 1 << 17
"""Maximum number of backward nodes that are remembered with the line that created them."""
_SPANS = "profiler"
"""Namespace of operations that mark spans of time and compute nothing."""
_FROM_OUTSIDE = "lift_fresh"
"""Last operation of torch.tensor, from_numpy and similar functions: a view of memory that no operation has computed."""


class _Kind(NamedTuple):
    """Properties of an operation that do not depend on its arguments."""

    number: int
    flags: int
    view: bool
    fresh: bool


class OperationLogger(DispatchMode):
    """Dispatch mode that logs the operations of one run.

    Args:
        path: File for the records.
        frames: Finder of the user's lines.
        steps: Counter of updates.
        zero_uninitialised: Whether uninitialised memory is set to zero.

    Attributes:
        names, places, origins: Names, places and origins that the numbers in the records stand for.
        count: Number of operations.
        uninitialised_allocations: Operations that returned uninitialised memory, and the user's lines that called them.
    """

    def __init__(
        self, path: Path, frames: UserFrameFinder, steps: OptimizerStepCounter, zero_uninitialised: bool = False
    ) -> None:
        super().__init__()
        self.names: list[str] = []
        self.places: list[tuple[str, int, str]] = [NOWHERE]
        self.origins: list[tuple[int, int] | None] = [None]
        self.count = 0
        self.uninitialised_allocations: dict[tuple[str, tuple[str, int, str]], None] = {}
        self._path, self._frames, self._steps, self._clear = path, frames, steps, zero_uninitialised
        self._kinds: dict[Any, _Kind] = {}
        self._name_numbers: dict[str, int] = {}
        self._place_numbers: dict[tuple[str, int, str], int] = {NOWHERE: 0}
        self._origin_numbers: dict[tuple[int, int] | None, int] = {None: 0}
        self._nodes: dict[int, tuple[int, int]] = {}
        self._held = bytearray()
        self._file = -1
        # The system itself is queried, as `os.getpid` may be pinned.
        self._owner, self._first = _process(), 0

    def _around(self, stack: ExitStack) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        stack.callback(os.close, self._file)
        self._first = next_number()

    def __exit__(self, *raised: Any) -> None:
        if _process() == self._owner:
            self._write()
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _process() != self._owner or func.namespace == _SPANS:
            return func(*args, **kwargs)
        known = self._kind(func)
        place = self._number(self._frames.current_user_line(), self.places, self._place_numbers)
        flags, origin = self._moment(known, place)
        if known.flags & DRAWS and own_generator((*args, *kwargs.values())):
            flags |= OWN
        arguments_hash = digest_given(args, kwargs)
        inputs = 0
        if not known.view and not known.fresh:  # neither reads anything
            read = operands_of(args, kwargs)
            if known.flags & DRAWS:  # memory that is about to be overwritten may hold anything
                written = {id(t) for t in written_by(func, args, kwargs)}
                read = [t for t in read if id(t) not in written]
            inputs = digest(read)
        result = func(*args, **kwargs)
        if known.fresh:
            if self._frames.is_called_by_user_code(sys._getframe()):
                self.uninitialised_allocations[self.names[known.number], self.places[place]] = None
            if self._clear:
                _zero(result)
        first, *rest = self._outputs(known, func, args, kwargs, result)
        if self.names[known.number] == _FROM_OUTSIDE:
            inputs = first
        record = (known.number, place, origin, self._steps.done, flags, arguments_hash, inputs, first, digest_all(rest))
        self._held += PACKED.pack(*record)
        self.count += 1
        if len(self._held) >= _BUFFER:
            self._write()
        return result

    def _outputs(self, known: _Kind, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> list[int]:
        """Hash of each output; 0 for the first if there is none."""
        if self.names[known.number] == _FROM_OUTSIDE:
            return [digest([result])]
        if known.view:
            return [0]
        return [digest([tensor]) for _, tensor in computed_outputs(func, args, kwargs, result)] or [0]

    def _moment(self, known: _Kind, place: int) -> tuple[int, int]:
        """Flags of an operation that is about to run, and the number of the forward operation it belongs to.

        The number is 0 unless it is a backward operation.
        """
        node = current_node()
        if node is not None and not torch.is_grad_enabled():
            return known.flags | BACKWARD, self._number(
                self._nodes.get(node._sequence_nr()), self.origins, self._origin_numbers
            )
        number = next_number() - 1
        if number >= self._first and number not in self._nodes:
            self._nodes[number] = known.number, place
            if len(self._nodes) > _NODES:
                for old in list(islice(self._nodes, _NODES // 2)):
                    del self._nodes[old]
        return known.flags | (UPDATE if self._steps.updating else 0), 0

    def _kind(self, func: Any) -> _Kind:
        if (known := self._kinds.get(func)) is None:
            name = operation_name(func)
            flags = DRAWS if torch.Tag.nondeterministic_seeded in func.tags else 0
            number = self._number(name, self.names, self._name_numbers)
            known = self._kinds[func] = _Kind(number, flags, bool(func.is_view), gives_uninitialised(func))
        return known

    @staticmethod
    def _number(value: Any, values: list[Any], numbers: dict[Any, int]) -> int:
        """The number of a value in a table; a new value is added."""
        if (count := numbers.get(value)) is None:
            count = numbers[value] = len(values)
            values.append(value)
        return count

    def _write(self) -> None:
        view = memoryview(self._held)
        while len(view):
            view = view[os.write(self._file, view) :]
        view.release()
        self._held = bytearray()


_process = os.getpid


def _zero(result: Any) -> None:
    for part in flatten(result):
        if isinstance(part, Tensor) and not part.is_meta and part.layout == torch.strided:
            words_of_storage(part).zero_()

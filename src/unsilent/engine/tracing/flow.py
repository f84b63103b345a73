"""A dispatch mode that records the values which each operation of a training step reads and writes.

Operations have the names that faults use. Values are identified by hashes. With hashes that do not depend on the order
of elements, two runs with the rows of a batch in different orders have equal records, until a sum rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from unsilent.basics.nested import tensors_in
from unsilent.engine.digests import digest_unordered
from unsilent.engine.tracing.tracer import ACCUMULATED, OutputKey, Tracer, computed_outputs
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.operands import draws_numbers, gives_uninitialised, is_view, operands_of, operation_name, written_by

_OVERWRITES = ("copy", "fill", "zero")
"""Operations that do not read the memory that they write."""
_TAKES = ("index", "index_select", "gather", "take", "embedding", "masked_select", "roll", "flip")
"""Operations that return elements of their operands."""


class RecordedOperation(NamedTuple):
    """An operation that ran, with the values it read and wrote.

    ``key``: the operation's name, or None if it computed nothing. For the other fields see `Operation` of replicas.
    """

    key: OutputKey | None
    kernel: str
    draws: bool
    moves: bool
    reads: tuple[int, ...]
    gives: tuple[int, ...]


class DataflowRecorder(DispatchMode):
    """Records the operations of one training step.

    Must be entered inside all other modes.

    Args:
        digest: Function that hashes a tensor, which may depend on the order of elements or not.

    Attributes:
        recorded_operations: The operations, in order.
    """

    def __init__(self, model: nn.Module, digest: Callable[[Tensor], int] = digest_unordered) -> None:
        super().__init__()
        self.recorded_operations: list[RecordedOperation] = []
        self._digest = digest
        self._names = Tracer(model, self._see, training=True)
        self._inner = ExitStack()

    def __enter__(self) -> DataflowRecorder:
        super().__enter__()
        self._inner.enter_context(self._names)  # entered last, so it is called first and sets the names
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inner.close()
        super().__exit__(*raised)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = draws_numbers(func, args, kwargs)
        kernel = operation_name(func)
        read = operands_of(args, kwargs)
        if draws or kernel in _OVERWRITES or "out" in kwargs:  # memory that will be overwritten may hold any content
            written = {id(t) for t in written_by(func, args, kwargs)}
            read = [t for t in read if id(t) not in written]
        reads = tuple(map(self._digest, read))
        result = func(*args, **kwargs)
        outputs: list[Tensor] = []
        view = is_view(func, args, kwargs, result)
        if view:
            outputs = list(tensors_in(result))
        elif not gives_uninitialised(func):
            outputs = [tensor for _, tensor in computed_outputs(func, args, kwargs, result)]
        self.recorded_operations.append(
            RecordedOperation(None, kernel, draws, view or kernel in _TAKES, reads, tuple(map(self._digest, outputs)))
        )
        return result

    def _see(self, key: OutputKey, tensor: Tensor) -> None:
        """Store the name of the operation that ran last.

        Called with each of its outputs. A gradient that was added to has no operation.
        """
        last = self.recorded_operations[-1] if self.recorded_operations else None
        if last is not None and last.key is None and not key.kernel.startswith(ACCUMULATED):
            self.recorded_operations[-1] = last._replace(key=key)

"""The first operation whose result differs between two fault-free runs.

Used only for the message about a workload that cannot be repeated. In both runs a dispatch mode hashes the raw bits of
the external inputs and of the results of every operation. Uninitialised memory is zeroed first, so that it is not taken
as a difference. If zeroing makes the runs equal, uninitialised memory was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.nested import tensors_in
from unsilent.engine.digests import digest, digest_given
from unsilent.engine.tape import flatten, words_of_storage
from unsilent.sites.calls import OperationNamer
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.operands import gives_uninitialised, operands_of, written_by

_LARGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """Hashes of one operation's Python arguments, its external input tensors and its results."""

    name: str
    python_arguments_hash: int
    external_inputs_hash: int
    results_hash: int
    random: bool


class OperationRecorder(DispatchMode):
    """Records the operations of one run in ``steps``.

    ``clear``: fill uninitialised memory with zeros.
    """

    def __init__(self, model: nn.Module, clear: bool) -> None:
        self._calls = OperationNamer(model)
        super().__init__(self._calls)
        self.steps: list[OperationRecord] = []
        self._clear = clear
        self._result_storages: dict[int, Any] = {}
        """Storages of results by address, kept alive so that no address is used twice."""

    def run(self, run: Callable[[], Any]) -> list[OperationRecord]:
        """Record the operations of one run."""
        with self:
            run()
        self._result_storages.clear()
        return self.steps

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, arguments_hash, outside = self._calls.next_name(func), digest_given(args, kwargs), 0
        if not func.is_view:  # a view reads nothing: the operation that uses it is named
            outside = digest([t for t in operands_of(args, kwargs) if _storage(t) not in self._result_storages])
        result = func(*args, **kwargs)
        results = [*flatten(result), *written_by(func, args, kwargs)]
        for tensor in (t for t in results if isinstance(t, Tensor) and not func.is_view):
            if (key := _storage(tensor)) is not None:
                self._result_storages[key] = tensor.untyped_storage()
        if gives_uninitialised(func):
            if self._clear:
                _zero(result)
            results = []
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.steps.append(
            OperationRecord(name, arguments_hash, outside, 0 if func.is_view else digest(results), random)
        )
        return result


def first_difference(run: Callable[[], Any], model: nn.Module) -> str | None:
    """Description of the first operation at which two runs differ, or None.

    The text continues a sentence after "first at".

    Args:
        run: One evaluation.
        model: The model that runs; operations are named after its modules.

    Returns:
        the description, or None if every operation gives the same bits twice, or if the run fails under the recorder.
            In that case the caller reports an error of its own.
    """
    try:
        result = _first_difference(run, model, clear=True)
        if result is None and (result := _first_difference(run, model, clear=False)) is not None:
            result = f"{result.split(', which ')[0]}, which reads memory that was never written"
    except Exception:
        return None
    return result


def _first_difference(run: Callable[[], Any], model: nn.Module, clear: bool) -> str | None:
    with torch.no_grad():
        first, second = OperationRecorder(model, clear).run(run), OperationRecorder(model, clear).run(run)
    before = ""
    for a, b in zip_longest(first, second):
        if a is None or b is None or a.name != b.name:
            names = [_quoted_step_name(step) for step in (a, b)]
            if not before:
                return f"the first operation, which is {names[0]} in one run and {names[1]} in the other"
            return f"{before}, which is followed by {names[0]} in one run and by {names[1]} in the other"
        if (why := _why(a, b)) is not None:
            return f"{_quoted_step_name(a)}, {why}"
        before = _quoted_step_name(a)
    return None


def _why(a: OperationRecord, b: OperationRecord) -> str | None:
    """Description of the difference between two executions of one operation, or None without a difference."""
    if a.python_arguments_hash != b.python_arguments_hash:
        return "which Python calls with other arguments in each run, maybe from a counter or a changing order"
    if a.external_inputs_hash != b.external_inputs_hash:
        return "which reads a tensor that differs. No recorded operation computed it: it may come from numpy or an earlier run"
    if a.results_hash == b.results_hash:
        return None
    if a.random:
        return "which draws random numbers"
    return "which returns different bits for the same inputs, maybe from a nondeterministic kernel"


def _quoted_step_name(step: OperationRecord | None) -> str:
    return "nothing" if step is None else repr(step.name[:_LARGEST_NAME])


def _storage(tensor: Tensor) -> int | None:
    """An identifier of the memory of a tensor, or None for a tensor without strided memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # for example sparse tensors
        return None


def _zero(result: Any) -> None:
    for part in tensors_in(result):
        if _storage(part) is not None and part.device.type != "meta":
            words_of_storage(part).zero_()

"""The operations after which the effect of a fault can be followed for each sample separately.

No later operation mixes samples. It is not enough that the samples of a trial do not reach an operation that mixes
samples: other samples may reach it under the same fault, and may then change the results of these samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.engine.sample_rows import RowPlan
from unsilent.engine.tape import Node, StorageWindow, Tape

if TYPE_CHECKING:
    from unsilent.engine.tape_replay import Replayer

_INDEXING = ("embedding", "_embedding_bag", "index", "gather", "scatter", "take", "one_hot")
_SOLVING = ("linalg", "cholesky", "_linalg")
"""Prefixes of the names of operations that raise for some indices, and of those that raise for some numbers."""


def separate_operations(replayer: Replayer) -> frozenset[int]:
    """The operations after which each sample can be evaluated separately, for any fault in a parameter."""
    tape, rows, places = replayer.tape, replayer.row_plan, replayer.in_place_plan
    changing = _changing_values(tape)
    wrong_outputs = {
        window.value
        for _, window in tape.output_tensors
        if not _one_row_a_sample(window, places) and window.value in changing
    }
    separate: set[int] = set()
    for node in reversed(tape.nodes):
        runs = bool(rows.sizes.get(node.index) or places.sizes.get(node.index))
        if not runs or _may_raise(node, changing):
            continue
        if all(
            (places.carries(v) or not _is_used(tape, v))
            and v not in wrong_outputs
            and all(reader in separate for reader in tape.values[v].readers if reader > node.index)
            for v in node.new_values
        ):
            separate.add(node.index)
    return frozenset(separate)


def _is_used(tape: Tape, value: int) -> bool:
    return bool(tape.values[value].readers) or tape.values[value].output


def _changing_values(tape: Tape) -> set[int]:
    """The values on a tape that are computed from memory other than the inputs."""
    inputs = {entry.window.value for entry in tape.inputs.values()}
    computed = set(tape.by_storage.values()) - inputs
    changing: set[int] = set()
    for node in tape.nodes:
        if any(w.value in computed or w.value in changing for w in node.reads):
            changing.update(node.new_values)
    return changing


def _one_row_a_sample(window: StorageWindow, plan: RowPlan) -> bool:
    """Whether a tensor of the output has one row per sample, each within that sample's part of the memory."""
    return plan.carries(window.value) and window.shape[:1] == (plan.batch,) and plan.lies_apart(window)


def _may_raise(node: Node, changing: set[int]) -> bool:
    """Whether a changed value of one sample may raise an error for the whole batch.

    For example an index out of range, or a matrix without inverse.
    """
    name = node.func.name().partition("::")[2] if node.func is not None else ""
    if name.startswith(_SOLVING):
        return any(w.value in changing for w in node.reads)
    whole_numbers = (w for w in node.reads if not w.dtype.is_floating_point)
    return name.startswith(_INDEXING) and any(w.value in changing for w in whole_numbers)

"""Inputs for an exported program, read from the user's file and checked against the program.

A program fixes the names, nesting and types of its inputs, and all sizes that were not exported as dynamic. Every batch
is checked against these before the first batch runs. Errors use the names in the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from unsilent.basics.errors import UsageError
from unsilent.sites.memory import dtype_name
from unsilent.workloads.program import Program, code_of
from unsilent.workloads.saved_files import read_saved

MOST = 2**40
"""Sizes of at least this value count as unlimited."""
FORMS = (
    "a tensor or a dict of inputs by name (one batch), or a list of batches: tensors, tuples of all inputs, or dicts"
)


class ProgramInputs:
    """The inputs that a program takes: their names, nesting, and example values from the export.

    Args:
        exported: The loaded program.
        program: The module that was made from the loaded program.
    """

    def __init__(self, exported: ExportedProgram, program: Program) -> None:
        code = code_of(program)
        self.names = list(inspect.signature(code.function).parameters)[1:]
        positional, by_name = code.in_spec.children()
        self._specs = dict(zip(self.names, [*positional.children(), *by_name.children()], strict=True))
        specs = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
        self._leaves = [values[s.arg.name] for s in specs]
        self._ranges = {str(symbol): result for symbol, result in exported.range_constraints.items()}
        starts = dict(zip(self.names, self._leaves, strict=False)) if len(self._leaves) == len(self.names) else {}
        self._fixed = {k: v for k, v in starts.items() if not isinstance(v, (Tensor, torch.SymInt, torch.SymFloat))}

    def read(self, path: Path) -> list[dict[str, Any]]:
        """The batches of a file, each a dict of inputs by name.

        Raises ``UsageError`` for a batch that does not fit the program.
        """
        whole = read_saved(path, "inputs")
        batches = list(whole) if isinstance(whole, (tuple, list)) else [whole]
        if not batches:
            raise UsageError(f"{path} holds no batch; expected {FORMS}")
        return [self._checked_batch(batch, f"{path}, batch {i}") for i, batch in enumerate(batches)]

    def _checked_batch(self, batch: Any, where: str) -> dict[str, Any]:
        inputs = {**self._fixed, **self._inputs_by_name(batch, where)}
        if missing := [name for name in self.names if name not in inputs]:
            raise UsageError(f"{where} has no {missing[0]!r}; {self._expected_inputs_text()}")
        leaves = iter(self._leaves)
        for name, spec in self._specs.items():
            try:
                values = _flat(inputs[name], spec)
            except LookupError:
                text = " ".join(str(spec).split())
                raise UsageError(f"{where}: {name!r} is not nested as at export; expected {text}") from None
            for value in values:
                self._check(value, next(leaves), f"{where}: {name!r}")
        return {name: inputs[name] for name in self.names}

    def _inputs_by_name(self, batch: Any, where: str) -> Mapping[str, Any]:
        """The inputs of a batch by name; constant inputs may be missing."""
        if isinstance(batch, Mapping):
            if extra := [key for key in batch if key not in self.names]:
                raise UsageError(
                    f"{where} has {extra[0]!r}, which the program does not take; {self._expected_inputs_text()}"
                )
            return batch
        values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        free = [name for name in self.names if name not in self._fixed]
        for names in (self.names, free):
            if len(values) == len(names):
                return dict(zip(names, values, strict=True))
        raise UsageError(
            f"{where}: the number of inputs is {len(values)}, expected {len(free)}; {self._expected_inputs_text()}"
        )

    def _expected_inputs_text(self) -> str:
        return f"the program takes {', '.join(self.names)}; expected {FORMS}"

    def _check(self, value: Any, exported: Any, name: str) -> None:
        """Raise ``UsageError`` unless a value fits the input that the program was exported with."""
        if not isinstance(exported, Tensor):
            free = isinstance(exported, (torch.SymInt, torch.SymFloat))
            if not isinstance(value, Tensor) and (free or value == exported):
                return
            raise UsageError(
                f"{name} is {value!r}, but the program was exported with the constant {exported!r}; give that value"
            )
        sizes = [self._size(size) for size in exported.shape]
        wanted = f"{dtype_name(exported.dtype)} [{', '.join(text for text, _ in sizes)}]"
        if not isinstance(value, Tensor):
            raise UsageError(f"{name} is {type(value).__name__}, the program takes {wanted}; expected {FORMS}")
        fits = len(sizes) == value.ndim
        fits = fits and all(n in allowed for n, (_, allowed) in zip(value.shape, sizes, strict=True))
        if not fits or value.dtype != exported.dtype:
            advice = "give inputs of that dtype"
            if not fits:
                advice = "give inputs of that shape and dtype, or export with dynamic_shapes"
            raise UsageError(
                f"{name} is {dtype_name(value.dtype)} {list(value.shape)}, the program takes {wanted}; {advice}"
            )

    def _size(self, size: Any) -> tuple[str, range]:
        """The allowed range of a dimension's size, as text and as a range.

        A size that depends on other sizes is only checked by the program.
        """
        if isinstance(size, int):
            return str(size), range(size, size + 1)
        value = self._ranges.get(str(size))
        low, high = (_whole(value.lower, 0), _whole(value.upper, MOST)) if value else (0, MOST)
        return f"{low} to {high}" if high < MOST else f"{low} or more" if low else "any", range(low, high + 1)


def _flat(value: Any, spec: Any) -> list[Any]:
    """The leaves of a nested input in the program's order.

    Raises ``LookupError`` if the nesting differs from the program's.
    """
    if spec.is_leaf():
        return [value]
    if spec.type in (tuple, list) and isinstance(value, (tuple, list)) and len(value) == spec.num_children:
        inner = list(value)
    elif spec.type is dict and isinstance(value, Mapping) and set(value) == set(spec.context):
        inner = [value[key] for key in spec.context]
    else:
        raise LookupError
    return [leaf for item, part in zip(inner, spec.children(), strict=True) for leaf in _flat(item, part)]


def _whole(bound: Any, default: int) -> int:
    """A bound of torch as an integer, or the default if the bound is infinite."""
    try:
        return int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return default

"""Nested tuples, lists and dicts, such as batches, outputs, arguments of operations and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[str, ...]
"""Path of keys and indices to a value."""


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container, each with its key or index; None for any other value."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def leaves_in(value: Any, path: Path = (), key_text: Callable[[Any], str] = str) -> Iterator[tuple[Path, Any]]:
    """All values in nested containers that are not containers themselves, in order, each with its path of keys."""
    parts = None if isinstance(value, Tensor) else parts_of(value)
    if parts is None:
        yield path, value
    else:
        for key, part in parts:
            yield from leaves_in(part, (*path, key_text(key)), key_text)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, part in parts_of(value) or ():
            yield from tensors_in(part)


def map_tensors(value: Any, change: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """A copy of nested containers with ``change`` applied to every tensor; mappings become plain dicts."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change, (*path, str(key))) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, change, (*path, str(i))) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value

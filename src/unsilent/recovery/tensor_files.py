"""Nested tensors and plain values in a safetensors file instead of a pickle, with bits and memory layout preserved.

Tensors are stored by the keys that lead to them; a JSON text in the header has the nesting and all other values.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsilent.basics.errors import UsageError, content_errors
from unsilent.basics.nested import map_tensors
from unsilent.basics.plainfiles import open_plain, parse_json
from unsilent.checkpoints.writing import write_safetensors

_NESTING = "nesting"
_PLAIN = (bool, int, float, str, type(None))


def host_copy(value: Any) -> Any:
    """A copy of nested containers with tensors copied to the host; for a distributed tensor, this rank's part."""
    return map_tensors(value, lambda _, tensor: getattr(tensor, "_local_tensor", tensor).detach().to("cpu", copy=True))


def write_tensors(path: Path, value: Any) -> None:
    """Atomically write nested host tensors and plain values to a file.

    Raises ``OSError``, or ``UsageError`` for other values.
    """
    tensors: dict[str, Tensor] = {}
    nesting = _taken_apart(value, "", tensors)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_safetensors(tensors, draft, {_NESTING: json.dumps(nesting)})
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_tensors(path: Path) -> Any:
    """Read the values in a file of `write_tensors`.

    Raises ``UsageError`` for any other file.
    """
    from safetensors import SafetensorError, safe_open

    open_plain(path).close()  # refuses pipes and devices
    problem, advice = f"{path} does not have the tensors of an incident", "give a file that a monitor wrote"
    kinds = (SafetensorError, OSError, KeyError, TypeError, RuntimeError)
    with content_errors(problem, advice, *kinds), safe_open(path, "pt") as file:
        nesting = parse_json((file.metadata() or {})[_NESTING].encode())
        return _put_together(nesting, file.get_tensor)


def _taken_apart(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The nested values as JSON; their tensors are added to ``tensors`` by name."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(f"{where} is no dense tensor, which a file of safetensors cannot hold")
        name = where or "tensor"
        while name in tensors:
            name += "'"
        tensors[name] = value.contiguous().clone()  # a file cannot store tensors that share memory
        return {"tensor": name, "strides": None if value.is_contiguous() else list(value.stride())}
    if isinstance(value, Mapping):
        pairs = []
        for key, part in value.items():
            part_taken_apart = _taken_apart(part, f"{where}/{key}".lstrip("/"), tensors)
            pairs.append([key if isinstance(key, _PLAIN) else str(key), part_taken_apart])
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        parts = [_taken_apart(part, f"{where}/{number}".lstrip("/"), tensors) for number, part in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if not isinstance(value, _PLAIN):
        raise UsageError(
            f"{where or 'it'} is a {type(value).__name__}; expected tensors, numbers, texts, lists and dicts"
        )
    return value


def _put_together(nesting: Any, tensor: Any) -> Any:
    if not isinstance(nesting, dict):
        return nesting
    if "tensor" in nesting:
        value = tensor(nesting["tensor"])
        if (strides := nesting["strides"]) is None:
            return value
        return _with_strides(value, strides)
    if "dict" in nesting:
        return {key: _put_together(part, tensor) for key, part in nesting["dict"]}
    parts = [_put_together(part, tensor) for part in nesting["tuple" if "tuple" in nesting else "list"]]
    return tuple(parts) if "tuple" in nesting else parts


def _with_strides(value: Tensor, strides: list[int]) -> Tensor:
    """The elements with other strides, limited to a few times the memory of the elements."""
    room = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    if not 0 < room <= 4 * max(1, value.numel()) or min(strides, default=0) < 0:
        raise ValueError("the memory layout of a tensor is none")
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)

"""Snapshots of a training: copies as plain data that are restored and compared bit for bit.

A snapshot is a nesting of dicts and lists of tensors and plain values. The state of optimizers is copied directly,
because loading a ``state_dict`` rounds state to the dtype of its parameter. Gradients are left out, because a step
begins without them.

Invariants: no tensor of a snapshot shares memory with the training; strides are kept, because kernels may sum in
another order if the memory layout differs.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.sites.memory import dtype_name
from unsilent.sites.modules import named_parameters, named_tensors, parameters_of

_PLAIN = (bool, int, float, str, type(None))


def snapshot_copy(value: Any, where: str) -> Any:
    """A copy of a value that shares no memory with it.

    Raises a ``UsageError`` that names ``where`` for anything but tensors and plain values.
    """
    if isinstance(value, Tensor):
        return _cloned_tensor(value)
    if isinstance(value, Mapping):
        return {key: snapshot_copy(item, f"{where}/{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot_copy(item, f"{where}/{i}") for i, item in enumerate(value))
    if type(value) in _PLAIN:
        return value
    raise UsageError(
        f"{where} is a {type(value).__name__}, which a snapshot cannot hold; expected tensors, numbers, texts, lists and dicts"
    )


def _cloned_tensor(tensor: Tensor) -> Tensor:
    """A copy of a tensor with the same strides.

    ``clone`` keeps the strides of dense tensors only.
    """
    result = tensor.detach().clone()
    if result.stride() == tensor.stride() or 0 in tensor.stride() or tensor.layout != torch.strided:
        return result
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(result)


def restored_value(current: Any, saved: Any, device: torch.device | None = None) -> Any:
    """The value of a snapshot for the place of ``current``.

    The result is ``current`` itself with the content of ``saved`` if it is a tensor that fits, else a copy of ``saved``.
    ``device``: device for tensors with dimensions (None: the device that they were on).
    """
    if isinstance(saved, Tensor):
        if isinstance(current, Tensor) and _alike(current, saved):
            current.data.copy_(saved)
            return current
        return saved.to(device, copy=True) if device is not None and saved.ndim else saved.clone()
    if isinstance(saved, Mapping):
        entries = current if isinstance(current, dict) else {}
        items = {key: restored_value(entries.get(key), item, device) for key, item in saved.items()}
        # Some schedulers hold a Counter.
        return type(current)(items) if isinstance(current, dict) else items
    if type(saved) in (list, tuple):
        destination = (
            current if isinstance(current, (list, tuple)) and len(current) == len(saved) else [None] * len(saved)
        )
        return type(saved)(restored_value(a, b, device) for a, b in zip(destination, saved, strict=True))
    return saved if type(saved) in _PLAIN else copy.deepcopy(saved)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers by name, including buffers that a state dict omits."""
    return named_tensors(model)


def put_into_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's tensors of the same names and shapes.

    A tensor with another memory layout gets the layout of the snapshot.
    """
    for name, tensor in model_tensors(model).items():
        source = saved[name]
        if _alike(tensor, source):
            tensor.data.copy_(source)
        else:
            tensor.data = source.to(tensor.device, copy=True)
        if tensor.requires_grad:
            tensor.grad = None


def optimizer_snapshot(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of an optimizer by parameter name, and the settings of its groups.

    ``names``: names of the parameters by ``id``.
    """
    stepped = stepped_parameters(optimizer, names)
    known = {id(p) for p in stepped.values()}
    stray = [key for key in optimizer.state if id(key) not in known]
    if stray:
        raise UsageError(
            f"{type(optimizer).__name__} keeps state for a {type(stray[0]).__name__}; expected state only for parameters of its "
            "groups"
        )
    return {
        "kind": type(optimizer).__name__,
        "state": {
            n: snapshot_copy(dict(optimizer.state[p]), f"optim:{n}") for n, p in stepped.items() if p in optimizer.state
        },
        "groups": [
            {k: snapshot_copy(v, f"optimizer group {i}/{k}") for k, v in group.items() if k != "params"}
            for i, group in enumerate(optimizer.param_groups)
        ],
    }


def put_into_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Restore an optimizer from a snapshot, in its existing tensors.

    State and settings that the snapshot lacks are removed.
    """
    stepped = stepped_parameters(optimizer, names)
    before = dict(optimizer.state)
    optimizer.state.clear()
    for name, entries in saved["state"].items():
        parameter = stepped[name]
        optimizer.state[parameter] = restored_value(dict(before.get(parameter, {})), entries, parameter.device)
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key in set(group) - {"params", *settings}:
            del group[key]
        group.update({key: restored_value(group.get(key), value) for key, value in settings.items()})


def stepped_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """The parameters it updates, by name; those outside of the model are numbered."""
    return {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters_of([optimizer]))}


def snapshot_misfit(saved: Mapping[str, Any], model: nn.Module) -> str | None:
    """A description of the first tensor that does not fit the model, or None if all fit."""
    tensors = model_tensors(model)
    for name, tensor in tensors.items():
        source = saved.get(name)
        if not isinstance(source, Tensor):
            return f"lacks {name!r}"
        if (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
            return f"has {name!r} as {_tensor_description(source)}, this model has {_tensor_description(tensor)}"
    surplus = next((name for name in saved if name not in tensors), None)
    return None if surplus is None else f"has {surplus!r}, which this model lacks"


def _tensor_description(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def first_snapshot_difference(a: Any, b: Any, where: str = "") -> str | None:
    """A description of the first place at which two nestings have different bits, or None.

    NaNs are compared by their bits.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{where} is {_tensor_description(a)} and {_tensor_description(b)}"
        count = int((_bytes(a) != _bytes(b)).any(-1).sum()) if a.numel() else 0
        return f"{where} ({_tensor_description(a)}) in {count} of {a.numel()} elements" if count else None
    if (parts := _parts(a, b)) is not None:
        result = (first_snapshot_difference(x, y, f"{where}/{key}" if where else key) for x, y, key in parts)
        return next(filter(None, result), None)
    if isinstance(a, float) and isinstance(b, float):
        same = struct.pack("d", a) == struct.pack("d", b)
    else:
        same = type(a) is type(b) and bool(a == b)
    return None if same else f"{where}: {_short_value_text(a)} and {_short_value_text(b)}"


def _parts(a: Any, b: Any) -> list[tuple[Any, Any, str]] | None:
    """The items of two containers in pairs, with their keys.

    None if they are not containers of the same kind.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [(a.get(key, _NOTHING), b.get(key, _NOTHING), str(key)) for key in dict.fromkeys([*a, *b])]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [(x, y, str(i)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    return None


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()
"""Placeholder if only the other container has a value."""


def _short_value_text(value: Any) -> str:
    return _tensor_description(value) if isinstance(value, Tensor) else f"{value!r:.60}"


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of every element of a tensor, uint8 [elements, bytes]."""
    dense = tensor.detach().cpu().contiguous()
    # In a contiguous tensor a dimension of size 1 may have any stride, and then torch returns no view of its bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).view(dense.numel(), -1)


def check_header(snapshot: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` unless the snapshot belongs to this training and has the same settings."""
    lacking = [key for key in KEYS if key not in snapshot]
    if lacking:
        raise UsageError(
            f"not a snapshot of a training: it lacks {lacking[0]!r}; expected the return value of snapshot(state)"
        )
    if snapshot["format"] != FORMAT:
        raise UsageError(
            f"snapshot has format {snapshot['format']!r}, expected {FORMAT}; take a new snapshot with this version"
        )
    if snapshot["workload"] != name:
        raise UsageError(
            f"snapshot is of training {snapshot['workload']!r}, expected a snapshot of {name!r}; {_REMEDY}"
        )
    if text := first_snapshot_difference(snapshot["settings"], dict(settings)):
        raise UsageError(
            f"snapshot of {name!r} was taken with other settings ({text} in this training); give the options of the snapshot"
        )


FORMAT = 1
"""Version of snapshots; raised whenever their format or the use of seeds changes."""
KEYS = (
    "format",
    "workload",
    "settings",
    "seeds",
    "step",
    "epoch",
    "cursor",
    "model",
    "optimizers",
    "schedulers",
    "scaler",
)
"""Keys of a snapshot."""
_REMEDY = "restore it with the training that it was taken from"


def check_fit(
    snapshot: Mapping[str, Any],
    name: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
) -> None:
    """Raise ``UsageError`` for the first part of a snapshot that does not fit.

    Called before anything is restored.
    """
    if text := snapshot_misfit(snapshot["model"], model):
        raise UsageError(f"snapshot of {name!r} {text}; {_REMEDY}")
    names = {id(p): n for n, p in named_parameters(model)}
    kinds = [saved["kind"] for saved in snapshot["optimizers"]]
    if kinds != [type(o).__name__ for o in optimizers]:
        here = ", ".join(type(o).__name__ for o in optimizers)
        raise UsageError(f"snapshot of {name!r} has optimizers {', '.join(kinds)}, this training has {here}; {_REMEDY}")
    for optimizer, saved in zip(optimizers, snapshot["optimizers"], strict=True):
        stepped = stepped_parameters(optimizer, names)
        if stray := [key for key in saved["state"] if key not in stepped]:
            raise UsageError(
                f"snapshot of {name!r} has optimizer state of {stray[0]!r}, which this training does not update; {_REMEDY}"
            )
        if len(saved["groups"]) != len(optimizer.param_groups):
            count = len(optimizer.param_groups)
            raise UsageError(
                f"snapshot of {name!r} has {len(saved['groups'])} parameter groups, this training has {count}; {_REMEDY}"
            )
    if len(snapshot["schedulers"]) != len(schedulers):
        count = len(schedulers)
        raise UsageError(
            f"snapshot of {name!r} has {len(snapshot['schedulers'])} schedulers, this training has {count}; {_REMEDY}"
        )

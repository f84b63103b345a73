"""Modules, parameters and buffers of a model by the names that are used in addresses, stores and reports.

They are PyTorch's names, with escapes for characters that cannot be stored or shown (see `unsilent.basics.printable`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.printable import escape_unprintable

T = TypeVar("T")
_PACKED = "_packed_params"
"""Attribute of quantised modules."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a DDP wrapper or a compiled module."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Modules like ``model.named_modules()``; raises ``UsageError`` if two names have the same text."""
    return _written(model.named_modules(remove_duplicate=remove_duplicate))


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters like ``model.named_parameters()``; raises ``UsageError`` if two names have the same text."""
    return _written(model.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Buffers like ``model.named_buffers()``; raises ``UsageError`` if two names have the same text."""
    return _written(model.named_buffers(remove_duplicate=remove_duplicate))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, by name; tied tensors appear once, under their first name."""
    return dict(named_parameters(model)) | dict(named_buffers(model))


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """All parameters that optimizers train, in their order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def unregistered(model: nn.Module) -> list[str]:
    """Names of places that hold numbers outside of parameters and buffers, such as packed quantised weights."""
    result = packed_weights(model)
    for name, module in named_modules(model):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.numel():
                result.append(f"{name}.{key}".lstrip("."))
    return sorted(set(result))


def packed_weights(model: nn.Module) -> list[str]:
    """Names of places that hold the weights of quantised modules in a packed form."""
    return [f"{name}.{_PACKED}".lstrip(".") for name, module in named_modules(model) if _PACKED in vars(module)]


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model. Raises ``UsageError`` with the module that cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # attributes of user code can raise any error
        raise UsageError(
            f"the model cannot be copied: {_attribute_that_cannot_be_copied(model)} "
            f"({kind_and_line(error)}); expected a model that copy.deepcopy copies"
        ) from None


def _attribute_that_cannot_be_copied(model: nn.Module) -> str:
    """Description of the first attribute that cannot be copied."""
    for name, module in named_modules(model):
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value if key != "_modules" else None)
            except Exception:
                return f"attribute {key!r} of {f'module {name!r}' if name else 'the model'} ({type(module).__name__})"
    return f"its class is {type(model).__name__}"


def mode_readers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that may compute differently in training mode, such as dropout."""
    result = {}
    for name, module in named_modules(model):
        kind: Any = type(module)
        if _reads_mode(kind):
            result[name] = module
    return result


def reject_training_mode(readers: Mapping[str, nn.Module]) -> None:
    """Raise ``UsageError`` if one of these modules (from `mode_readers`) is in training mode."""
    for name, module in readers.items():
        if module.training:
            module_text = f"module {name!r}" if name else "the model"
            raise UsageError(f"{module_text} ({type(module).__name__}) is in training mode; call model.eval() first")


@cache
def _reads_mode(kind: Any) -> bool:
    """Whether the code of a module class reads ``training``; always true for code compiled by torch.jit."""
    own_classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [value for each in own_classes for value in vars(each).values() if isinstance(value, FunctionType)]
    return issubclass(kind, torch.jit.ScriptModule) or any("training" in f.__code__.co_names for f in functions)


def _written(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    escaped: dict[str, str] = {}
    for name, thing in named:
        written = escape_unprintable(name)
        if "\\" in written and escaped.setdefault(written, name) != name:
            raise UsageError(f"two names in the model are both written as {written!r}; rename one of the two")
        yield written, thing

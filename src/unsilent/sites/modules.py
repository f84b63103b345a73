"""Modules, parameters and buffers of a model by the names that addresses, stores and reports have for them.

They are PyTorch's names, with escapes for characters that cannot be stored or shown (see `unsilent.printable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from unsilent.errors import UsageError
from unsilent.printable import escape_unprintable

T = TypeVar("T")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``model.named_modules()``; raises ``UsageError`` for two names that are written alike."""
    return _written(model.named_modules())


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``model.named_parameters()``; raises ``UsageError`` for two names that are written alike."""
    return _written(model.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """As ``model.named_buffers()``; raises ``UsageError`` for two names that are written alike."""
    return _written(model.named_buffers(remove_duplicate=remove_duplicate))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, tied ones once under their first name."""
    return dict(named_parameters(model)) | dict(named_buffers(model))


def _written(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    escaped: dict[str, str] = {}
    for name, thing in named:
        written = escape_unprintable(name)
        if "\\" in written and escaped.setdefault(written, name) != name:
            raise UsageError(f"two names in the model are both written as {written!r}; rename one of the two")
        yield written, thing

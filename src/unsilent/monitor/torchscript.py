"""Keeps hooks of the monitor out of `torch.jit.script`, which compiles the hooks of a module and cannot compile these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class HiddenFromScript:
    """Base class of hooks that `torch.jit.script` does not see."""


def script_without_hooks(plain: Any) -> Any:
    """`torch.jit.script`, with such hooks taken out of a module while it is compiled."""

    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **named: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return plain(
                obj, optimize, _frames_up + 1, *args, **named
            )  # names are looked up in the frame of the caller
        with _without_hooks(obj):
            return plain(obj, optimize, _frames_up + 1, *args, **named)

    return script


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Put the hooks back afterwards, in their order."""
    tables = [table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
    before = [(table, dict(table)) for table in tables if any(map(_is_hidden, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_hidden(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def _is_hidden(hook: object) -> bool:
    return isinstance(hook, HiddenFromScript)

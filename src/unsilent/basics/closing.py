"""Base classes of objects with a method ``close``, which also runs at the end of a ``with`` block."""

from __future__ import annotations

from typing import Any, Self


class Closing:
    """A context manager that is closed on exit."""

    def close(self) -> None:
        """Release all resources; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Hooked(Closing):
    """A context manager that removes its hooks."""

    _hooks: list[Any]

    def close(self) -> None:
        """Remove all hooks; closing twice does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

"""The base class of objects with a ``close`` method that are also context managers."""

from __future__ import annotations

from typing import Self


class Closing:
    """A context manager that is closed on exit."""

    def close(self) -> None:
        """Release all resources; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

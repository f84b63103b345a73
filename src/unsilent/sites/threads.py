"""Separation of training steps that run in several threads at once, although torch's hooks are process-wide."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class StepThread:
    """The thread of a training step, together with the threads that torch uses for its backward passes.

    Must be created in the step's thread. A thread of torch belongs to the step if ``mode`` is active in it, because torch passes
    the mode on to its threads.

    Args:
        mode: The dispatch mode of the step.
    """

    def __init__(self, mode: Any = None) -> None:
        self._ident, self._mode = threading.get_ident(), mode

    @property
    def is_current(self) -> bool:
        """Whether the current thread is the step's own thread."""
        return threading.get_ident() == self._ident

    def includes(self, is_of_step: bool = False) -> bool:
        """Whether the current thread works for the step; ``is_of_step``: whether it uses the step's model or data."""
        if self.is_current:
            return True
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return False  # another thread of the program runs its own steps
        return is_of_step or any(mode is self._mode for mode in _get_current_dispatch_mode_stack())


class SharedContext(AbstractContextManager[None]):
    """A process-wide context: entered by the first of several users, exited by the last.

    If each user entered and left it separately, the last one to leave would restore the setting of another user.

    Args:
        make: Function that enters the context on the given stack.
    """

    def __init__(self, make: Callable[[ExitStack], object]) -> None:
        self._make, self._lock, self._users, self._stack = make, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                with ExitStack() as stack:
                    self._make(stack)
                    self._stack = stack.pop_all()
            self._users += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._stack.close()

"""Waits for the import of torch in a program.

Importing torch before the program does so would change the program: it may set variables, such as ``OMP_NUM_THREADS``, that torch
and its libraries read when they are loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterTorchImport(MetaPathFinder):
    """Calls a function when torch has been imported; at once where it has been already."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def install(self) -> None:
        """Wait for the import."""
        if "torch" in sys.modules:
            self._function()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                self._function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

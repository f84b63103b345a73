"""Waits until a program imports torch.

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
    """Calls a function once torch has been imported, or immediately if it already is."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def install(self) -> None:
        """Start to wait for the import."""
        if "torch" in sys.modules:
            self._function()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop waiting for the import."""
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

"""Modules that are imported when something of them is used first, so that ``--help`` does not wait for numpy."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of its name; give type checkers the real one: ``if TYPE_CHECKING: import numpy as np``."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value

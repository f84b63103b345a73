"""Modules and functions that are imported when they are first used, so that ``--help`` does not wait for numpy."""

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


def load_named(name: str) -> Any:
    """What ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class LazyFunction:
    """Stands for a function, ``module:name``, whose module is imported when it is called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.__module__ = name.partition(":")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load_named(self.name)(*args, **kwargs)

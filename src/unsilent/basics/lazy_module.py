"""Modules and functions that are imported on first use, so that ``--help`` does not wait for numpy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from unsilent.basics.errors import missing_name_error


class LazyModule(ModuleType):
    """A placeholder for a module that is imported on first use.

    Give type checkers the real one: ``if TYPE_CHECKING: import numpy as np``.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def load_named(name: str) -> Any:
    """Import the object named ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_names(package: str, modules: Mapping[str, str], known: Iterable[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names are imported from ``modules`` on first use."""

    def __getattr__(
        name: str,
    ) -> Any:  # `error_origin` blames who asked for the name, and knows this function by its name
        if name not in modules:
            raise missing_name_error(package, name, known)
        return getattr(importlib.import_module(modules[name]), name)

    return __getattr__


class LazyFunction:
    """A placeholder for a function ``module:name`` whose module is imported on the first call.

    Args:
        options: A dataclass that the function takes in place of keyword arguments, as its last argument.
    """

    def __init__(self, name: str, options: Callable[..., Any] | None = None) -> None:
        self.name, self.options = name, options
        self.__module__ = name.partition(":")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = load_named(self.name)
        return function(*args, **kwargs) if self.options is None else function(*args, self.options(**kwargs))

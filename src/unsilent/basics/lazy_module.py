"""Modules and functions that are imported on first use, so that ``--help`` does not wait for numpy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from unsilent.basics.errors import missing_name_error


class LazyModule(ModuleType):
    """A placeholder for a module that is imported on first use.

    Type checkers need the real module: ``if TYPE_CHECKING: import numpy as np``.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def load_named(name: str) -> Any:
    """Import the object named ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], present: Sequence[str] = ()
) -> tuple[Callable[[str], Any], list[str]]:
    """The ``__getattr__`` of a package whose modules are imported when one of their names is first used, and its ``__all__``.

    Args:
        package: Name of the package.
        names: Public names, by the module that defines them.
        present: Further public names, which the package imports itself.
    """
    module_of = {name: module for module, of_module in names.items() for name in of_module}
    public = sorted((*module_of, *present))

    # `error_origin` recognises this function by its name and assigns the error to the caller.
    def __getattr__(name: str) -> Any:
        if name not in module_of:
            raise missing_name_error(package, name, public)
        return getattr(importlib.import_module(module_of[name]), name)

    return __getattr__, public


class LazyFunction:
    """A placeholder for a function ``module:name`` whose module is imported on the first call.

    Args:
        options: Dataclass that the function takes as its last argument instead of keyword arguments.
    """

    def __init__(self, name: str, options: Callable[..., Any] | None = None) -> None:
        self.name, self.options = name, options
        self.__module__ = name.partition(":")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = load_named(self.name)
        return function(*args, **kwargs) if self.options is None else function(*args, self.options(**kwargs))

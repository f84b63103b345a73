"""Objects of a test whose attributes no variable of a loop leads to: what a test counts is no part of the loop."""

import sys
from typing import Any
from weakref import WeakKeyDictionary

ATTRIBUTES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Unreachable:
    """Its attributes are kept in this module, to which its methods get by a name: modules are not searched."""

    __slots__ = ("__weakref__",)

    def __getattr__(self, name: str) -> Any:
        try:
            return sys.modules[__name__].ATTRIBUTES[self][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        sys.modules[__name__].ATTRIBUTES.setdefault(self, {})[name] = value

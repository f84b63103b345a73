"""Whether a deployed model still answers as the original did: disagreement, layers, attacks, canaries.

A satellite: nothing below the command line imports it. The package is also the function `unsilent.compare`: both have one name,
and importing a module of the folder puts the package in the function's place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unsilent.lazy_module import load_named


class _CallablePackage(ModuleType):
    """The package, with the call, signature and docstring of `unsilent.compare.comparing.compare`."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        function: Callable[..., Any] = load_named("unsilent.compare.comparing:compare")
        return function

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

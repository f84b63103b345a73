"""Whether a deployed model still answers as the original did: disagreement, layers, attacks, canaries.

A satellite: nothing below the command line imports it. The package is also the function `unsilent.compare`: both have one name,
and importing a module of the folder puts the package in the function's place.
"""

from __future__ import annotations

import sys
from types import ModuleType

from unsilent.lazy_module import LazyFunction


class _CallablePackage(ModuleType):
    """The package, which can be called."""

    __call__ = staticmethod(LazyFunction("unsilent.compare.comparing:compare"))


sys.modules[__name__].__class__ = _CallablePackage

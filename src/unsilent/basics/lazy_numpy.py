"""numpy, imported on first use: ``from unsilent.basics.lazy_numpy import np``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np, npt = LazyModule("numpy"), LazyModule("numpy.typing")

__all__ = ["np", "npt"]

"""The base of our dispatch modes."""

from __future__ import annotations

import sys
from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that is hidden from torch's compiler only once a compiler is there.

    Torch hides every mode when its class is made, which imports the whole compiler: a second of CPU time and 70 MiB in each
    worker, for models that are hardly ever compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        cls = type(self)
        if "torch._dynamo" in sys.modules and "_hidden" not in vars(cls):
            cls._hidden = True  # type: ignore[attr-defined]
            hide = torch._disable_dynamo  # type: ignore[attr-defined]
            cls.__torch_dispatch__ = hide(cls.__torch_dispatch__, recursive=True)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

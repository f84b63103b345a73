"""Observation of a generating model's key/value cache before each call that receives one.

Known forms: objects with ``layers[i].keys`` and ``.values`` (transformers 5), with ``key_cache`` and ``value_cache``
(transformers 4), and tuples ``past_key_values[i][0]`` and ``[1]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from unsilent.faults.naming import CACHED
from unsilent.sites.corrupting import corruptible

ARGUMENT = "past_key_values"


def kv_cache_entries(cache: Any) -> dict[str, Tensor]:
    """The non-empty tensors of a cache by name, ``LAYER/key`` and ``LAYER/value``."""
    pairs: Iterable[tuple[Any, Any]]
    if hasattr(cache, "layers"):
        pairs = ((getattr(part, "keys", None), getattr(part, "values", None)) for part in cache.layers)
    elif hasattr(cache, "key_cache"):
        pairs = zip(cache.key_cache, cache.value_cache, strict=True)
    elif isinstance(cache, (tuple, list)):
        pairs = ((part[0], part[1]) for part in cache if isinstance(part, (tuple, list)) and len(part) > 1)
    else:
        pairs = ()
    return {
        f"{i}/{name}": tensor
        for i, pair in enumerate(pairs)
        for name, tensor in zip(CACHED, pair, strict=True)
        if isinstance(tensor, Tensor) and corruptible(tensor)
    }


def _takes_cache(module: nn.Module) -> bool:
    try:
        return ARGUMENT in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a compiled forward has no signature
        return False


class KvCacheObserver:
    """Context manager that reports the key/value cache before each outermost module call that receives one.

    Args:
        model: Model whose modules with a parameter ``past_key_values`` are observed.
        on_cache: Function that is called with the number of the call, counted from 0, and the cache.
    """

    def __init__(self, model: nn.Module, on_cache: Callable[[int, Any], None]) -> None:
        self._modules = [m for m in model.modules() if _takes_cache(m)]
        self._tell = on_cache
        self._depth = 0
        self._count = 0
        self._handles: list[Any] = []

    def __enter__(self) -> KvCacheObserver:
        self._depth = self._count = 0
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._depth += 1
        cache = kwargs.get(ARGUMENT)
        if self._depth == 1 and cache is not None:
            number, self._count = self._count, self._count + 1
            self._tell(number, cache)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

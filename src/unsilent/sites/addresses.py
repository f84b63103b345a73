"""Addresses of sites: ``param:layer1.0.conv1.weight``, globs that select many, ``[3,5]`` for elements.

Only the ``param:`` kind exists so far; a text without a kind is taken as one. An index in brackets is numpy's basic
indexing (integers, slices, ``...``); a single integer on a tensor of several dimensions is a flat C-order index.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import UsageError, unknown

KINDS = ("param",)
_ADDRESS = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<glob>[^\[\]:]+)(?:\[(?P<index>[^\[\]]*)\])?$")
_INDEX = re.compile(r"-?\d+|\.\.\.|(-?\d+)?:(-?\d+)?(:-?\d+)?")


@dataclass(frozen=True)
class Address:
    """One parsed address: ``kind``, ``glob`` over names, optional ``index`` text."""

    kind: str
    glob: str
    index: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address; raises ``UsageError`` for an unknown kind or an unreadable text."""
        match = _ADDRESS.match(text.strip())
        if match is None:
            raise UsageError(f"cannot read address {text!r}; expected param:NAME-OR-GLOB or param:NAME[index]")
        kind = match["kind"] or "param"
        if kind not in KINDS:
            raise unknown("kind of site", kind, KINDS)
        return cls(kind, match["glob"], match["index"])

    def matching(self, names: Iterable[str]) -> list[str]:
        """The names this address selects, in their own order; raises ``UsageError`` when there are none."""
        known = list(names)
        found = [self.glob] if self.glob in known else [n for n in known if fnmatch.fnmatchcase(n, self.glob)]
        if not found:
            if any(n.startswith(f"{self.glob}.") for n in known):
                raise UsageError(
                    f"{self.glob!r} is a module, not a parameter; select its parameters with '{self.glob}.*'"
                )
            raise unknown("parameter" if not _is_glob(self.glob) else "glob (it matches nothing)", self.glob, known)
        return found


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def flat_elements(index: str, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Flat C-order indices that ``[index]`` selects in a tensor of ``shape``; raises ``UsageError`` outside of it."""
    parts = [p.strip() for p in index.split(",")] if index.strip() else []
    if any(not _INDEX.fullmatch(p) for p in parts):
        raise UsageError(
            f"cannot read index [{index}] of {name!r}; expected integers, slices or ..., like [3,5] or [:,0]"
        )
    size = int(np.prod(shape, dtype=np.int64))
    flat = np.arange(size, dtype=np.int64)
    try:
        if len(parts) == 1 and len(shape) != 1 and re.fullmatch(r"-?\d+", parts[0]):
            return np.atleast_1d(flat[int(parts[0])])
        chosen = flat.reshape(shape)[tuple(_part(p) for p in parts)]
    except IndexError:
        raise UsageError(f"index [{index}] is outside {name!r} of shape {list(shape)}; count from 0") from None
    if not chosen.size:
        raise UsageError(f"index [{index}] selects no element of {name!r} of shape {list(shape)}")
    return np.unique(chosen)


def _part(text: str) -> int | slice | EllipsisType:
    if text == "...":
        return ...
    if ":" not in text:
        return int(text)
    return slice(*(int(p) if p else None for p in text.split(":")))

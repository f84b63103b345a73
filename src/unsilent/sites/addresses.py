"""Addresses of sites: ``param:layer1.0.conv1.weight``, globs for several sites, ``[3,5]`` for elements.

Kinds: ``param`` (the default), ``op:MODULE#OP.k/PHASE/OPERAND``, ``input:NAME``, ``kv:LAYER/key``; see
`unsilent.faults.naming`. An index in brackets is numpy's basic indexing (integers, slices, ``...``); a single integer on a
tensor of several dimensions is a flat C-order index.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.printable import escape_unprintable
from unsilent.faults.naming import KINDS, OPERANDS, PHASES, SiteName, is_cast

_ADDRESS = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<glob>[^\[\]:]+)(?:\[(?P<index>[^\[\]]*)\])?$")
_EXAMPLES = {
    "param": "param:* or param:layer1.0.conv1.weight",
    "op": "op:* or op:layer1.*",
    "input": "input:* or input:0",
    "kv": "kv:* or kv:0/key",
}
_INDEX = re.compile(r"-?\d{1,18}|\.\.\.|(-?\d{1,18})?:(-?\d{1,18})?(:-?\d{1,18})?", re.ASCII)


@dataclass(frozen=True)
class Address:
    """A parsed address: ``kind``, ``glob`` over names, optional ``index`` text."""

    kind: str
    glob: str
    index: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address; raises ``UsageError`` for an unknown kind or an unreadable text."""
        text = escape_unprintable(text)
        match = _ADDRESS.match(text.strip())
        if match is None and text.strip().rstrip(":") in KINDS:
            raise UsageError(f"address {text!r} has a kind but no name; expected {_EXAMPLES[text.strip().rstrip(':')]}")
        if match is None:
            raise UsageError(
                f"cannot read address {text!r}; expected KIND:NAME-OR-GLOB or KIND:NAME[index], like param:*"
            )
        kind = match["kind"] or "param"
        if kind not in KINDS:
            raise unknown_name_error("kind of site", kind, KINDS)
        return cls(kind, match["glob"], match["index"])

    def matching(self, names: Iterable[str]) -> list[str]:
        """The names that this address selects, in their given order; raises ``UsageError`` if there are none."""
        known = list(names)
        result = [self.glob] if self.glob in known else [n for n in known if fnmatch.fnmatchcase(n, self.glob)]
        if not result:
            if any(n.startswith(f"{self.glob}.") for n in known):
                raise UsageError(
                    f"{self.glob!r} is a module, not a parameter; select its parameters with '{self.glob}.*'"
                )
            raise unknown_name_error(_noun(self), self.glob, known)
        return result

    def operations(self, known: Sequence[SiteName], non_sites: Collection[str] = ()) -> list[SiteName]:
        """The operation sites among ``known`` that this address selects.

        A glob is compared with ``MODULE#OP.k`` and ``MODULE.OP.k``, so that ``op:layer1.*`` selects all operations in ``layer1``.
        A module alone selects its only operation, not counting casts. Raises ``UsageError`` if it has none or several.
        """
        stem, phase, operand = _operand(self.glob)
        every = known
        if not any(fnmatch.fnmatchcase(s.phase, phase) for s in known) and not _is_glob(phase):
            raise UsageError(f"phase {phase!r} exists only in a training step; the only phase here is fwd")
        known = [s for s in known if fnmatch.fnmatchcase(s.operand, operand) and fnmatch.fnmatchcase(s.phase, phase)]
        if _is_glob(stem):
            result = [s for s in known if _fits(s.name, stem)]
        elif "#" in stem:
            result = [s for s in known if s.name == stem]
        else:
            result = [s for s in known if s.layer == stem and not is_cast(s.name)]
            if len(names := list(dict.fromkeys(s.name for s in result))) > 1:
                raise UsageError(
                    f"{len(names)} operations of {stem!r} can be corrupted; name one ({_first_operation_names(names)}) "
                    f"or all: 'op:{stem}#*'"
                )
        if not result:
            raise self._no_operation(stem, operand, every, non_sites)
        return result

    def _no_operation(
        self, stem: str, operand: str, known: Sequence[SiteName], non_sites: Collection[str]
    ) -> UsageError:
        there = [s for s in known if (_fits(s.name, stem) if _is_glob(stem) else stem in (s.name, s.layer))]
        if there and operand != OPERANDS[0]:
            operation = repr(there[0].name) if len({s.name for s in there}) == 1 else f"no operation of {stem!r}"
            has = "has no" if len({s.name for s in there}) == 1 else "has a"
            can = [o for o in OPERANDS if any(s.operand == o for s in there)]
            return UsageError(
                f"{operation} {has} {operand} tensor operand that can be corrupted, only {', '.join(can)}"
            )
        names = list(dict.fromkeys(s.name for s in known if fnmatch.fnmatchcase(s.operand, operand)))
        module, mark, _ = stem.rpartition("#")
        module = module if mark else stem
        near = [n for n in names if n.rpartition("#")[0] == module]
        if stem in non_sites or any(not mark and name.rpartition("#")[0] == stem for name in non_sites):
            return UsageError(
                f"{stem!r} cannot be corrupted at {operand!r}: it is a view, is absent, or has a dtype without a codec; "
                f"choose one of {_first_operation_names(near or names) or 'op:*'}"
            )
        if not _is_glob(stem) and not mark and any(n.startswith(f"{stem}.") for n in names):
            return UsageError(f"no operation runs in {stem!r} itself; select those of its children with 'op:{stem}.*'")
        if near:
            return unknown_name_error(f"operation of {module!r}", stem, near)
        if _is_glob(stem):
            return unknown_name_error("glob (it matches no operation)", stem, names)
        return unknown_name_error("module with operations", module, {n.rpartition("#")[0] for n in names})


def component_hint(error: UsageError, addresses: Iterable[str], components: Mapping[str, Sequence[str]]) -> UsageError:
    """A more helpful error if an address that selects nothing is the name of a component."""
    for text in addresses:
        kind, colon, rest = text.strip().partition(":")
        kind, rest = (kind, rest) if colon else ("param", kind)
        name = rest.partition("/")[0].removesuffix(".*")
        is_unknown = str(error).startswith("unknown ") and f"'{name}" in str(error)
        if kind in ("param", "op") and name in components and is_unknown:
            globs = [glob.removeprefix("param:") for glob in components[name]]
            instead = " ".join(f"--at '{kind}:{glob}'" for glob in globs if kind == "param" or _is_glob(glob))
            return UsageError(
                f"{name!r} is a component, which is not an address; address what it contains, like {instead or 'op:*'}"
            )
    return error


def _fits(name: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name.replace("#", "."), glob)


def _first_operation_names(names: Sequence[str]) -> str:
    return ", ".join(f"op:{n}" for n in names[:6]) + (", …" if len(names) > 6 else "")


def _operand(text: str) -> tuple[str, str, str]:
    """Split ``MODULE#OP.k/PHASE/OPERAND`` into its three parts; phase and operand may both be left out."""
    head, mark, rest = text.rpartition("#")
    stem, *suffix = rest.split("/")
    if not suffix:
        return text, PHASES[0], OPERANDS[0]
    if len(suffix) != 2:
        raise UsageError(f"cannot read address 'op:{text}'; expected op:MODULE#OP.k/PHASE/OPERAND, like /fwd/out")
    for noun, part, known in (("phase", suffix[0], PHASES), ("operand", suffix[1], OPERANDS)):
        if noun == "operand" and re.fullmatch(r"out\.[1-9*]\d?", part):
            continue
        if not fnmatch.filter(known, part):
            raise unknown_name_error(f"{noun} of an operation", part, known)
    return head + mark + stem, suffix[0], suffix[1]


def _noun(address: Address) -> str:
    if _is_glob(address.glob):
        return "glob (it matches nothing)"
    return {"param": "parameter", "input": "input", "kv": "entry of the key/value cache"}[address.kind]


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def flat_elements(index: str, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Flat C-order indices that ``[index]`` selects in a tensor of ``shape``; raises ``UsageError`` if out of range."""
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

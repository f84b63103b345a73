"""Budgets and TOML files of memory blocks: what they say, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.options import MOST_BYTES
from unsilent.plainfiles import parse_toml, read_plain
from unsilent.sizes import parse_bytes
from unsilent.studies.plan.assignment import Block, Memory

_PERCENT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")
_LIMITS = ("max-latency", "max-energy")
_KEYS = ("name", "capacity", "residual", "latency", "energy")
MOST_BLOCKS = 32


def parse_capacity(text: str, total: int, name: str) -> int:
    """Bits of a capacity: a share of ``total`` bits (``5%``) or a size (``64kB``); errors call it ``name``."""
    match = _PERCENT.fullmatch(text)
    if match:
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(f"{name} is {text!r}; expected a share above 0% and up to 100%, like 5%")
        return math.floor(share * total + 1e-6)
    try:
        size = parse_bytes(text)
    except UsageError:
        size = 0
    if size < 1:
        raise UsageError(f"{name} is {text!r}; expected a share of the parameters like 5%, or a size like 64kB")
    return min(8 * size, total)


def read_memory(path: Path, total: int) -> Memory:
    """The memory that a file describes, for parameters of ``total`` bits; raises ``UsageError``."""
    record = parse_toml(read_plain(path, MOST_BYTES), str(path))
    blocks = record.get("block")
    unknown = sorted(set(record) - {"block", *_LIMITS})
    if unknown:
        raise UsageError(f"{path} has the key {unknown[0]!r}; expected [[block]] tables, and {' or '.join(_LIMITS)}")
    if not isinstance(blocks, list) or not 1 <= len(blocks) <= MOST_BLOCKS:
        raise UsageError(
            f"{path} has no list of blocks; expected 1 to {MOST_BLOCKS} [[block]] tables, each with a name"
        )
    read = tuple(_read_block(one, f"{path}: block {n}", total) for n, one in enumerate(blocks, 1))
    names = [block.name for block in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} has two blocks of the name {twice!r}; give each block a name of its own")
    latency, energy = (_number(record, key, str(path), None) for key in _LIMITS)
    return Memory(read, latency, energy)


def _read_block(values: Any, where: str, total: int) -> Block:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str) or not values["name"]:
        raise UsageError(f'{where} has no name; expected name = "ecc" and capacity, residual, latency, energy')
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        raise UsageError(f"{where} has the key {unknown[0]!r}; expected {', '.join(_KEYS)}")
    capacity = values.get("capacity")
    if capacity is not None:
        capacity = parse_capacity(str(capacity), total, f"{where}: capacity")
    residual = _number(values, "residual", where, 1.0)
    if residual is None or residual > 1:
        raise UsageError(f"{where}: residual is {residual}; expected the share of faults that remain, from 0 to 1")
    return Block(
        values["name"], capacity, residual, _number(values, "latency", where, 0.0) or 0.0,
        _number(values, "energy", where, 0.0) or 0.0,
    )  # fmt: skip


def _number(values: Mapping[str, Any], key: str, where: str, default: float | None) -> float | None:
    """A number of 0 or more."""
    value = values.get(key, default)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf):
        return value
    raise UsageError(f"{where}: {key} is {value!r}; expected a number of 0 or more")

"""Values as strict JSON: what any program can read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def as_json_values(value: Any) -> Any:
    """A value as dicts, lists, text, numbers, booleans and None alone; a dataclass becomes its fields."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json_values(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json_values(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [as_json_values(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json_values(item) for item in value), key=str)
    item = getattr(value, "item", None)  # numpy scalars and one-element tensors
    return as_json_values(item()) if callable(item) and getattr(value, "shape", None) == () else str(value)

"""Conversion to strict JSON values that any program can read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def as_json_values(value: Any) -> Any:
    """Convert a value to dicts, lists, text, numbers, booleans and None; a record becomes its fields."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json_values(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return as_json_values(fields_by_name(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json_values(value._asdict())
    if isinstance(value, (list, tuple)):
        return [as_json_values(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json_values(item) for item in value), key=str)
    to_list = getattr(value, "tolist", None)  # arrays, tensors, numpy scalars
    return as_json_values(to_list()) if callable(to_list) else str(value)


def fields_by_name(record: Any, *left_out: str) -> dict[str, Any]:
    """The fields of a dataclass as a dict, without the fields in ``left_out``."""
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in left_out}

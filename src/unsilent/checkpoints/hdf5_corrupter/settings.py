"""Reading and checking of the YAML settings of hdf5_corrupter, which may come from an untrusted source.

Keys are as in ``read_config_file`` of ``settings_reader.py``. Settings that its own checks refuse by mistake are accepted: a
precision written as a number, a scaling factor or bit mask (lines 263-266 always refuse both), and a percentage below 1 (line 288
treats it as a count).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import read_plain
from unsilent.basics.printable import short_repr
from unsilent.basics.yaml_text import load_yaml

MOST_BYTES = 2**17
"""Largest size of a file, enough for a thousand locations; the YAML package takes quadratic time for numbers like 1:1:1."""
DEEPEST = 4
_Bit = Annotated[int, Field(ge=0, le=63)]


class InjectorSettings(BaseModel):
    """The settings of hdf5_corrupter, explained in its README; bits are counted from the sign bit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    injection_type: Literal["count", "percentage"]
    injection_tries: Annotated[float, Field(gt=0, le=1_000_000)]
    injection_probability: Annotated[float, Field(ge=0, le=1)]
    float_precision: Annotated[Literal["auto", "16", "32", "64"], BeforeValidator(str)]
    allow_sign_change: bool
    allow_NaN_values: bool
    use_random_locations: bool
    first_bit: _Bit | None = None
    last_bit: _Bit | None = None
    burst: Annotated[int, Field(ge=1, le=1024)] = 1
    scaling_factor: Annotated[float, Field(allow_inf_nan=False)] | None = None
    bit_mask: Annotated[str, Field(pattern="^[01]{1,64}$")] | None = None
    locations_to_corrupt: list[Annotated[str, Field(max_length=4096)]] | None = None
    hdf5_file: Any = None
    log_file_path: Any = None
    save_injection_sequence: Any = None
    injection_sequence_path: Any = None

    @property
    def width(self) -> int | None:
        """Number of bits of ``float_precision``; None if it is that of each tensor."""
        return None if self.float_precision == "auto" else int(self.float_precision)

    def candidate_bits(self, width: int) -> list[int]:
        """The bits that may be flipped, counted from the sign bit."""
        if self.first_bit is None or self.last_bit is None:
            return list(range(width))
        bits = list(range(self.first_bit, self.last_bit + 1))
        return [0, *bits] if self.allow_sign_change and self.first_bit > 0 else bits


def read_settings(path: str | Path) -> InjectorSettings:
    """The settings in a YAML file.

    Raises ``UsageError`` if the file is invalid, or if hdf5_corrupter could not use the settings.
    """
    values = load_yaml(read_plain(path, MOST_BYTES, f"the settings {path}"), str(path), DEEPEST)
    if not isinstance(values, dict):
        raise UsageError(f"{path} is {short_repr(values)}; expected settings like injection_type: count")
    try:
        settings = InjectorSettings.model_validate(values)
    except ValidationError as error:
        raise _in_one_line(str(path), error) from None
    if problem := _problem(settings):
        raise UsageError(f"{path}: {problem}")
    return settings


def _in_one_line(name: str, error: ValidationError) -> UsageError:
    """The first validation error of some settings as a one-line ``UsageError``."""
    first = error.errors(include_url=False)[0]
    key = short_repr(str(first["loc"][0]), 60)[1:-1]
    if first["type"] == "missing":
        return UsageError(f"{name} lacks {key}; add it, as hdf5_corrupter does not work without it")
    if first["type"] == "extra_forbidden":
        return unknown_name_error(f"setting in {name}:", key, InjectorSettings.model_fields)
    hint = '; put it in quotes, like "1011"' if key == "bit_mask" else ""
    message = first["msg"][:1].lower() + first["msg"][1:]
    return UsageError(f"{name}: {key} is {short_repr(first['input'])}; {message}{hint}")


def _problem(settings: InjectorSettings) -> str:
    """The problem with settings that are valid separately but not together; empty if there is none."""
    modes = {
        "float_precision: auto": settings.width is None,
        "a bit range or burst": settings.first_bit is not None or settings.last_bit is not None or settings.burst > 1,
        "scaling_factor": settings.scaling_factor is not None,
        "bit_mask": settings.bit_mask is not None,
    }
    if len(modes_set := [mode for mode, is_set in modes.items() if is_set]) > 1:
        return f"found {' and '.join(modes_set)}; expected one of them, remove the others"
    first, last = settings.first_bit, settings.last_bit
    width = settings.width or 64
    if (first is None) != (last is None):
        return f"found first_bit {first} and last_bit {last}; give both"
    if first is not None and last is not None and not first <= last < width:
        return f"bits {first} to {last}; expected a range within 0-{width - 1}, the bits of float_precision {width}"
    if settings.bit_mask is not None and len(settings.bit_mask) > width:
        return f"bit_mask has {len(settings.bit_mask)} bits; expected at most {width}, those of float_precision"
    if settings.injection_type == "percentage" and settings.injection_tries > 1:
        return f"injection_tries is {settings.injection_tries:g}; expected at most 1 for percentage"
    if settings.injection_type == "count" and settings.injection_tries < 1:
        return f"injection_tries is {settings.injection_tries:g}; expected 1 or more for count"
    if not settings.use_random_locations and not settings.locations_to_corrupt:
        return "lacks locations_to_corrupt; give some, or use_random_locations: True"
    return ""

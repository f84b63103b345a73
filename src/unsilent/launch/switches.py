"""Settings of a monitor from arguments, a TOML file and the variables of ASD, in this order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.basics.options import Request, options_of
from unsilent.launch.asd_variables import read_asd_variables
from unsilent.monitor.settings import MonitorSettings


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings of a monitor, and notes for the user on their origin.

    Attributes:
        settings: Settings; None if a variable switches the detection off, and no preset or rule was given.
        notes: A sentence on each value that was overruled, malformed or ignored.
        uses_asd_variables: Whether a variable of ASD set or switched off anything.
    """

    settings: MonitorSettings | None
    notes: tuple[str, ...] = ()
    uses_asd_variables: bool = False


def resolve_settings(
    arguments: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]
) -> ResolvedSettings:
    """The settings of a monitor from all sources; see `unsilent.launch.asd_variables` for the environment variables.

    Args:
        arguments: Given values, by field of `MonitorSettings`.
        config: A TOML file whose keys are names of options.
        environment: Variables, such as `os.environ`.

    Raises:
        UsageError: an argument or a key of the file is invalid. An environment variable never raises it.
    """
    values = {**(_read_file(config) if config is not None else {}), **arguments}
    request = read_asd_variables(environment, values.get("preset"))
    notes = request.notes
    if request.switched_off_by and not values.get("preset") and not values.get("rule"):
        notes.append(f"{request.switched_off_by} switches the detection off; give a preset to monitor the training")
        return ResolvedSettings(None, tuple(notes), True)
    if request.switched_off_by:
        chosen = "preset" if values.get("preset") else "rule"
        notes.append(f"{request.switched_off_by} switches the detection off, but a {chosen} was given, and is used")
    options = options_of(MonitorSettings)
    for name, value in request.settings.items():
        if values.setdefault(name, value) != value:
            option, asked_text, value_text = options[name].option_name, _value_text(value), _value_text(values[name])
            notes.append(
                f"{request.sources[name]} asks for {option} {asked_text}; {value_text} was given instead, and is used"
            )
    return ResolvedSettings(MonitorSettings(**values), tuple(notes), bool(request.settings))


def _read_file(path: Path) -> dict[str, Any]:
    values = Request((MonitorSettings,))
    values.read_toml(path)
    return values.given_values


def _value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

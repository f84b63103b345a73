"""The environment variables of accuracy-sensitive detection (ASD), translated to settings of a monitor.

Their meaning depends on the generation of ASD that the preset names. Without a preset they choose the generation:
``enable:true`` in ``NPU_ASD_CONFIG`` or ``MS_NPU_ASD_CONFIG`` chooses asd-combined, which ignores ``NPU_ASD_ENABLE``; else
``NPU_ASD_ENABLE`` chooses asd-v2 if ``NPU_ASD_SIGMA_THRESH`` is set (asd-v3 has no jump threshold), and asd-v3 otherwise.

The values of ``NPU_ASD_ENABLE``, the limits of the two pairs of thresholds, the keys of the two configurations and all defaults
are documented. Not documented, and chosen here: a value of ``NPU_ASD_ENABLE`` other than 0 to 3 counts as not set (the first
generation treats it as 0); a malformed value in a configuration is replaced by its default; ``NPU_ASD_UPPER_THRESH`` sets both
ratios of asd-v3, which have the same defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unsilent.basics.options import LARGEST

ENABLE, UPPER, SIGMA = "NPU_ASD_ENABLE", "NPU_ASD_UPPER_THRESH", "NPU_ASD_SIGMA_THRESH"
CONFIGURATIONS = {"NPU_ASD_CONFIG": 3, "MS_NPU_ASD_CONFIG": 10}
"""Default of ``grad_sample_interval`` in each. The first variable is torch_npu's, and is used if both are set."""
VARIABLES = (ENABLE, UPPER, SIGMA, *CONFIGURATIONS)
V1, V2, V3, COMBINED = "asd-v1", "asd-v2", "asd-v3", "asd-combined"
LEAST_THRESHOLD = 3
PAIR_DEFAULTS = {UPPER: (1_000_000, 10_000), SIGMA: (100_000, 5_000)}
_ABSOLUTE_AND_JUMP = {UPPER: ("upper_alarm", "upper_warning"), SIGMA: ("jump_alarm", "jump_warning")}
PAIR_PARAMETERS = {
    V1: _ABSOLUTE_AND_JUMP,
    V2: _ABSOLUTE_AND_JUMP,
    V3: {UPPER: ("alarm_ratio", "warning_ratio")},
}
"""Parameters of a rule that a variable with two thresholds sets."""
CONFIGURATION_DEFAULTS = {
    "grad_sample_interval": 3,
    "upper_thresh1": 1_000_000,
    "upper_thresh2": 100,
    "cooldown": 5,
    "strikes_num": 3,
    "strikes_window": 480,
}
"""Defaults of the keys of a configuration; the keys are also parameters of asd-combined."""
SAMPLE_INTERVAL = "grad_sample_interval"
CHECKSUM_KEYS = ("with_checksum", "checksum_cooldown")
"""Keys that have no effect here."""


@dataclass
class AsdRequest:
    """Settings that the environment variables request, and notes for the user.

    Attributes:
        settings: Values by field of `MonitorSettings`.
        sources: Variable that requests the value, by field.
        switched_off_by: The variable, with its value, that switches the detection off; empty if there is none.
        notes: A sentence on each variable that is malformed or ignored.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    switched_off_by: str = ""
    notes: list[str] = field(default_factory=list)

    def ask(self, variable: str, field: str, value: Any) -> None:
        """Request a value for a field of the settings."""
        self.settings[field], self.sources[field] = value, variable


def read_asd_variables(environment: Mapping[str, str], preset: str | None) -> AsdRequest:
    """The settings that the environment variables request.

    Args:
        environment: Variables, such as `os.environ`. An empty one counts as not set.
        preset: Name of a preset; None if none was given.
    """
    request = AsdRequest()
    variables = {name: environment[name] for name in VARIABLES if environment.get(name)}
    configuration = next((name for name in CONFIGURATIONS if name in variables), "")
    enabled = bool(configuration) and dict(_items(variables[configuration])).get("enable") == "true"
    generation = COMBINED if preset is None and enabled else preset
    reads_level = generation is None or generation in PAIR_PARAMETERS
    level = _read_level(variables.get(ENABLE, ""), generation, request.notes) if reads_level else ""
    if generation is None and level not in ("", "0"):
        generation = V2 if SIGMA in variables else V3
    if generation != preset:
        request.ask(configuration if enabled else ENABLE, "preset", generation)
    used = {ENABLE} if reads_level else set()
    if generation == COMBINED and configuration:
        used = {configuration}
        _read_configuration(configuration, variables[configuration], request)
    elif generation in PAIR_PARAMETERS:
        used |= set(PAIR_PARAMETERS[generation])
        _read_action(level, generation, request)
        _read_pairs(generation, variables, request)
    if level == "0":
        request.switched_off_by = f"{ENABLE}={level}"
    elif configuration and not enabled and generation in (None, COMBINED):
        text = variables[configuration]
        is_said = dict(_items(text)).get("enable") == "false"
        request.switched_off_by = f"{configuration}={text}" + ("" if is_said else ", without enable:true,")
    if generation is not None or not request.switched_off_by:
        why = f"has no meaning for preset {generation}" if generation else f"has no effect without {ENABLE}"
        request.notes += [f"{name} {why}, and is ignored" for name in variables if name not in used]
    return request


def _read_level(value: str, generation: str | None, notes: list[str]) -> str:
    """The value of ``NPU_ASD_ENABLE``; empty if it is unset or invalid."""
    known = ("0", "1") if generation == V1 else ("0", "1", "2", "3")
    if value in ("", *known):
        return value
    least = (
        f", and {V1} takes anything else for 0, which the preset that was given overrules" if generation == V1 else ""
    )
    notes.append(f"{ENABLE} is {value!r}; expected {', '.join(known)}{least or ', so it counts as not set'}")
    return ""


def _read_action(level: str, generation: str, request: AsdRequest) -> None:
    """Translate ``NPU_ASD_ENABLE`` to the action on an alarm, and to the logging of normal values.

    The first generation stops with 1, later ones with 2; 3 also logs normal values.
    """
    if level in ("1", "2", "3"):
        request.ask(ENABLE, "on_alarm", "log" if level == "1" and generation != V1 else "stop")
    if level == "3":
        request.ask(ENABLE, "log_normal", True)


def _read_pairs(generation: str, variables: Mapping[str, str], request: AsdRequest) -> None:
    """Translate the two variables with thresholds to a rule, if they differ from the defaults."""
    parameters: dict[str, int] = {}
    sources = []
    for variable, names in PAIR_PARAMETERS[generation].items():
        pair, problem = read_pair(variables.get(variable, ""), PAIR_DEFAULTS[variable])
        if variable in variables and problem:
            request.notes.append(f"{variable} is {variables[variable]!r}; {problem}")
        if pair != PAIR_DEFAULTS[variable]:
            parameters |= dict(zip(names, pair, strict=True))
            sources.append(variable)
    _ask_for_rule(generation, " and ".join(sources), parameters, request)


def read_pair(text: str, default: tuple[int, int]) -> tuple[tuple[int, int], str]:
    """Parse two thresholds, such as ``1000000,10000``, and describe any problem with the text.

    Thresholds below 3 are raised to 3. If the first is then not greater than the second, both are set to the defaults.
    """
    numbers = [number for part in text.split(",") if (number := _whole_number(part)) is not None]
    fallback = f"so the defaults {default[0]},{default[1]} are used"
    if len(numbers) != 2 or text.count(",") != 1:
        return default, f"expected two whole numbers, such as {default[0]},{default[1]}, {fallback}"
    first, second = (max(number, LEAST_THRESHOLD) for number in numbers)
    if first <= second:
        return default, f"the first number must be greater than the second, {fallback}"
    raised = [first, second] != numbers
    return (first, second), f"the least threshold is {LEAST_THRESHOLD}, so {first},{second} is used" if raised else ""


def _whole_number(text: str) -> int | None:
    """An integer of at most 64 bits; None for any other text."""
    number = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text) else LARGEST + 1
    return number if abs(number) <= LARGEST else None


def _items(text: str) -> list[tuple[str, str]]:
    """Keys and values of a configuration such as ``enable:true,strikes_num:3``."""
    pairs = [item.partition(":")[::2] for item in text.split(",") if item.strip()]
    return [(key.strip(), value.strip()) for key, value in pairs]


def _read_configuration(variable: str, text: str, request: AsdRequest) -> None:
    """Translate ``NPU_ASD_CONFIG`` or ``MS_NPU_ASD_CONFIG`` to a rule, if the values differ from the defaults."""
    defaults = CONFIGURATION_DEFAULTS | {SAMPLE_INTERVAL: CONFIGURATIONS[variable]}
    values, problems, without_effect, unknown = dict(defaults), [], [], []
    for key, value in _items(text):
        number = _whole_number(value)
        if key in values and number is not None and number >= 1:
            values[key] = number
        elif key in CHECKSUM_KEYS:
            without_effect += [key] if value != "false" else []
        elif key not in (*values, "enable"):
            unknown.append(f"{key}:{value}" if value else key)
        elif key != "enable" or value not in ("true", "false"):
            problems.append(f"{key}:{value}" if value else key)
    notes = [f"cannot use {', '.join(problems)}, so the defaults are used instead"] if problems else []
    first, second = values["upper_thresh1"], values["upper_thresh2"]
    if first <= second:
        notes.append(
            f"upper_thresh1:{first} is not greater than upper_thresh2:{second}, so the defaults of both are used"
        )
        values |= {key: defaults[key] for key in ("upper_thresh1", "upper_thresh2")}
    if unknown:
        notes.append(f"there is no key {', '.join(unknown)}; known: enable, {', '.join([*values, *CHECKSUM_KEYS])}")
    if without_effect:
        notes.append(f"{', '.join(without_effect)} has no effect, because there is no checksum here")
    if notes:
        request.notes.append(f"{variable}: {'; '.join(notes)}")
    changed = {key: value for key, value in values.items() if value != CONFIGURATION_DEFAULTS[key]}
    _ask_for_rule(COMBINED, variable, changed, request)


def _ask_for_rule(rule: str, variable: str, parameters: Mapping[str, int], request: AsdRequest) -> None:
    if parameters:
        text = ",".join(f"{name}={value}" for name, value in parameters.items())
        request.ask(variable, "rule", (f"{rule}:{text}",))

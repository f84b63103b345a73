"""Settings of a monitor: options of ``unsilent run``, arguments of `Monitor` or keys of a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

from unsilent.basics.errors import UsageError, check_name
from unsilent.basics.name_and_parameters import parse_named
from unsilent.basics.options import OUTPUT_PANEL, Option, check_count, options_of
from unsilent.basics.sizes import parse_whole_number
from unsilent.detectors.rules import PRESETS, check_rule

DETECTION_PANEL, ALARM_PANEL, COST_PANEL = "Detection", "Alarms", "Cost"
ACTIONS = ("log", "skip", "rerun", "replay", "save", "stop")
"""Actions on an alarm."""
EXECUTE_AGAIN = ("rerun", "replay")
"""Actions that execute the last steps again."""
MODES = ("lagged", "strict")
FINGERPRINTS = ("rotating", "full", "off")
INCIDENTS = ("full", "small", "off")
"""Amounts of data that the first alarm of a run writes."""
LARGEST_BUDGET = 2.0
"""Largest budget, in percent of a step."""
MOST_INTERVAL = 4096


def rules_given(value: Any) -> tuple[Any, ...]:
    """Rules as texts with their parameters, from texts or a table.

    Example of a table: ``{"robust-z": {"threshold": 12}}``. `Rule` objects are returned unchanged.
    """
    if isinstance(value, Mapping) and all(isinstance(table, Mapping) for table in value.values()):
        return tuple(_rule_text(rule, table) for rule, table in value.items())
    rules = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    return tuple(rule if isinstance(rule, str) else check_rule(rule, "--rule") for rule in rules)


def _rule_text(rule: str, parameters: Mapping[str, Any]) -> str:
    pairs = (f"{key}={'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in parameters.items())
    return f"{rule}:{','.join(pairs)}".rstrip(":")


def sampling_text(value: Any) -> str:
    """The sampling setting as text; an integer R becomes ``fixed:R``."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return f"fixed:{value}"
    if isinstance(value, str):
        return value
    raise UsageError(f"--sampling is {value!r}; expected auto, or fixed:R with a whole number, such as fixed:4")


@dataclass(frozen=True)
class MonitorSettings:
    """Settings of a monitor.

    Values may have the types of a TOML file: one text instead of several, or a file name as text.

    Raises:
        UsageError: a name does not exist, a value has another type, or a number makes no sense; the message names the option.
    """

    preset: Annotated[
        str,
        Option("Rules and thresholds: robust-z, asd-v1, asd-v2, asd-v3, asd-combined, megatron, all.", DETECTION_PANEL),
    ] = "robust-z"
    rule: Annotated[
        tuple[Any, ...],
        Option(
            "A rule with parameters, such as robust-z:threshold=12; replaces those of the preset. Repeatable. In a TOML file "
            "also a table: [rule.robust-z].",
            DETECTION_PANEL,
            parser=rules_given,
            is_repeatable=True,
        ),
    ] = ()
    watch: Annotated[
        tuple[str, ...],
        Option(
            "A tensor to watch: MODULE:input, MODULE:output or MODULE:gradient (of its output); MODULE may be a pattern. "
            "Repeatable.",
            DETECTION_PANEL,
            is_repeatable=True,
        ),
    ] = ()
    fingerprint: Annotated[
        str,
        Option(
            "Compare the bits of parameters and optimizer state after a step with those before the next one: "
            "rotating (a part of them in each step), full, off.",
            DETECTION_PANEL,
        ),
    ] = "rotating"
    on_alarm: Annotated[
        str,
        Option(
            "On an alarm: log; skip the optimizer step; rerun the last steps; replay them to find out what kind of fault it was, "
            "without changing the training; save the state; stop the job.",
            ALARM_PANEL,
        ),
    ] = "log"
    mode: Annotated[
        str,
        Option("strict: the verdict comes before the optimizer step. lagged: one step later.", ALARM_PANEL),
    ] = "lagged"
    act_on: Annotated[str, Option("Lowest level that --on-alarm acts on: alarm or warning.", ALARM_PANEL)] = "alarm"
    log_normal: Annotated[
        bool, Option("Log a line about once a second also without an alarm, at level INFO.", ALARM_PANEL)
    ] = False
    save_to: Annotated[Path | None, Option("Folder for the states that --on-alarm save writes.", ALARM_PANEL)] = None
    sampling: Annotated[
        str,
        Option(
            "Tensors read at each step: auto (as many as the budget allows; of short steps only some are read), or fixed:R "
            "(every R-th).",
            COST_PANEL,
            parser=sampling_text,
        ),
    ] = "auto"
    budget: Annotated[
        float, Option("Percent of the time of a step that the monitor may take, at most 2.", COST_PANEL)
    ] = 0.5
    events: Annotated[
        Path | None,
        Option(
            "File for events as JSON lines. With several ranks, each writes its own: NAME.rank1.jsonl …", OUTPUT_PANEL
        ),
    ] = None
    incident: Annotated[
        str,
        Option(
            "What the first alarm writes into the folder incidents beside the events: full; small (without state and batch); "
            "off.",
            OUTPUT_PANEL,
        ),
    ] = "full"
    record: Annotated[
        Path | None, Option("File for a recording of all series (.npz), for rules to be tried later.", OUTPUT_PANEL)
    ] = None
    metrics_port: Annotated[
        int | None, Option("Port on 127.0.0.1 for Prometheus metrics. Rank r uses the port plus r.", OUTPUT_PANEL)
    ] = None
    tensorboard: Annotated[Path | None, Option("Folder for TensorBoard logs.", OUTPUT_PANEL)] = None
    strict: Annotated[
        bool, Option("An internal error of the monitor stops the job, instead of being logged once.", ALARM_PANEL)
    ] = False

    def __post_init__(self) -> None:
        for name, asking in options_of(MonitorSettings).items():
            value = asking.parse_value(getattr(self, name), asking.flag, typed=True)
            object.__setattr__(self, name, value)
        check_name("--on-alarm", self.on_alarm, ACTIONS)
        check_name("--mode", self.mode, MODES)
        check_name("--fingerprint", self.fingerprint, FINGERPRINTS)
        check_name("--act-on", self.act_on, ("alarm", "warning"))
        check_name("--incident", self.incident, INCIDENTS)
        if self.on_alarm == "skip" and self.mode != "strict":
            raise UsageError(
                "--on-alarm is 'skip', but --mode is 'lagged', whose verdict comes after the step; use mode strict"
            )
        if not (math.isfinite(self.budget) and 0 < self.budget <= LARGEST_BUDGET):
            raise UsageError(
                f"--budget is {self.budget:g}; expected a percentage above 0, and at most {LARGEST_BUDGET:g}"
            )
        if self.metrics_port is not None:
            check_count("--metrics-port", self.metrics_port, 0, 65535)
        if self.on_alarm == "save" and self.save_to is None:
            raise UsageError("--on-alarm is 'save', but there is no folder for the states; give --save-to")
        if self.on_alarm != "save" and self.save_to is not None:
            raise UsageError(
                f"--save-to is given, but --on-alarm is {self.on_alarm!r}, which saves nothing; use save, or leave it out"
            )
        self.sampling_interval  # noqa: B018 - checks it

    @property
    def sampling_interval(self) -> int | None:
        """Number of steps within which every tensor is read, or None if the budget decides."""
        if self.sampling == "auto":
            return None
        kind, _, number = self.sampling.partition(":")
        interval = parse_whole_number(number)
        if kind != "fixed" or interval is None:
            raise UsageError(
                f"--sampling is {self.sampling!r}; expected auto, or fixed:R with a whole number, such as fixed:4"
            )
        return check_count("R of --sampling fixed:R", interval, 1, MOST_INTERVAL)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """Names of the rules that are applied."""
        rules = self.rule or PRESETS.get(self.preset, ())
        return tuple(parse_named(rule)[0] if isinstance(rule, str) else rule.name for rule in rules)


def settings_of(settings: MonitorSettings | None, options: Mapping[str, Any]) -> MonitorSettings:
    """Settings from a settings object or from options by name.

    Raises ``UsageError`` for both together, and for an unknown name.
    """
    known = [option.field for option in options_of(MonitorSettings).values()]
    for name in options:
        check_name("option of a monitor", name, known)
    if settings is not None and options:
        raise UsageError(f"settings and {', '.join(options)} were both given; give settings alone, or options alone")
    return settings or MonitorSettings(**options)

"""The rules and presets by name, with thresholds in the form ``robust-z:threshold=20``.

A rule is imported when it is made, so that listing them is instant. Another package registers the class of a rule under its name,
as an entry point of the group ``unsilent.rules``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unsilent.basics.entry_points import RULES as GROUP
from unsilent.basics.entry_points import installed_parts, load_part, wrong_part_error
from unsilent.basics.errors import UsageError, check_name, unknown_name_error, wrong_value_error
from unsilent.basics.lazy_module import load_named
from unsilent.basics.name_and_parameters import build_named, parse_named
from unsilent.basics.printable import escape_unprintable

if TYPE_CHECKING:
    from unsilent.detectors.rule import Rule


class RuleEntry(NamedTuple):
    """A rule that can be chosen: the location of its class (``module:class``), and a one-line description."""

    target: str
    description: str


_HERE = "unsilent.detectors."
RULES: Mapping[str, RuleEntry] = {
    "robust-z": RuleEntry(
        _HERE + "robust_z:RobustZ", "distance from the median of the last values, in both directions, on the log scale"
    ),
    "asd-v1": RuleEntry(_HERE + "asd_v1:AsdV1", "MindSpore 2.2: value and jump of gradients of norm layers' inputs"),
    "asd-v2": RuleEntry(_HERE + "asd_v2:AsdV2", "MindSpore 2.4: value and jump of gradients"),
    "asd-v3": RuleEntry(_HERE + "asd_v3:AsdV3", "MindSpore 2.5: largest gradient element against its moving average"),
    "asd-combined": RuleEntry(
        _HERE + "asd_combined:AsdCombined", "MindSpore 2.7.1, torch_npu 7.1: moving average, jump, and counted strikes"
    ),
    "megatron-large": RuleEntry(
        _HERE + "megatron_large:MegatronLarge",
        "Megatron-LM: loss or gradient against its largest value among the first 100",
    ),
    "loss-spike": RuleEntry(_HERE + "loss_spike:LossSpike", "Lightning: loss against the mean of the last losses"),
    "nonfinite": RuleEntry(_HERE + "nonfinite:Nonfinite", "NaN or infinity anywhere"),
    "update-rms": RuleEntry(_HERE + "update_rms:UpdateRms", "size of updates against their running mean and spread"),
}
"""Rules in the order in which they are listed."""

PRESETS: Mapping[str, tuple[str, ...]] = {
    "robust-z": ("robust-z", "nonfinite"),
    "asd-v1": ("asd-v1",),
    "asd-v2": ("asd-v2",),
    "asd-v3": ("asd-v3",),
    "asd-combined": ("asd-combined",),
    "megatron": ("megatron-large", "nonfinite"),
    "all": tuple(RULES),
}
"""Texts of the rules of each preset."""


def rule_class(name: str) -> type[Rule]:
    """The class of a rule, which may be from another package.

    Raises ``UsageError`` if there is no rule with this name.
    """
    if name in RULES:
        return cast("type[Rule]", load_named(RULES[name].target))
    installed = installed_parts(GROUP, RULES)
    if name not in installed:
        raise unknown_name_error("rule", name, [*RULES, *installed])
    part = load_part("rule", installed[name])
    if not isinstance(part, type) or getattr(part, "name", None) != name:
        part_text = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
        raise wrong_part_error(installed[name], part_text, f"a class of rules whose name is {name!r}")
    return part


def make_rule(what: str | Rule) -> Rule:
    """The rule described by a text ``name:key=value,key=value``; a rule is returned unchanged.

    Raises ``UsageError`` if there is none.

    >>> make_rule("megatron-large:factor=20").factor
    20.0
    """
    if not isinstance(what, str):
        return check_rule(what)
    name, _ = parse_named(what)
    return check_rule(build_named("rule", what, {name: rule_class(name)}))


def check_rule(value: Any, argument: str = "rule") -> Rule:
    """The object unchanged, if it has the interface of a rule.

    Raises ``UsageError`` otherwise; ``argument`` is its name in the message.
    """
    if isinstance(value, type):
        raise UsageError(f"{argument} is the class {value.__name__}; expected an object: write {value.__name__}(…)")
    methods = (getattr(value, name, None) for name in ("reads", "initial_state", "judge"))
    if not isinstance(getattr(value, "name", None), str) or not all(map(callable, methods)):
        expected = (
            "texts such as 'robust-z:threshold=12', tables such as [rule.robust-z], or objects with methods of Rule"
        )
        raise wrong_value_error(argument, value, expected)
    return cast("Rule", value)


def format_rule(rule: Rule) -> str:
    """The text from which `make_rule` makes this rule, without default thresholds.

    >>> format_rule(make_rule("megatron-large:factor=20,samples=100"))
    'megatron-large:factor=20.0'
    """
    parameters = [
        f"{name}={_text(value)}" for name, value in rule_thresholds(rule).items() if value != _defaults(rule)[name]
    ]
    return f"{rule.name}:{','.join(parameters)}" if parameters else rule.name


def recorded_text(rule: Rule) -> str:
    """The text that represents a rule in records: that for `make_rule` if possible, else its ``repr`` or name.

    >>> recorded_text(make_rule("megatron-large:factor=20"))
    'megatron-large:factor=20.0'
    """
    is_named = rule.name in RULES or rule.name in installed_parts(GROUP)
    if is_named and dataclasses.is_dataclass(rule) and type(rule) is rule_class(rule.name):
        return format_rule(rule)
    has_own_repr = type(rule).__repr__ is not object.__repr__  # the default one differs between the processes of a job
    return escape_unprintable(repr(rule)) if has_own_repr else rule.name


def rule_thresholds(rule: Rule) -> dict[str, Any]:
    """The thresholds of a rule, by name."""
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(cast(Any, rule))}


def rules_of_preset(name: str) -> tuple[Rule, ...]:
    """The rules in a preset, with their default thresholds.

    Raises ``UsageError`` if there is no preset with this name.
    """
    check_name("preset", name, PRESETS)
    return tuple(make_rule(text) for text in PRESETS[name])


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_text, value))
    return value if isinstance(value, str) else repr(value)


def _defaults(rule: Rule) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cast(Any, rule))}

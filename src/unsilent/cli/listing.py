"""Verbs that list what there is: ``workloads``, ``faults``, ``detectors``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unsilent.basics.options import FAULTS_PANEL, Asked, Option
from unsilent.cli import accelerators
from unsilent.cli.tables import show_lines, show_table
from unsilent.command import LISTS, Command, DisplayOptions


def workloads(asked: Asked) -> int:
    """List the built-in workloads and their options."""
    from unsilent.workloads import TRAININGS, ZOO

    as_json, plain = asked[DisplayOptions].as_json, asked[DisplayOptions].plain
    kinds = {"inference": ZOO, "training": TRAININGS}
    if as_json:
        entries = [
            {
                "name": e.name,
                "kind": kind,
                "description": e.description,
                "options": dict(e.options),
                "data": e.data,
                "weights": e.weights,
            }
            for kind, known in kinds.items()
            for e in known.values()
        ]
        print(json.dumps(entries, indent=2))
        return 0
    for kind, known in kinds.items():
        show_table(
            [(e.name, e.description + _needs(e.data, e.weights), _options(e.options)) for e in known.values()],
            (kind, "description", "options (--with)"),
            plain=plain,
        )
    show_lines(
        "",
        "To use your own workload, give file.py:name or package.module:name (a workload, or a function that returns one).",
        "For inference, you can also give hf:DIR (a local transformers folder) or FILE.pt2 (a program saved by torch.export).",
        plain=plain,
    )
    return 0


def _options(about: Mapping[str, str]) -> str:
    """Names of options, and which of them mean something only for a file of the user's."""
    return ", ".join(f"{name} (needs --data)" if "(--data)" in text else name for name, text in about.items())


def _needs(data: str, weights: str) -> str:
    files = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "required"]
    optional = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "optional"]
    return (f"; needs {', '.join(files)}" if files else "") + (f"; takes {', '.join(optional)}" if optional else "")


@dataclass(frozen=True)
class FaultListOptions:
    """Which fault models."""

    accelerator: Annotated[
        str | None,
        Option(
            "Show the fault models and memories of this accelerator: nvdla, systolic, tensor-core, tpu-v4, h100-pcie, "
            "inferentia2 or FILE.toml.",
            FAULTS_PANEL,
        ),
    ] = None


def faults(asked: Asked) -> int:
    """List the fault models and the presets, or those that follow from the description of an accelerator."""
    accelerator, as_json, plain = (
        asked[FaultListOptions].accelerator,
        asked[DisplayOptions].as_json,
        asked[DisplayOptions].plain,
    )
    if accelerator is not None:
        return accelerators.show_accelerator(accelerator, as_json, plain)
    from unsilent.faults import FAULT_MODELS
    from unsilent.faults.hardware.presets import PRESETS

    models = [
        {
            "name": name,
            "kind": "value model",
            "description": inspect.cleandoc(factory.__doc__ or "").splitlines()[0],
            "parameters": {p.name: repr(p.default) for p in inspect.signature(factory).parameters.values()},
        }
        for name, factory in FAULT_MODELS.items()
    ]
    presets = [
        {
            "name": p.name,
            "kind": "preset",
            "description": p.hardware_defect,
            "operand": p.operand,
            "fault": p.fault_model_text,
            "reach": p.affected_outputs_text,
            "remark": p.remark,
        }
        for p in PRESETS.values()
    ]
    if as_json:
        print(json.dumps(models + presets, indent=2))
        return 0
    own = [[k for k in e["parameters"] if k not in _PATTERN] for e in models]
    show_table(
        [(e["name"], e["description"], ", ".join(k)) for e, k in zip(models, own, strict=True)],
        ("fault model", "what a corrupted element becomes", "parameters (name:key=value,…)"),
        plain=plain,
    )
    show_lines(
        "",
        f"Every fault model also takes parameters that choose the corrupted elements: {', '.join(_PATTERN)} "
        "(default: one element).",
        plain=plain,
    )
    show_table(
        [(p.name, p.operand, p.fault_model_text, p.affected_outputs_text, p.hardware_defect) for p in PRESETS.values()],
        ("preset", "operand", "fault", "affected outputs", "hardware defect"),
        optional=("affected outputs",),
        plain=plain,
    )
    show_lines(
        "",
        "These presets were published for one training accelerator; --accelerator shows the fault models of other accelerators.",
        plain=plain,
    )
    return 0


_PATTERN = ("count", "rate", "run", "stride", "block", "cycles", "tile", "whole", "heads")


def detectors(asked: Asked) -> int:
    """List the rules that find faults in a running training, the presets that combine them, and the detectors for inference."""
    as_json, plain = asked[DisplayOptions].as_json, asked[DisplayOptions].plain
    from unsilent.detectors.activations.rules import ACTIVATION_RULES
    from unsilent.detectors.rules import PRESETS, RULES, make_rule, rule_thresholds
    from unsilent.protection.detector import DETECTORS

    thresholds = {name: rule_thresholds(make_rule(name)) for name in RULES}
    presets = [{"name": name, "kind": "preset", "rules": list(texts)} for name, texts in PRESETS.items()]
    made_by: dict[str, Callable[..., Any]] = {**DETECTORS, **ACTIVATION_RULES}
    inference: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": "inference",
            "description": inspect.cleandoc(made.__doc__ or "").splitlines()[0].rstrip("."),
            "parameters": {
                p.name: p.default for p in inspect.signature(made).parameters.values() if p.default is not None
            },
        }
        for name, made in made_by.items()
    ]
    if as_json:
        rules = [
            {"name": name, "kind": "rule", "description": entry.description, "parameters": thresholds[name]}
            for name, entry in RULES.items()
        ]
        print(json.dumps([*rules, *presets, *inference], indent=2))
        return 0
    show_table(
        [(name, entry.description, _defaults(thresholds[name])) for name, entry in RULES.items()],
        ("training: rule", "what it compares", "thresholds with defaults (name:key=value,…)"),
        plain=plain,
    )
    show_lines("", plain=plain)
    show_table(
        [(name, ", ".join(texts)) for name, texts in PRESETS.items()], ("training: preset", "rules"), plain=plain
    )
    show_lines("", plain=plain)
    show_table(
        [(one["name"], one["description"], _defaults(one["parameters"])) for one in inference],
        ("inference: detector", "what it compares", "parameters with defaults (name:key=value,…)"),
        plain=plain,
    )
    return 0


def _defaults(given: Mapping[str, object]) -> str:
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value).lower() for name, value in given.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


WORKLOADS = Command("workloads", LISTS, str(workloads.__doc__), "unsilent workloads", (DisplayOptions,), workloads)
FAULTS = Command(
    "faults",
    LISTS,
    str(faults.__doc__),
    "unsilent faults --accelerator nvdla",
    (FaultListOptions, DisplayOptions),
    faults,
)
DETECTORS = Command("detectors", LISTS, str(detectors.__doc__), "unsilent detectors", (DisplayOptions,), detectors)

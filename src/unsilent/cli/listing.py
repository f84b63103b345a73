"""Commands that list the available parts: ``workloads``, ``faults`` and ``detectors``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

from unsilent.basics.entry_points import installed_parts, package_of
from unsilent.basics.errors import UsageError
from unsilent.basics.options import FAULTS_PANEL, Option, Request
from unsilent.cli import accelerators
from unsilent.cli.tables import show_lines, show_table
from unsilent.command import LISTS, Command, DisplayOptions


def workloads(request: Request) -> int:
    """List the built-in workloads and their options."""
    from unsilent.workloads import TRAININGS, ZOO

    as_json, plain = request[DisplayOptions].as_json, request[DisplayOptions].plain
    kinds = {"inference": ZOO, "training": TRAININGS}
    if as_json:
        entries = [
            {"name": e.name, "kind": kind, "description": e.description, "options": dict(e.options)}
            | {"data": e.data, "weights": e.weights}
            for kind, known in kinds.items()
            for e in known.values()
        ]
        print(json.dumps(entries, indent=2))
        return 0
    for kind, known in kinds.items():
        rows = [(e.name, e.description + _needs(e.data, e.weights), _options(e.options)) for e in known.values()]
        show_table(rows, (kind, "description", "options (--with)"), plain=plain)
    show_lines(
        "",
        "To use your own workload, give file.py:name or package.module:name (a workload, or a function that returns one).",
        "For inference, you can also give hf:DIR (a local transformers folder) or FILE.pt2 (a program saved by torch.export).",
        plain=plain,
    )
    return 0


def _options(about: Mapping[str, str]) -> str:
    """Names of a workload's options, with a note on those that need ``--data``."""
    return ", ".join(f"{name} (needs --data)" if "(--data)" in text else name for name, text in about.items())


def _needs(data: str, weights: str) -> str:
    files = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "required"]
    optional = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "optional"]
    return (f"; needs {', '.join(files)}" if files else "") + (f"; takes {', '.join(optional)}" if optional else "")


@dataclass(frozen=True)
class FaultListOptions:
    """Options of ``unsilent faults``."""

    accelerator: Annotated[
        str | None,
        Option(
            "Show the fault models and memories of this accelerator: nvdla, systolic, tensor-core, tpu-v4, h100-pcie, "
            "inferentia2 or FILE.toml.",
            FAULTS_PANEL,
        ),
    ] = None


def faults(request: Request) -> int:
    """List the fault models and the presets, or those that follow from the description of an accelerator."""
    accelerator, as_json = request[FaultListOptions].accelerator, request[DisplayOptions].as_json
    plain = request[DisplayOptions].plain
    if accelerator is not None:
        return accelerators.show_accelerator(accelerator, as_json, plain)
    from unsilent.faults import FAULT_MODELS
    from unsilent.faults.hardware.presets import PRESETS

    models = [
        {
            "name": name,
            "kind": "value model",
            "description": _first_line(factory),
            "parameters": {p.name: repr(p.default) for p in inspect.signature(factory).parameters.values()},
        }
        for name, factory in FAULT_MODELS.items()
    ]
    presets = [
        {"name": p.name, "kind": "preset", "description": p.hardware_defect, "operand": p.operand}
        | {"fault": p.fault_model_text, "reach": p.affected_outputs_text, "remark": p.remark}
        for p in PRESETS.values()
    ]
    if as_json:
        print(json.dumps(models + presets, indent=2))
        return 0
    names = [", ".join(name for name in model["parameters"] if name not in _PATTERN) for model in models]
    rows = [(model["name"], model["description"], text) for model, text in zip(models, names, strict=True)]
    heads = ("fault model", "what a corrupted element becomes", "parameters (name:key=value,…)")
    show_table(rows, heads, plain=plain)
    show_lines(
        "",
        f"Every fault model also takes parameters that choose the corrupted elements: {', '.join(_PATTERN)} "
        "(default: one element).",
        plain=plain,
    )
    fields = attrgetter("name", "operand", "fault_model_text", "affected_outputs_text", "hardware_defect")
    heads_of_presets = ("preset", "operand", "fault", "affected outputs", "hardware defect")
    show_table(list(map(fields, PRESETS.values())), heads_of_presets, ("affected outputs",), plain=plain)
    show_lines(
        "",
        "These presets were published for one training accelerator; --accelerator shows the fault models of other accelerators.",
        plain=plain,
    )
    return 0


_PATTERN = ("count", "rate", "run", "stride", "block", "cycles", "tile", "whole", "heads")


def detectors(request: Request) -> int:
    """List the rules that find faults in a running training, the presets that combine them, and the detectors for inference."""
    as_json, plain = request[DisplayOptions].as_json, request[DisplayOptions].plain
    from unsilent.basics.entry_points import DETECTORS as DETECTOR_GROUP
    from unsilent.basics.entry_points import RULES as RULE_GROUP
    from unsilent.detectors.activations.rules import ACTIVATION_RULES
    from unsilent.detectors.rules import PRESETS, RULES, rule_class
    from unsilent.protection.detector import ALL_DETECTORS, DETECTORS

    rules = [_table_row(name, "rule", rule_class(name), entry.description) for name, entry in RULES.items()]
    rules += _listed_of_others("rule", RULE_GROUP, RULES, rule_class)
    presets = [{"name": name, "kind": "preset", "rules": list(texts)} for name, texts in PRESETS.items()]
    made_by: dict[str, Callable[..., Any]] = {**DETECTORS, **ACTIVATION_RULES}
    inference = [_table_row(name, "inference", factory) for name, factory in made_by.items()]
    inference += _listed_of_others("inference", DETECTOR_GROUP, DETECTORS, ALL_DETECTORS.__getitem__)
    if as_json:
        print(json.dumps([*rules, *presets, *inference], indent=2))
        return 0
    _show_parts(rules, "training: rule", "thresholds", plain)
    names = [(name, ", ".join(texts)) for name, texts in PRESETS.items()]
    show_lines("", plain=plain)
    show_table(names, ("training: preset", "rules"), plain=plain)
    show_lines("", plain=plain)
    _show_parts(inference, "inference: detector", "parameters", plain)
    return 0


def _show_parts(parts: Sequence[Mapping[str, Any]], name: str, settings: str, plain: bool) -> None:
    """Print a table of rules or detectors."""
    rows = [(part["name"], part["description"], _defaults(part["parameters"])) for part in parts]
    show_table(rows, (name, "what it compares", f"{settings} with defaults (name:key=value,…)"), plain=plain)


def _table_row(name: str, kind: str, factory: Callable[..., Any], description: str = "") -> dict[str, Any]:
    """A rule or detector as a table row: name, kind, description and parameters.

    Without a description, the first line of the docstring is used.
    """
    parameters = inspect.signature(factory).parameters.values()
    return {
        "name": name,
        "kind": kind,
        "description": description or _first_line(factory).rstrip("."),
        "parameters": {p.name: p.default for p in parameters if p.default not in (None, inspect.Parameter.empty)},
    }


def _first_line(factory: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return inspect.cleandoc(factory.__doc__ or "").partition("\n")[0]


def _listed_of_others(
    kind: str, group: str, known: Mapping[str, Any], load: Callable[[str], Callable[..., Any]]
) -> Iterator[dict[str, Any]]:
    """Rules or detectors that other packages provide.

    If one cannot be imported, its description is the error.
    """
    for name, entry in installed_parts(group, known).items():
        try:
            part = _table_row(name, kind, load(name))
            yield {**part, "description": f"{part['description']} ({package_of(entry)})"}
        except UsageError as error:
            yield {"name": name, "kind": kind, "description": str(error), "parameters": {}}


def _defaults(values: Mapping[str, object]) -> str:
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value).lower() for name, value in values.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


WORKLOADS = Command("workloads", LISTS, "unsilent workloads", (DisplayOptions,), workloads)
FAULT_OPTIONS = (FaultListOptions, DisplayOptions)
FAULTS = Command("faults", LISTS, "unsilent faults --accelerator nvdla", FAULT_OPTIONS, faults)
DETECTORS = Command("detectors", LISTS, "unsilent detectors", (DisplayOptions,), detectors)

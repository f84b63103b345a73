"""The table of query templates, with the function or command that answers each."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import options_of
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, Outcome, Query
from unsilent.triage.queries import (
    checkpoints,
    compare_settings,
    find_straggler,
    inspect_batch,
    inspect_state,
    monitor_findings,
    read_flight_record,
    read_log,
    series,
)


@dataclass(frozen=True)
class Template:
    """A template of queries.

    Attributes:
        help: Description of the query in one line.
        blanks: Names of the fields of `Blanks` that the query takes.
        seconds: Approximate duration in seconds; for a command that the user runs, that of the command.
        answer: Function that answers the query from the folder; ``None`` if a command answers it, with the code of the training
            or on its device.
        command: Arguments of another command that answers the query, with ``{folder}``, ``{rank}`` and ``{device}``; empty if
            the folder answers it.
        least_ranks: Least number of ranks for which the query makes sense.
    """

    help: str
    blanks: tuple[str, ...]
    seconds: float
    answer: Callable[[Bundle, Blanks], Finding] | None
    command: str = ""
    least_ranks: int = 1


TEMPLATES: dict[str, Template] = {
    "read-verdict": Template("Read what kind of fault the monitor found.", (), 0.1, monitor_findings.read_verdict),
    "scan-nonfinite": Template(
        "Find the first value that is not finite, in series.", ("rank", "steps"), 0.5, series.scan_nonfinite),
    "compare-gradients": Template(
        "Compare gradients of ranks with each other.", ("tensor", "steps"), 0.5, series.compare_gradients, least_ranks=2),
    "compare-parameters": Template(
        "Find parameters that changed between steps or differ between ranks.", ("steps",), 0.1,
        monitor_findings.compare_parameters),
    "find-onset": Template(
        "Find the series that left its own past first.", ("rank", "steps"), 0.5, series.find_onset),
    "inspect-batch": Template("Look for wrong values in the batch of the step.", ("rank",), 1.0, inspect_batch.answer),
    "inspect-state": Template(
        "Look for wrong parameters and moments in the state before the step.", ("rank", "tensor"), 2.0, inspect_state.answer),
    "compare-settings": Template(
        "Compare settings with those of an earlier job, and settings of optimizers between ranks.", (), 1.0,
        compare_settings.answer),
    "read-log": Template("Find the first error that one rank alone logged.", ("rank",), 0.5, read_log.answer),
    "read-flight-record": Template(
        "Find the rank that did not enter a collective, in dumps of the flight recorder.", (), 0.5, read_flight_record.answer,
        least_ranks=2),
    "find-straggler": Template(
        "Find the rank that takes longer than the others, and in which part of a step.", ("rank", "steps"), 0.1,
        find_straggler.answer, least_ranks=2),
    "verify-checkpoints": Template(
        "Compare the checkpoints saved last with their manifests.", ("steps",), 30.0, checkpoints.verify_checkpoints),
    "compare-checkpoints": Template(
        "Compare the checkpoint saved last with the one before.", (), 30.0, checkpoints.compare_checkpoints),
    "replay-step": Template(
        "Execute the recorded step again; needs your code.", ("rank",), 60.0, None,
        "unsilent incident replay {folder} --code step.py:make --rank {rank}"),
    "test-device": Template(
        "Test the device with known answers, on its host.", ("host", "rank"), 600.0, None,
        "unsilent selftest --device {device} --minutes 10"),
    "rerun-seeded": Template(
        "Run the training again with the same seed, and compare the runs; needs your code.", (), 1800.0, None,
        "unsilent explain train.py:loop"),
}  # fmt: skip


def find_template(name: str) -> Template:
    """The template with the given name.

    Raises ``UsageError`` if there is none.
    """
    if name not in TEMPLATES:
        raise unknown_name_error("query", name, TEMPLATES)
    return TEMPLATES[name]


def execute(bundle: Bundle, query: Query) -> Finding:
    """The finding of a query.

    Raises ``UsageError`` if the template is unknown or does not take these blanks.
    """
    template = find_template(query.template)
    if unknown := [name for name in query.blanks.given if name not in template.blanks]:
        known = ", ".join(f"--{blank}" for blank in template.blanks) or "none"
        raise UsageError(f"--{unknown[0]} is no blank of {query.template}; it takes {known}")
    if template.answer is None:
        text = f"the folder of the incident does not answer it; run: {command_of(bundle, query)}"
        return Finding(outcome=Outcome.UNANSWERED, text=text)
    finding = template.answer(bundle, query.blanks)
    if finding.outcome is Outcome.LOCALISED and query.blanks.rank is not None:
        everywhere = template.answer(bundle, replace(query.blanks, rank=None))
        # Whether other ranks do not have it.
        if (everywhere.outcome, everywhere.ranks) != (finding.outcome, finding.ranks):
            text = f"{finding.text}; looking at all ranks does not tell this one apart: {everywhere.text}"
            return replace(finding, outcome=Outcome.DIFFERS, text=text)
    return finding


def command_of(bundle: Bundle, query: Query) -> str:
    """The command line that answers a query."""
    template, folder = TEMPLATES[query.template], str(bundle.folder)
    if not template.command:
        return shlex.join(["unsilent", "triage", "query", query.template, folder, *query.blanks.words])
    rank = max(0, bundle.incident.suspect) if query.blanks.rank is None else query.blanks.rank
    parts, _ = bundle.parts(rank)
    device = parts[rank].device if rank in parts else bundle.incident.device
    return template.command.format(folder=shlex.quote(folder), rank=rank, device=shlex.quote(device or "auto"))


def json_schemas() -> list[dict[str, Any]]:
    """Name, help, seconds and command of each template, with its blanks as a JSON Schema."""
    whole, texts = {"type": "integer", "minimum": 0}, {"type": "string"}
    kinds: dict[str, dict[str, Any]] = {
        "rank": whole, "tensor": texts, "host": texts,
        "steps": {"type": "array", "prefixItems": [whole, whole], "minItems": 2, "maxItems": 2},
    }  # fmt: skip
    fields = options_of(Blanks)
    return [
        {
            "name": name,
            "description": template.help,
            "seconds": template.seconds,
            "command": template.command or f"unsilent triage query {name} DIR",
            "parameters": {
                "type": "object",
                "properties": {
                    blank: {**kinds[blank], "description": fields[blank].option.help} for blank in template.blanks
                },
                "additionalProperties": False,
            },
        }
        for name, template in TEMPLATES.items()
    ]

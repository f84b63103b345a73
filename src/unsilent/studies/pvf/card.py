"""The PVF card: a small JSON file with the settings, the results and the command of a campaign.

A card depends only on its campaign and on the options of the analysis (unit, confidence). It contains no time, host or path of a
store. Running its command again with the same files, versions and kind of device therefore gives the same card, byte for byte.
The last field is the SHA-256 of all other fields. It detects damage and careless edits, but does not show who made the card.

A card may come from an untrusted source. `read_card` therefore checks all of its contents.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, Lt

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.basics.plainfiles import parse_json, read_plain
from unsilent.basics.strictjson import as_json_values, fields_by_name
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.merging import shard_in_command
from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import sorted_json_text, strata_of
from unsilent.campaigns.stored_command import without_options
from unsilent.outcomes.pvf_options import PvfAnalysisOptions
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.report.estimates import Estimate, estimate_cells, limits_text, machine_table, share_cells
from unsilent.report.model import Column, Report, Section, Table, TableRow, TextCell, columns
from unsilent.report.text import (
    EstimateWithLimits,
    count_text,
    estimate_text,
    flips_number_text,
    flips_text,
    number_text,
    percent_text,
    rate_text,
)
from unsilent.studies.pvf.analysis import analyse, non_default_question_options
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.memory_records import Rate
from unsilent.studies.pvf.records import EVENTS_COMING_THROUGH
from unsilent.studies.pvf.spec import PvfSpec
from unsilent.studies.pvf.wanted_precision import Precision
from unsilent.studies.pvf.words import accuracy_text, info_text, judging_text

SCHEMA = "unsilent-pvf-card"
VERSION = 3
KNOWN = (VERSION,)
"""Versions of cards that can be read."""
Level = Literal["model", "component", "layer"]
FitLevel = Literal["memory", "model"]
Share = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(0)]
Size = Annotated[int, Ge(1)]
MOST_BYTES = 16 * 2**20
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class CardRow:
    """One estimate on a card; see `PvfRow`."""

    level: Level
    target: str
    parent: str
    flips: Size | None
    estimate: Share | None
    low: Share
    high: Share
    n: Count
    """Independent trials (faults)."""
    method: str
    silent_share: Share | None
    elements: Size
    bits: Size


@dataclass(frozen=True, slots=True)
class CardFit:
    """A FIT with its limits."""

    estimate: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CardFitRow:
    """The FIT of the model or of a memory; see `MemoryFitRow`."""

    level: FitLevel
    name: str
    raw: Rate
    corrected: Rate
    detected: Rate
    silent: CardFit
    detectable: CardFit
    incorrect: CardFit
    n: Count
    """Independent trials (faults that come through the protection)."""


@dataclass(frozen=True, slots=True)
class PvfCard:
    """The settings (``spec``) and results of a campaign, in a form to share."""

    schema: str
    version: int
    measure: Literal["PVF", "P(incorrect)"]
    command: str
    campaign: str
    spec: PvfSpec
    judge: str
    unit: Literal["sample", "batch"]
    confidence: Annotated[float, Ge(0.5), Lt(1)]
    samples: Size
    batches: Size
    trials: Count
    info: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    """Content of the campaign's hash: hashes of weights, inputs, golden outputs and code, and the kind of machine."""
    files: Mapping[str, str]
    """SHA-256 of the named files, by option."""
    versions: Mapping[str, str]
    device: str
    dtype: str
    threads: Size
    rows: tuple[CardRow, ...]
    memory_fit: tuple[CardFitRow, ...]
    """FIT of memories; empty if no memories are described."""
    notes: tuple[str, ...]
    sha256: str
    """Checksum of all other fields as `sorted_json_text`."""


def make_card(store: PvfStore, question: PvfEstimator) -> PvfCard:
    """The card of a stored campaign.

    Raises ``UsageError`` if no single command reproduces its trials.
    """
    result, description = analyse(store, question), store.baseline
    if result.trials_done < result.trials_planned:
        raise UsageError(
            f"{store.path} has {result.trials_done:,} of {result.trials_planned:,} planned trials, but a card needs "
            f"all of them; {_missing(store)}"
        )
    _check_plan(store, result.command, question.with_default_unit(store.spec.is_transient))
    values = {name: getattr(result, name, "") for name in PvfCard.__dataclass_fields__} | {
        "schema": SCHEMA,
        "version": VERSION,
        "spec": store.spec.to_json(),
        "trials": result.trials_done,
        "fingerprint": description.fingerprint,
        "files": description.files,
        "rows": [row for row in result.rows if row.level in get_args(Level)],
        "memory_fit": [
            {**fields_by_name(row), "n": row.silent.n} for row in result.memory_fit if row.level in get_args(FitLevel)
        ],
        "notes": [*result.notes, *result.imprecise_rows],
    }
    # Fields of a result's row that a card's row does not have are left out when the card is read.
    card = _parse_card(json.dumps(as_json_values(values)), f"the card of {store.path}")
    return replace(card, sha256=checksum(card_json(card)))


def _missing(store: PvfStore) -> str:
    """An instruction on how to complete the trials of a store."""
    trials, command = store.largest_budget()
    spec, strata = store.spec, strata_of(store.spec, store.baseline)
    where = f" --store {shlex.quote(str(store.path))}" if command.startswith("unsilent ") else ""
    part, parts = shard_in_command(command)
    ends = [target.slots if spec.is_enumerated else trials for target, _ in strata]
    if parts < 2 or sum(1 for _ in store.rows()) < sum(len(range(part - 1, end, parts)) for end in ends):
        return f"finish it first: {command}{where}"
    return (
        f"the store is part {part} of {parts}; merge it with the other parts first, then make the card of the merged "
        f"store: unsilent merge {shlex.quote(str(store.path))} … -o ALL.sqlite"
    )


def _check_plan(store: PvfStore, command: str, question: PvfEstimator) -> None:
    """Raise ``UsageError`` if the campaign was planned for another precision, unit or confidence."""
    rounds: list[list[CellPlan]] = store.records(ROUND)
    planned = list(dict.fromkeys(plan.target_precision for plans in rounds for plan in plans))
    if not planned or not command.startswith("unsilent "):
        return
    option_values = dict(pairwise(shlex.split(command)))
    precision = str(Precision.parse(option_values.get("--ci"), option_values.get("--rel")))
    if planned == [f"{precision} at {question.confidence:g} per {question.unit}"]:
        return
    last = re.fullmatch(r"(.+) at (0\.[0-9]+) per (sample|batch)", planned[-1])
    if len(planned) == 1 and last and last[1] == precision:
        raise UsageError(
            f"{store.path} was planned for {planned[0]} but is read at {question.confidence:g} per {question.unit}; "
            f"no command reproduces that; read it as it was planned: --confidence {last[2]} --unit {last[3]}"
        )
    usual = PvfEstimator().with_default_unit(store.spec.is_transient)
    more = (
        non_default_question_options(replace(question, unit=last[3], confidence=float(last[2])), usual) if last else []
    )
    anew = " ".join([without_options(store.largest_budget()[1], PvfAnalysisOptions), *more, "--store NEW.sqlite"])
    raise UsageError(
        f"{store.path} was planned for {', then for '.join(planned)}; no single command reproduces its trials; for a "
        f"card, run the campaign again in a new store: {anew}"
    )


def checksum(values: Mapping[str, Any]) -> str:
    """The SHA-256, in hex, of all fields of a card except the checksum itself."""
    return hashlib.sha256(sorted_json_text({k: v for k, v in values.items() if k != "sha256"}).encode()).hexdigest()


def card_json(card: PvfCard) -> dict[str, Any]:
    """The card as plain JSON values."""
    plain = as_json_values(asdict(card))
    assert isinstance(plain, dict)
    return plain


def card_text(card: PvfCard) -> str:
    """The content of a card file, as JSON text."""
    return json.dumps(card_json(card), indent=2, allow_nan=False) + "\n"


def is_card(path: Path) -> bool:
    """Whether a file looks like a card: by its first bytes, or by its name if it is not a store."""
    try:
        if not path.is_file():  # opening a pipe would block
            return False
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") or (path.suffix == ".json" and head[:16] != _SQLITE)


def read_card(path: Path) -> PvfCard:
    """Read a card from a file.

    Raises ``UsageError`` for a file that is not a card, is damaged, or has an unknown version.
    """
    values = _parse_json_object(content := read_plain(path, MOST_BYTES, f"the card {path}"), path)
    if values.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} is not a PVF card: its schema is {_short_value(values.get('schema'))}, expected {SCHEMA!r}"
        )
    version = values.get("version")
    if type(version) is not int or version not in KNOWN:
        known = ", ".join(map(str, KNOWN))
        raise UsageError(
            f"{path} is a card of version {_short_value(version)}, expected one of: {known}; "
            "read it with the version of Unsilent that made it"
        )
    if values.get("sha256") != checksum(values):
        raise UsageError(
            f"{path} does not match the checksum in it: it was changed or truncated; get it from its source again"
        )
    card = _parse_card(content.decode(), str(path))
    if sorted_json_text(card_json(card)) != sorted_json_text(values):
        raise UsageError(f"{path} is not a valid PVF card: it has fields or values that no card can have")
    wrong = next(_impossible(card), None)
    if wrong is not None:
        raise UsageError(f"{path} is not a valid PVF card: {wrong}")
    return card


def _parse_json_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object with finite numbers and unique keys; raises ``UsageError``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"{text[:20]} is not a finite number")
        return float(text)

    try:
        values = parse_json(content, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a PVF card: it cannot be read as JSON ({_short_value(error)}); give a card or a store"
        ) from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a PVF card: it holds {type(values).__name__}, expected a JSON object")
    return values


def _parse_card(text: str, name: str) -> PvfCard:
    """Parse a JSON text as a card and check the types of its fields; raises ``UsageError``."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(PvfCard).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{name} is not a valid PVF card: {_short_value(where)}: {_short_value(first['msg'])}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not a valid PVF card: {_short_value(error)}") from None


def _impossible(card: PvfCard) -> Iterator[str]:
    """Descriptions of values that no campaign produces, beyond what the types exclude."""
    for number, row in enumerate(card.rows):
        if not _are_limits(row, 1.0):
            yield f"row {number} has impossible values"
    for number, fit in enumerate(card.memory_fit):
        most = fit.raw * (1 + 1e-9)  # the rate of all events, with room for rounding
        rates = (fit.silent, fit.detectable, fit.incorrect)
        if fit.corrected + fit.detected > most or not all(_are_limits(rate, most) for rate in rates):
            yield f"row {number} of memory_fit has impossible values"


def _are_limits(value: EstimateWithLimits, most: float) -> bool:
    """Whether an estimate lies between its limits, and all of them between 0 and ``most``."""
    return 0 <= value.low <= (value.low if value.estimate is None else value.estimate) <= value.high <= most


def _short_value(value: object) -> str:
    """A short, printable text of a value from a file."""
    text = value if isinstance(value, str) else repr(value) if not isinstance(value, Exception) else str(value)
    return text.encode("unicode_escape").decode()[:80]


HASHES = ("weights", "inputs", "golden", "code", "components")
"""Fingerprints that are shown; others are of the device, threads and versions."""
FIT_LEAD = (
    "Failures in 10⁹ device hours (FIT), judged on one inference call. Silent: a call is incorrect and nothing reports it. "
    "Detectable: the memory reports an error, or the call ends with an error or a number that is not finite. Incorrect: silent "
    "calls and those that end with an error, without what memories report. Rates of the description are taken as exact."
)
ESTIMATE_COLUMNS = ("level", "target", "parent", "flips", "", "silent")
POINT = "Hover over a row for its size and method."
METHOD = (
    "With the same files, versions and kind of device, the {} of this card reproduces the campaign. Then unsilent report STORE "
    "--card -o FILE.json, with the same --unit and --confidence, writes the same card, byte for byte."
)


def report(card: PvfCard) -> Report:
    """The report on a card."""
    spec, rows = card.spec, ordered(card)
    trials = f"{count_text(card.trials, 'trial')} on {count_text(card.samples, 'sample')} in {count_text(card.batches, 'batch')}"
    most = max((row.high for row in rows), default=0.0) or 1.0
    said = {(row.target, row.flips, row.estimate, row.n) for row in rows if row.level == "component"}
    # A component that is one layer has no row for that layer.
    layers = [row for row in rows if row.level == "layer"]
    layers = [r for r in layers if r.target != r.parent or (r.target, r.flips, r.estimate, r.n) not in said]
    cause = "an event in the target that comes through the protection" if card.memory_fit else "a fault in the target"
    lead = f"How often an output is wrong, given {cause} ({limits_text(rows, card.confidence)}). n counts faults. "
    lead += f"Bars go from the lower to the upper limit, on a scale from 0 to {100 * most:.3g} %. {POINT}"
    main, known = _table(card, most, [row for row in rows if row.level != "layer"]), tuple(facts(card))
    result = [replace(main, title=_measure(card)) if card.memory_fit else main]
    heads, title = (Column(""), Column("", left_aligned=True)), "to repeat the measurement"
    again = Table(heads, tuple(map(TableRow, known)), title, on_page=False, plain_line_format="{0}: {1}")
    what = "FIT of memories" if card.memory_fit else card.measure
    section = Section(_measure(card), lead, (*result, *([_table(card, most, layers, "Layers")] if layers else [])))
    if not rows:
        trials = "no trial was run, because nothing or too little comes through the protection"
    return Report(
        schema=SCHEMA,
        report_type="A measurement to share",
        title=f"PVF card of {spec.workload}",
        headline=f"{what} of {spec.workload}: {spec.fault} at {' '.join(spec.at)}, per {spec.per}; {trials}",
        estimates=machine_table(_estimates(rows, card.confidence), ESTIMATE_COLUMNS),
        numbers=tuple(key_numbers(card)),
        findings=card.notes,
        sections=(
            *([Section("Failure rate of memories", FIT_LEAD, (_fit_table(card),))] if card.memory_fit else []),
            *([section] if rows else []),
            Section("To repeat the measurement", "", (again,)),
        ),
        facts=known,
        notes=(
            *([f"{limits_text(card.rows, card.confidence)}; n counts faults"] if rows else []),
            f"PVF card, version {card.version}, checksum verified: {card.sha256}",
        ),
        repeat_command=card.command,
        method=METHOD.format("command" if card.command.startswith("unsilent ") else "Python call"),
    )


def ordered(card: PvfCard) -> list[CardRow]:
    """The rows in display order: components, the model, layers; flips ascending."""
    levels = ("component", "model", "layer")
    place = {key: i for i, key in enumerate(dict.fromkeys((row.level, row.parent, row.target) for row in card.rows))}
    return sorted(card.rows, key=lambda r: (levels.index(r.level), place[r.level, r.parent, r.target], r.flips or 0))


def _estimates(rows: Sequence[CardRow], confidence: float) -> Iterator[Estimate]:
    for row in rows:
        keys = {"level": row.level, "target": row.target, "parent": row.parent, "flips": row.flips}
        interval = Interval(row.estimate, row.low, row.high, confidence, row.n, row.method)
        yield Estimate(keys, interval, further={"silent": row.silent_share})


def _table(card: PvfCard, most: float, rows: Sequence[CardRow], title: str = "") -> Table:
    def hint(row: CardRow) -> str:
        return f"{count_text(row.elements, 'element')}, {count_text(row.bits, 'bit')}; {row.method}"

    shown = [
        Column("target"),
        *([Column.text("part of", "parent", 1)] if title else []),  # only layers are part of something
        Column("flips", of=lambda row: TextCell(flips_number_text(row.flips), row.flips)),
        Column(f"{card.measure} %", of=lambda row: share_cells(row)[0]),
        Column("interval %", of=lambda row: replace(share_cells(row)[1], bar=(row.low / most, row.high / most))),
        Column("n"),
        Column("silent", of=lambda row: percent_text(row.silent_share)),
    ]
    more = {"terminal_rows": len(rows), "sortable": len(rows) > 12}
    return Table.of(rows, shown, title, lambda row: row.level == "model", hint, **more)


def _measure(card: PvfCard) -> str:
    return f"{card.measure} of {EVENTS_COMING_THROUGH}" if card.memory_fit else card.measure


def _fit_table(card: PvfCard) -> Table:
    heads = ("level", "of", "raw FIT", "corrected", "silent FIT", "interval", "detectable FIT", "interval ",
             "incorrect FIT", "interval  ", "n")  # fmt: skip
    lines = []
    for row in card.memory_fit:
        rates = [TextCell(number_text(value), value) for value in (row.raw, row.corrected)]
        for fit in (row.silent, row.detectable, row.incorrect):
            rates += estimate_cells(rate_text(fit), fit)
        lines.append(TableRow((row.level, row.name, *rates, row.n), row.level == "model"))
    title = "Failures in 1e9 device hours (FIT)"
    return Table(columns(*heads, left=("level", "of")), tuple(lines), title, terminal_rows=len(lines))


def key_numbers(card: PvfCard) -> Iterator[tuple[str, str, str]]:
    """Key numbers for the head of the page: term, value and small text."""
    for row in card.rows:
        if row.level == "model":
            text = estimate_text(row)
            where = "" if row.flips is None else f", {flips_text(row.flips)}"
            value = text.estimate if row.estimate is None else f"{text.estimate} %"
            yield f"{_measure(card)}{where}", value, text.limits if row.estimate else ""
    yield "faults tried", f"{card.trials:,}", ""
    if accuracy := accuracy_text(card.info):
        yield "fault-free", accuracy, ""


def facts(card: PvfCard) -> Iterator[tuple[str, str]]:
    """Facts that identify the measurement, as pairs of term and text."""
    spec = card.spec
    yield "read as", f"{judging_text(card.judge, card.unit, spec.law)}, seed {spec.seed}"
    yield "campaign", card.campaign
    options = ", ".join(f"{key}={value}" for key, value in spec.options)
    named_inputs = {"options": options, "data": spec.data, "weights": spec.weights, "faults": spec.faults}
    yield from ((name, value) for name, value in named_inputs.items() if value)
    yield from ((f"fingerprint of {key}", card.fingerprint[key]) for key in HASHES if key in card.fingerprint)
    yield from ((f"SHA-256 of {name}", digest) for name, digest in card.files.items())
    yield "device", f"{card.device}, {card.dtype}, {count_text(card.threads, 'thread')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())
    accuracy = accuracy_text(card.info)
    yield from ((key, info_text(value)) for key, value in card.info.items() if key != "accuracy" or not accuracy)

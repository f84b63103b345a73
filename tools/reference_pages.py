"""Writes the pages of the reference from the code: options, exit codes, fault codes, export columns, events.

``make reference`` writes them into ``docs/reference``; a test checks that they are those of the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from unsilent.basics.options import OptionField, options_of
from unsilent.command import Command

OPEN_CODE = re.compile(r"``(.+?)``", re.DOTALL)
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")


def pages() -> dict[str, str]:
    """The pages, by their path in ``docs``."""
    made: dict[str, Callable[[], Iterable[str]]] = {
        "options": options, "exit-codes": exit_codes, "fault-codes": fault_codes,
        "export-columns": export_columns, "events": events,
    }  # fmt: skip
    return {f"reference/{name}.md": "\n".join(make()).rstrip() + "\n" for name, make in made.items()}


# -- text ----------------------------------------------------------------------------------------------------------------


def line(text: str | None) -> str:
    """A text in one line of Markdown."""
    plain = OPEN_CODE.sub(r"`\1`", " ".join((text or "").split()))
    return re.sub(r"(?<!`)<(?![^`]*`[^`]*$)", "&lt;", plain)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table."""
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def prose(doc: str | None) -> Iterator[str]:
    """A docstring as Markdown: its sections as lists."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(doc or ""), flags=re.MULTILINE)
    yield OPEN_CODE.sub(r"`\1`", parts[0]).strip()
    yield ""
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        section, _, after = body.partition("\n\n")
        yield f"*{title}*\n"
        for entry in re.split(r"\n(?!\s)", textwrap.dedent(section)):
            yield f"- {line(entry)}"
        yield ""
        if after.strip():
            yield OPEN_CODE.sub(r"`\1`", textwrap.dedent(after)).strip()
            yield ""


# -- options -------------------------------------------------------------------------------------------------------------


def options() -> Iterator[str]:
    """Every verb with its arguments and options, as ``--help`` shows them."""
    from unsilent.cli.table import COMMANDS, load_command

    yield "# Options\n\nMade from the code. `unsilent VERB --help` shows the same. Of `report`, `diff` and `replay`,"
    yield "`--help` after the name of a store shows further options of its kind.\n"
    for name in COMMANDS:
        yield from _verb(load_command(name))


def _verb(command: Command) -> Iterator[str]:
    """One verb."""
    yield f"## unsilent {command.name}\n\n{line(command.help)}\n\nExample: `{command.example}`\n"
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in options_of(*command.all_option_classes()).values():
        title = "Arguments" if option.is_argument else option.option.panel
        panels.setdefault(title, []).append((f"`{_usage(option)}`", line(option.help_text)))
    for title, records in sorted(panels.items(), key=lambda item: item[0] != "Arguments"):
        yield f"**{title}**\n"
        yield from table(("option", "what it does"), records)


def _usage(option: OptionField) -> str:
    """The option as it is written on a command line."""
    letter = f"-{option.option.short_flag}, " if option.option.short_flag else ""
    return f"{letter}{option.flag} {option.metavar}".strip()


# -- exit codes ----------------------------------------------------------------------------------------------------------


def exit_codes() -> Iterator[str]:
    """Exit codes of the command, and the errors of Python."""
    from unsilent.basics import errors
    from unsilent.cli import main

    said = re.search(r"Exit codes: (.+)\.", main.__doc__ or "", re.DOTALL)
    assert said is not None
    codes = [line(text).partition(" ")[::2] for text in said[1].split(", ")]
    yield "# Exit codes and errors\n\nMade from the code.\n"
    yield from table(
        ("code", "meaning"), ((f"`{code}`", text) for code, text in sorted(codes, key=lambda c: int(c[0])))
    )
    yield "With 1 end: `pvf --assert` that does not hold, `pvf` whose rows stay wider than `--ci` or `--rel` ask, `replay` of a"
    yield "trial that ends otherwise, `noise` whose control runs differ, `checkpoint last-good` without a good one, `status` of a"
    yield "store that cannot be read, `watch` of a rank that is lost or (`--once`, `--json`) with an alarm (also of a run that it"
    yield "continues), `triage --run` and `triage query` that find something, and a defect of Unsilent"
    yield "(`internal error of unsilent`)."
    yield "`run` and `timeline record` end with the exit code of the script that they run, unless the monitor stopped it: with"
    yield "`--on-alarm stop`, 16, or 17 where bits changed; with `--on-alarm replay`, that of the [fault code](fault-codes.md),"
    yield "16 at most once for a step and a device."
    yield "`run --isolate` ends with the code of the job, or with 2 where no device or no good checkpoint is left."
    yield "In your own script:"
    yield "`sys.exit(stop.exit_code)` after a `GuardStop` or a `MonitorStop`.\n"
    yield "An error is one line on stderr that begins with `unsilent: error:` and says what was found, what was expected,"
    yield "and what to do. In Python it is one of these:\n"
    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    yield f"```text\n{tree}\n```"


# -- fault codes ---------------------------------------------------------------------------------------------------------


def fault_codes() -> Iterator[str]:
    """The kinds of faults that an alarm can turn out to be, and what follows."""
    from unsilent.recovery.fault_codes import ASD_CODE, ASD_LEVEL, FAULT_CODES

    yield "# Fault codes\n\nMade from the code. What the step of an alarm, executed again, says of the fault. Codes are stable."
    yield "[How it is decided](../concepts/monitor.md#fault-verdicts).\n"
    rows = (
        (
            f"`{one.code}`",
            one.kind,
            one.level,
            f"`{one.exit_code}`" if one.exit_code else "goes on",
            one.meaning,
            one.action,
        )
        for one in FAULT_CODES
    )
    yield from table(("code", "kind", "level", "exit code of the job", "what was found", "what to do"), rows)
    yield "Where the variables of accuracy-sensitive detection (ASD) ask for the monitor, the log gives every fault the event"
    yield f"code `{ASD_CODE}` of MindSpore as well, whose level is {ASD_LEVEL}."


# -- exports and JSON ----------------------------------------------------------------------------------------------------


def export_columns() -> Iterator[str]:
    """Columns of ``unsilent export`` and fields of ``--json``."""
    from unsilent.campaigns.codec import row_codec
    from unsilent.campaigns.driver import ROUND
    from unsilent.outcomes import Outcome
    from unsilent.render.report_json import FIELDS, RUN_DETAILS
    from unsilent.studies.campaign_kinds import KINDS

    yield "# Export columns and JSON\n\nMade from the code. [How to export](../howto/export-results.md).\n"
    for kind in KINDS:
        yield f"## Stores of unsilent {kind.name}\n"
        yield from prose((kind.row.__doc__ or "").split("Attributes:")[0])
        described = _attributes(kind.row)
        looks = [("`look`", "int", MEANINGS["look"])] if ROUND in kind.record_readers else []
        yield from table(("column", "type", "meaning"), [*_columns(row_codec(kind.row), described), *looks])
    yield "Columns that are marked as *of one run*, and `look`, are left out by `--canonical`.\n"
    yield "## Reading a trial of unsilent pvf\n"
    yield READING.format(digits=", ".join(f"`{outcome.value}` {outcome.name.lower()}" for outcome in Outcome))
    yield "## The object of --json\n\nOne object on stdout, nothing else. `results` has one object for each estimate:\n"
    yield from table(("field", "meaning"), ((f"`{name}`", MEANINGS.get(name, "")) for name in FIELDS))
    left_out = ", ".join(f"`{name}`" for name in sorted(RUN_DETAILS))
    yield f"`--json --canonical` leaves out what differs between two runs of a campaign: {left_out}."


READING = """\
- **Outcomes.** The digits of `outcome_codes` mean: {digits}.
  Digit number i belongs to sample number i of the evaluation, over all batches. `sdc` is silent; `nonfinite`,
  `exception`, `crash` and `hang` are detectable (DUE). `spared` marks samples of batches that the fault did not reach
  and that were not run. The columns with these names have the number of samples of each outcome.
- **Flipped bits.** Each object in `faults` is one corrupted tensor (`site`). `elements` are flat positions in C order. A bit flip
  has the operation `xor`. `operands` then has one mask for each element, in hexadecimal digits. A bit that is 1 in the mask was
  flipped: `0x40000000` is bit 30. Bit 0 is the lowest bit.
- **Severity.** How far a sample is from the golden run, in the unit of the judge; 0 for an identical output. `top1` and
  `next-token`: by how much the softmax probability of the golden class or token fell. `topk`: share of the golden set that was
  lost. `threshold`: difference of the score from that of the golden run.
  `exact-sequence`: share of positions that differ. `tolerance`: largest relative
  difference. `segmentation`: 1 - intersection over union of the two label maps. `detections`: share of detections, of both
  runs, without a partner in the other run.
- **Looks.** A campaign with `--ci` or `--rel` runs in rounds: a pilot, then looks 0, 1, 2 and so on. No estimate uses a
  trial with `look` -1. A row for one target uses its other trials. A row for several targets uses the trials up to the last look
  that all of these targets have reached. The `.json` format has what each round decided in `rounds`, the last one last, and so
  has the first line of a canonical export: by stratum the number of trials of the pilot (`pilot_trials`), of look 0
  (`first_look_trials`; look L has 1.5 to the power of L times as many, rounded up), the mean share of incorrect outputs that the
  pilot lets expect (`pilot_means`), the samples of a trial of the pilot (`pilot_samples`), further pilot trials of more samples
  (`wide_pilot_trials`, of `wide_samples` each), the samples of a trial of the looks (`samples`; 0 for what the campaign
  says), and the look that the target has reached (`look`).
  [How to compute an estimate from an export](../howto/export-results.md#compute-an-estimate-yourself).
"""
MEANINGS = {
    "estimate": "the value, a share from 0 to 1 where it is a probability", "low": "lower limit", "high": "upper limit",
    "confidence": "of the limits", "n": "independent observations (faults, replicas)", "method": "how the limits are made",
    "trial": "the trial as text: target, `x` and flips, k, like `head/x1/17`", "target": "the target of the trial",
    "flips": "number of flips; null where the fault model says how many",
    "k": "number of the trial among those of its target and flips, from 0",
    "faults": "JSON list of the injected faults; a digest where they touch more than 4,096 elements",
    "outcome_codes": "one digit for each sample: its outcome (see below)",
    "incorrect_batches": "number of batches with at least one incorrect output",
    "severity": "largest finite severity of a sample (see below); inf if only detectable outcomes have one",
    "error": "what was raised, or why the process ended; empty for neither",
    "look": "the look from which on the trial counts; -1 for a trial that no estimate uses, like those of a pilot; null in a "
            "campaign without --ci and --rel, where all count",
    "seconds": "time of the trial", "worker": "number of the worker that ran it",
}  # fmt: skip


def _columns(codec: Any, described: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    from unsilent.campaigns.codec import NOT_EXPORTED, RUN_SPECIFIC

    for field in codec.fields:
        if NOT_EXPORTED in field.type_annotations:
            continue
        whole = described.get(field.name, "")
        run = "of one run; " if RUN_SPECIFIC in field.type_annotations else ""
        if field.name == "trial":
            yield "`trial`", "text", MEANINGS["trial"]
        for column in field.columns:
            kind = "list" if field.dtype else "text of hex digits" if field.is_array else column.kind.__name__
            part = f"of `{field.name}`: " if len(field.columns) > 1 and field.name != "trial" else ""
            meaning = (part + whole if whole else "") or MEANINGS.get(column.name, "")
            yield f"`{column.name}`", kind, line(run + meaning)


def _attributes(cls: type) -> dict[str, str]:
    """Descriptions of fields in the docstring of a class."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    result: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?! )", "\n" + section):
        names, _, text = entry.partition(": ")
        result |= dict.fromkeys(names.strip().split(", "), " ".join(text.split()))
    return result


# -- events --------------------------------------------------------------------------------------------------------------


def events() -> Iterator[str]:
    """The events that a command, or a guarded or monitored training, writes while it runs."""
    from unsilent.campaigns.observer import Observer
    from unsilent.events.event_kinds import EVENTS, LOGGER, Event
    from unsilent.guard import guard
    from unsilent.guard.alarms import Alarm, GuardOverhead, GuardStop, NotRepeatable, RepeatabilityWarning

    yield "# Events\n\nMade from the code.\n\n## A guarded training\n"
    yield f"Every recovery is one line of the logger `{guard.LOGGER}`. In Python: `guard.alarms`, `guard.recoveries`,"
    yield "`guard.overhead`, and `Guard(…, on_alarm=function)`.\n"
    for record in (Alarm, GuardOverhead):
        yield f"### {record.__name__}\n"
        yield from prose(record.__doc__)
        yield from table(("field", "type"), ((f"`{f.name}`", f"`{f.type}`") for f in dataclasses.fields(record)))
    yield from table(
        ("raised or warned", "when"),
        (
            (f"`{c.__name__}`", line((c.__doc__ or "").split("\n\n")[0]))
            for c in (GuardStop, NotRepeatable, RepeatabilityWarning)
        ),
    )
    yield "## A monitored training\n"
    yield f"Every event is a line of the logger `{LOGGER}`, and a line of JSON in the file of `--events`. The field `kind`"
    yield "says which event it is. Numbers that are not finite are the strings `nan`, `inf` and `-inf`. With several ranks,"
    yield "each rank writes a file of its own: `NAME.rank0.jsonl`, `NAME.rank1.jsonl`."
    yield "[How to watch a training](../howto/monitor-training.md#watch-a-monitored-training).\n"
    for title, record in {"All events": Event, **{f"`{kind}`": event for kind, event in EVENTS.items()}}.items():
        yield f"### {title}\n"
        yield from prose((record.__doc__ or "").split("Attributes:")[0])
        described = _attributes(record)
        own = [f for f in dataclasses.fields(record) if record is Event or f.name not in vars(Event)["__annotations__"]]
        yield from table(
            ("field", "type", "meaning"),
            ((f"`{f.name}`", f"`{f.type}`", line(described.get(f.name, ""))) for f in own),
        )
    yield "## A campaign\n"
    yield "Progress goes to stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing with `--quiet`. It shows:\n"
    methods = ((name, m) for name, m in vars(Observer).items() if not name.startswith("_") and inspect.isfunction(m))
    yield from table(("event", "what happened"), ((f"`{name}`", line(m.__doc__)) for name, m in methods))
    yield "All that happened in a trial is its row in the store: [export columns](export-columns.md)."


def main() -> None:
    """Write the pages into a folder."""
    for name, text in pages().items():
        path = Path(sys.argv[1], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

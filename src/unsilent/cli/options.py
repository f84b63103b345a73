"""Options that several verbs share, spelled once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from unsilent.errors import UsageError

Workload = Annotated[
    str,
    typer.Argument(help="Built-in name, file.py:name, package.module:name, hf:DIR or FILE.pt2.", show_default=False),
]
StoreOrCard = Annotated[Path, typer.Argument(help="A campaign store, or a card.", show_default=False)]
StoreFile = Annotated[Path, typer.Argument(help="A campaign store.", show_default=False)]
With = Annotated[list[str] | None, typer.Option("--with", help="Option of the workload, key=value; repeat for more.")]
Data = Annotated[str | None, typer.Option(help="Data file for workloads that take one.")]
Weights = Annotated[str | None, typer.Option(help="Weights file for workloads that take one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Plain = Annotated[bool, typer.Option("--plain", help="No colour, no boxes: for pipes and logs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Seed = Annotated[int, typer.Option(help="Campaign seed; every trial's randomness derives from it.")]
Jobs = Annotated[int, typer.Option(help="Worker processes.")]
StorePath = Annotated[
    Path | None, typer.Option("--store", help="Where trials are kept.", show_default="unsilent-VERB-….sqlite here")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")]
Dtype = Annotated[str | None, typer.Option(help="Run the model in this floating-point type.")]
Threads = Annotated[
    int, typer.Option(help="CPU threads per worker (part of a campaign's identity: results depend on it).")
]
Executor = Annotated[str | None, typer.Option(help="serial, processes or ray.", show_default="by --jobs")]
Ray = Annotated[
    str | None,
    typer.Option(
        help="A Ray cluster to run trials on, like 10.0.0.1:6379.", show_default="--executor ray makes its own here"
    ),
]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds after which a trial hangs.", show_default="20x golden, at least 10")
]
Unit = Annotated[
    str | None,
    typer.Option(
        help="What an incorrect output is counted on: sample or batch.",
        show_default="sample; batch for op:, input: and kv:",
    ),
]
Confidence = Annotated[float, typer.Option(help="Confidence of every interval.")]
Interval = Annotated[str, typer.Option(help="clopper-pearson, or wilson where that holds.")]
FitPerBit = Annotated[float | None, typer.Option(help="Raw FIT (failures per 1e9 hours) of one bit of memory.")]
Html = Annotated[Path | None, typer.Option("--html", help="Where the report goes.", show_default="beside the store")]
Engine = Annotated[
    str, typer.Option(help="auto (run only what a fault changes) or plain; rows are the same, bit for bit.")
]
Memory = Annotated[
    str | None,
    typer.Option(help="What all workers may hold for shortcuts, like 2GB.", show_default="a quarter of what is free"),
]
Accelerator = Annotated[
    str | None,
    typer.Option(help="Show what follows from nvdla, systolic, tensor-core or FILE.toml.", show_default=False),
]


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ``UsageError`` where one of these parameters of a verb was given and would be ignored."""
    words = {p.name: p.opts[0] if p.opts[0][0] == "-" else p.opts[0].upper() for p in context.command.params}
    given = [words[name] for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise UsageError(f"{why}: leave out {', '.join(given)}")


def pairs(items: list[str] | None) -> tuple[tuple[str, str], ...]:
    """What ``--with key=value`` says, sorted; raises ``UsageError``."""
    pairs = dict(item.partition("=")[::2] for item in items or ())
    for item in items or ():
        if "=" not in item:
            raise UsageError(f"cannot read --with {item!r}; expected key=value")
    return tuple(sorted(pairs.items()))


OUTPUT = ("--output", "-o")
Output = Annotated[
    Path | None, typer.Option(*OUTPUT, help="Where the page is written.", show_default="beside the store")
]

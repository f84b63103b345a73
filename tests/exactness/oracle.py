"""What a workload gives under each of a list of faults, by the plain engine alone, in a process of its own.

    python oracle.py WORKLOAD FAULTS.json OUT.json [--with key=value] [--data FILE] [--weights FILE] [--dtype NAME]

Several such groups of words, with a lone ``+`` between them, share one process.
``FAULTS.json`` is a list of trials, each a list of fault records; ``OUT.json`` what `Answers` says. Nothing of the engine
under test is used: `PlainEngine` runs the whole workload for every batch of every trial. Bits are read and hashed here,
not by the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import xxhash
from torch import Tensor

THREADS = 1
WHOLE_EVERY = 5
"""Every so many trials, the row that a campaign would store is compared as well."""


class Answer(TypedDict):
    """One batch under one trial, or golden."""

    raised: str | None
    """``Type: text`` of what the model raised."""
    leaves: list[list[Any]] | None
    """``[path, dtype, shape, xxh3-128 of the raw bits]`` of every tensor and number of the output."""
    nonfinite: bool


class Row(TypedDict):
    """How a trial ended: outcome codes in hex, severity of each batch in hex, first error."""

    codes: str
    severity: str
    error: str


class Answers(TypedDict):
    """Everything the oracle found."""

    engine: str
    golden: list[Answer]
    trials: list[list[Answer]]
    """By trial, by batch."""
    rows: dict[str, Row]
    """By number of the trial."""


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of an output, each with where it is; containers say their type, so that a changed nesting shows."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{path}{type(value).__name__}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from flatten(item, f"{path}{type(value).__name__}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flatten(getattr(value, field.name), f"{path}{type(value).__name__}.{field.name}")
    else:
        yield path, value


def raw(tensor: Tensor) -> bytes:
    """The bits of a tensor in C order: NaN payloads and the sign of zero included."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def describe(value: Any) -> tuple[list[Any], bool]:
    """``[dtype, shape, hash]`` of a leaf, and whether it holds NaN or infinity."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        return [type(value).__name__, [], repr(value)], isinstance(value, float) and not np.isfinite(value)
    loud = value.is_floating_point() and not bool(torch.isfinite(value.to(torch.float64)).all())
    return [str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(raw(value))], loud


def answer(evaluate: Callable[[], Any]) -> Answer:
    """What one evaluation gives, or raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # corrupted models divide by zero and the like; only bits count
            output = evaluate()
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as raised:
        return {"raised": f"{type(raised).__name__}: {raised}", "leaves": None, "nonfinite": False}
    found = [(path, *describe(leaf)) for path, leaf in flatten(output)]
    return {"raised": None, "leaves": [[p, *d] for p, d, _ in found], "nonfinite": any(n for _, _, n in found)}


def row(outcome: Any) -> Row:
    """A `TrialOutcome` in JSON values."""
    severity = np.concatenate([batch.severity for batch in outcome.batches])
    return {"codes": outcome.codes.tobytes().hex(), "severity": severity.tobytes().hex(), "error": outcome.error}


def answers(
    engine: Any,
    trials: Sequence[Sequence[Any]],
    order: Sequence[int] | None = None,
    after: Callable[[int], None] = lambda number: None,
) -> Answers:
    """Run all trials, in the given order of their numbers, calling ``after`` with each; what is found goes by number."""
    batches = range(len(engine.batches))
    found: dict[int, list[Answer]] = {}
    rows: dict[str, Row] = {}
    for number in order if order is not None else range(len(trials)):
        faults = trials[number]
        found[number] = [answer(lambda b=b, faults=faults: engine.output(b, faults)) for b in batches]  # type: ignore[misc]
        if number % WHOLE_EVERY == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[str(number)] = row(engine.trial(faults))
        after(number)
    golden = [answer(lambda g=g: g) for g in engine.golden]  # type: ignore[misc]
    engine.check_intact()
    return {
        "engine": type(engine).__name__,
        "golden": golden,
        "trials": [found[n] for n in range(len(trials))],
        "rows": rows,
    }


def serve(words: Sequence[str]) -> None:
    """Read the faults, run them plainly, write the answers."""
    from unsilent.engine.plain import PlainEngine
    from unsilent.faults import Fault
    from unsilent.workloads import load

    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("faults", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--with", dest="options", action="append", default=[])
    parser.add_argument("--data")
    parser.add_argument("--weights")
    parser.add_argument("--dtype")
    asked = parser.parse_args(words)
    options = dict(option.split("=", 1) for option in asked.options)
    workload = load(asked.workload, options, data=asked.data, weights=asked.weights)
    torch.set_num_threads(THREADS)
    engine = PlainEngine(workload, dtype=asked.dtype)
    assert type(engine) is PlainEngine
    trials = [[Fault.from_json(f) for f in trial] for trial in json.loads(asked.faults.read_text())]
    asked.out.write_text(json.dumps(answers(engine, trials)))


def main(words: Sequence[str]) -> None:
    """One group of words after the other."""
    while words:
        end = words.index("+") if "+" in words else len(words)
        serve(words[:end])
        words = words[end + 1 :]


if __name__ == "__main__":
    main(sys.argv[1:])

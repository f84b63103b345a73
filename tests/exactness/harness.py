"""Proof that an engine gives the bits of the plain run: the same faults here and in a fresh process, bit for bit.

`compare` runs the trials by `ENGINE` here, in another order than the oracle (so that what one trial leaves behind shows),
runs ``oracle.py`` in a process of its own with a clean environment, and counts. `Summary.check` judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exactness.faults import KINDS, Trial, sites, to_json
from exactness.listening import Fallbacks, Packs, insist
from exactness.oracle import THREADS, Answer, Answers, Row, answers
from exactness.summary import HEADER as HEADER
from exactness.summary import Mismatch
from exactness.summary import Summary as Summary
from unsilent.basics.errors import UsageError
from unsilent.engine import PlainEngine, make_engine
from unsilent.faults import Region
from unsilent.faults.naming import is_transient
from unsilent.workloads import load
from unsilent.workloads.base import InferenceWorkload

ENGINE: Callable[..., PlainEngine] = make_engine
"""Makes the engine under test from a workload and options."""

ORACLE = Path(__file__).with_name("oracle.py")
KEPT = ("PATH", "HOME", "UNSILENT_CACHE", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment that the oracle gets; the cache among it holds trained weights alone."""
PACK = 16
"""Trials that are given to the engine together."""


@dataclass(frozen=True)
class Reference:
    """A workload as the command line names it, for both sides."""

    ref: str
    options: Mapping[str, str] = field(default_factory=dict)
    data: str | None = None
    weights: str | None = None
    dtype: str | None = None
    undefined: tuple[str, ...] = ()
    """Globs over sites that are left alone, because under a fault there the plain run does not agree with itself."""

    def load(self) -> InferenceWorkload:
        """The workload, loaded anew."""
        return load(self.ref, self.options, data=self.data, weights=self.weights)

    def words(self) -> list[str]:
        """Options of the oracle."""
        given = {"--data": self.data, "--weights": self.weights, "--dtype": self.dtype}
        words = [word for key, value in given.items() if value is not None for word in (key, value)]
        return words + [word for key, value in self.options.items() for word in ("--with", f"{key}={value}")]


@contextmanager
def one_thread() -> Iterator[None]:
    """As many threads as the oracle uses; the caller's number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Comparison:
    """One workload under the engine to be tried; an object, so that faults can be drawn from its sites first.

    Args:
        workload: what to run. engine_options: passed to `ENGINE`.
    """

    def __init__(self, workload: str | Reference, **engine_options: Any) -> None:
        self.reference = Reference(workload) if isinstance(workload, str) else workload
        if self.reference.dtype is not None:
            engine_options["dtype"] = self.reference.dtype
        with one_thread():
            self.engine = ENGINE(self.reference.load(), **engine_options)
        if type(self.engine) is PlainEngine and engine_options.get("engine") != "plain":
            raise AssertionError(f"{self.reference.ref}: no engine but the plain one was made, so nothing is compared")
        insist(self.engine)

    def regions(self, kind: str) -> tuple[Region, ...]:
        """Everything of one of `KINDS` that can be corrupted; nothing where the workload has none."""
        # Index buffers are selected by their names alone.
        indices = [f"param:{name}" for name in self.engine.parameters.index_buffers] if kind == "param" else []
        try:
            with one_thread():
                found = self.engine.select_regions((*KINDS[kind], *indices))
        except UsageError:
            if kind == "param":
                raise
            return ()
        return tuple(r for r in found if not any(fnmatchcase(r.site, glob) for glob in self.reference.undefined))

    def answers(self, trials: Sequence[Trial], seed: int) -> Found:
        """What the engine under test says of each trial alone and of several at once; ``seed`` of their order."""
        fallbacks = Fallbacks(self.engine)
        faults = [t.faults for t in trials]
        order = np.random.default_rng([seed, 2]).permutation(len(trials)).tolist()
        with one_thread():
            alone = answers(self.engine, faults, order, after=fallbacks.note)
            packs = Packs(self.engine)
            for transient in (False, True):  # a campaign corrupts parameters, or values of a run
                these = [n for n in order if any(is_transient(f.site) for f in faults[n]) == transient]
                for first in range(0, len(these), PACK):
                    packs.run(these[first : first + PACK], faults)
            self.engine.check_intact()
        return Found(alone, packs.answers, packs.rows, packs.shared, fallbacks.count)


@dataclass(frozen=True)
class Found:
    """What the engine under test said."""

    alone: Answers
    together: dict[tuple[int, int], Answer]
    """By trial and batch, of the batches in which a fault acts."""
    rows: dict[int, Row]
    """By trial, from running several at once."""
    shared: int
    """Answers that came out of calls which several trials shared."""
    fallbacks: int | None


def compare(workload: str | Reference, trials: Sequence[Trial], seed: int, **engine_options: Any) -> Summary:
    """Run ``trials`` by the engine under test and by the oracle in a fresh process, and count where they differ.

    Args:
        workload: what to run. seed: of the order in which the trials run here. engine_options: passed to `ENGINE`.
    """
    return compare_all([(Comparison(workload, **engine_options), trials)], seed)[0]


def compare_all(asked: Sequence[tuple[Comparison, Sequence[Trial]]], seed: int) -> list[Summary]:
    """`compare` for several workloads, which share the fresh process."""
    found = [comparison.answers(trials, seed) for comparison, trials in asked]
    expected = consult([(comparison.reference, trials) for comparison, trials in asked])
    return [
        summarise(comparison, trials, said, mine)
        for (comparison, trials), said, mine in zip(asked, expected, found, strict=True)
    ]


def compare_each(
    named: Mapping[str, Reference], choose: Callable[[Comparison], list[Trial]], seed: int
) -> dict[str, Summary | Exception]:
    """`compare` for several workloads with the trials that ``choose`` gives; what one of them raises is its result."""
    asked: dict[str, tuple[Comparison, list[Trial], Found]] = {}
    results: dict[str, Summary | Exception] = {}
    for name, reference in named.items():
        try:
            comparison = Comparison(reference)
            trials = choose(comparison)
            asked[name] = comparison, trials, comparison.answers(trials, seed)
        except Exception as error:
            results[name] = error
    expected = consult([(comparison.reference, trials) for comparison, trials, _ in asked.values()])
    for (name, (comparison, trials, found)), said in zip(asked.items(), expected, strict=True):
        try:
            results[name] = summarise(comparison, trials, said, found)
        except AssertionError as error:
            results[name] = error
    print(HEADER, *(r.row for r in results.values() if isinstance(r, Summary)), sep="\n")
    return results


def checked(result: Summary | Exception) -> Summary:
    """The summary, once it shows no difference; raises what was raised."""
    if isinstance(result, Exception):
        raise result
    return result.check()


def consult(asked: Sequence[tuple[Reference, Sequence[Trial]]]) -> list[Answers]:
    """What the oracle says, from a fresh process with a clean environment."""
    with tempfile.TemporaryDirectory() as folder:
        words: list[str] = []
        for i, (reference, trials) in enumerate(asked):
            faults = Path(folder, f"faults-{i}.json")
            faults.write_text(json.dumps(to_json(trials)))
            words += ["+"] * bool(words)
            words += [reference.ref, str(faults), str(Path(folder, f"out-{i}.json")), *reference.words()]
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        done = subprocess.run(
            # -I: neither PYTHON* variables nor the current folder decide what is imported.
            [sys.executable, "-I", ORACLE, *words],
            env={**environment, "TMPDIR": folder},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise AssertionError(f"the oracle failed on {', '.join(r.ref for r, _ in asked)}:\n{done.stderr}")
        said: list[Answers] = [json.loads(Path(folder, f"out-{i}.json").read_text()) for i in range(len(asked))]
    for (reference, trials), one in zip(asked, said, strict=True):
        assert one["engine"] == "PlainEngine", f"the oracle must run plainly, it ran {one['engine']}"
        told = len(one["trials"])
        assert told == len(trials), f"{reference.ref}: the oracle answered {told} of {len(trials)} trials"
    return said


def summarise(comparison: Comparison, trials: Sequence[Trial], expected: Answers, found: Found) -> Summary:
    """Compare answer with answer."""
    golden = expected["golden"]
    same = golden == plain_json(found.alone["golden"])
    assert same, f"{comparison.reference.ref}: golden outputs differ between the two processes"
    hit = sites(trials)
    known = {f"param:{name}" for name in comparison.engine.parameters.sites}
    return Summary(
        workload=comparison.reference.ref.rpartition(":")[2],
        engine=found.alone["engine"],
        trials=len(trials),
        batches=sum(map(len, expected["trials"])),
        shared=found.shared,
        rows=len(expected["rows"]),
        changed=sum(t != golden for t in expected["trials"]),
        nonfinite=sum(any(a["nonfinite"] for a in t) for t in expected["trials"]),
        exceptions=sum(any(a["raised"] for a in t) for t in expected["trials"]),
        fallbacks=found.fallbacks,
        unrecorded=tuple(dict(getattr(comparison.engine, "reasons", {})).values()),
        corrupted=len(hit & known),
        sites=len(known),
        transient=len(hit - known),
        mismatches=tuple(_mismatches(trials, expected, found)),
        notes=tuple(comparison.engine.notes),
    )


def plain_json(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


def _mismatches(trials: Sequence[Trial], expected: Answers, found: Found) -> Iterator[Mismatch]:
    for number, trial in enumerate(trials):
        told = tuple(fault.describe() for fault in trial.faults[:4])
        said, key = expected["trials"][number], str(number)
        pairs: list[tuple[str, Any, Any]] = [
            (f"batch {b}", *pair) for b, pair in enumerate(zip(said, found.alone["trials"][number], strict=True))
        ]
        pairs += [
            (f"batch {b}, together", one, found.together[number, b])
            for b, one in enumerate(said)
            if (number, b) in found.together
        ]
        if key in expected["rows"]:
            pairs.append(("row", expected["rows"][key], found.alone["rows"][key]))
            pairs.append(("row, together", expected["rows"][key], found.rows[number]))
        for where, one, two in pairs:
            two = plain_json(two)
            if one != two:
                yield Mismatch(number, trial.label, where, told, *_told(one, two))


def _told(one: Any, two: Any) -> tuple[str, str]:
    """The parts in which two answers differ, shortened."""
    keys = [k for k in one if one[k] != two[k]]
    return tuple(", ".join(f"{k} {str(side[k])[:200]}" for k in keys) for side in (one, two))  # type: ignore[return-value]

"""Protocols that campaigns of every kind implement.

`Spec` is what was asked, `Baseline` what was found out before the first trial, `TrialId` names a trial, a `Runner` runs trials
and `CampaignRow` is what happened in one.

A campaign's identity is the hash of its spec and of the fingerprint of all that its rows depend on. A trial's randomness derives
from that hash, the seed, its stratum and its number alone, so any trial replays alone, anywhere, in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, cast

import xxhash

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import load_named
from unsilent.basics.options import options_of
from unsilent.faults.fault_texts import with_function_file, without_folder

if TYPE_CHECKING:
    from unsilent.workloads.model_fitting import Progress

Json = dict[str, Any]
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How trials are run. It changes what they cost, never a row, so it is not part of a campaign's identity."""

    engine: str = "auto"
    """``auto``: every shortcut that a check allows; ``plain``: none."""
    memory: int | None = None
    """Bytes that all workers together may hold for shortcuts; None: a quarter of what is free."""
    jobs: int = 1
    """Workers that share the memory."""


class TrialId(NamedTuple):
    """One trial: the k-th fault of ``flips`` flips in ``target``. Text form ``target/x8/17``, or ``target/x8/17/s4``.

    ``sample_count``: how many samples of one batch it evaluates; 0 is what the spec says, usually all samples of all batches.
    """

    target: str
    flips: int | None
    k: int
    sample_count: int = 0

    def __str__(self) -> str:
        text = f"{self.target}/x{self.flips or ''}/{self.k}"
        return f"{text}/s{self.sample_count}" if self.sample_count else text

    @classmethod
    def parse(cls, text: str) -> TrialId:
        """The inverse of ``str``; raises ``UsageError`` for another text."""
        target, _, rest = text.rpartition("/x")
        flips, slash, number = rest.partition("/")
        k, evaluated, samples = number.partition("/s")
        numbers = [k] + [flips] * bool(flips) + [samples] * bool(evaluated)
        if not (target and slash and all(map(_NUMBER.fullmatch, numbers))):
            head, _, number = text.rpartition("/")
            other = f"{head}/x/{number}" if head and _NUMBER.fullmatch(number) else "random/x/17"
            raise UsageError(
                f"cannot read trial {text!r}; expected TARGET/xFLIPS/NUMBER, like top_mlp/x8/17, "
                f"or without a number of flips TARGET/x/NUMBER, like {other}"
            )
        return cls(target, int(flips) if flips else None, int(k), int(samples or 0))


class DeferredTrial(NamedTuple):
    """A trial that must run again alone before it has an outcome.

    It ran out of memory, which other trials may have taken, or (without a ``reason``) it needs all processors.
    """

    trial: TrialId
    reason: str


def without_folders(values: Json, *paths: str) -> Json:
    """The values of a spec, its workload and the files at ``paths`` without the folders that they happen to lie in."""
    workload = values["workload"]
    file, colon, name = workload.rpartition(":")
    if colon and file.endswith(".py"):
        workload = f"{PurePath(file).name}:{name}"
    elif workload.startswith("hf:"):
        workload = f"hf:{PurePath(workload[3:]).name}"
    elif workload.endswith(".pt2"):
        workload = PurePath(workload).name
    if isinstance(values.get("fault"), str):
        values = values | {"fault": without_folder(values["fault"])}
    return values | {"workload": workload} | {key: PurePath(values[key]).name if values[key] else None for key in paths}


def sorted_json_text(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class Spec(Protocol):
    """The settings of a campaign, a frozen dataclass. Budget, jobs and executor are not part of it: they change no row."""

    @property
    def workload(self) -> str: ...

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of the workload."""
        ...

    @property
    def flips(self) -> tuple[int | None, ...]:
        """Faults of a trial; (None,) where something else says how many."""
        ...

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def is_enumerated(self) -> bool:
        """Whether all trials are known beforehand, each target's as many as its ``slots``, instead of drawn."""
        ...

    def identity(self) -> Json:
        """The spec without the folders that its files happen to lie in.

        A campaign's name derives from it. Of options that name files (a class attribute ``FILES``) and of the file of the
        workload, the content counts and not the name: the fingerprint has to cover what changes with it.
        """
        ...

    def to_json(self) -> Json: ...

    def make_runner(self, progress: Progress | None, worker_settings: WorkerSettings) -> Runner:
        """The runner of trials, in a worker: it may load torch."""
        ...


class JsonRecord:
    """A base of dataclasses that are stored as JSON."""

    __slots__ = ()

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(cast("Any", self))


class StoredSpec(JsonRecord):
    """A base of specs, frozen dataclasses: what most of them say of themselves.

    Attributes:
        FILES: Names of options that name files.
        RUNNER: Where the class of the runner is, ``module:class``; it takes the spec, ``progress`` and ``worker_settings``.
    """

    __slots__ = ()
    FILES: ClassVar[tuple[str, ...]] = ()
    RUNNER: ClassVar[str]

    @property
    def is_enumerated(self) -> bool:
        """Whether all trials are known beforehand: no, they are drawn."""
        return False

    def identity(self) -> Json:
        """The spec without the folders its files happen to lie in, and the kind of device without its index."""
        values = without_folders(self.to_json(), *self.FILES)
        return values | ({"device": values["device"].partition(":")[0]} if "device" in values else {})

    def make_runner(self, progress: Progress | None, worker_settings: WorkerSettings) -> Runner:
        """The runner of trials, in a worker."""
        runner: Runner = load_named(self.RUNNER)(self, progress=progress, worker_settings=worker_settings)
        return runner


class SpecOfTraining(StoredSpec):
    """A base of specs whose workload is a training, and whose trials have no number of flips."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """Where it trains: an option of its workload."""
        return dict(cast("Spec", self).options).get("device", "cpu")

    @property
    def flips(self) -> tuple[None]:
        """The fault model, if there is one, says how many elements."""
        return (None,)


class TrialTarget(Protocol):
    """A target that trials are drawn for."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int:
        """Trials there are, where all are to be run."""
        ...


class Baseline(Protocol):
    """Facts that a worker establishes before the first trial, a frozen dataclass."""

    @property
    def campaign(self) -> str: ...

    @property
    def fingerprint(self) -> Mapping[str, str]: ...

    @property
    def targets(self) -> Sequence[TrialTarget]: ...

    @property
    def golden_seconds(self) -> float:
        """Seconds of one fault-free run."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """The workload's statements of itself."""
        ...

    @property
    def versions(self) -> Mapping[str, str]: ...

    def to_json(self) -> Json: ...


def strata_of(spec: Spec, baseline: Baseline) -> list[tuple[TrialTarget, int | None]]:
    """The strata of a campaign: each target with each number of flips; some targets are for some of these numbers only."""
    return [
        (t, flips) for t in baseline.targets for flips in spec.flips if flips in (getattr(t, "flips", ()) or (flips,))
    ]


class CampaignRow(Protocol):
    """The record of one trial: a frozen dataclass whose columns `unsilent.campaigns.codec` reads off its fields."""

    @property
    def trial(self) -> TrialId: ...

    @property
    def seconds(self) -> float: ...

    @property
    def worker(self) -> int: ...

    def reproducible_values(self) -> dict[str, Any]: ...

    def with_worker(self, number: int) -> Self: ...

    def derived(self) -> dict[str, Any]: ...


class Runner(Protocol):
    """Runs trials of one campaign in this process.

    Where its kind's replay asks for more than a row, it has a method ``answer(what, *arguments)`` as well, which answers that.

    Attributes:
        max_trials_together: Trials that are run together at most.
        unverified_row_count: Rows that no proof covers yet.
    """

    max_trials_together: int
    unverified_row_count: int

    @property
    def workload(self) -> Any:
        """The loaded workload, by its ``name``."""
        ...

    def establish_baseline(self) -> Any: ...

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[Any]: ...

    def lost_trial_row(self, trial: TrialId, outcome: Any, seconds: float, reason: str) -> Any:
        """The row of a trial whose process was lost."""
        ...

    def verify_restored_state(self) -> None:
        """Raises where trials left something behind."""
        ...


def campaign_hash(spec: Spec, fingerprint: Mapping[str, str]) -> str:
    """32 hex digits that name the campaign."""
    return xxhash.xxh3_128_hexdigest(
        sorted_json_text({"spec": _without_file_names(spec), "fingerprint": dict(fingerprint)}).encode()
    )


def _without_file_names(spec: Spec) -> Json:
    """The identity of a spec without names of files: what counts of a file is its content, which the fingerprint covers."""
    values = {key: value for key, value in spec.identity().items() if key not in getattr(spec, "FILES", ())}
    file, colon, name = values["workload"].rpartition(":")
    if colon and file.endswith(".py"):
        values["workload"] = f"*.py:{name}"
    elif values["workload"].startswith("hf:"):
        values["workload"] = "hf:*"
    elif values["workload"].endswith(".pt2"):
        values["workload"] = "*.pt2"
    if isinstance(values.get("fault"), str):
        values["fault"] = with_function_file(values["fault"], "*.py")
    return values


def differences(
    stored_campaign: tuple[Spec, Baseline], current_campaign: tuple[Spec, Baseline]
) -> Iterator[tuple[str, tuple[Any, Any] | None]]:
    """Differences that make two campaigns two: values of the spec with both values, then keys of the fingerprint with None."""
    (old, then), (new, now) = (
        (_without_file_names(spec), result.fingerprint) for spec, result in (stored_campaign, current_campaign)
    )
    yield from ((key, (old[key], new[key])) for key in new if old[key] != new[key])
    yield from ((key, None) for key in {**then, **now} if then.get(key) != now.get(key))


DEFAULT_TEXTS = {"dtype": "as built", "judge": "the workload's own", "samples": "chosen by a pilot"}
"""What it is called that nothing was asked; else ``none``."""


def spec_value_text(spec: type, key: str, value: Any) -> str:
    """A value of a spec as the command line writes it: ``1,8`` for flips, ``as built`` for no dtype."""
    asking = options_of(spec).get(key)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if asking is not None and asking.option.formatter is not None and isinstance(value, int):
        return " ".join(asking.format_value(value))
    if key == "flips" and isinstance(value, tuple | list) and None in value:
        return "set by the fault model"
    if value and isinstance(value, tuple | list) and asking is not None:
        return " ".join(asking.format_value(value))
    if isinstance(value, tuple | list):
        return " ".join("=".join(map(str, v)) if isinstance(v, tuple | list) else str(v) for v in value) or "none"
    return DEFAULT_TEXTS.get(key, "none") if value in (None, "") else str(value)


def trial_seed(campaign: str, seed: int, trial: TrialId) -> int:
    """128-bit seed of one trial's generator."""
    return int(xxhash.xxh3_128_intdigest(f"{campaign}|{seed}|{trial}".encode()))

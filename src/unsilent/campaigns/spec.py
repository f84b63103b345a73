"""Base classes and protocols of campaigns: the spec, the baseline, the trial and its row.

`Spec` holds the settings, `Baseline` the facts measured before the first trial, `TrialId` identifies a trial, and `CampaignRow`
is the record of one. Trials are run by a `unsilent.campaigns.runner.Runner`.

A campaign's identity is the hash of its spec and of the fingerprint of everything that its rows depend on. A trial's randomness
derives only from that hash, the seed, its stratum and its number, so any trial can be replayed alone, anywhere, in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, cast

import xxhash

from unsilent.basics.errors import UsageError
from unsilent.basics.options import options_of
from unsilent.faults.fault_texts import with_function_file, without_folder

Json = dict[str, Any]
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of workers that change the cost of trials but not their rows.

    They are not part of a campaign's identity.
    """

    engine: str = "auto"
    """``auto``: every shortcut that a check allows; ``plain``: none."""
    memory: int | None = None
    """Bytes that all workers together may hold for shortcuts; ``None``: a quarter of the free memory."""
    jobs: int = 1
    """Number of workers that share the memory."""


class TrialId(NamedTuple):
    """The identity of one trial: fault number k with ``flips`` flips in ``target``.

    Text form ``target/x8/17``, or ``target/x8/17/s4``.

    ``sample_count`` is the number of samples of one batch that the trial evaluates. 0 means the number in the spec, usually all
    samples of all batches.
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
        """The trial of a text such as ``target/x8/17``; raises ``UsageError`` for an invalid text."""
        target, _, rest = text.rpartition("/x")
        flips, slash, number = rest.partition("/")
        k, evaluated, samples = number.partition("/s")
        numbers = [k] + [flips] * bool(flips) + [samples] * bool(evaluated)
        if not (target and slash and all(map(_NUMBER.fullmatch, numbers))):
            head, _, number = text.rpartition("/")
            example = f"{head}/x/{number}" if head and _NUMBER.fullmatch(number) else "random/x/17"
            raise UsageError(
                f"cannot read trial {text!r}; expected TARGET/xFLIPS/NUMBER, like top_mlp/x8/17, "
                f"or without a number of flips TARGET/x/NUMBER, like {example}"
            )
        return cls(target, int(flips) if flips else None, int(k), int(samples or 0))


class DeferredTrial(NamedTuple):
    """A trial that must run again, alone, before it has an outcome.

    It ran out of memory, which other trials may have taken, or (without a ``reason``) it needs all processors.
    """

    trial: TrialId
    reason: str


def without_folders(values: Json, *paths: str) -> Json:
    """The values of a spec without the folders of its workload and of the files at ``paths``."""
    workload = _with_file_names(values["workload"], lambda path, ending: PurePath(path).name)
    if isinstance(values.get("fault"), str):
        values = values | {"fault": without_folder(values["fault"])}
    return values | {"workload": workload} | {key: PurePath(values[key]).name if values[key] else None for key in paths}


def _with_file_names(workload: str, name_of: Callable[[str, str], str]) -> str:
    """A workload whose file or folder is renamed by ``name_of``, a function of path and file ending."""
    file, colon, name = workload.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{name_of(file, '.py')}:{name}"
    if workload.startswith("hf:"):
        return f"hf:{name_of(workload[3:], '')}"
    return name_of(workload, ".pt2") if workload.endswith(".pt2") else workload


def sorted_json_text(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class JsonRecord:
    """A base class of dataclasses that are stored as JSON."""

    __slots__ = ()

    def to_json(self) -> Json:
        """The fields as plain JSON values."""
        return asdict(cast("Any", self))


class Spec(JsonRecord):
    """The settings of a campaign: a base class of frozen dataclasses.

    Fields of a subclass replace the defaults here.

    Budget, jobs and executor are not part of it, as they change no row. ``class PiSpec(Spec, study="pi")`` is a study without
    workloads, whose name is used as that of the workload.

    Attributes:
        FILES: Names of the fields that contain file names.
        workload: Name of the workload that trials run.
        study: Name of the study, so that no campaign of another study has the same hash.
    """

    __slots__ = ()
    FILES: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:

        @property
        def workload(self) -> str: ...

        @property
        def study(self) -> str: ...

    def __init_subclass__(cls, study: str = "") -> None:
        if study:
            cls.study = cls.workload = study  # type: ignore[assignment, method-assign]
        if "__dataclass_fields__" in vars(cls):
            return  # slots=True makes the class a second time, without the defaults
        for name in vars(cls).get("__annotations__", ()):
            # A dataclass would take the property of this class for the default of the field.
            if isinstance(getattr(cls, name, None), property):
                raise TypeError(
                    f"{cls.__name__}.{name} has no default, which a field named as a property of Spec needs"
                )

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of the workload."""
        return ()

    @property
    def flips(self) -> tuple[int | None, ...]:
        """The numbers of flips of a trial; (None,) if the fault model decides."""
        return (None,)

    @property
    def seed(self) -> int:
        """The seed of the campaign."""
        return 0

    @property
    def threads(self) -> int:
        """The number of CPU threads of a worker."""
        return 1

    @property
    def device(self) -> str:
        """The device of a worker."""
        return "cpu"

    @property
    def is_enumerated(self) -> bool:
        """Whether the campaign runs all ``slots`` trials of each target instead of random ones."""
        return False

    def identity(self) -> Json:
        """The spec as JSON, without the folders of its files and the index of its device.

        A campaign's name derives from it. For fields that name files and for the file of the workload, the content counts and
        not the name, so the fingerprint has to cover everything that depends on the content.
        """
        names = {key: getattr(self, key) for key in ("workload", "study") if hasattr(self, key)}
        values = without_folders(names | self.to_json(), *self.FILES)
        return values | ({"device": values["device"].partition(":")[0]} if "device" in values else {})


class SpecOfTraining(Spec):
    """A base class of specs whose workload is a training, and whose trials have no number of flips."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """The device of the training, which is an option of its workload."""
        return dict(self.options).get("device", "cpu")


class TrialTarget(Protocol):
    """The interface of targets for which trials are drawn."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int:
        """The number of trials of the target in a campaign that runs all of them."""


class Baseline(Protocol):
    """The interface of baselines: facts that a worker establishes before the first trial."""

    @property
    def campaign(self) -> str: ...

    @property
    def fingerprint(self) -> Mapping[str, str]: ...

    @property
    def targets(self) -> Sequence[TrialTarget]: ...

    @property
    def golden_seconds(self) -> float:
        """Seconds of one fault-free run."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Facts that the workload reports about itself."""

    @property
    def versions(self) -> Mapping[str, str]: ...

    def to_json(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A target of trials that has only a name."""

    name: str
    slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBaseline(JsonRecord):
    """A base class of stored baselines; subclasses add `targets`.

    Attributes:
        campaign: The hash that names the campaign, see `campaign_hash`.
        fingerprint: Everything that rows depend on and that is not part of the spec.
        golden_seconds: Seconds of one fault-free run.
        info: Description of the workload by itself.
        versions: Versions of libraries.
    """

    campaign: str
    fingerprint: Mapping[str, str]
    golden_seconds: float = 1e-3
    info: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, fingerprint: Mapping[str, str], **facts: Any) -> Self:
        """The baseline of a campaign with this spec and fingerprint."""
        return cls(campaign=campaign_hash(spec, fingerprint), fingerprint=fingerprint, **facts)


@dataclass(frozen=True, slots=True)
class PlainBaseline(StoredBaseline):
    """A baseline without further facts of its kind.

    ``targets`` are the targets for which trials are drawn.
    """

    targets: tuple[Target, ...]


def strata_of(spec: Spec, baseline: Baseline) -> list[tuple[TrialTarget, int | None]]:
    """The strata of a campaign: each target with each number of flips that applies to it."""
    return [
        (t, flips) for t in baseline.targets for flips in spec.flips if flips in (getattr(t, "flips", ()) or (flips,))
    ]


class CampaignRow(Protocol):
    """The interface of rows: the record of one trial, a frozen dataclass.

    `unsilent.campaigns.codec` derives the columns from its fields.
    """

    @property
    def trial(self) -> TrialId: ...

    @property
    def seconds(self) -> float: ...

    @property
    def worker(self) -> int: ...

    def reproducible_values(self) -> dict[str, Any]: ...

    def with_worker(self, number: int) -> Self: ...

    def derived(self) -> dict[str, Any]: ...


S = TypeVar("S", bound=Spec)
B = TypeVar("B", bound=Baseline)
R = TypeVar("R", bound=CampaignRow)


def campaign_hash(spec: Spec, fingerprint: Mapping[str, str]) -> str:
    """The hash that identifies the campaign, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(
        sorted_json_text({"spec": _without_file_names(spec), "fingerprint": dict(fingerprint)}).encode()
    )


def _without_file_names(spec: Spec) -> Json:
    """The identity of a spec without file names.

    The fingerprint covers the contents of the files instead.
    """
    values = {key: value for key, value in spec.identity().items() if key not in spec.FILES}
    values["workload"] = _with_file_names(values["workload"], lambda path, ending: f"*{ending}")
    if isinstance(values.get("fault"), str):
        values["fault"] = with_function_file(values["fault"], "*.py")
    return values


def differences(
    stored_campaign: tuple[Spec, Baseline], current_campaign: tuple[Spec, Baseline]
) -> Iterator[tuple[str, tuple[Any, Any] | None]]:
    """The differences between two campaigns: spec fields with both values, fingerprint keys with None."""
    (old, then), (new, now) = (
        (_without_file_names(spec), result.fingerprint) for spec, result in (stored_campaign, current_campaign)
    )
    yield from ((key, (old[key], new[key])) for key in new if old[key] != new[key])
    yield from ((key, None) for key in {**then, **now} if then.get(key) != now.get(key))


DEFAULT_TEXTS = {"dtype": "as built", "judge": "the workload's own", "samples": "chosen by a pilot"}
"""Texts for options that were not given; for other options, ``none``."""


def spec_value_text(spec: type, key: str, value: Any) -> str:
    """A value of a spec as written on the command line: ``1,8`` for flips, ``as built`` for no dtype."""
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
    """The 128-bit seed of one trial's random generator."""
    return int(xxhash.xxh3_128_intdigest(f"{campaign}|{seed}|{trial}".encode()))

"""What was asked (`CampaignSpec`), what is run (`TrialId`), what was found out before the first trial (`Description`) and
what happened (`TrialRow`): frozen records with a JSON form.

A campaign's identity is the hash of its spec and of the fingerprint of weights, inputs, golden outputs, judge, device
kind, threads and versions. A trial's randomness derives from that hash, the seed, its stratum and its number alone, so
any trial replays alone, anywhere, in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import xxhash

from unsilent.errors import UsageError
from unsilent.faults.naming import is_transient, parse_site

Json = dict[str, Any]
LISTED = "list"
"""Stands for the fault model and the sampling law where faults are given, not drawn."""
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class CampaignSpec:
    """What was asked. Budget, jobs and executor are not part of it: they change cost, never a row."""

    workload: str
    options: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    weights: str | None = None
    fault: str = "bitflip"
    flips: tuple[int | None, ...] = (1,)
    """Faults per trial; (None,) where the fault model itself says how many (a rate, a run)."""
    at: tuple[str, ...] = ("param:*",)
    per: str = "component"
    law: str = "per-element"
    judge: str | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    threads: int = 1
    study: str = "pvf"
    strata: str = "none"
    """``bits``: trials are drawn in classes of bits of every target, so that each can be given its own number of them;
    ``risk``: by predicted risk of elements as well; ``dtype``: in each of its dtypes."""

    one_batch: bool = False
    """A trial evaluates one batch, drawn with its fault, instead of all."""
    exhaustive: bool = False
    """Every fault there is once, instead of drawn ones."""
    faults: str | None = None
    """A file of given faults, each once, instead of drawn ones; ``fault`` and ``law`` are `LISTED` then."""
    faults_as: str | None = None
    """How that file is read, where its content does not say it: the name of a format, like ``sci-fi``."""

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)

    @property
    def transient(self) -> bool:
        """Whether faults strike values of one evaluation (operations, inputs, caches) rather than parameters."""
        return any(map(is_transient, self.at))

    @property
    def enumerated(self) -> bool:
        """Whether all its trials are known beforehand: every fault there is, or those of a list."""
        return self.exhaustive or self.faults is not None

    def identity(self) -> Json:
        """The spec without the folders its files happen to lie in, and the kind of device without its index."""
        values = without_folders(self.to_json(), "data", "weights", "faults")
        values["device"] = self.device.partition(":")[0]
        return values


@dataclass(frozen=True, slots=True)
class Means:
    """How trials are run. It changes what they cost, never a row, so it is not part of a campaign's identity."""

    engine: str = "auto"
    """``auto``: every shortcut that a check allows; ``plain``: none."""
    memory: int | None = None
    """Bytes that all workers together may hold for shortcuts; None: a quarter of what is free."""
    jobs: int = 1
    """Workers that share the memory."""


class TrialId(NamedTuple):
    """One trial: the k-th fault of ``flips`` flips in ``target``. Text form ``target/x8/17``."""

    target: str
    flips: int | None
    k: int

    def __str__(self) -> str:
        return f"{self.target}/x{self.flips or ''}/{self.k}"

    @classmethod
    def parse(cls, text: str) -> TrialId:
        """The inverse of ``str``; raises ``UsageError`` for another text."""
        target, _, rest = text.rpartition("/x")
        flips, slash, k = rest.partition("/")
        if not (target and slash and _NUMBER.fullmatch(k) and (flips == "" or _NUMBER.fullmatch(flips))):
            raise UsageError(f"cannot read trial {text!r}; expected TARGET/xFLIPS/NUMBER, like top_mlp/x8/17")
        return cls(target, int(flips) if flips else None, int(k))


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """One target as the driver knows it: names, size and its share of the sampling law."""

    name: str
    level: str
    component: str
    layer: str
    share: float
    elements: int
    bits_by_width: tuple[tuple[int, int], ...]
    """Pairs of an element width and the bits that may be struck in elements of it."""
    group: str = ""
    """What is reported: itself, or the target that it is a stratum of."""
    bits: tuple[int, ...] | None = None
    """Bits that are struck; None for all of them."""
    dtype: str = ""
    """The only dtype, where that is known."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Elements of each site, where a stratum takes some of them."""
    slots: int = 0
    """Faults there are, where they are all to be tried."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One struck tensor, for sorting trials by layer and bit afterwards."""

    site: str
    component: str
    dtype: str
    shape: tuple[int, ...]
    """The largest over the batches, where the tensor is there once in each."""
    elements: int
    """Elements that may be struck, over all batches."""
    width: int
    """Bits of one element."""

    @property
    def layer(self) -> str:
        """What the tensor belongs to: a module, an input, a layer of the cache."""
        return parse_site(self.site).layer


@dataclass(frozen=True, slots=True)
class Description:
    """Everything a worker finds out before the first trial."""

    campaign: str
    fingerprint: Mapping[str, str]
    targets: tuple[TargetInfo, ...]
    tensors: tuple[TensorInfo, ...]
    samples: tuple[int, ...]
    golden_seconds: float
    judge: str
    info: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    lookups: Mapping[str, list[int]] = field(default_factory=dict)

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrialRow:
    """What happened in one trial. ``codes`` is one `Outcome` byte a sample; time and worker are not part of its content."""

    trial: TrialId
    faults: str
    """JSON list of resolved faults (or their digest where there are very many elements)."""
    codes: bytes
    incorrect_batches: int
    severity: float
    error: str
    seconds: float
    worker: int = 0

    def content(self) -> tuple[Any, ...]:
        """What must be equal when the trial is run again."""
        return (self.trial, self.faults, self.codes, self.incorrect_batches, self.severity, self.error)


class RunAlone(NamedTuple):
    """A trial that ran out of memory, which others may have taken: it has no outcome before it has run alone."""

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
    return values | {"workload": workload} | {key: PurePath(values[key]).name if values[key] else None for key in paths}


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class Identified(Protocol):
    """Any spec of a campaign."""

    def identity(self) -> Json: ...


def campaign_hash(spec: Identified, fingerprint: Mapping[str, str]) -> str:
    """32 hex digits that name the campaign."""
    return xxhash.xxh3_128_hexdigest(canonical({"spec": spec.identity(), "fingerprint": dict(fingerprint)}).encode())


def differences(
    there: tuple[CampaignSpec, Description], here: tuple[CampaignSpec, Description]
) -> Iterator[tuple[str, tuple[Any, Any] | None]]:
    """What makes two campaigns two: values of the spec that differ with both values, then keys of the fingerprint with None."""
    (old, then), (new, now) = ((spec.identity(), found.fingerprint) for spec, found in (there, here))
    yield from ((key, (old[key], new[key])) for key in new if old[key] != new[key])
    yield from ((key, None) for key in {**then, **now} if then.get(key) != now.get(key))


USUAL = {"dtype": "as built", "judge": "the workload's own"}
"""What it is called that nothing was asked; else ``none``."""


def value_text(key: str, value: Any) -> str:
    """A value of a spec as the command line writes it: ``1,8`` for flips, ``as built`` for no dtype."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "flips" and isinstance(value, tuple | list):
        return ",".join("as drawn" if count is None else str(count) for count in value)
    if isinstance(value, tuple | list):
        return " ".join("=".join(map(str, v)) if isinstance(v, tuple | list) else str(v) for v in value) or "none"
    return USUAL.get(key, "none") if value in (None, "") else str(value)


def trial_seed(campaign: str, seed: int, trial: TrialId) -> int:
    """128-bit seed of one trial's generator."""
    return int(xxhash.xxh3_128_intdigest(f"{campaign}|{seed}|{trial}".encode()))

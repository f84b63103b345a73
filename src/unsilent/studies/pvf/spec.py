"""Records of campaigns of ``unsilent pvf``: what was asked (`CampaignSpec`), how much of it (`PvfBudget`), what was found out
before the first trial (`Description`), what happened in a trial (`TrialRow`).

The fingerprint of such a campaign is of weights, inputs, golden outputs, judge, device kind, threads and versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt

from unsilent.campaigns import codec
from unsilent.campaigns.codec import RUN, StoredRow
from unsilent.campaigns.options import DATA, SEED, SHARD, WITH, Budget
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders
from unsilent.errors import UsageError
from unsilent.faults.naming import is_transient, parse_site
from unsilent.options import FAULTS, INTERNAL, PRECISION, RUNS, Asked, Option
from unsilent.outcomes.base import Outcome

if TYPE_CHECKING:
    from unsilent.studies.pvf.precision import Precision
    from unsilent.workloads.training import Progress

LISTED = "list"
"""Stands for the fault model and the sampling law where faults are given, not drawn."""
EACH, MOST = 1000, 200_000
"""Trials per target and number of flips: of a campaign that is planned at once, and at most where a precision is asked."""
OF_DRAWN = ("trials", "ci", "rel", "strata", "exhaustive", "one_batch", "flips", "fault", "at", "law")
"""Options that mean nothing where faults are given."""


@dataclass(frozen=True, slots=True)
class CampaignSpec:
    """What was asked. Budget, jobs and executor are not part of it: they change cost, never a row.

    ``flips`` is (None,) where the fault model itself says how many (a rate, a run); ``fault`` and ``law`` are `LISTED` where
    faults are given. ``strata`` dtype: in each of its dtypes.
    """

    workload: Annotated[str, Option(
        "Built-in name, file.py:name, package.module:name, hf:DIR or FILE.pt2.", RUNS,
        missing="no workload was named; give one like digits-cnn (see unsilent workloads)")]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WITH] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, Option("Weights file for workloads that take one.", RUNS)] = None
    fault: Annotated[str, Option(
        "Fault model, like bitflip:bits=exponent; see unsilent faults.", FAULTS,
        read=lambda given: str(getattr(given, "text", given)))] = "bitflip"  # fmt: skip
    flips: Annotated[tuple[int | None, ...], Option(
        "Faults per trial, like 1,8,128.", FAULTS, usual="1", unasked=None, joined=",")] = (1,)  # fmt: skip
    at: Annotated[tuple[str, ...], Option(
        "Where faults are injected: parameters like 'layer1.*', or values of a run: 'op:*', 'op:layer1.*', 'input:*', "
        "'kv:*'. Repeat for more.", FAULTS, repeated=True)] = ("param:*",)  # fmt: skip
    per: Annotated[str, Option("What a target is: component, layer, tensor or bit.", FAULTS)] = "component"
    law: Annotated[str, Option(
        "per-element (uniform over elements) or per-tensor (uniform over tensors first).",
        FAULTS)] = "per-element"  # fmt: skip
    judge: Annotated[str | None, Option(
        "What an incorrect output is, like topk:k=3.", RUNS, usual="the workload's own")] = None  # fmt: skip
    seed: Annotated[int, SEED] = 0
    device: Annotated[str, Option("auto, cpu, cuda or cuda:0.", RUNS, unasked="auto")] = "cpu"
    dtype: Annotated[str | None, Option("Run the model in this floating-point type.", RUNS)] = None
    threads: Annotated[int, Option(
        "CPU threads per worker (part of a campaign's identity: results depend on it).", RUNS)] = 1  # fmt: skip
    study: Annotated[str, INTERNAL] = "pvf"
    strata: Annotated[str, Option(
        "bits: draw within classes of bits, as many in each as it takes; risk: and of predicted risk; or none.", PRECISION,
        usual="bits with --ci or --rel and single flips", unasked=None)] = "none"  # fmt: skip
    one_batch: Annotated[bool, Option(
        "Each trial evaluates one batch, drawn at random: many cheap trials.", PRECISION)] = False  # fmt: skip
    exhaustive: Annotated[bool, Option(
        "Try every single bit flip there is; narrow it with --at or bits=.", PRECISION)] = False  # fmt: skip
    faults: Annotated[str | None, Option(
        "Try each fault of this file once: JSON lines of faults, a list of SCI-FI or PyTorchALFI.",
        FAULTS)] = None  # fmt: skip
    faults_as: Annotated[str | None, Option(
        "How --faults is read, where the file does not say it: unsilent, sci-fi, pytorchalfi:…", FAULTS)] = None  # fmt: skip

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)

    def make_runner(self, progress: Progress | None, means: Means) -> Runner:
        """What runs trials, in a worker."""
        from unsilent.studies.pvf.runner import TrialRunner

        return TrialRunner(self, progress=progress, means=means)

    @property
    def transient(self) -> bool:
        """Whether faults corrupt values of one evaluation (operations, inputs, caches) rather than parameters."""
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
class TargetInfo:
    """One target as the driver knows it: names, size and its share of the sampling law."""

    name: str
    level: str
    component: str
    layer: str
    share: float
    elements: int
    bits_by_width: tuple[tuple[int, int], ...]
    """Pairs of an element width and the bits that may be corrupted in elements of it."""
    group: str = ""
    """What is reported: itself, or the target that it is a stratum of."""
    bits: tuple[int, ...] | None = None
    """Bits that are corrupted; None for all of them."""
    dtype: str = ""
    """The only dtype, where that is known."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Elements of each site, where a stratum takes some of them."""
    slots: int = 0
    """Faults there are, where they are all to be tried."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One corrupted tensor, for sorting trials by layer and bit afterwards."""

    site: str
    component: str
    dtype: str
    shape: tuple[int, ...]
    """The largest over the batches, where the tensor is there once in each."""
    elements: int
    """Elements that may be corrupted, over all batches."""
    width: int
    """Bits of one element."""

    @property
    def layer(self) -> str:
        """What the tensor belongs to: a module, an input, a layer of the cache."""
        return parse_site(self.site).layer


@dataclass(frozen=True, slots=True)
class PvfBaseline:
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
class TrialRow(StoredRow):
    """What happened in one trial. ``codes`` is one `Outcome` byte a sample; time and worker are not part of its content."""

    trial: TrialId
    faults: Annotated[str, codec.FAULTS]
    """JSON list of resolved faults (or their digest where there are very many elements)."""
    codes: bytes
    incorrect_batches: Annotated[int, Ge(0)]
    severity: float
    error: str
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN]
    worker: Annotated[int, RUN] = 0

    def derived(self) -> dict[str, int]:
        """Samples by outcome."""
        return {o.name.lower(): self.codes.count(o) for o in Outcome}


# -- what is asked beside it, and how a spec is made of that -------------------------------------------------------------


@dataclass(frozen=True)
class PvfBudget:
    """How many trials: a number, or until every row is precise."""

    trials: Annotated[int | None, Option(
        "Trials per target and number of flips; with --ci or --rel the most there may be.", PRECISION,
        usual="1000; 200000 with --ci or --rel")] = None  # fmt: skip
    ci: Annotated[str | None, Option(
        "Run until every row's interval has this half-width, like 0.1%.", PRECISION, read=str)] = None  # fmt: skip
    rel: Annotated[str | None, Option(
        "The same relative to the estimate, like 20%; --ci (default 0.02%) is always enough.", PRECISION,
        read=str)] = None  # fmt: skip
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)

    @property
    def precision(self) -> Precision | None:
        """What is asked of every row; raises ``UsageError``."""
        from unsilent.studies.pvf.precision import Precision

        return Precision.parse(self.ci, self.rel)

    def resolve(self) -> Budget:
        """The most trials there are to be; raises ``UsageError``."""
        most = EACH if self.precision is None else MOST
        return Budget(most if self.trials is None else self.trials, self.shard)


def resolve(asked: Asked) -> CampaignSpec:
    """A checked spec: fault model and flips are read together, texts are made canonical.

    Raises ``UsageError`` for what would be ignored, and where flips are given both here and in the fault model, are repeated or
    below 1.
    """
    from unsilent.faults import fault_model

    adaptive = asked.make(PvfBudget).precision is not None
    if asked["faults"] is not None:
        asked.refuse(OF_DRAWN, "--faults says which faults are tried, each once")
    elif asked["faults_as"] is not None:
        raise UsageError(
            f"--faults-as {asked['faults_as']} says how a list is read; give --faults FILE, or leave it out"
        )
    if asked["exhaustive"]:
        asked.refuse(("trials", "ci", "rel"), "--exhaustive runs every fault there is")
    if adaptive:
        asked.refuse(("shard",), "where --ci or --rel stop is decided from all trials")
    if asked["threads"] < 1:
        raise UsageError(f"--threads is {asked['threads']}; expected 1 or more")
    device = _device(asked["device"])
    if device != "cpu":
        asked.given["device"] = device  # a command for another machine has to name it
    spec = asked.make(CampaignSpec)
    if spec.faults is not None:
        from unsilent.faults.lists import kind_of_list

        at = (f"{kind_of_list(spec.faults, spec.faults_as)}:*",)
        return replace(spec, device=device, fault=LISTED, law=LISTED, flips=(None,), at=at)
    model = fault_model(spec.fault)
    flips = _flips(asked["flips"], model.counted, model.pattern.text)
    strata = asked["strata"]
    if strata is None:
        single = model.text == "bitflip" and flips == (1,) and spec.per != "bit"
        strata = "dtype" if spec.exhaustive else "bits" if adaptive and single else "none"
    return replace(spec, device=device, fault=model.text, flips=flips, strata=strata)


def _flips(asked: tuple[int, ...] | None, counted: bool, pattern: str) -> tuple[int | None, ...]:
    """Faults per trial, where the fault model says how many (``counted``, by its pattern) or does not."""
    if asked is None:
        return (None,) if counted else (1,)
    if counted:
        raise UsageError(f"--flips and the {pattern} of --fault both say how many; give one of them")
    if any(count < 1 for count in asked):
        raise UsageError(f"--flips has {min(asked)}; expected 1 or more")
    if len(set(asked)) != len(asked) or not asked:
        raise UsageError(f"--flips is {','.join(map(str, asked))!r}; expected different numbers, like 1,8,128")
    return asked


def _device(device: str) -> str:
    """``auto`` is decided without torch where that is possible: without a CUDA driver it is the CPU."""
    if device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia/version").exists()):
        return "cpu"
    from unsilent.engine.placement import resolve_device

    return resolve_device(device)

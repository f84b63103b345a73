"""Records of campaigns of ``unsilent pvf``: what was asked (`CampaignSpec`), what was found out before the first trial
(`Description`), what happened in a trial (`TrialRow`).

The fingerprint of such a campaign is of weights, inputs, golden outputs, judge, device kind, threads and versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt

from unsilent.campaigns.codec import FAULTS, RUN, StoredRow
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders
from unsilent.faults.naming import is_transient, parse_site
from unsilent.outcomes.base import Outcome

if TYPE_CHECKING:
    from unsilent.workloads.training import Progress

LISTED = "list"
"""Stands for the fault model and the sampling law where faults are given, not drawn."""


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

    def make_runner(self, told: Progress | None, means: Means) -> Runner:
        """What runs trials, in a worker."""
        from unsilent.studies.pvf.runner import TrialRunner

        return TrialRunner(self, progress=told, means=means)

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
class TrialRow(StoredRow):
    """What happened in one trial. ``codes`` is one `Outcome` byte a sample; time and worker are not part of its content."""

    trial: TrialId
    faults: Annotated[str, FAULTS]
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

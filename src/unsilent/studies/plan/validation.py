"""The second campaign that validates a plan: faults drawn over all parameters, those in protected memory corrected.

It has another seed than the campaign that was planned with, and is drawn by components without strata, so that shares of tensors
and classes of bits come from the draws themselves. A fault in a protected part counts as if it had not been: its outcome is
multiplied by the share of faults that remain there. One campaign therefore serves every budget.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unsilent.campaigns.confirmed_files import with_confirmed_files
from unsilent.campaigns.observer import Observer
from unsilent.errors import StoreError, UsageError
from unsilent.faults.naming import parse_site
from unsilent.interval import Interval
from unsilent.outcomes.tallies import Tally
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.comparing import paired_strata
from unsilent.studies.plan.assignment import Floats, Ints
from unsilent.studies.plan.items import ParameterItems
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.row_scopes import single_element_trials
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow
from unsilent.studies.pvf.study import pvf

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload


@dataclass(frozen=True)
class ValidationTrials:
    """Trials of the second campaign by component.

    Attributes:
        strata: Share of the sampling law, item that each fault hit (int64[n]), share of outputs it made incorrect (float64[n]).
        store: Where they are.
    """

    strata: tuple[tuple[float, Ints, Floats], ...]
    store: str
    seed: int

    @property
    def n(self) -> int:
        """Number of trials."""
        return sum(len(items) for _, items, _ in self.strata)

    def rate(self, weights: Floats, confidence: float) -> Interval:
        """As `ParameterItems.rate`, for weights from -1 to 1."""
        weighted = [(share, outcomes * weights[items]) for share, items, outcomes in self.strata]
        if weights.size and float(weights.min()) < 0:
            return paired_strata(weighted, confidence)
        return stratified([Stratum.of(values, share) for share, values in weighted], confidence)


def run_validation(
    store: PvfStore,
    path: Path,
    items: ParameterItems,
    *,
    trials: int | None,
    seed: int | None,
    unit: str,
    confirmed: Mapping[str, str | None],
    options: Collection[tuple[str, str]],
    workload: InferenceWorkload | None = None,
    jobs: int = 1,
    observer: Observer | None = None,
) -> ValidationTrials:
    """Run the second campaign, or resume it.

    Args:
        store: Of the campaign that was planned with.
        path: The store of the second one.
        trials: Per component; None: as many in all as ``store`` has.
        seed: None: that of ``store`` plus 1.
        confirmed, options: What the user names again, see `with_confirmed_files`.
        workload: A live one, in place of a named one.

    Raises:
        UsageError: the seed is that of ``store``, or a file must be named again.
        StoreError: the workload is not the one that was planned with.
    """
    spec = store.spec
    seed = spec.seed + 1 if seed is None else seed
    if seed == spec.seed:
        raise UsageError(
            f"--validation-seed is {seed}, the seed of {store.path}; give another, so that the two campaigns are independent"
        )
    if path.resolve() == store.path.resolve():
        raise UsageError(f"--validation-store is {path}, the store that is planned with; give another file")
    if workload is None:
        spec = with_confirmed_files(spec, confirmed, PVF.builtin_values, options)
    components = {target.component for target in store.baseline.targets}
    total = sum(1 for _ in store.rows())
    count = math.ceil(total / len(components)) if trials is None else trials
    live = spec.workload if workload is None else workload
    named: dict[str, object] = {"options": dict(spec.options), "data": spec.data, "weights": spec.weights}
    pvf(
        live, trials=count, per="component", strata="none", seed=seed, flips=1, fault=spec.fault, at=spec.at, law=spec.law,
        judge=spec.judge if workload is None else None, one_batch=spec.one_batch, dtype=spec.dtype, threads=spec.threads,
        device=spec.device, unit=unit, jobs=jobs, store=path, observer=observer, **(named if workload is None else {}),  # type: ignore[arg-type]
    )  # fmt: skip
    with PvfStore(path) as second:
        _check_same_workload(store, second)
        return read_trials(second, items, unit, seed)


def _check_same_workload(store: PvfStore, second: PvfStore) -> None:
    one, other = store.baseline.fingerprint, second.baseline.fingerprint
    changed = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    if changed:
        raise StoreError(
            f"the workload differs from that of {store.path} in {', '.join(changed)}; run that campaign again, and plan with it"
        )


def read_trials(store: PvfStore, items: ParameterItems, unit: str, seed: int) -> ValidationTrials:
    """The trials of a second campaign, each with the item that its fault hit."""
    spec: PvfSpec = store.spec
    by_tensor: dict[str, list[tuple[frozenset[int] | None, int]]] = defaultdict(list)
    for number, item in enumerate(items.items):
        by_tensor[item.tensor].append((None if item.bits is None else frozenset(item.bits), number))
    rows: dict[str, list[PvfTrialRow]] = defaultdict(list)
    for row in store.rows():
        rows[row.trial.target].append(row)
    strata = []
    for target in store.baseline.targets:
        own = rows[target.name]
        hits = single_element_trials(own, store.baseline)
        if len(hits) != len(own):
            raise UsageError(
                f"{store.path} has trials with several faults ({spec.fault}); a plan needs one fault in a trial"
            )
        tally = Tally.of([row.outcome_codes for row in own], store.baseline.samples, unit)
        hit_items = [
            next(n for bits, n in by_tensor[parse_site(hit.tensor.site).label] if bits is None or hit.bit in bits)
            for hit in hits
        ]
        judged = tally.units_per_trial > 0
        strata.append((target.share, np.array(hit_items, np.int64)[judged], tally.incorrect_share_per_trial))
    total = math.fsum(share for share, _, _ in strata)
    return ValidationTrials(tuple((s / total, i, x) for s, i, x in strata), str(store.path), seed)

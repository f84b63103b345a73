"""Runs the second campaign that validates a plan.

The seed differs from that of the first campaign. Trials are drawn by components without strata, so that shares of items come
from the draws themselves. The outcome of a fault in a protected part is multiplied by the share of faults that remain
there. One campaign is therefore enough for all budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.confirmed_files import with_confirmed_files
from unsilent.campaigns.observer import Observer
from unsilent.faults.fault_texts import function_file
from unsilent.studies.plan.items import Item, ItemTrials
from unsilent.studies.plan.spec import PlanOptions
from unsilent.studies.plan.stored_items import read_trials
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.study import pvf

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload


@dataclass(frozen=True, slots=True)
class ValidationCampaign:
    """The store, the seed and the trials of the second campaign."""

    store: str
    seed: int
    trials: ItemTrials


def run_validation(
    store: PvfStore,
    items: Sequence[Item],
    options: PlanOptions,
    workload: InferenceWorkload | None = None,
    observer: Observer | None = None,
) -> ValidationCampaign:
    """Run or resume the second campaign.

    Args:
        store: Store of the campaign from which the plan was made.
        workload: A live workload, instead of a named one.

    Raises:
        UsageError: the seed or the file is that of ``store``, or a file must be named again.
        StoreError: the workload differs from that of ``store``.
    """
    spec = store.spec
    path = options.validation_store or options.store.with_suffix(".validation.sqlite")
    seed = spec.seed + 1 if options.validation_seed is None else options.validation_seed
    if seed == spec.seed:
        raise UsageError(
            f"--validation-seed is {seed}, the seed of {store.path}; give another, so that the two campaigns are independent"
        )
    if path.resolve() == store.path.resolve():
        raise UsageError(f"--validation-store is {path}, the store that is planned with; give another file")
    if function_file(spec.fault) is not None:
        raise UsageError(
            f"{store.path} draws faults by a Python function, {spec.fault}, which a validation does not run; leave out --validate"
        )
    named: dict[str, Any] = {}
    if workload is None:
        confirmed = {"workload": options.workload, "data": options.data, "weights": options.weights}
        spec = with_confirmed_files(spec, confirmed, PVF.builtin_values, options.options)
        named = {"options": dict(spec.options), "data": spec.data, "weights": spec.weights, "judge": spec.judge}
    components = {target.component for target in store.baseline.targets}
    trials = options.validation_trials or math.ceil(sum(1 for _ in store.rows()) / len(components))
    pvf(
        spec.workload if workload is None else workload, trials=trials, per="component", strata="none", seed=seed, flips=1,
        fault=spec.fault, at=spec.at, law=spec.law, samples=spec.samples or "all", dtype=spec.dtype, threads=spec.threads,
        device=spec.device, unit=options.unit, jobs=options.jobs, store=path, observer=observer, **named,
    )  # fmt: skip
    with PvfStore(path) as second:
        _check_same_workload(store, second)
        return ValidationCampaign(str(path), seed, read_trials(second, items, options.unit))


def _check_same_workload(store: PvfStore, second: PvfStore) -> None:
    planned, repeated = store.baseline.fingerprint, second.baseline.fingerprint
    changed = sorted(name for name in {*planned, *repeated} if planned.get(name) != repeated.get(name))
    if changed:
        raise StoreError(
            f"the workload differs from that of {store.path} in {', '.join(changed)}; run that campaign again, and plan with it"
        )

"""Replay of a stored trial: the same fault in the same campaign, compared with the stored row.

`replay_trial` replays trials of any kind. Kinds that report more about a trial (`Kind.replay`) use the same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from unsilent.basics.errors import StoreError
from unsilent.campaigns.confirmed_files import with_confirmed_files
from unsilent.campaigns.executors import Executor, LocalExecutor, make_executor
from unsilent.campaigns.spec import Baseline, Spec, TrialId, WorkerSettings, differences
from unsilent.campaigns.store import AnyStore
from unsilent.campaigns.trial_replay import TrialReplay


def replay_trial(
    store: AnyStore, trial: TrialId, confirmed: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> TrialReplay[Any]:
    """Run a stored trial again in a worker process.

    Args:
        confirmed, options: Values that the user has to give again, see `with_confirmed_files`.

    Raises:
        UsageError: A value has to be given again.
        StoreError: There is no such trial, or its campaign is no longer the stored one.
    """
    stored = store.row(trial)
    spec = with_confirmed_files(store.spec, confirmed, store.kind.builtin_values, options)
    with replay_executor(store, spec) as executor:
        return TrialReplay(stored, run_one_trial(executor, trial))


@contextmanager
def replay_executor(
    store: AnyStore,
    spec: Spec,
    *,
    ignored_differences: Collection[str] = (),
    worker_settings: WorkerSettings | None = None,
) -> Iterator[LocalExecutor]:
    """A serial executor for trials of a stored campaign, checked by `check_same_campaign`.

    ``spec`` is the stored spec with the files that the user confirmed.
    """
    with make_executor("serial", store.kind.runner, spec, worker_settings=worker_settings) as executor:
        check_same_campaign(store, spec, executor.establish_baseline(), ignored_differences)
        yield cast("LocalExecutor", executor)


def check_same_campaign(
    store: AnyStore, spec: Spec, baseline: Baseline, ignored_differences: Collection[str] = ()
) -> None:
    """Raise ``StoreError`` if a campaign differs from the stored one.

    ``ignored_differences`` are keys that may differ.
    """
    known = store.spec, store.baseline
    changed = [name for name, _ in differences(known, (spec, baseline)) if name not in ignored_differences]
    if changed:
        raise StoreError(
            f"the campaign in {store.path} differs from this replay in {', '.join(changed)}; "
            "a bit-exact replay needs the same weights, inputs, device model, threads and versions"
        )


def run_one_trial(executor: Executor, trial: TrialId) -> Any:
    """Run one trial and return its row."""
    (row,) = (row for rows in executor.run([trial]) for row in rows)
    return row

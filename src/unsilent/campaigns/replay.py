"""A stored trial, run again alone: same campaign, same fault, same content.

`replay_trial` does that for trials of any kind. A kind that can say more of a trial (`Kind.replay`) is made of the same parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, cast

from unsilent.campaigns.codec import codec
from unsilent.campaigns.driver import AnyStore
from unsilent.campaigns.executors import Executor, LocalExecutor, make_executor
from unsilent.campaigns.kinds import R
from unsilent.campaigns.named_again import named_again
from unsilent.campaigns.reading import shown
from unsilent.campaigns.spec import Baseline, Means, Spec, TrialId, differences
from unsilent.errors import StoreError
from unsilent.report.model import Report
from unsilent.strictjson import strict

SCHEMA = "unsilent/replay/1"


@dataclass(frozen=True)
class Replay(Generic[R]):
    """A stored trial, and its row when it was run again.

    Attributes:
        told: sentences of its kind about the trial; empty: its fields are listed. data: further fields of the JSON object.
        report: how its fault spread, where that was asked. log: lines that say what was injected, where they were asked.
    """

    stored: R
    again: R
    told: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    report: Report | None = None
    log: tuple[str, ...] = ()

    @property
    def differing(self) -> list[str]:
        """Fields whose content is not the stored one."""
        again = self.again.content()
        return [name for name, value in self.stored.content().items() if again[name] != value]

    @property
    def same(self) -> bool:
        """Whether all content is equal, bit for bit."""
        return not self.differing

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        columns = codec(cast("Any", type(self.stored)))
        stored, again = (columns.record(cast("Any", row), canonical=True) for row in (self.stored, self.again))
        verdict = {"schema": SCHEMA, "trial": str(self.stored.trial), "same": self.same, "differing": self.differing}
        return {**verdict, "stored": stored, "again": again, **strict(self.data)}

    def __str__(self) -> str:
        stored, again = self.stored.content(), self.again.content()
        ended = f"ENDED DIFFERENTLY ({', '.join(self.differing)})" if self.differing else "ended the same"
        fields = [f"{name}: {text}" for name, value in stored.items() if name != "trial" and (text := _text(value))]
        changed = [f"{name}: {_change(stored[name], again[name])}" for name in self.differing]
        return "\n".join([f"{self.stored.trial} {ended}", *(self.told or fields), *changed])


def _text(content: Any) -> str:
    """The content of a field in a few words."""
    return f"{len(content):,} bytes" if isinstance(content, bytes) else shown(", ".join(map(str, content)))


def _change(stored: Any, again: Any) -> str:
    return "other bytes" if isinstance(stored, bytes) else f"{_text(stored)} stored, {_text(again)} now"


def replay_trial(
    store: AnyStore, trial: TrialId, given: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> Replay[Any]:
    """Run a stored trial again in a worker process.

    Args:
        given, options: what the user names again, see `named_again`.

    Raises:
        UsageError: something has to be named. StoreError: there is no such trial, or its campaign is not the stored one any more.
    """
    stored = store.row(trial)
    spec = named_again(store.spec, given, store.kind.builtin, options)
    with running_again(store, spec) as executor:
        return Replay(stored, run_again(executor, trial))


@contextmanager
def running_again(
    store: AnyStore, spec: Spec, *, apart: Collection[str] = (), means: Means | None = None
) -> Iterator[LocalExecutor]:
    """An executor of a stored campaign; ``spec``: the stored one, as the user has named it again. See `check_same`."""
    with make_executor("serial", spec, means=means) as executor:
        check_same(store, spec, executor.describe(), apart)
        yield cast("LocalExecutor", executor)


def check_same(store: AnyStore, spec: Spec, baseline: Baseline, apart: Collection[str] = ()) -> None:
    """Raise ``StoreError`` where a campaign differs from the stored one in anything but the parts named in ``apart``."""
    known = store.spec, store.description
    changed = [name for name, _ in differences(known, (spec, baseline)) if name not in apart]
    if changed:
        raise StoreError(
            f"{store.path} was made with another {', '.join(changed)}; "
            "a bit-exact replay needs the same weights, inputs, device model, threads and versions"
        )


def run_again(executor: Executor, trial: TrialId) -> Any:
    """The row of a trial."""
    (row,) = (row for rows in executor.run([trial]) for row in rows)
    return row

"""What a study registers of its campaigns, so that stores, exports and merges know how to read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from unsilent.campaigns.codec import Shape
from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.options import Budget, ExecutionOptions, Reading
from unsilent.campaigns.spec import Baseline, Row, Spec, TrialId
from unsilent.campaigns.sqlite_file import HELD
from unsilent.options import Asked
from unsilent.report.model import Report

if TYPE_CHECKING:
    from unsilent.campaigns.replay import Replay

S = TypeVar("S", bound=Spec)
B = TypeVar("B", bound=Baseline)
R = TypeVar("R", bound=Row)


def of_its_targets(trial: TrialId, spec: Spec, targets: frozenset[str]) -> bool:
    """Whether a trial is of one of the campaign's targets, with one of its numbers of flips."""
    return trial.target in targets and trial.flips in spec.flips


def nothing(*_: Any, **__: Any) -> Any:
    """Finds nothing wrong."""


def size(store: Any) -> int:
    """Trials of all strata, by the budget that was asked."""
    spec, baseline = store.spec, store.description
    if spec.enumerated:
        return sum(target.slots for target in baseline.targets)
    return int(store.budget()[0]) * len(baseline.targets) * len(spec.flips)


@dataclass(frozen=True)
class Kind(Generic[S, B, R]):
    """A kind of campaigns. What a file says is believed once its own checks have not raised ``Damaged``.

    Attributes:
        name: of the verb, and of the kind. application: of SQLite files, as four letters. version: of what is stored.
        spec, baseline, row: its records. check_spec, check_baseline, check_row (with the baseline): of values that types do
            not limit.
        shapes: by the baseline and the scalars of a row, the shapes of its arrays.
        has: whether a campaign with this spec and these names of targets may hold a trial.
        planned: whether a trial is part of the campaign, not asked for afterwards. longest: bytes of a cell at most.
        records: further records by name -> how their text is read, with spec and baseline.
        fixed: fields of the baseline that are equal in all stores of one campaign.
        analyse: the result of a store, by fields of ``reading``. report: what is shown of a result, by ``report_choices``.
        compare: what is shown of two stores, by fields of ``reading``; None where that means nothing.
        store: the class of its open stores; None: `Store` itself.
        builtin: field of the spec -> values that are part of this package, so that a replay may use them (see `named_again`).
        replay: runs a trial again, by ``replay_choices``; None: as `unsilent.campaigns.replay.replay_trial` does, for specs that
            name no files but those that `named_again` knows.
        size: how many trials a store will hold when its campaign is complete. subject: what its trials run.
        about: the help of its verb. budget, reading, means: dataclasses of options beside the spec: how many trials, how a store
            is read, where trials run. more: further ones. resolve: makes the spec of what was asked; None: of its fields alone.
    """

    name: str
    application: int
    spec: type[S]
    baseline: type[B]
    row: type[R]
    version: int = 3
    check_spec: Callable[[S], None] = nothing
    check_baseline: Callable[[B], None] = nothing
    check_row: Callable[[R, B], None] = nothing
    shapes: Callable[[B, Mapping[str, Any]], Mapping[str, Shape]] = lambda baseline, values: {}
    has: Callable[[TrialId, S, frozenset[str]], bool] = of_its_targets
    planned: Callable[[TrialId], bool] = lambda trial: True
    longest: int = TEXT_BYTES
    records: Mapping[str, Callable[[str, S, B], Any]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ("targets",)
    analyse: Callable[..., Any] = nothing
    report: Callable[..., Report] = nothing
    report_choices: tuple[str, ...] = ()
    compare: Callable[..., Report] | None = None
    store: Callable[..., Any] | None = None
    builtin: Mapping[str, Collection[str]] = field(default_factory=dict)
    replay: Callable[..., Replay[Any]] | None = None
    replay_choices: tuple[str, ...] = ()
    size: Callable[[Any], int] = size
    subject: Callable[[Any], str] = lambda store: str(store.spec.workload)
    about: str = ""
    budget: type = Budget
    reading: type = Reading
    more: tuple[type, ...] = ()
    means: type[ExecutionOptions] = ExecutionOptions
    resolve: Callable[[Asked], S] | None = None

    @property
    def options(self) -> tuple[type, ...]:
        """All that is asked of a campaign."""
        return self.spec, self.budget, self.reading, *self.more, self.means

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of what may be chosen when a store is read, which changes no row."""
        return tuple(field.name for field in fields(self.reading))

    def __post_init__(self) -> None:
        verb = f"unsilent {self.name}"
        HELD[self.application] = (f"a campaign of {verb}", f"{verb} needs a store of its own campaigns")

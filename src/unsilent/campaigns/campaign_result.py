"""The result of a campaign, with its report and a table of all stored trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import load_named
from unsilent.campaigns.spec import B, S
from unsilent.report.model import Report
from unsilent.report.shown import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

    from unsilent.campaigns.kinds import Kind
    from unsilent.campaigns.store import AnyStore

Options = TypeVar("Options")


class CampaignResult(Shown):
    """The result of a campaign.

    Attributes:
        KIND: Reference to the kind of the campaign, ``module:name``.
        store: File of the store; empty if several stores were read together.
    """

    __slots__ = ()
    KIND: ClassVar[str]
    store: str

    @property
    def kind(self) -> Kind[Any, Any, Any]:
        """The kind of the campaign."""
        kind: Kind[Any, Any, Any] = load_named(self.KIND)
        return kind

    @names_arguments
    def report(self, *args: Any, **options: Any) -> Report:
        """The report of the result.

        ``options`` are fields of the kind's ``report_options``, for example ``fit_per_bit`` of `pvf`.
        """
        return self.kind.report(self, *args, **options)

    def to_frame(self) -> DataFrame:
        """Every trial of the campaign as a pandas table, with the columns of ``unsilent export``.

        Raises:
            UsageError: pandas is missing, or the store was not kept.
        """
        from unsilent.campaigns.export import trials_as_frame
        from unsilent.campaigns.store import open_store

        if not Path(self.store).is_file():
            where = f"the store {self.store} of this result does not exist any more" if self.store else ""
            raise UsageError(
                f"{where or 'this result is of several stores'}; keep the trials of a campaign with store='FILE.sqlite', "
                "and read them again with unsilent.read_result('FILE.sqlite')"
            )
        with open_store(self.store, self.kind) as store:
            return trials_as_frame(store)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class StoreResult(CampaignResult, Generic[S, B, Options]):
    """A base of results that are read from one store, or from several stores together.

    Attributes:
        spec, baseline: Spec and baseline of the first store, with the names of all stores.
        command: Command of the store; empty if several stores were read together.
        seconds, cpu_seconds: Wall and CPU seconds of all sessions.
    """

    spec: S
    baseline: B
    options: Options
    command: str
    seconds: float
    cpu_seconds: float
    store: str


def facts_of_stores(stores: Sequence[AnyStore], options: Any) -> dict[str, Any]:
    """The field values of a `StoreResult` that is read from these stores."""
    first, is_alone = stores[0], len(stores) == 1
    seconds, cpu_seconds = map(sum, zip(*(store.total_session_seconds() for store in stores), strict=True))
    return {
        "spec": first.spec,
        "baseline": replace(first.baseline, name=", ".join(store.baseline.name for store in stores)),
        "options": options,
        "command": first.largest_budget()[1] if is_alone else "",
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "store": str(first.path) if is_alone else "",
    }

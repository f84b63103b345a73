"""The result of a campaign: shown as its kind says, with the trials of its store as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import load_named
from unsilent.report.model import Report
from unsilent.report.shown import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

    from unsilent.campaigns.kinds import Kind


class CampaignResult(Shown):
    """The result of a campaign.

    Attributes:
        KIND: Where the kind of the campaign is, ``module:name``.
        store: File of the store; empty: several stores were read together.
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
        """The report of the result; ``options``: fields of the kind's ``report_options``, as ``fit_per_bit`` of `pvf`."""
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

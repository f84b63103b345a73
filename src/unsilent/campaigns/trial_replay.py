"""A stored trial compared with its replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, cast

from unsilent.basics.strictjson import as_json_values
from unsilent.campaigns.codec import row_codec
from unsilent.campaigns.spec import R
from unsilent.campaigns.stored_values import one_line_preview
from unsilent.report.model import Report

SCHEMA = "unsilent/replay/1"


@dataclass(frozen=True)
class TrialReplay(Generic[R]):
    """The stored row of a trial and the row of its replay.

    Attributes:
        trial_sentences: Sentences of the kind about the trial; if empty, the fields of the row are listed.
        further_json: Further fields of the JSON object.
        report: Report on the propagation of the fault, if requested.
        log: Lines on the injected faults, if requested.
    """

    stored_row: R
    replayed_row: R
    trial_sentences: tuple[str, ...] = ()
    further_json: Mapping[str, Any] = field(default_factory=dict)
    report: Report | None = None
    log: tuple[str, ...] = ()

    @property
    def differing(self) -> list[str]:
        """Names of the fields that differ between the stored row and the replay."""
        again = self.replayed_row.reproducible_values()
        return [name for name, value in self.stored_row.reproducible_values().items() if again[name] != value]

    @property
    def is_identical(self) -> bool:
        """Whether both rows have the same content, bit for bit."""
        return not self.differing

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        columns = row_codec(cast("Any", type(self.stored_row)))
        stored, again = (
            columns.row_as_json(cast("Any", row), canonical=True) for row in (self.stored_row, self.replayed_row)
        )
        verdict = {
            "schema": SCHEMA,
            "trial": str(self.stored_row.trial),
            "same": self.is_identical,
            "differing": self.differing,
        }
        return {**verdict, "stored": stored, "again": again, **as_json_values(self.further_json)}

    def __str__(self) -> str:
        stored, again = self.stored_row.reproducible_values(), self.replayed_row.reproducible_values()
        ended = f"ENDED DIFFERENTLY THAN STORED ({', '.join(self.differing)})" if self.differing else "ended as stored"
        fields = [f"{name}: {text}" for name, value in stored.items() if name != "trial" and (text := _text(value))]
        changed = [f"{name}: {_change(stored[name], again[name])}" for name in self.differing]
        return "\n".join([f"{self.stored_row.trial} {ended}", *(self.trial_sentences or fields), *changed])


def _text(content: Any) -> str:
    """A short text for the content of a field."""
    return f"{len(content):,} bytes" if isinstance(content, bytes) else one_line_preview(", ".join(map(str, content)))


def _change(stored: Any, again: Any) -> str:
    return "different bytes" if isinstance(stored, bytes) else f"{_text(stored)} stored, {_text(again)} now"

"""A file that holds one campaign of any kind: what it is, what was asked of it, what it took. Its trials are a subclass's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

from unsilent.campaigns.filed import StoreFile
from unsilent.campaigns.reading import Damaged, read_budget, stored_json
from unsilent.campaigns.spec import campaign_hash, differences, value_text
from unsilent.errors import StoreError
from unsilent.printable import clean

S = TypeVar("S", bound=Any)
D = TypeVar("D", bound=Any)
_LONGEST = 80
"""Characters of a value in a message."""
TABLES = """
CREATE TABLE campaign (
    id INTEGER PRIMARY KEY CHECK (id = 1), hash TEXT NOT NULL, spec TEXT NOT NULL, description TEXT NOT NULL
);
CREATE TABLE budget (trials INTEGER NOT NULL, command TEXT NOT NULL, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE usage (seconds REAL NOT NULL, cpu_seconds REAL NOT NULL);
"""


class CampaignFile(StoreFile, Generic[S, D]):
    """An open file of one campaign, with a spec of type S and a description of type D."""

    owner = "campaign"
    _read: tuple[tuple[Any, ...], tuple[S, D]] | None = None

    @abstractmethod
    def _read_spec(self, text: Any) -> S:
        """Raises ``Damaged``."""

    @abstractmethod
    def _read_description(self, text: Any) -> D:
        """Raises ``Damaged``."""

    def bind(self, spec: S, description: D) -> None:
        """Make this store that campaign's, or check that it is; raises ``StoreError`` when it holds another one."""
        known = self._one("SELECT hash, spec, description FROM campaign")
        if known is None:
            with self._errors(), self._db:
                self._db.execute(
                    "INSERT INTO campaign VALUES (1, ?, ?, ?)",
                    (description.campaign, stored_json(spec.to_json()), stored_json(description.to_json())),
                )
        else:
            self.check(spec, description)

    def check(self, spec: S, description: D) -> None:
        """Raise ``StoreError`` with what differs where this store holds another campaign."""
        known = self._one("SELECT hash FROM campaign")
        if known is None or known[0] != description.campaign:
            raise StoreError(
                f"{self.path} holds another campaign ({self._difference(spec, description)}); "
                "give another --store, or remove the file"
            )

    def _difference(self, spec: S, description: D) -> str:
        found = islice(differences((self.spec, self.description), (spec, description)), 4)
        told = (
            f"{key}: {_short(key, v[0])} there, {_short(key, v[1])} now" if v else f"{key} changed" for key, v in found
        )
        return "; ".join(told) or "unknown difference"

    @property
    def spec(self) -> S:
        """The campaign's spec; raises ``StoreError`` when the store is empty."""
        return self._campaign()[0]

    @property
    def description(self) -> D:
        """What was found out before the first trial."""
        return self._campaign()[1]

    def _campaign(self) -> tuple[S, D]:
        """Spec and description, which must belong to each other; read again only where the file says something else."""
        with self._errors():
            row = self._one("SELECT hash, spec, description FROM campaign")
            if row is None:
                raise StoreError(f"{self.path} holds no campaign yet; run the command that made it again")
            if self._read is None or self._read[0] != row:
                spec, found = self._read_spec(row[1]), self._read_description(row[2])
                if not row[0] == found.campaign == campaign_hash(spec, found.fingerprint):
                    raise Damaged("its campaign is not the one that its spec makes")
                self._read = row, (spec, found)
            return self._read[1]

    def note_budget(self, trials: int, command: str) -> None:
        """Remember what budget was asked with which command (a campaign may be extended)."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO budget (trials, command) VALUES (?, ?)", (trials, clean(command)))

    def budget(self) -> tuple[int, str]:
        """Largest number of trials a stratum asked so far, and the command that asked it."""
        with self._errors():
            found = [read_budget(*row) for row in self._db.execute("SELECT trials, command FROM budget ORDER BY rowid")]
        return max(reversed(found), key=itemgetter(0), default=(0, ""))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is written inside is committed at the end, or not at all."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _short(key: str, value: Any) -> str:
    text = value_text(key, value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

"""``unsilent KIND``: a campaign of one registered kind, from its options to its report. Kinds that do more derive from `Verb`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.options import Budget, ExecutionOptions
from unsilent.cli.options import Output
from unsilent.cli.paths import default_store, report_path
from unsilent.options import Asked

Running = tuple[Any, Any]
"""An executor and its observer."""


class Verb:
    """What is done for a kind; ``more``: dataclasses of options that only the command line has."""

    more: tuple[type, ...] = ()
    unresolved: tuple[str, ...] = ()
    """Fields of the spec that a dry run cannot know."""

    def __init__(self, kind: Kind[Any, Any, Any]) -> None:
        self.kind = kind
        self.options = (*kind.options, *self.more, Output)
        self.script: tuple[str, ...] = ()

    def __call__(self, given: dict[str, Any], script: Sequence[str] = ()) -> int:
        """Run the command; ``given``: options by field. ``script``: arguments of a script of the user's."""
        self.script = tuple(script)
        asked = Asked(self.options, given)
        if asked["config"] is not None:
            asked.read_file(asked["config"])
        return self.main(asked)

    def main(self, asked: Asked) -> int:
        """From what was asked to the exit code."""
        from unsilent.campaigns.store import open_store
        from unsilent.cli.dry_run import dry_run

        kind = self.kind
        spec = kind.resolve(asked) if kind.resolve else asked.make(kind.spec)
        self.check(asked, spec)
        path = asked["store"] or Path(default_store(kind.name, self.named(asked, spec)))
        page = report_path(path, asked["output"])
        if asked["dry_run"]:
            return dry_run(self, asked, spec, path)
        with open_store(path, kind, write=True) as store:
            result = self.run(asked, spec, store)
        return self.show(asked, result, page, path)

    def check(self, asked: Asked, spec: Any) -> None:
        """Raise ``UsageError`` for what cannot be, before anything is opened."""
        self.budget(asked)
        asked.make(self.kind.reading)
        self.means(asked).check()

    def named(self, asked: Asked, spec: Any) -> dict[str, Any]:
        """What the name of a store follows from where none is given."""
        identity: dict[str, Any] = spec.identity()
        return identity

    def budget(self, asked: Asked) -> Budget:
        """How many trials; raises ``UsageError``."""
        result: Budget = asked.make(self.kind.budget).resolve()
        return result

    def means(self, asked: Asked) -> ExecutionOptions:
        """Where they are run."""
        return asked.make(self.kind.means)

    def command(self, asked: Asked) -> str:
        """The command line that asks for the same again."""
        kind = self.kind
        return asked.command(kind.name, kind.budget, kind.spec, kind.reading, *kind.more)

    def numbers(self, asked: Asked, spec: Any, result: Any) -> Mapping[tuple[str, int | None], range]:
        """Which trials a dry run foresees, by target and number of flips."""
        from unsilent.campaigns.driver import numbers

        return numbers(spec, result, self.budget(asked))

    def seconds(self, result: Any) -> float:
        """Of a fault-free run."""
        return float(result.golden_seconds)

    def foreseen(self, asked: Asked) -> Iterator[str]:
        """Further sentences of a dry run."""
        yield from ()

    @contextmanager
    def running(self, asked: Asked, spec: Any) -> Iterator[Running]:
        """The executor, while what it does is shown."""
        from unsilent.cli.progress import make_observer

        observer = make_observer(quiet=asked["quiet"], plain=asked["plain"] or asked["as_json"])
        with observer, self.means(asked).open(spec, observer) as executor:
            yield executor, observer

    def run(self, asked: Asked, spec: Any, store: Any) -> Any:
        """Run what is missing and read the store."""
        from unsilent.campaigns.driver import run_campaign

        with self.running(asked, spec) as (executor, observer):
            run_campaign(spec, self.budget(asked), executor, store, observer=observer, command=self.command(asked))
        return self.kind.analyse(store, **vars(asked.make(self.kind.reading)))

    def show(self, asked: Asked, result: Any, page: Path, path: Path) -> int:
        """Print the report and write its page."""
        from unsilent.cli.reporting import show_report

        show_report(self.kind.report(result), page, asked["as_json"], asked["plain"], {"Store": path})
        return 0

"""The base class of results, which can be shown as a report, a page, a notebook cell or text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unsilent.basics.lazy_module import load_named
from unsilent.report.model import Report
from unsilent.report.text import escape_unprintable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

MOST_NUMBERS = 6
"""Most numbers in the text of a result besides its headline."""


class Shown:
    """A base class of results that can be shown.

    A dataclass of results needs ``repr=False``.

    The function that makes the report, and the renderers outside this folder, are imported when a result is shown.

    Attributes:
        REPORT: Name of the function that makes the report from the result, ``module:name``. A subclass may have a method
            ``report`` instead.
    """

    __slots__ = ()
    REPORT: ClassVar[str]

    def report(self, *args: Any, **options: Any) -> Report:
        """The report of the result: headline, findings, tables and figures."""
        report: Report = load_named(self.REPORT)(self, *args, **options)
        return report

    def write_html(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the report as one self-contained HTML file, replacing it in one step, and return its path.

        Args:
            path: File of the page.
            options: Options of ``report()``.

        Raises:
            UsageError: the file cannot be written, or an existing file is not a page of this package.
        """
        from unsilent.render.report_page import write_report

        return write_report(self.report(**options), path)

    def figure(self, name: str, **options: Any) -> MatplotlibFigure:
        """A figure of the report as a matplotlib figure; needs the extra ``figures``.

        ``unsilent report STORE --figure NAME -o FILE.pdf`` writes the same to a file with embedded fonts.

        Args:
            name: Name of the figure; the error for an unknown name lists all names.
            options: Options of ``report()``.

        Raises:
            UsageError: the report has no figure of this name, or matplotlib is missing.
        """
        from unsilent.render.figure_file import draw_figure

        drawn: MatplotlibFigure = draw_figure(self.report(**options), name)
        return drawn

    def _repr_html_(self) -> str:
        from unsilent.render.report_terminal import report_as_preformatted_html

        return report_as_preformatted_html(self.report())

    def __repr__(self) -> str:
        report = self.report()
        numbers = [f"{term}: {text}{small and f' ({small})'}" for term, text, small in report.numbers[:MOST_NUMBERS]]
        lines = [report.title, report.headline, *numbers]
        return f"<{type(self).__name__}> " + "\n  ".join(map(escape_unprintable, lines))

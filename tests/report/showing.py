"""Results and comparisons as every way of showing them has them: a terminal, a page, its figures, JSON."""

import io

from rich.console import Console

from unsilent.render import report_page
from unsilent.render.report_json import report_json
from unsilent.render.report_terminal import render_report
from unsilent.studies.pvf.comparison import Comparison
from unsilent.studies.pvf.comparison_report import comparison_report
from unsilent.studies.pvf.report import report


def report_of(found, **more):
    return comparison_report(found) if isinstance(found, Comparison) else report(found, **more)


def text_of(found, plain=False, width=120, force=False, is_terminal=True, **more):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system="truecolor" if force else None
    )
    render_report(report_of(found, **more), console, plain)
    return console.file.getvalue()


def render_html(found, **more):
    return report_page.report_html(report_of(found, **more))


def write_html(found, path, **more):
    return report_page.write_report(report_of(found, **more), path)


def figures(found):
    return report_page.figures_by_place(report_of(found))


def to_json(found, **more):
    return report_json(report_of(found, **more))

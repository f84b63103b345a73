"""A result as one self-contained HTML file that works offline.

Everything is inlined once: style, the figures as JSON, plotly.js. Names are hostile: jinja2 escapes every
value, figures are stored as JSON with ``<``, ``>`` and ``&`` written as ``\\\\uXXXX`` and are parsed, not
executed, and a content security policy allows exactly the two scripts written here (by hash) and no
connection at all.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.report.figures import curves_figure, heat_figure, heat_floor, lookup_figure, split_figure
from unsilent.report.fit import NEEDS, check_rate, fit_rows, surprise
from unsilent.report.headline import headline
from unsilent.report.info import BARS, curves, due_split, heats, outcome_split, pooled, split_rows
from unsilent.report.jsonout import strict
from unsilent.report.look import Figure
from unsilent.report.tables import facts, fit_table, lookup_table, numbers, result_columns, result_table
from unsilent.report.terminal import meaning
from unsilent.report.text import clean, counted, listed
from unsilent.studies.records import PvfResult
from unsilent.version import __version__

GENERATOR = "Unsilent"
_MARK = f'<meta name="generator" content="{GENERATOR} '.encode()
_HEAD = 4096
TEMPLATE = "pvf.html.jinja"


def write_html(result: PvfResult, path: str | os.PathLike[str], *, fit_per_bit: float | None = None) -> Path:
    """Write the report to ``path`` (replacing it in one step) and return the path.

    Raises ``UsageError`` where the file cannot be written; a file that was there before is then untouched.
    """
    target = Path(path)
    page = render_html(result, fit_per_bit=fit_per_bit)
    try:
        _replace(target, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot write the report to {str(target)!r}: {reason}; choose another path") from None
    return target


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether the file there is a report of ours, by the mark in its first 4 KB; False where no file can be read."""
    file = Path(path)
    try:
        if not file.is_file():  # opening a pipe would wait
            return False
        with open(file, "rb") as opened:
            return _MARK in opened.read(_HEAD)
    except (OSError, ValueError):
        return False


def render_html(result: PvfResult, *, fit_per_bit: float | None = None) -> str:
    """The whole page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    if fit_per_bit is not None:
        check_rate(fit_per_bit)
    environment = Environment(
        loader=PackageLoader("unsilent", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    # A browser reads \r\n as \n before it hashes; the hash must be that of what it sees.
    library = get_plotlyjs().replace("\r\n", "\n")
    script = environment.get_template("pvf.js.jinja").render()
    return environment.get_template(TEMPLATE).render(
        **page(result, fit_per_bit),
        plotly=Markup(library),  # noqa: S704 - plotly's own file
        script=Markup(script),  # noqa: S704 - ours, holds no value
        hashes=[_hash(library), _hash(script)],
    )


def page(result: PvfResult, fit_per_bit: float | None) -> dict[str, Any]:
    """Everything the template shows."""
    from markupsafe import Markup

    lines = curves(result)
    fits = fit_rows(result, fit_per_bit) if fit_per_bit is not None else ()
    drawn = figures(result)
    return {
        "result": result,
        "measure": result.measure,
        "meaning": capitalised(meaning(result)),
        "generator": f"{GENERATOR} {__version__}",
        "is_command": result.command.startswith("unsilent "),
        "units": _units(result),
        "headline": headline(result),
        "numbers": numbers(result),
        "confidence": f"{100 * result.confidence:g}",
        "curves": lines,
        "missing": listed(clean(name) for name in lines.missing),
        "heats": [(f"heat-{i}", clean(one.dtype), counted(one.trials, "trial")) for i, one in enumerate(heats(result))],
        "heat_trials": counted(sum(one.trials for one in result.heat_maps), "trial"),
        "judged_once": result.unit == "batch" and (result.transient or result.batches == 1),
        "pooled": pooled(result),
        "bars": BARS,
        "splits_left": split_rows(result)[1],
        "figures": drawn,
        "figure_data": Markup(as_script(drawn)),  # noqa: S704 - see as_script
        "fit_per_bit": fit_per_bit,
        "fit_needs": NEEDS,
        "fits": fit_table(fits),
        "fit_surprise": surprise(fits),
        "lookups": lookup_table(result),
        "columns": result_columns(result),
        "rows": result_table(result),
        "facts": facts(result),
    }


def figures(result: PvfResult) -> dict[str, Figure]:
    """The figures that have something to show, by the id of their place in the page."""
    found: dict[str, Figure] = {}
    lines, splits, dues = curves(result), outcome_split(result), due_split(result)
    if lines.series:
        found["curves"] = curves_figure(lines, result.measure)
    maps = heats(result)
    for number, one in enumerate(maps):
        found[f"heat-{number}"] = heat_figure(one, heat_floor(maps), result.measure)
    if splits:
        found["outcomes"] = split_figure(splits, f"share of {_units(result)}")
    if dues:
        found["due"] = split_figure(dues, f"share of incorrect {_units(result)}")
    if any(row.estimate is not None for row in result.lookups):
        found["lookups"] = lookup_figure(result.lookups)
    return found


def as_script(value: Any) -> str:
    """JSON that is safe inside a script element: no character is left that HTML would read.

    >>> as_script("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(strict(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def _units(result: PvfResult) -> str:
    return "batches" if result.unit == "batch" else "samples"


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _replace(target: Path, content: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one."""
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise

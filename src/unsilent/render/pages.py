r"""Functions shared by all HTML pages, which are self-contained and work offline.

Everything is inlined once: style, the figures as JSON, plotly.js if a page has figures. Names are not trusted: jinja2 escapes
every value; figures are stored as JSON with ``<``, ``>`` and ``&`` written as ``\\uXXXX`` and are parsed, not
executed; and a content security policy allows only the scripts in this package (by hash) and no
connections.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import replace_file
from unsilent.basics.strictjson import as_json_values
from unsilent.report.text import escape_unprintable
from unsilent.report.theme import Figure
from unsilent.version import __version__

GENERATOR = "Unsilent"
_MARK = f'<meta name="generator" content="{GENERATOR} '.encode()
_HEAD = 4096


def render_page(values: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    """The HTML text of a page.

    ``figures`` are drawn at the places named ``figure-NAME``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("unsilent", "render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    script = environment.get_template("page.js.jinja").render()
    library = _plotly() if figures else ""
    return environment.get_template("report.html.jinja").render(
        **values,
        generator=f"{GENERATOR} {__version__}",
        figures=figures,
        figure_data=Markup(json_for_script(figures)),  # noqa: S704 - see as_script
        plotly=Markup(library),  # noqa: S704 - plotly's own file
        script=Markup(script),  # noqa: S704 - ours, holds no value
        hashes=[_hash(text) for text in (library, script) if text],
    )


def _printable(value: object) -> object:
    """A value for a template, in which unprintable characters are escaped.

    Markup is unchanged.
    """
    return escape_unprintable(value) if type(value) is str else value


def write_file(content: bytes, path: str | os.PathLike[str], what: str) -> Path:
    """Write a file in one step, so that it is never incomplete, and return its path.

    Raises ``UsageError`` if the file cannot be written; an existing file is then unchanged.
    """
    target = Path(path)
    try:
        replace_file(target, content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot write {what} to {str(target)!r}: {reason}; choose another path") from None
    return target


def is_unsilent_page(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a page of this package; False if it cannot be read."""
    file = Path(path)
    try:
        if not file.is_file():  # opening a pipe would block
            return False
        with open(file, "rb") as opened:
            return _MARK in opened.read(_HEAD)
    except (OSError, ValueError):
        return False


def json_for_script(value: Any) -> str:
    r"""JSON that is safe inside an HTML script element.

    >>> json_for_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(as_json_values(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def capitalised(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # A browser reads \r\n as \n before it computes the hash, so the hash must be that of the text with \n.
    return str(get_plotlyjs()).replace("\r\n", "\n")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

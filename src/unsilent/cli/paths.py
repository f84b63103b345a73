"""Default paths of stores and reports, and checks of output paths."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError

LONGEST_NAME = 180
"""Most characters of a workload in the name of a store, so that file systems accept the name with SQLite's suffixes."""


def default_store(verb: str, identity: Mapping[str, Any]) -> str:
    """The default file name of a campaign's store, which depends on its spec alone.

    ``identity`` is the identity of the spec.
    """
    import xxhash

    from unsilent.campaigns.spec import sorted_json_text

    name = re.sub(r"[^A-Za-z0-9.-]+", "-", identity["workload"]).strip("-")[:LONGEST_NAME]
    return f"unsilent-{verb}-{name}-{xxhash.xxh3_64_hexdigest(sorted_json_text(identity).encode())[:8]}.sqlite"


def report_path(store: Path, output: Path | None) -> Path:
    """The path of the report's page: the given one, or one next to the store.

    The path is checked before any trial is run.

    Raises ``UsageError`` if the path is the store itself, its folder does not exist, or its file is not a report.
    """
    from unsilent.render.pages import is_unsilent_page

    path = output or default_report_path(store)
    if os.path.realpath(path) == os.path.realpath(store):
        raise UsageError(f"the report would overwrite the store {store}; give another --output or --store")
    check_writable(output, "the report ")
    if output is None and path.exists() and not is_unsilent_page(path):
        raise UsageError(f"{path} exists and is not an Unsilent report; give another --output")
    return path


def check_writable(path: Path | None, what: str = "") -> None:
    """Raise ``UsageError`` if a file cannot be written at the path.

    ``what`` is a description of the file for the message, with a space at its end.
    """
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UsageError(
            f"cannot write {what}{path}: its folder does not exist, or a folder has that name; give another --output"
        )


def writable_page(page: Path, output: Path | None) -> Path | None:
    """The path of the page; None, after printing a note, if the default folder is not writable."""
    if output is not None or os.access(page.parent, os.W_OK):
        return page
    print(
        f"unsilent: the report page was not written, as {page.parent} cannot be written; name a file with -o",
        file=sys.stderr,
    )
    return None


def default_report_path(store: Path) -> Path:
    """The default path of the report on a store."""
    return store.with_suffix(".html") if store.suffix in (".sqlite", ".jsonl") else Path(f"{store}.html")

"""A hook of mkdocs that stops ``make docs`` at dead links into the repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files

sys.path.insert(0, str(Path(__file__).parent))
import doc_links


def on_files(files: Files, config: Any) -> Files:
    """Check the links of all pages."""
    if problems := doc_links.dead_links(doc_links.sources()):
        raise PluginError("dead links:\n" + "\n".join(problems))
    return files

"""Lists docstrings that do not begin with the thing or with what is returned: ``python tools/docstring_openings.py FOLDER …``.

A reader sees the folder, the name and the first line. "That of the model." or "What is shown of two." leaves the noun out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

OPENINGS = ("What", "Of", "That", "Those", "As", "It", "Its", "The same", "In", "At", "By", "To")


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring that begins with one of `OPENINGS`."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and text.startswith(tuple(f"{opening} " for opening in OPENINGS)):
            yield node.body[0].lineno, text.partition("\n")[0]


def main(folders: list[str]) -> int:
    """Print them; 1 where there are any."""
    found = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for line, text in openings(path.read_text(encoding="utf-8")):
            found += 1
            print(f"{path}:{line}: begin with the noun: {text}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

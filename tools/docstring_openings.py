"""Lists docstrings that do not begin with the thing or with what is returned: ``python tools/docstring_openings.py FOLDER …``.

A reader sees the folder, the name and the first line. "That of the model." or "What is shown of two." leaves the noun out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

NAMED = (ast.Assign, ast.AnnAssign)
OPENINGS = ("What", "Of", "That", "Those", "As", "It", "Its", "The same", "In", "At", "By", "To")


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring, also of one below a name, that begins with one of `OPENINGS`."""
    for node in ast.walk(ast.parse(source)):
        for text in _docstrings(node):
            if str(text.value).startswith(tuple(f"{opening} " for opening in OPENINGS)):
                yield text.lineno, str(text.value).partition("\n")[0]


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """The docstring of a module, class or function, and the texts that stand below the names it assigns."""
    body = getattr(node, "body", [])
    for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text and isinstance(statement.value.value, str) and (before is None or isinstance(before, NAMED)):
            yield statement.value


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

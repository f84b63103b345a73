"""Counts lines of code, those that hold a token besides comments and docstrings: ``python tools/count_code.py [FOLDER …]``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING
}  # fmt: skip


def docstring_lines(tree: ast.AST) -> set[int]:
    """Numbers of the lines of all docstrings, and of strings that stand alone below a name."""
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    strings = (node for node in texts if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(source: str) -> int:
    """How many lines of a module are code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in IGNORED for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstring_lines(ast.parse(source)))


def main(folders: list[str]) -> None:
    """Print the count of each folder below the given ones, and the sum."""
    counts: Counter[str] = Counter()
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            counts["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    for name, count in counts.most_common():
        print(f"{count:>7,}  {name}")
    print(f"{counts.total():>7,}  in all")


if __name__ == "__main__":
    main(sys.argv[1:] or ["src"])

"""Seeded mutants of the source: of each one change, do tests that cover its line notice it?

    make coverage                                    # .coverage, which test ran which line
    .venv/bin/python tests/mutants.py --count 60     # a line for each mutant, survivors at the end

A mutant survives when every covering test passes, or when 60 s of CPU time are not enough to tell. Other work on the
machine does not count.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
FOLDERS = ("faults", "statistics", "outcomes", "campaigns")
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
MOST_TESTS, CPU_SECONDS, SECONDS = 200, 60, 1800
FAILED = (1, 2)
"""What pytest returns where tests fail, or cannot even be collected; not where it was asked for tests that there are none of."""


class Mutant(NamedTuple):
    """A change of one expression: its file and line, the text before and after, and the file's new text."""

    file: Path
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line}: {self.before} -> {self.after}"


def changed(node: ast.AST) -> ast.expr | None:
    """Another expression in place of this one; None where there is none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        return ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not isinstance(node.left, ast.Constant):
        return ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ast.Constant(not node.value)
    return None


def mutants(file: Path, lines: set[int]) -> Iterator[Mutant]:
    """Of the expressions that begin and end on one of these lines, inside of functions; annotations are left alone."""
    text = file.read_text(encoding="utf-8")
    rows = text.splitlines(keepends=True)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                after = changed(node)
                if after is None or not isinstance(node, ast.expr) or node.lineno not in lines:
                    continue
                if node.end_lineno != node.lineno or node.end_col_offset is None:
                    continue
                row = rows[node.lineno - 1].encode()
                written = f"({ast.unparse(after)})".encode()
                new = row[: node.col_offset] + written + row[node.end_col_offset :]
                whole = "".join([*rows[: node.lineno - 1], new.decode(), *rows[node.lineno :]])
                yield Mutant(file, node.lineno, ast.unparse(node), ast.unparse(after), whole)


def _limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))


def noticed(mutant: Mutant, copy: Path, tests: list[str], folder: Path) -> bool | None:
    """Whether a test fails; None where the time is over before."""
    target = copy / mutant.file.relative_to(SOURCE)
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.text, encoding="utf-8")
    chosen = folder / "tests.txt"
    chosen.write_text("\n".join(tests), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not claim", f"@{chosen}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS, check=False, preexec_fn=_limit_cpu
        )
        return None if done.returncode == -signal.SIGXCPU else done.returncode in FAILED
    except subprocess.TimeoutExpired:
        return None
    finally:
        target.write_text(original, encoding="utf-8")


def main() -> None:
    """Make mutants, run tests, print what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    asked = parser.parse_args()
    data = CoverageData(str(asked.coverage))
    data.read()
    covered: dict[Path, dict[int, list[str]]] = {}
    sizes: dict[str, int] = {}
    for name in data.measured_files():
        by_line = {n: [c.partition("|")[0] for c in found if c] for n, found in data.contexts_by_lineno(name).items()}
        covered[Path(name)] = {n: list(dict.fromkeys(found)) for n, found in by_line.items() if found}
        for tests in by_line.values():
            for test in tests:
                sizes[test] = sizes.get(test, 0) + 1
    files = sorted(file for folder in FOLDERS for file in (SOURCE / "unsilent" / folder).rglob("*.py"))
    every = [one for file in files for one in mutants(file, set(covered.get(file, ())))]
    chosen = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants, seed {asked.seed}", flush=True)
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy)
        for mutant in chosen:
            tests = sorted(covered[mutant.file][mutant.line], key=lambda test: sizes[test])[:MOST_TESTS]
            found = noticed(mutant, copy, tests, Path(folder))
            print(
                f"{'killed' if found else 'time over' if found is None else 'SURVIVED'}  {mutant}  ({len(tests)} tests)",
                flush=True,
            )
            if not found:
                survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed; survivors:")
    print("\n".join(map(str, survivors)) or "none")


if __name__ == "__main__":
    main()

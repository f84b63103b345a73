"""Two checkouts of the source run the same six campaigns: are trials, estimates and intervals the same, digit for digit?

git worktree add /tmp/before COMMIT
python -m benchmarks.same_numbers /tmp/before .       # some minutes; exit status 1 where a number differs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CAMPAIGNS: dict[str, tuple[str, ...]] = {
    "pvf, parameters": ("pvf", "digits-cnn", "--trials", "150", "--flips", "1,8", "--jobs", "2"),
    "pvf, operations": ("pvf", "digits-cnn", "--at", "op:*", "--trials", "100"),
    "pvf, exhaustive": ("pvf", "digits-cnn", "--at", "*.bias", "--fault", "bitflip:bits=28-31", "--trials", "all"),
    "pvf, some samples": ("pvf", "chargpt", "--samples", "2", "--trials", "60"),
    "training": ("training", "train-resnet", "--trials", "24", "--horizon", "20", "--guard"),
    "noise": ("noise", "train-resnet", "--replicas", "3", "--variants", "control,algo+impl", "--steps", "60"),
}
NUMBERS = ("estimate", "low", "high", "n")
RENAMED = {
    "codes": "outcome_codes", "bits": "bit_identical", "ran": "steps_run", "reason": "end_reason", "usual": "reference_max",
    "written": "injected_max", "test": "test_accuracy", "watched": "history_magnitudes",
    "wrote more than 10000 x usual": "over 10000 x the largest value before",
}  # fmt: skip
"""Fields of trials, and rows, that older checkouts call otherwise."""
SAME_CODE = """
import importlib.abc, importlib.util, sys
class SameCode(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "unsilent.campaigns.code":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def then_patch(module):
            execute(module)
            module.code_fingerprint = lambda *arguments: ""
        spec.loader.exec_module = then_patch
        return spec
sys.meta_path.insert(0, SameCode())
"""
"""A ``sitecustomize`` module. The code of a workload is part of a campaign's identity, from which faults are drawn: a
workload whose names were changed would get other faults."""


def main() -> int:
    """Run both, print what is the same and what is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", choices=CAMPAIGNS, action="append")
    asked = parser.parse_args()
    differ = False
    for name in asked.only or CAMPAIGNS:
        (trials, numbers), (trials_again, numbers_again) = (_run(tree, CAMPAIGNS[name]) for tree in asked.trees)
        same = trials == trials_again and numbers == numbers_again
        differ |= not same
        print(
            f"{name}: {len(trials)} trials and {sum(numbers.values())} estimates, {'the same' if same else 'DIFFERENT'}"
        )
        for kind, one, other in (("trial", trials, trials_again), ("estimate", numbers, numbers_again)):
            first = [(f"only before: {kind}", x) for x in list(one - other)[:3]]
            for where, found in first + [(f"only after: {kind}", x) for x in list(other - one)[:3]]:
                print(f"  {where} {found}")
    return int(differ)


def _run(tree: Path, words: tuple[str, ...]) -> tuple[Counter[str], Counter[Any]]:
    """Rows of the export as text, and all estimates of the JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SAME_CODE, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": f"{(tree / 'src').resolve()}{os.pathsep}{folder}"}

        def unsilent(*arguments: str) -> str:
            command = [sys.executable, "-m", "unsilent", *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{tree}: unsilent {' '.join(arguments)}: {done.stderr}")
            return done.stdout

        found = json.loads(unsilent(*words, "--json", "--quiet", "--store", "s.sqlite"))
        lines = [] if words[0] == "noise" else unsilent("export", "s.sqlite", "--canonical").splitlines()
    return Counter(_rows(lines)), Counter(_estimates(found))


def _rows(lines: list[str]) -> Iterator[str]:
    """The campaign's hash, then its trials; what a trial does not have (null) may be left out."""
    for number, values in enumerate(map(json.loads, lines)):
        shown = {RENAMED.get(k, k): v for k, v in values.items() if v is not None}
        yield values["campaign"] if not number else json.dumps(dict(sorted(shown.items())))


def _estimates(found: Any) -> Iterator[tuple[Any, ...]]:
    """Every object that has an estimate with limits, as what it is called and its numbers."""
    if isinstance(found, dict):
        if set(NUMBERS) <= found.keys():
            called = (found.get(key) for key in ("variant", "measure", "target", "level", "flips", "name"))
            yield (*(RENAMED.get(str(c), c) for c in called if c is not None), *(found[key] for key in NUMBERS))
        for value in found.values():
            yield from _estimates(value)
    elif isinstance(found, list):
        for value in found:
            yield from _estimates(value)


if __name__ == "__main__":
    sys.exit(main())

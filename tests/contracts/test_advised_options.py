"""Options and arguments that messages of the package advise exist where the message says they do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import unsilent
from docs.test_examples import known_options

SOURCE = Path(unsilent.__file__).parent
OF_OTHERS = {
    "campaigns/ray_launch.py": {"--head"},  # ray start
    "checkpoints/hdf5_corrupter/sequence.py": {"--allow"},  # hdf5_corrupter --allowNaNValues
    "monitor/incident_writer.py": {"--query-gpu", "--format", "--id"},  # nvidia-smi
    "launch/rank_processes.py": {"--standalone", "--nproc-per-node"},  # torchrun
    "triage/collected.py": {"--log-dir", "--redirects"},  # torchrun
}
"""Options of programs of others, and the files that name them."""
VERBS = {
    "cli/main.py": (),
    "cli/status.py": (),
    "replicas": ("noise", "training"),
    "studies/checkpoint": ("checkpoint study",),
    "studies/coverage/inference": ("inference-coverage",),
    "studies/coverage": ("coverage",),
    "papers/isca23/replay.py": ("replay-injection",),
    "studies/noise": ("noise",),
    "explain": ("explain",),
    "studies/plan": ("plan", "pvf"),
    "studies/pvf/replay.py": ("replay",),
    "studies/pvf/words.py": ("pvf", "report", "plan"),
    "studies/pvf": ("pvf", "report"),
    "studies/training": ("training", "checkpoint study", "coverage"),
}
"""Verbs whose messages a folder or a file has; `cli/VERB.py` has those of its verb. Others have those of any verb."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_COMMAND = re.compile(r"unsilent ([a-z][a-z-]*(?: [a-z]+)?)([^;.)]* --[^;.)]*)")
_ARGUMENT = re.compile(r"(?<![\w-])([a-z_]+)=")


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module but docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {
        id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and isinstance(n.body[0], ast.Expr)
    }  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


TREES = {str(p.relative_to(SOURCE)): ast.parse(p.read_text("utf-8")) for p in sorted(SOURCE.rglob("*.py"))}
OPTIONS = known_options()


def options_at(file: str) -> set[str]:
    verbs = next((verbs for place, verbs in VERBS.items() if file.startswith(place)), ())
    if file.startswith("cli/") and file not in VERBS and (own := Path(file).stem.replace("_", " ")) in OPTIONS:
        verbs = tuple(verb for verb in OPTIONS if verb == own or verb.startswith(f"{own} "))
    return set[str]().union(*(OPTIONS[verb] for verb in verbs or OPTIONS)) | OF_OTHERS.get(file, set()) | {"--version"}


@pytest.mark.parametrize("file", [file for file, tree in TREES.items() if any(map(_FLAG.search, texts(tree)))])
def test_every_option_that_is_named_exists(file):
    known = options_at(file)
    for text in texts(TREES[file]):
        commands = [
            (OPTIONS.get(verb) or OPTIONS.get(verb.split()[0]), flag)
            for verb, rest in _COMMAND.findall(text)
            for flag in _FLAG.findall(rest)
        ]
        of_command = {flag for options, flag in commands if options and flag in options}
        wrong = [flag for options, flag in commands if options and flag not in options]
        wrong += [flag for flag in _FLAG.findall(text) if flag not in known | of_command]
        assert not wrong, text


def test_every_argument_that_an_error_names_exists():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    known = {node.arg for node in nodes if isinstance(node, ast.arg)} | {
        "weights_only",
        "record_shapes",
        "profile_memory",
        "with_stack",
        "reshard_after_forward",
        "network",
        "race",
        "from",
    }  # of torch; a switch; a what-if; of fault models
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            known |= {b.target.id for b in node.body if isinstance(b, ast.AnnAssign) and isinstance(b.target, ast.Name)}
    errors = [node.exc for node in nodes if isinstance(node, ast.Raise) and node.exc is not None]
    wrong = [
        (name, text)
        for error in errors
        for text in texts(error)
        for name in _ARGUMENT.findall(text)
        if name not in known
    ]
    assert not wrong

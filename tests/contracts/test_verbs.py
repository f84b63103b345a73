"""Every verb that prints a result can print it as one JSON object, and without colours and boxes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch

from conftest import in_process
from docs.test_examples import known_options
from unsilent.cli.table import COMMANDS

OTHERS = {
    "checkpoint": "has verbs of its own",
    "export": "writes trials in a format for programs",
    "placement measure": "writes a description of the machine as TOML",
    "run": "prints what the script prints",
    "timeline record": "prints what the script prints",
}
"""Verbs that print no result, and why."""
OPTIONS = known_options()
LISTS = [["workloads"], ["faults"], ["faults", "--accelerator", "nvdla"], ["detectors"], ["status"]]


@pytest.mark.parametrize("verb", [verb for verb in OPTIONS if verb not in OTHERS])
def test_a_result_is_printed_plainly_or_as_json(verb):
    assert {"--json", "--plain"} <= OPTIONS[verb]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that is narrow and shows colours."""
    from rich import console

    plain = console.Console
    monkeypatch.setattr(console, "Console", lambda: plain(force_terminal=True, width=60))


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_plain_lists_have_no_boxes_and_no_broken_lines(words, stored, terminal):
    done = in_process(*words, "--plain")
    assert done.returncode == 0
    assert not set("\x1b─━│┃") & set(done.stdout)
    columns = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert len(columns) > 1
    # Comments are whole sentences, and no cell is broken: no line begins with a blank.
    assert not [line for line in done.stdout.splitlines() if line.startswith(" ")]
    json.loads(in_process(*words, "--json").stdout)


def test_plain_results_of_checkpoint_verbs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(8)}, "c.pt")
    for words in (
        ("manifest", "c.pt"),
        ("verify", "c.pt"),
        ("corrupt", "c.pt", "--flips", 3, "--save", "i.json"),
        ("undo", "c.pt"),
        ("replay", "c.pt", "i.json"),
    ):
        done = in_process("checkpoint", *words, "--plain")
        assert (done.returncode, done.stderr) == (0, "")
        assert all(line.startswith("# ") for line in done.stdout.splitlines())


def test_a_checkpoint_is_corrupted_by_a_number_of_flips(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(8)}, "c.pt")
    done = in_process("checkpoint", "corrupt", "c.pt", "--flips", 3, "--json")
    assert json.loads(done.stdout)["changed_bits"] == 3
    for words, message in (
        (("--flips", 2, "--fault", "bitflip:count=4"), "--flips and the count=4 of --fault both set the number"),
        (("--flips", 2, "--fault", "bitflip:rate=0.1"), "--flips and the rate=0.1 of --fault both set the number"),
        (("--flips", 0), "--flips is 0; expected 1 or more"),
        (("--flips", 2, "--settings", "s.yaml"), "leave out"),
    ):
        refused = in_process("checkpoint", "corrupt", "c.pt", *words)
        assert refused.returncode == 2
        assert message in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["", *OPTIONS])
def test_help_is_shown_at_once(verb):
    """In CPU time, without torch, numpy or scipy."""
    if verb and verb not in COMMANDS:
        pytest.skip("a command of the tests")
    code = (
        "import sys; from unsilent.cli.main import run; code = run(sys.argv[1:]); "
        "print(code, *({'torch', 'numpy', 'scipy'} & {*sys.modules}))"
    )
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code, *verb.split(), "--help"], text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0", done.stdout[-200:]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun < 2

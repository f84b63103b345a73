"""The command line end to end, as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unsilent
from conftest import command, in_process, unsilent_cli
from unsilent.basics.options import options_of
from unsilent.basics.user_code import find_user_object
from unsilent.cli.table import COMMANDS, PYTHON_FUNCTIONS, load_command


@pytest.fixture(scope="module")
def campaign(pvf_campaign, tmp_path_factory):
    """A campaign of the tiny workload: a copy of its folder, and what the command printed as JSON."""
    folder = tmp_path_factory.mktemp("campaign")
    shutil.copytree(pvf_campaign, folder, dirs_exist_ok=True)
    return folder, json.loads((folder / "printed.json").read_text())


def test_json_holds_what_the_design_promises(campaign):
    _, told = campaign
    assert {"schema", "command", "spec", "seed", "seconds", "cpu_seconds", "store", "versions", "results"} <= set(told)
    for row in told["results"]:
        assert {"target", "level", "flips", "estimate", "low", "high", "confidence", "n", "unit"} <= set(row)
        assert row["masked"] + row["benign"] + row["sdc"] + row["due"] == row["units"]
        assert row["n"] == 0 or row["low"] <= row["estimate"] <= row["high"]
    assert {r["target"] for r in told["results"] if r["level"] == "component"} == {"first", "norm", "last"}
    assert [r["flips"] for r in told["results"] if r["level"] == "model"] == [1, 8]


def test_the_named_command_reproduces_the_store(campaign):
    folder, told = campaign
    words = told["command"].split()
    assert words[0] == "unsilent"
    done = in_process(*words[1:], "--store", "again.sqlite", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] == told["results"]


def test_the_same_command_again_runs_no_trial(campaign):
    folder, _ = campaign
    done = in_process("pvf", "tiny.py:make", "--trials", 40, "--flips", "1,8", "--store", "s.sqlite", cwd=folder)
    assert done.returncode == 0
    assert "240 trials, 240 of them already stored" in done.stderr
    assert "Report: s.html" in done.stdout


def test_report_reads_any_unit_from_the_store(campaign):
    folder, told = campaign
    done = in_process("report", "s.sqlite", "--unit", "batch", "--json", cwd=folder)
    rows = {(r["target"], r["level"], r["flips"]): r for r in json.loads(done.stdout)["results"]}
    for row in told["results"]:
        batch = rows[row["target"], row["level"], row["flips"]]
        assert batch["unit"] == "batch"
        assert batch["units"] * 7 == row["units"]
        assert row["n"] == 0 or batch["estimate"] >= row["estimate"]


def test_plain_output_has_no_escape_codes(campaign):
    folder, _ = campaign
    done = in_process("report", "s.sqlite", "--plain", "-o", "p.html", cwd=folder)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "last" in done.stdout


@pytest.mark.slow
def test_every_trial_replays_the_same(campaign):
    folder, _ = campaign
    for trial in ("first/x1/0", "last/x8/39"):
        done = in_process("replay", "s.sqlite", trial, "--workload", "tiny.py:make", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert f"{trial} ended as stored" in done.stdout
    told = json.loads(
        in_process("replay", "s.sqlite", "norm/x8/3", "--workload", "tiny.py:make", "--json", cwd=folder).stdout
    )
    assert told["same"] is True
    assert told["stored"] == told["again"]


def test_a_trial_replays_in_a_process_that_has_loaded_the_workload(campaign, monkeypatch):
    folder, _ = campaign
    monkeypatch.chdir(folder)
    find_user_object("tiny.py:make")
    done = in_process("replay", "s.sqlite", "first/x1/0", "--workload", "tiny.py:make")
    assert done.returncode == 0, done.stderr


def test_a_row_that_was_changed_replays_differently(campaign, tmp_path):
    import sqlite3
    import zlib
    from contextlib import closing

    folder, _ = campaign
    copy = folder / "changed.sqlite"
    copy.write_bytes((folder / "s.sqlite").read_bytes())
    with closing(sqlite3.connect(copy)) as db, db:
        db.execute(
            "UPDATE trial SET outcome_codes = ? WHERE target = 'first' AND k = 0", (zlib.compress(b"\x02" * 14),)
        )
    done = in_process("replay", copy, "first/x1/0", "--workload", "tiny.py:make", cwd=folder)
    assert done.returncode == 1
    assert "ENDED DIFFERENTLY" in done.stdout


@pytest.mark.slow
def test_reports_of_two_runs_are_equal_where_they_are_canonical(campaign):
    """Also where the workload's file lies in another folder."""
    folder, told = campaign
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "tiny.py").write_text((folder / "tiny.py").read_text())
    stores = ("real.sqlite", "elsewhere/t.sqlite")
    for file, store in zip(("tiny.py", "elsewhere/tiny.py"), stores, strict=True):
        words = ("pvf", f"{file}:make", "--trials", 40, "--flips", "1,8", "--quiet", "--store", store)
        done = unsilent_cli(*words, cwd=folder)  # in processes of their own, which have loaded nothing before
        assert done.returncode == 0, done.stderr
    for verb, words in (
        ("report", ("--unit", "batch")),
        ("diff", ("real.sqlite",)),
        ("report", ("--fit-per-bit", "1e-4")),
    ):
        one, two = (in_process(verb, name, *words, "--json", "--canonical", cwd=folder).stdout for name in stores)
        assert one == two
    left_out = {"command", "seconds", "cpu_seconds", "golden_seconds", "store", "versions", "report", "notes"}
    assert left_out == (told.keys() - {"failed_assertions"}) - json.loads(one).keys()


def test_exports_agree(campaign):
    folder, told = campaign
    for name in ("t.csv", "t.json", "t.jsonl", "t.parquet"):
        done = in_process("export", "s.sqlite", "--output", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    with (folder / "t.csv").open() as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()]
    whole = json.loads((folder / "t.json").read_text())["trials"]
    assert whole == lines
    assert len(table) == len(lines) == 240
    assert [r["trial"] for r in table] == [r["trial"] for r in lines]
    import pyarrow.parquet as parquet

    assert parquet.read_table(folder / "t.parquet").column("sdc").to_pylist() == [r["sdc"] for r in lines]
    (row,) = [r for r in told["results"] if (r["target"], r["level"], r["flips"]) == ("last", "component", 8)]
    assert sum(r["sdc"] for r in lines if (r["target"], r["flips"]) == ("last", 8)) == row["sdc"]


def test_stored_faults_are_replayable_records(campaign):
    import numpy as np
    import torch

    import unsilent

    folder, _ = campaign
    sys.path.insert(0, str(folder))
    try:
        import tiny
    finally:
        sys.path.remove(str(folder))
    (row,) = [
        r
        for r in map(json.loads, in_process("export", "s.sqlite", cwd=folder).stdout.splitlines())
        if r["trial"] == "last/x8/5"
    ]
    model = tiny.Tiny().eval()
    golden = [model(b) for b in tiny.batches()]
    with torch.no_grad(), unsilent.inject(model, [unsilent.Fault.from_json(f) for f in row["faults"]]) as receipt:
        assert receipt.changed_bits == 8
        faulty = [model(b) for b in tiny.batches()]
    wrong = np.concatenate(
        [((g.argmax(1) != f.argmax(1)) | ~f.isfinite().all(1)).numpy() for g, f in zip(golden, faulty, strict=True)]
    )
    assert wrong.sum() == row["sdc"] + row["nonfinite"]


@pytest.mark.parametrize(("limit", "code"), [("1", 0), ("0.0001", 1)])
def test_gates_hold_the_upper_limit(campaign, limit, code):
    folder, _ = campaign
    done = in_process(
        "pvf",
        "tiny.py:make",
        "--trials",
        40,
        "--flips",
        "1,8",
        "--store",
        "s.sqlite",
        "--assert",
        f"last<={limit}",
        cwd=folder,
    )
    assert done.returncode == code
    assert done.stderr.count("assertion failed: last at") == 2 * code
    assert ("assertions hold: last<=" in done.stderr) == (not code)


def test_listings():
    workloads = json.loads(in_process("workloads", "--json").stdout)
    assert {"digits-cnn", "digits-vit", "chargpt", "dlrm", "cifar-resnet32"} <= {w["name"] for w in workloads}
    faults = json.loads(in_process("faults", "--json").stdout)
    assert {"bitflip", "burst", "stuck", "zero"} <= {f["name"] for f in faults}
    listed = json.loads(in_process("detectors", "--json").stdout)
    detectors = {entry["name"]: entry for entry in listed if entry["kind"] != "inference"}
    for_inference = {entry["name"]: entry for entry in listed if entry["kind"] == "inference"}
    assert {"dr-dna", "ranger", "abft", "nonfinite", "weight-integrity", "golden-test", "duplication"} <= set(
        for_inference
    )
    assert for_inference["duplication"]["parameters"] == {"layers": "", "share": 1.0}
    assert all(entry["description"] for entry in for_inference.values())
    plain = in_process("detectors").stdout
    assert plain.index("training: rule") < plain.index("training: preset") < plain.index("inference: detector")
    assert detectors["megatron-large"]["parameters"] == {"factor": 10.0, "samples": 100}
    assert detectors["megatron"]["rules"] == ["megatron-large", "nonfinite"]
    for verb in ("workloads", "faults", "detectors"):
        plain = in_process(verb).stdout
        assert len(plain.splitlines()) > 5


def test_what_needs_another_option_says_so():
    listed, helped = in_process("workloads").stdout, in_process("replay", "--help").stdout
    assert listed.count("depth (needs --data)") == 3
    assert "unsilent replay STORE --help" in " ".join(helped.split())


def test_importing_is_light():
    code = (
        "import sys, unsilent; heavy = {'torch', 'numpy', 'scipy', 'typer', 'rich'} & set(sys.modules); assert not heavy, heavy;"
        "import unsilent.campaigns, unsilent.campaigns.processes, unsilent.studies.pvf.study;"
        "assert 'torch' not in sys.modules, 'the driver imports torch'"
    )
    help_code = (
        "import sys, unsilent.cli.main as m; assert not m.run(['--help']);"
        "verbs = 'pvf training noise report replay export merge plan status watch workloads faults detectors checkpoint'.split();"
        "[m.run([v, '--help']) for v in verbs];"
        "heavy = {'torch', 'numpy', 'scipy', 'plotly', 'sklearn', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    for each in (code, help_code):
        done = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_help_names_every_verb():
    done = in_process("--help")
    assert done.returncode == 0
    for verb in ("pvf", "report", "replay", "export", "merge", "plan", "workloads", "faults", "detectors"):
        assert verb in done.stdout
    assert in_process("--version").stdout.startswith("unsilent ")


@pytest.mark.claim
def test_per_bit_and_per_tensor_roll_up(campaign):
    folder, _ = campaign
    for per in ("tensor", "layer", "bit"):
        done = in_process(
            "pvf", "tiny.py:make", "--trials", 4, "--per", per, "--at", "last.*", "--json", "--quiet", cwd=folder
        )
        levels = [r["level"] for r in json.loads(done.stdout)["results"]]
        assert levels[0] == "model"
        assert "component" in levels
        assert per in levels
    assert len(list(Path(folder).glob("unsilent-pvf-tiny.py-make-*.sqlite"))) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("export", "s.sqlite"),
        ("report", "s.sqlite"),
        ("report", "s.sqlite", "--json"),
        ("faults",),
        ("pvf", "--help"),
    ],
)
@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly(campaign, words):
    folder, _ = campaign
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command(*words), cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_verb_has_more_than_forty_options():
    """What is typed with dashes in front; a reader of help compares them all."""
    for name in COMMANDS:
        classes = load_command(name).all_option_classes()
        options = [asking.flag for asking in options_of(*classes).values() if not asking.is_argument]
        assert len(options) <= 40, (name, options)


@pytest.mark.parametrize("name", ["inject", "protect"])
def test_functions_of_python_are_named_where_somebody_looks_for_a_command(name):
    overview = " ".join(in_process("--help").stdout.split())
    assert f"unsilent.{name}" in overview.partition("In Python:")[2]
    done = in_process(name, "model.py")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"unsilent: error: {name} is a function of Python, not a command: unsilent.{name}(model"
    )
    assert "unsilent.inject" not in in_process("checkpoint").stdout


def test_each_function_that_help_names_is_there():
    assert all(callable(getattr(unsilent, name)) for name in PYTHON_FUNCTIONS)

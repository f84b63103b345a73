"""``unsilent replay``, with and without --trace, on stored campaigns."""

from __future__ import annotations

import ast
import json
import re

import numpy as np
import pytest

from conftest import few, in_process
from unsilent.outcomes import Outcome

MINE = ("--workload", "tiny.py:make")
ENDED = [outcome.name.lower() for outcome in Outcome]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder for stores of the built-in workload."""
    return tmp_path_factory.mktemp("digits")


def traced(store, trial, *words, cwd="."):
    done = in_process("replay", store, trial, "--trace", "--json", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


KINDS = [("p.sqlite", "block2/x1/0", "param"), ("o.sqlite", "block1/x1/1", "op"), ("i.sqlite", "input/x1/0", "input")]


@pytest.mark.parametrize(("store", "trial", "kind"), few(KINDS, KINDS[1], several=True))
def test_trials_of_every_kind(digits, store, trial, kind):
    at = {"param": "param:*", "op": "op:*", "input": "input:0"}[kind]
    done = in_process("pvf", "digits-cnn", "--at", at, "--trials", 2, "--quiet", "--store", store, cwd=digits)
    assert done.returncode == 0, done.stderr
    told = traced(store, trial, "--log", "log.txt", cwd=digits)
    check_log(digits / "log.txt", told["stored"]["faults"][0])
    assert (told["schema"], told["same"], told["trace"]["schema"]) == ("unsilent/replay/1", True, "unsilent/trace/2")
    (fault,) = told["trace"]["faults"]
    assert fault["site"].startswith(f"{kind}:")
    rows = told["trace"]["rows"]
    assert (fault["row"] == -1) == (kind != "op")
    if kind == "op":
        assert rows[fault["row"]]["name"] in fault["site"]
    assert all(0 <= row["share"] <= 1 and "change" not in row for row in rows)
    # The judge says of how many samples the last output differs, the trace in how many elements.
    last = rows[-1]
    assert last["name"] == "head.2#addmm.0"
    differing = sum(told["again"][name] for name in ENDED if name not in ("masked", "spared"))
    assert (last["changed"] > 0) == (differing > 0)
    assert differing <= last["changed"] <= 10 * differing
    assert (digits / told["report"]).read_text().startswith("<!doctype html>")


def check_log(log, fault):
    """Golden and new value differ by the bits that the stored fault flips."""
    worker, layer, shape, victim = log.read_text().splitlines()
    assert worker == "Inject worker: 0"
    assert layer == f"Inject layer: {fault['site']}"
    named = re.fullmatch(r"Shape for target layer is (\(.*\))", shape)
    channels_last = len(fault["shape"]) == 4 and "#convolution" in fault["site"]
    wanted = [fault["shape"][a] for a in (0, 2, 3, 1)] if channels_last else fault["shape"]
    assert ast.literal_eval(named[1]) == tuple(wanted)
    place, golden, new = re.fullmatch(
        r"Position is (\(.*\)), Golden data is (.*), inject data is (.*)", victim
    ).groups()
    element = np.ravel_multi_index(ast.literal_eval(place), tuple(wanted))
    assert channels_last or element == fault["elements"][0]
    words = [int(np.float32(float(x)).view(np.uint32)) for x in (golden, new)]
    assert words[0] ^ words[1] == int(fault["operands"][0], 16)


def test_the_table_and_the_page(stored):
    done = in_process("replay", stored, "first/x1/0", *MINE, "--trace")
    assert done.returncode == 0, done.stderr
    assert "first/x1/0 ended as stored" in done.stdout
    assert "first#addmm.0" in done.stdout
    assert "Report: s-first-x1-0.trace.html" in done.stdout
    page = (stored.parent / "s-first-x1-0.trace.html").read_text()
    assert "first#addmm.0" in page
    plain = in_process("replay", stored, "first/x1/0", *MINE, "--trace", "--plain", "-o", "mine.html").stdout
    told = traced(stored, "first/x1/0", *MINE)
    lines = [line.split() for line in plain.splitlines() if line and not line.startswith("#")]
    assert lines[0][:4] == ["row", "phase", "micro_step", "operation"]
    assert [line[3] for line in lines[1:]] == [row["name"] for row in told["trace"]["rows"]]
    assert [int(line[8]) for line in lines[1:]] == [row["changed"] for row in told["trace"]["rows"]]
    assert all(len(line) == len(lines[0]) for line in lines)
    assert (stored.parent / "mine.html").exists()


def test_the_batch_is_the_first_that_changed_or_the_one_asked(stored):
    told = traced(stored, "last/x1/1", *MINE)
    assert told["batch"] == 0
    other = traced(stored, "last/x1/1", *MINE, "--batch", 1)
    assert other["batch"] == 1
    assert [r["name"] for r in other["trace"]["rows"]] == [r["name"] for r in told["trace"]["rows"]]
    done = in_process("replay", stored, "last/x1/1", *MINE, "--trace", "--batch", 2)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--batch is 2; the workload has batches 0 to 1" in done.stderr


@pytest.mark.claim
def test_a_transient_fault_is_traced_in_its_batch(tiny):
    done = in_process("pvf", "tiny.py:make", "--at", "op:first", "--trials", 2, "--quiet", "--store", "t.sqlite")
    assert done.returncode == 0, done.stderr
    for k in range(2):
        told = traced("t.sqlite", f"first/x1/{k}", *MINE)
        step = told["stored"]["faults"][0]["step"]
        assert (told["batch"], told["trace"]["faults"][0]["row"]) == (step, 0)
        assert told["trace"]["rows"][0]["changed"] == 1
        refused = in_process("replay", "t.sqlite", f"first/x1/{k}", *MINE, "--trace", "--batch", 1 - step)
        assert refused.returncode == 2
        assert f"acts in batch {1 - step}; expected one of: {step}" in refused.stderr


@pytest.mark.claim
def test_a_fault_of_a_list_is_traced(tiny):
    listed = in_process("export", "s.sqlite")
    assert listed.returncode == 2  # there is no such store here
    done = in_process("pvf", "tiny.py:make", "--trials", 2, "--quiet", "--store", "a.sqlite")
    assert done.returncode == 0
    rows = [json.loads(line) for line in in_process("export", "a.sqlite").stdout.splitlines()]
    with open("list.jsonl", "w") as file:
        file.writelines(json.dumps(row["faults"]) + "\n" for row in rows)
    done = in_process("pvf", "tiny.py:make", "--faults", "list.jsonl", "--quiet", "--store", "l.sqlite")
    assert done.returncode == 0, done.stderr
    trial = json.loads(in_process("export", "l.sqlite").stdout.splitlines()[-1])
    told = traced("l.sqlite", trial["trial"], *MINE)
    assert told["trace"]["faults"][0]["site"] == trial["faults"][0]["site"]


@pytest.mark.parametrize(("words", "said"), [
    (("-o", "x.html"), "only used with --trace: leave out --output"),
    (("--batch", 0), "only used with --trace: leave out --batch"),
    (("--trace", "--output", "s.sqlite"), "would overwrite the store"),
    (("--trace", "--output", "s.html"), "s.html is the report of s.sqlite"),
    (("--trace", "--output", "nowhere/x.html"), "its folder does not exist"),
])  # fmt: skip
def test_mistakes_take_one_line(stored, words, said):
    done = in_process("replay", stored, "first/x1/0", *MINE, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.claim
@pytest.mark.parametrize(("workload", "ended"), [("dies", "crash"), ("hangs", "hang")])
def test_what_took_its_process_leaves_nothing_to_trace(tiny, workload, ended):
    ask = (
        "pvf",
        f"tiny.py:{workload}",
        "--at",
        "last.bias",
        "--trials",
        1,
        "--deadline",
        1,
        "--quiet",
        "--store",
        "c.sqlite",
    )
    assert in_process(*ask).returncode == 0
    done = in_process("replay", "c.sqlite", "last/x1/0", "--workload", f"tiny.py:{workload}", "--trace")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"last/x1/0 ended in a {ended}, which leaves nothing to trace" in done.stderr


def test_a_model_that_raises_is_traced_up_to_there(tiny):
    done = in_process("pvf", "tiny.py:raises", "--at", "last.bias", "--trials", 1, "--quiet", "--store", "r.sqlite")
    assert done.returncode == 0, done.stderr
    told = traced("r.sqlite", "last/x1/0", "--workload", "tiny.py:raises")
    assert told["trace"]["parting"]["error"] == "ArithmeticError: the model itself raises"
    assert told["trace"]["parting"]["row"] == len(told["trace"]["rows"])

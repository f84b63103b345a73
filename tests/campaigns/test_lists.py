"""Campaigns over lists of faults by the command line: what is corrupted, how it ends, and that nothing else changes a row."""

from __future__ import annotations

import json
import pickle
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import unsilent
from campaigns.test_survival import canonical, stored, wait_until
from conftest import command, in_process
from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.export import export_store
from unsilent.campaigns.spec import TrialId
from unsilent.cli.main import run
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.studies.pvf.comparison import compare_campaigns
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.words import headline as sentence

pytestmark = pytest.mark.slow

NET = """
import time
import torch
from torch import nn
import unsilent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(27, 3)  # made first, run last
        self.stem = nn.Conv2d(1, 3, 2)
        self.again = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.again.weight
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x):
        return self.tied(self.again(self.head(self.stem(x).relu().flatten(1))))


def batches():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(n, 1, 4, 4, generator=generator) for n in (5, 3)]


def make(sleep: float = 0.0):
    def run(model, batch):
        time.sleep(sleep)
        return model(batch)

    return unsilent.Workload(Net(), batches(), run=run, name="net")
"""
ALFI = "pytorchalfi:rnd_mode=weights,rnd_value_type=bitflip,layer_types=conv2d+fcc"
CORRUPTED = [
    ("head.weight", (2, 11), 30), ("stem.weight", (1, 0, 1, 0), 31), ("head.weight", (0, 0), 23),
    ("stem.weight", (2, 0, 0, 1), 30), ("head.weight", (1, 26), 0), ("head.weight", (2, 11), 30),
    ("again.weight", (1, 2), 29), ("stem.weight", (0, 0, 0, 0), 28),
]  # fmt: skip
"""Parameter, coordinates and bit of what every list below says; one of them stands there twice."""
LAYERS = {"head.weight": (0, (3, 27)), "stem.weight": (1, (3, 1, 2, 2)), "again.weight": (2, (3, 3))}
"""What PyTorchALFI counts them as, in the order in which the model holds them."""


def scifi():
    rows = [
        f"{i},{name.removesuffix('.weight')},{np.ravel_multi_index(index, LAYERS[name][1])},{bit}"
        for i, (name, index, bit) in enumerate(CORRUPTED)
    ]
    Path("list.csv").write_text("\n".join(["Injection,Layer,TensorIndex,Bit", *rows]) + "\n")
    return ["--faults", "list.csv"]


def alfi():
    made = [(LAYERS[n][0], *(i[:2] if len(i) == 4 else (-1, -1)), -1, *i[-2:], 31 - bit) for n, i, bit in CORRUPTED]
    Path("net_test_random_sbf_weights_inj_fault_locs.bin").write_bytes(pickle.dumps(np.array(made).T, protocol=4))
    return ["--faults", "net_test_random_sbf_weights_inj_fault_locs.bin", "--faults-as", ALFI]


def own():
    lines = [json.dumps(record(*corrupted)) for corrupted in CORRUPTED]
    Path("list.jsonl").write_text("\n".join(lines) + "\n")
    return ["--faults", "list.jsonl"]


def record(name, index, bit, **more):
    shape = LAYERS[name][1]
    element = int(np.ravel_multi_index(index, shape))
    return {
        "version": 1, "site": f"param:{name}", "dtype": "float32", "shape": list(shape), "elements": [element],
        "operation": "xor", "operands": [f"0x{1 << bit:08x}"], **more,
    }  # fmt: skip


def ending(name, index, bit):
    """How every sample ends when that bit is flipped by hand: 0 masked, 1 benign, 2 silent, 3 not finite."""
    namespace = {}
    exec(NET, namespace)
    model, codes = namespace["Net"](), []
    with torch.no_grad():
        golden = [model(b).clone() for b in namespace["batches"]()]
        word = model.get_parameter(name).data.numpy().view(np.uint32)
        word[index] ^= np.uint32(1 << bit)
        for batch, right in zip(namespace["batches"](), golden, strict=True):
            for one, two in zip(right.numpy(), model(batch).numpy(), strict=True):
                decided = 2 if one.argmax() != two.argmax() else 1
                same = 0 if one.tobytes() == two.tobytes() else decided
                codes.append(same if np.isfinite(two).all() else 3)
    return bytes(codes)


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return "net.py:make"


def pvf(*words):
    done = in_process("pvf", "net.py:make", "--quiet", "--plain", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("write", [scifi, alfi, own])
def test_each_fault_is_corrupted_and_ends_as_by_hand(net, write):
    out = pvf(*write(), "--store", "s.sqlite", "--per", "tensor")
    with PvfStore("s.sqlite") as store:
        rows = {row.trial: row for row in store.rows()}
        assert store.spec.is_enumerated
    assert len(rows) == len(CORRUPTED)
    numbers: dict[str, int] = {}
    for name, index, bit in CORRUPTED:
        k = numbers[name] = numbers.get(name, -1) + 1
        row = rows[TrialId(name, None, k)]
        (fault,) = json.loads(row.faults)
        expected = record(name, index, bit)
        assert {key: fault[key] for key in expected} == expected
        assert row.outcome_codes == ending(name, index, bit)
    wrong = np.array([[c >= 2 for c in ending(*corrupted)] for corrupted in CORRUPTED]).mean(1)
    told = {line.split()[1]: line.split() for line in out.splitlines() if line.startswith(("tensor", "model"))}
    for name in LAYERS:
        mean = wrong[[n == name for n, *_ in CORRUPTED]].mean()
        assert [float(x) for x in told[name][4:7]] == pytest.approx([mean] * 3, rel=1e-3)
    assert [float(x) for x in told["model"][4:7]] == pytest.approx([wrong.mean()] * 3, rel=1e-3)
    assert "All numbers describe only the 8 faults of the list" in out


@pytest.mark.claim
def test_rows_depend_on_neither_jobs_nor_engine_nor_kills(net):
    ask, times = [*own(), "--with", "sleep=0.03"], 6
    (path := Path("list.jsonl")).write_text(path.read_text() * times)
    for name, more in {"one": [], "two": ["--jobs", "2"], "plain": ["--engine", "plain"]}.items():
        pvf(*ask, *more, "--store", f"{name}.sqlite")
    killed = 0
    for _ in range(2):
        process = subprocess.Popen(
            command("pvf", net, *ask, "--engine", "plain", "--store", "killed.sqlite", "--quiet"),
            stdout=subprocess.DEVNULL,
        )
        before = stored("killed.sqlite")
        wait_until(lambda p=process, seen=before: stored("killed.sqlite") > seen or p.poll() is not None)
        process.kill()
        process.wait()
        killed += 0 < stored("killed.sqlite") < times * len(CORRUPTED)
    assert killed, "no kill fell into the trials"
    pvf(*ask, "--store", "killed.sqlite")
    found = {canonical(f"{name}.sqlite") for name in ("one", "two", "plain", "killed")}
    assert len(found) == 1
    assert found.pop().count("\n") == 1 + times * len(CORRUPTED)


def test_shards_join_to_the_whole_and_a_part_claims_no_more_than_it_knows(net):
    ask = own()
    whole = json.loads(pvf(*ask, "--store", "all.sqlite", "--json"))
    for part in (1, 2):
        pvf(*ask, "--shard", f"{part}/2", "--store", f"{part}.sqlite")
    part = json.loads(in_process("report", "1.sqlite", "--json").stdout)
    exact = {row["target"]: row for row in whole["results"]}
    for row in part["results"]:
        assert row["method"] == ("whole list" if row["target"] == "again" else "part of a list")  # of one fault
        assert row["n"] <= exact[row["target"]]["n"]
        assert row["low"] <= exact[row["target"]]["estimate"] <= row["high"]
        assert row["high"] - row["low"] == pytest.approx(1 - row["n"] / exact[row["target"]]["n"])
        assert exact[row["target"]]["method"] == "whole list"
    done = in_process("merge", "1.sqlite", "2.sqlite", "-o", "joined.sqlite")
    assert done.returncode == 0, done.stderr
    assert canonical("joined.sqlite") == canonical("all.sqlite")


@pytest.mark.parametrize(
    "ask", [{"trials": 6, "flips": [1, 5]}, {"trials": 20, "at": "op:*"}, {"trials": 9, "samples": 5}]
)
def test_what_was_exported_runs_again_as_a_list(net, ask):
    def content(name):
        with PvfStore(name) as store:
            return store.spec.is_transient, sorted(
                (r.faults, r.outcome_codes, r.incorrect_batches) for r in store.rows()
            )

    unsilent.pvf(live(), store="drawn.sqlite", **ask)
    with PvfStore("drawn.sqlite") as drawn:
        for name, more in {"plain.jsonl": {}, "canonical.jsonl": {"canonical": True}, "whole.json": {}}.items():
            export_store(drawn, Path(name), **more)
            unsilent.pvf(live(), faults=name, store=f"{name}.sqlite")
            assert content(f"{name}.sqlite") == content("drawn.sqlite")


def test_the_command_in_the_store_makes_it_again(net):
    ask = [*alfi(), "--per", "layer", "--seed", "5"]
    pvf(*ask, "--store", "s.sqlite")
    with PvfStore("s.sqlite") as store:
        words = shlex.split(store.largest_budget()[1])
    assert words[:3] == ["unsilent", "pvf", "net.py:make"]
    assert sorted(words[3:]) == sorted([*alfi(), "--per", "layer", "--seed", "5"])
    assert in_process(*words[1:], "--store", "again.sqlite", "--quiet").returncode == 0
    assert canonical("again.sqlite") == canonical("s.sqlite")


def test_the_content_is_part_of_the_identity_and_the_folder_is_not(net):
    own()
    unsilent.pvf(live(), faults="list.jsonl", store="s.sqlite")
    Path("elsewhere").mkdir()
    moved = Path("list.jsonl").rename("elsewhere/list.jsonl")
    assert unsilent.pvf(live(), faults=moved, store="s.sqlite").trials_done == len(CORRUPTED)
    moved.write_text(moved.read_text() + json.dumps(record(*CORRUPTED[0])) + "\n")
    with pytest.raises(StoreError, match=r"holds another campaign \(faults changed\)"):
        unsilent.pvf(live(), faults=moved, store="s.sqlite")


@pytest.mark.claim
def test_a_trial_replays_from_its_row_alone(net):
    pvf(*scifi(), "--store", "s.sqlite", "--per", "layer")
    Path("list.csv").unlink()
    for trial in ("head/x/1", "stem/x/2"):
        done = in_process("replay", "s.sqlite", trial, "--workload", net)
        assert (done.returncode, done.stdout.split("\n")[0]) == (0, f"{trial} ended as stored"), done.stderr
    with sqlite3.connect("s.sqlite") as db:
        db.execute(
            "UPDATE trial SET outcome_codes = (SELECT outcome_codes FROM trial WHERE target = 'head' AND k = 2) WHERE k = 1"
        )
    assert "ENDED DIFFERENTLY" in in_process("replay", "s.sqlite", "head/x/1", "--workload", net).stdout
    with sqlite3.connect("s.sqlite") as db:
        db.execute("UPDATE trial SET faults = '{\"site\": 1}'")
    done = in_process("replay", "s.sqlite", "head/x/1", "--workload", net)
    assert done.returncode == 2
    assert "stored.jsonl line 1: fault record lacks" in done.stderr
    Path("net.py").write_text(NET.replace("manual_seed(3)", "manual_seed(33)"))
    with sqlite3.connect("s.sqlite") as db:
        db.execute("UPDATE trial SET faults = ?", (json.dumps([record(*CORRUPTED[0])]),))
    done = in_process("replay", "s.sqlite", "head/x/1", "--workload", net)
    assert done.returncode == 2
    assert "differs from this replay in weights" in done.stderr


def test_a_fault_of_several_tensors_is_one_trial(net):
    three = [record(*CORRUPTED[0]), record(*CORRUPTED[1]), record("stem.weight", (1, 0, 0, 0), 3)]
    Path("list.jsonl").write_text(json.dumps([three[0], three[1]]) + "\n" + json.dumps(three[2]) + "\n")
    result = unsilent.pvf(live(), faults="list.jsonl", per="layer", store="s.sqlite")
    assert {r.target: r.n for r in result.rows if r.level == "layer"} == {"head+stem": 1, "stem": 1}
    with PvfStore("s.sqlite") as store:
        both = next(r for r in store.rows() if r.trial.target == "head+stem")
    assert [f["site"] for f in json.loads(both.faults)] == ["param:head.weight", "param:stem.weight"]


def test_two_models_compare_exactly_on_one_list(net):
    own()
    unsilent.pvf(live(), faults="list.jsonl", store="a.sqlite")
    unsilent.pvf(live(seed=33), faults="list.jsonl", store="b.sqlite")
    with PvfStore("a.sqlite") as one, PvfStore("b.sqlite") as two:
        found = compare_campaigns(one, two, PvfEstimator())
    assert any(row.difference.estimate for row in found.rows)
    for row in found.rows:
        assert row.method == "whole list"
        assert row.is_paired, "the same faults corrupted both"
        assert row.difference.low == row.difference.high == row.difference.estimate
    Path("list.jsonl").write_text("".join(reversed(Path("list.jsonl").read_text().splitlines(keepends=True))))
    unsilent.pvf(live(seed=33), faults="list.jsonl", store="c.sqlite")
    with PvfStore("a.sqlite") as one, PvfStore("c.sqlite") as two:
        found = compare_campaigns(one, two, PvfEstimator())
    assert not any(row.is_paired for row in found.rows if row.a.n > 1), "trials of the same name with other faults"


@pytest.mark.claim
def test_halves_of_one_list_are_paired_within_the_bounds_of_the_whole(net):
    ask = own()
    Path("other.py").write_text(NET.replace("manual_seed(3)", "manual_seed(33)"))
    for name in ("net", "other"):
        words = [f"{name}.py:make" if word == "net.py:make" else word for word in ask]
        pvf(*words, "--store", f"{name}.sqlite")
        pvf(*words, "--shard", "1/2", "--store", f"{name}-1.sqlite")
    with PvfStore("net.sqlite") as one, PvfStore("other.sqlite") as two:
        exact = {row.target: row.difference.estimate for row in compare_campaigns(one, two, PvfEstimator()).rows}
    with PvfStore("net-1.sqlite") as one, PvfStore("other-1.sqlite") as two:
        rows = compare_campaigns(one, two, PvfEstimator()).rows
    assert any(row.difference.low < row.difference.high for row in rows)
    for row in rows:
        assert row.is_paired
        assert row.difference.low <= exact[row.target] <= row.difference.high
    said = in_process("diff", "net-1.sqlite", "other-1.sqlite").stdout
    assert "for partly run fault lists, bounds that allow any outcome of the remaining faults" in " ".join(said.split())
    assert "% intervals" not in said


REFUSED = {
    "--trials 5": "leave out --trials", "--ci 1%": "leave out --ci", "--rel 20%": "leave out --rel",
    "--flips 1": "leave out --flips", "--fault zero": "leave out --fault",
    "--at head.*": "leave out --at", "--trials all": "leave out --trials",
    "--law per-tensor": "leave out --law", "--strata bits": "leave out --strata", "--samples 4": "leave out --samples",
    "--per bit": "--per is 'bit'; expected component, layer or tensor for a list of faults",
    "--faults-as sci-fi": "list.jsonl line 1: found the header",
    "--faults-as csv": "unknown format of a list of faults 'csv'",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_asked_of_a_list_is_one_line(net, words, capsys):
    ask = ["pvf", net, *own(), *words.split(), "--quiet", "--store", "s.sqlite"]
    assert run(ask) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert REFUSED[words] in err
    assert not list(Path().glob("s.sqlite*"))


def test_what_does_not_fit_the_workload_is_one_line(net, capsys):
    Path("list.csv").write_text("Injection,Layer,TensorIndex,Bit\n0,head,0,0\n1,haed,0,0\n")
    assert run(["pvf", net, "--faults", "list.csv", "--quiet", "--store", "s.sqlite"]) == 2
    assert capsys.readouterr().err.endswith(
        "list.csv line 3, Layer: unknown layer 'haed'; did you mean 'head'? Known: again, head, stem, tied.\n"
    )
    mixed = [record(*CORRUPTED[0]), record(*CORRUPTED[0], site="input:0", shape=[5, 1, 4, 4], step=0)]
    Path("mixed.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert run(["pvf", net, "--faults", "mixed.jsonl", "--quiet", "--store", "s.sqlite"]) == 2
    assert "mixes parameters, which stay corrupted, with values of one evaluation" in capsys.readouterr().err
    large = record(*CORRUPTED[0]) | {"elements": list(range(81)), "operands": ["0x00000001"] * 81}
    Path("large.jsonl").write_text("\n".join([json.dumps(large)] * 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unsilent.studies.pvf.runner.MOST_ELEMENTS", 80)
        with pytest.raises(UsageError, match=r"large.jsonl line 1: corrupts 81 elements, but at most 80 can be stored"):
            unsilent.pvf(live(), faults="large.jsonl")
    assert run(["pvf", net, "--faults-as", "sci-fi", "--quiet", "--store", "s.sqlite"]) == 2
    assert "--faults-as sci-fi is the format of a list of faults; give --faults FILE" in capsys.readouterr().err
    assert not list(Path().glob("s.sqlite*"))


def live(seed=3):
    namespace = {"__name__": "net"}
    exec(NET.replace("manual_seed(3)", f"manual_seed({seed})"), namespace)
    return unsilent.Workload(namespace["Net"](), namespace["batches"](), name="net")


def test_from_python(net):
    own()
    result = unsilent.pvf(live(), faults=Path("list.jsonl"))
    (row,) = [r for r in result.rows if r.level == "model"]
    wrong = np.mean([[c >= 2 for c in ending(*corrupted)] for corrupted in CORRUPTED])
    assert row.estimate == row.low == row.high == pytest.approx(wrong)
    assert result.command == "unsilent.pvf(workload, faults='list.jsonl', seed=0)"
    assert result.trials_done == result.trials_planned == len(CORRUPTED)
    (heat,) = result.heat_maps
    for layer, cells, sizes in zip(heat.layers, heat.estimate, heat.n, strict=True):
        for bit, cell, size in zip(heat.bits, cells, sizes, strict=True):
            mine = [s for s in CORRUPTED if (s[0].removesuffix(".weight"), s[2]) == (layer, bit)]
            assert size == len(mine)
            assert cell == (pytest.approx(np.mean([[c >= 2 for c in ending(*s)] for s in mine])) if mine else None)
    for more in ({"trials": 5}, {"ci": "1%"}, {"fault": "zero"}, {"flips": 1}, {"at": "head.*"}):
        with pytest.raises(UsageError, match=f"leave out {next(iter(more))}"):
            unsilent.pvf(live(), faults="list.jsonl", **more)


def test_values_of_a_run_are_corrupted_as_listed(net):
    """An output, an operand and an input in one list; the batch that is not corrupted is spared."""
    sites = [
        ("op:head#addmm.0/fwd/out", [5, 3], 0),
        ("op:head#addmm.0/fwd/first", [3, 27], 1),
        ("input:0", [3, 1, 4, 4], 1),
    ]
    found = [
        {
            **record("again.weight", (0, 0), 0),
            "site": site,
            "shape": shape,
            "step": step,
            "elements": [2],
            "operands": ["0x80000000"],
        }
        for site, shape, step in sites
    ]
    Path("run.jsonl").write_text("\n".join(map(json.dumps, found)))
    result = unsilent.pvf(live(), faults="run.jsonl", per="tensor", store="s.sqlite")
    assert (result.measure, result.unit) == ("P(incorrect)", "batch")
    with PvfStore("s.sqlite") as store:
        rows = {json.loads(r.faults)[0]["site"]: r for r in store.rows()}
    work = live()
    for site, _, step in sites:
        model, batches = work.model(), work.batches()
        with torch.no_grad():
            golden = model(batches[step])
            if site == "input:0":
                corrupted = batches[step].clone()
                corrupted.view(-1)[2] *= -1
                faulty = model(corrupted)
            else:
                flat = model.stem(batches[step]).relu().flatten(1)
                weight = model.head.weight.clone()
                if site.endswith("first"):  # what addmm multiplies by weight.T
                    flat.view(-1)[2] *= -1
                out = torch.nn.functional.linear(flat, weight, model.head.bias)
                if site.endswith("out"):
                    out.view(-1)[2] *= -1
                faulty = model.tied(model.again(out))
        decided = (golden.argmax(1) != faulty.argmax(1)).tolist()
        codes = rows[site].outcome_codes[:5] if step == 0 else rows[site].outcome_codes[5:]
        assert [c == 2 for c in codes] == decided
        assert set(rows[site].outcome_codes[5:] if step == 0 else rows[site].outcome_codes[:5]) == {7}
        assert any((golden != faulty).any(1).tolist()) == (codes != bytes(len(codes)))


def test_a_list_that_does_nothing_is_told_without_a_limit(net):
    Path("list.jsonl").write_text(json.dumps(record("head.weight", (0, 0), 0)) + "\n")
    result = unsilent.pvf(live(), faults="list.jsonl")
    assert (
        sentence(result)
        == "A fault of the `list list.jsonl` made no output wrong in 1 trial: all faults that there are."
    )


def test_the_driver_reads_lists_without_torch():
    asked = "import sys, unsilent.faults.lists; assert 'torch' not in sys.modules and 'pickle' not in vars(unsilent.faults.lists)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

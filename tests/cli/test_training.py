"""``unsilent training`` as a user meets it: campaigns in real processes, their page and JSON, and errors in one line."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
from contextlib import closing

import pytest

import unsilent
from campaigns.faulty_loop import write_loop
from conftest import few, in_process
from unsilent.outcomes.training import TrainingOutcome
from unsilent.studies.training import study
from unsilent.studies.training.kind import TrainingStore
from unsilent.studies.training.spec import ReferenceRunOptions

LOOP = ("faulty_loop.py:make", "--with", "steps=12", "--floor", "floor.sqlite")
ASK = (*LOOP, "--store", "s.sqlite")


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def parsed(text):
    """Strictly: no NaN, no Infinity."""
    return json.loads(text, parse_constant=refuse)


def trials(path):
    with TrainingStore(path) as store:
        return {row.trial: row.reproducible_values() for row in store.rows()}


def campaign(folder):
    write_loop(folder)
    done = in_process("training", *ASK, "--trials", 16, "--guard", "--quiet", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "printed.json").write_text(done.stdout)


@pytest.fixture(scope="module")
def ran(made_once):
    """A folder with a campaign, and what the command said."""
    folder = made_once("training", campaign)
    return folder, parsed((folder / "printed.json").read_text())


@pytest.fixture
def copied(ran, tmp_path):
    """The same in a folder of its own."""
    for name in ("s.sqlite", "s.html", "floor.sqlite", "faulty_loop.py"):
        shutil.copy(ran[0] / name, tmp_path)
    return tmp_path


def test_json_has_everything(ran):
    folder, found = ran
    assert found["schema"] == "unsilent/training/3"
    assert (found["workload"], found["n"], found["steps"]) == ("tiny", 16, 12)
    assert set(found["classes"]) == {str(outcome) for outcome in TrainingOutcome}
    assert sum(found["classes"].values()) == 16
    for kind, groups in found["groups"].items():
        assert sum(group["n"] for group in groups) == 16, kind
    for row in found["results"]:
        assert {"group", "target", "measure", "estimate", "low", "high", "confidence", "n", "unit"} <= row.keys()
        assert row["estimate"] is None or row["low"] <= row["estimate"] <= row["high"]
    assert {name: len(floor["accuracy"]) for name, floor in found["floors"].items()} == {
        "implementation": 20,
        "seeds": 20,
    }
    assert len(found["points"]) == 16
    assert 0 < found["cost"]["steps"] <= found["cost"]["steps_without_early_end"] < 1
    assert found["report"] == "s.html"
    assert shlex.split(found["command"])[:3] == ["unsilent", "training", "faulty_loop.py:make"]
    assert len([t for t in trials(folder / "s.sqlite") if t.target == "random"]) == 16


def test_the_page_is_written(ran):
    page = (ran[0] / "s.html").read_text()
    assert "tiny" in page
    assert "figure-" in page
    assert "http" not in page.split("<body")[1].split("<script")[0]


@pytest.mark.claim
def test_a_report_of_the_store_alone(ran, copied):
    done = in_process("report", "s.sqlite", "--json", "-o", "again.html", cwd=copied)
    assert done.returncode == 0, done.stderr
    again, first = parsed(done.stdout), ran[1]
    for key in (
        "classes",
        "groups",
        "results",
        "conditions",
        "points",
        "curves",
        "cost",
        "guard",
        "thresholds",
        "floors",
    ):
        assert again[key] == first[key], key
    assert (copied / "again.html").exists()
    plain = in_process("report", "s.sqlite", "--plain", cwd=copied)
    assert plain.returncode == 0, plain.stderr
    assert "Report: s.html" in plain.stdout
    table = in_process("report", "s.sqlite", cwd=copied)
    for outcome in ("masked-bitwise", "masked-benign", "immediate-nan"):
        assert outcome in table.stdout


def test_rows_can_be_exported(copied):
    for name in ("rows.csv", "rows.json", "rows.jsonl"):
        assert in_process("export", "s.sqlite", "-o", name, cwd=copied).returncode == 0
    rows = [parsed(line) for line in (copied / "rows.jsonl").read_text().splitlines()]
    assert {row["trial"] for row in rows} == {str(t) for t in trials(copied / "s.sqlite")}


@pytest.mark.claim
def test_a_campaign_goes_on_and_is_extended(copied):
    before = trials(copied / "s.sqlite")
    done = in_process("training", *ASK, "--trials", 16, "--guard", "--quiet", "--plain", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert trials(copied / "s.sqlite") == before
    done = in_process("training", *ASK, "--trials", 20, "--quiet", "--json", cwd=copied)
    assert parsed(done.stdout)["n"] == 20
    after = trials(copied / "s.sqlite")
    assert {t: after[t] for t in before} == before
    assert sum(t.target == "random" for t in after) == 20


@pytest.mark.claim
def test_another_question_in_the_same_file_is_refused(copied):
    done = in_process("training", *ASK, "--seed", 3, "--quiet", cwd=copied)
    assert done.returncode == 2
    assert "holds another campaign (seed: 0 in the store, 3 now)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.claim
def test_a_horizon_costs_less_and_corrupts_the_same(copied):
    done = in_process(
        "training", *LOOP, "--horizon", 4, "--store", "h.sqlite", "--trials", 16,
        "--quiet", "--json", cwd=copied,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    assert found["cost"]["ends"].get("horizon", 0) > 0
    with TrainingStore(copied / "s.sqlite") as one, TrainingStore(copied / "h.sqlite") as other:
        corrupted = {row.trial: row.injection for row in one.rows() if row.trial.target == "random"}
        assert {row.trial: row.injection for row in other.rows()} == corrupted


@pytest.mark.claim
@pytest.mark.parametrize("per", ["component", "layer"])
def test_training_pvf(tmp_path, per):
    write_loop(tmp_path)
    done = in_process(
        "training", *LOOP, "--per", per, "--fault", "scale:factor=-30,rate=1", "--trials", 3, "--store", "s.sqlite",
        "--quiet", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    parts = [row for row in found["results"] if row["measure"] == "training_pvf"]
    assert {row["target"] for row in parts} == {
        f"{what}:{p}" for what in ("param", "optim") for p in ("conv", "norm", "fc")
    }
    assert all(row["n"] == 3 and row["estimate"] == row["failures"] / 3 for row in parts)
    assert (tmp_path / "s.html").exists()


@pytest.mark.claim
def test_what_dies_under_a_campaign_with_the_guard(tmp_path):
    """Trials that raise are harmful, and so are run again under the guard; they raise there as well."""
    write_loop(tmp_path)
    done = in_process(
        "training", *LOOP, "--with", "ends=raises", "--per", "tensor", "--layer", "fc", "--fault", "set:value=1e6",
        "--trials", 2, "--guard", "--store", "s.sqlite", "--quiet", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    assert found["classes"]["crashed"] == 2
    assert found["guard"]["faults"][0]["n"] >= 2


@pytest.mark.claim
def test_a_training_that_does_not_come_back_is_refused(tmp_path):
    write_loop(tmp_path)
    done = in_process("training", *LOOP, "--with", "loose=unseeded", "--trials", 2, "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not restored bit for bit" in done.stderr
    assert "unsilent explain" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.claim
def test_a_built_in_training(tmp_path):
    """With everything that is small enough: two workers, the guard, lines for pipes."""
    ask = ("train-resnet", "--with", "steps=30", "--trials", 40, "--jobs", 2, "--guard")
    done = in_process("training", *ask, "--plain", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "# Report: unsilent-training-train-resnet-" in done.stdout
    (store,) = tmp_path.glob("unsilent-training-train-resnet-*.sqlite")
    (page,) = tmp_path.glob("unsilent-training-train-resnet-*.html")
    assert store.stem == page.stem
    assert sum(t.target == "random" for t in trials(store)) == 40
    found = parsed(in_process("report", store, "--json", cwd=tmp_path).stdout)
    assert found["spec"]["options"] == [["steps", "30"]]
    assert sum(found["classes"].values()) == 40


@pytest.mark.slow
def test_a_trial_under_the_guard_is_replayed_without_a_class(copied):
    done = in_process(
        "training", *LOOP, "--per", "tensor", "--layer", "fc", "--fault", "set:value=1e6",
        "--trials", 2, "--guard", "--store", "g.sqlite", "--quiet", cwd=copied,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trial = next(str(trial) for trial in trials(copied / "g.sqlite") if trial.target.startswith("guarded:"))
    done = in_process("replay", "g.sqlite", trial, "--workload", *LOOP[:3], cwd=copied)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{trial} ended as stored\ninjection: ")
    refused = in_process("replay", "g.sqlite", trial, "--workload", *LOOP[:3], "--trace", cwd=copied)
    assert "No such option: --trace" in refused.stderr


@pytest.mark.slow
def test_reports_of_two_runs_are_equal_where_they_are_canonical(copied):
    shutil.copy(copied / "s.sqlite", copied / "t.sqlite")
    with closing(sqlite3.connect(copied / "t.sqlite")) as db, db:
        db.execute("UPDATE trial SET seconds = 2 * seconds + 1, worker = 7")
        db.execute("UPDATE usage SET seconds = seconds + 1, cpu_seconds = 9")
        db.execute("UPDATE budget SET command = 'unsilent training other'")
        db.execute("UPDATE campaign SET spec = json_set(spec, '$.workload', '/elsewhere/faulty_loop.py:make')")
        changes = "'$.golden_seconds', 2.5, '$.versions.python', '3.99'"
        db.execute(f"UPDATE campaign SET description = json_set(description, {changes})")
    for verb, words in (("report", ()), ("diff", ("s.sqlite",))):
        told = [in_process(verb, n, *words, "--json", "--canonical", cwd=copied) for n in ("s.sqlite", "t.sqlite")]
        assert [one.returncode for one in told] == [0, 0]
        assert told[0].stdout == told[1].stdout
        assert "elsewhere" not in told[0].stdout


def test_user_code_is_not_run_unasked(copied):
    done = in_process("replay", "s.sqlite", "random/x/0", cwd=copied)
    assert done.returncode == 2
    assert "used only if the command names them too; add --workload faulty_loop.py:make" in done.stderr


# -- mistakes -----------------------------------------------------------------------------------------------------------


MISTAKES = [
    ([], "no training was named; give one like train-resnet"),
    (["train-resnet", "--phase", "backward"], "unknown phase 'backward'"),
    (["train-resnet", "--per", "kind", "--moment", "beginning"], "unknown moment 'beginning'"),
    (["train-resnet", "--fault", "RDX"], "unknown fault model 'RDX'"),
    (["train-resnet", "--fault", "0*RD"], "--fault 0*RD has weight 0; expected more than 0"),
    (["train-resnet", "--threshold", "gab=1"], "unknown threshold 'gab'; did you mean 'gap'"),
    (["train-resnet", "--threshold", "gap"], "--threshold 'gap': expected a number, like gap=0.02"),
    (["train-resnet", "--threshold", "window=1.5"], "expected a whole number, like window=10"),
    (["train-resnet", "--threshold", "gap=-1"], "threshold gap is -1.0; expected more than 0"),
    (["train-resnet", "--trials", 0], "--trials is 0"),
    (["train-resnet", "--steps", 0], "--steps is 0; expected 1 or more"),
    (["train-resnet", "--horizon", 1], "--horizon is 1; expected 2 or more"),
    (["train-resnet", "--seed", -1], "--seed is -1"),
    (["train-resnet", "--per", "layer", "--margin", 2], "margin is 2.0; expected a share"),
    (["train-resnet", "--confidence", 2], "confidence is 2.0; expected a share between 0 and 1"),
    (["train-resnet", "--replicas", 5], "--replicas is 5; a noise floor at level 0.05 needs at least 20"),
    (["train-resnet", "--noise", "control"], "--noise control does not vary between runs"),
    (["train-resnet", "--noise", "algo"], "varies seeds (init, order, augment, dropout), but every campaign "
     "already has a noise floor of seeds"),
    (["train-resnet", "--noise", "treads"], "did you mean 'threads"),
    (["train-resnet", "--per", "layers"], "unknown --per 'layers'; did you mean 'layer'?"),
    (["train-resnet", "--per", "layer", "--phase", "fwd"], "--per corrupts parameters and optimizer state"),
    (["train-resnet", "--per", "layer", "--accelerator", "nvdla"], "--per corrupts parameters and optimizer state"),
    (["train-resnet", "--with", "steps"], "expected key=value"),
    (["train-resnet", "--output", "nowhere/x.html"], "its folder does not exist"),
    (["train-resnet", "--jobs", 0], "--jobs is 0"),
    (["train-resnet", "--jobs", 2, "--executor", "serial"], "--executor serial runs one job"),
    (["train-resnet", "--executor", "thread"], "unknown executor 'thread'"),
    (["train-resnet", "--deadline", -1], "--deadline is -1"),
    (["train-resnet", "--ray", "here:1", "--executor", "serial"], "leave out --ray or --executor"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), few(MISTAKES, *MISTAKES[::3], several=True))
def test_mistakes_are_one_line(tmp_path, words, said):
    done = in_process("training", *words, "--quiet", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.claim
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "blok1"], "unknown layer with convolutions or matrix products"),
        (["--layer", "conv", "--phase", "grad_in"], "no convolution or matrix product of conv has phase grad_in"),
        (["--accelerator", "nvdia"], "unknown accelerator 'nvdia'; did you mean 'nvdla'"),
        (["--accelerator", "nvdla", "--fault", "RD"], "--accelerator and --fault both choose the fault models"),
        (["--fault", "bitflip", "--value", "set:value=1"], "--value and --fault bitflip both set what elements become"),
        (["--per", "layer", "--fault", "zero", "--fault", "bitflip"], "give one --fault"),
    ],
)
def test_mistakes_that_show_in_the_training_are_one_line(tmp_path, words, said):
    write_loop(tmp_path)
    done = in_process("training", *LOOP, *words, "--quiet", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_workload_that_does_not_train(tmp_path):
    done = in_process("training", "digits-cnn", "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected a training" in done.stderr
    assert not list(tmp_path.glob("*training*.sqlite"))


@pytest.mark.parametrize("name", ["pvf", "noise"])
def test_a_store_of_another_verb_is_named(copied, name, tmp_path):
    other = {"pvf": ("pvf", "digits-cnn", "--trials", 2), "noise": ("noise", "train-resnet", "--replicas", 3)}[name]
    done = in_process(*other, "--store", "s.sqlite", "--quiet", cwd=copied)
    assert done.returncode == 2
    assert "holds a campaign of unsilent training" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_store_is_one_line(copied):
    content = (copied / "s.sqlite").read_bytes()
    (copied / "s.sqlite").write_bytes(content[: len(content) // 2])
    done = in_process("report", "s.sqlite", cwd=copied)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("trial", ["random/x/999", "randon/x/0", "random/0", "random/x/-1"])
def test_trials_that_are_not_there(copied, trial):
    done = in_process("replay", "s.sqlite", trial, "--workload", LOOP[0], cwd=copied)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_the_python_function_asks_for_the_guard(monkeypatch):
    given = {}
    monkeypatch.setattr(study, "measure_noise_floors", lambda *_: None)
    monkeypatch.setattr(study, "run_with_floors", lambda run, _: given.update(vars(run.request[ReferenceRunOptions])))
    for guard in (True, False):
        unsilent.training("train-resnet", guard=guard)
        assert given["guard"] is guard


def test_help_says_what_there_is():
    done = in_process("training", "-h")
    assert done.returncode == 0
    for word in ("--trials", "--horizon", "--guard", "--per", "--accelerator", "--replicas"):
        assert word in done.stdout

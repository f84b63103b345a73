"""``unsilent noise`` as a user meets it: table, JSON, page, and errors in one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from conftest import in_process
from replicas.subjects import LOOP
from unsilent.replicas import ReplicaSpec, ReplicaStore, Switches
from unsilent.report.text import interval_text
from unsilent.statistics.intervals import Interval
from unsilent.statistics.replica_spread import max_possible_sd
from unsilent.studies.noise.plots import plots_by_place
from unsilent.studies.noise.report import findings, headline, report
from unsilent.studies.noise.study import NoiseQuestion, read_noise


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with a loop, and what one command said of it."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "loop.py").write_text(LOOP)
    words = ("--replicas", 3, "--variants", "control,algo+impl", "--switch", "tf32", "--store", "s.sqlite", "--quiet")
    return folder, words, in_process("noise", "loop.py:make", *words, "--plain", cwd=folder)


def test_plain_table_and_page(ran):
    folder, _, done = ran
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#") and line]
    assert lines[0] == ["variant", "measure", "target", "estimate", "low", "high", "n"]
    assert {len(line) for line in lines} == {7}
    assert ["CONTROL", "churn", "all", "0"] in [line[:4] for line in lines]
    told = {(line[0], line[1], line[2]) for line in lines[1:]}
    for measure in ("accuracy_mean", "loss_mean", "distinct_states", "churn_twin_least", "churn_twin_most"):
        assert {("CONTROL", measure, "all"), ("ALGO+IMPL", measure, "all")} <= told
    for measure in ("group_samples", "group_by_size", "group_p_corrected", "group_error_sd", "group_error_sd_common"):
        assert ("ALGO+IMPL", measure, "class_1") in told
    values = {(line[0], line[1], line[2]): line[3:] for line in lines[1:]}
    assert values["CONTROL", "distinct_states", "all"] == ["1", "-", "-", "3"]
    samples = [int(values["CONTROL", "group_samples", f"class_{k}"][0]) for k in (0, 1)]
    assert sum(samples) == 50
    assert (
        "# fewer than 10 replicas: intervals are wide and may not cover rare runs that end differently" in done.stdout
    )
    assert "in all sessions" in done.stdout
    assert "# tf32 was not run: tf32 needs a CUDA device" in done.stdout
    assert "# switch within: yes: differs from the clean twin" in done.stdout
    page = (folder / "s.html").read_text()
    for part in (
        "figure-accuracy",
        "figure-loss",
        "figure-churn",
        "figure-parting",
        "figure-groups",
        "ALGO+IMPL",
        "Holm",
    ):
        assert part in page
    assert "http" not in page.split("<body")[1].split("<script")[0]


def test_json_and_table_from_the_store(ran):
    folder, words, plain = ran
    done = in_process("noise", "loop.py:make", *words, "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert found["schema"] == "unsilent/noise/3"
    assert {"command", "spec", "seed", "seconds", "cpu_seconds", "store", "versions", "results"} <= found.keys()
    for row in found["results"]:
        assert {"estimate", "low", "high", "confidence", "n", "unit"} <= row.keys()
    churn = {row["variant"]: row["estimate"] for row in found["results"] if row["measure"] == "churn"}
    assert churn["CONTROL"] == 0
    assert churn["ALGO+IMPL"] > 0
    assert f"{churn['ALGO+IMPL']:.6g}" in plain.stdout
    assert [e["changes_bits"] for e in found["effects"] if e["switch"] == "tf32"] == [None]
    assert [v["distinct_final_states"] for v in found["variants"]] == [1, 3]
    table = in_process("noise", "loop.py:make", *words, cwd=folder).stdout
    for word in ("CONTROL", "ALGO+IMPL", "different final states", "diverges at step", "not applicable", "never"):
        assert word in table


def test_a_store_is_shown_again(ran, tmp_path):
    folder, words, _ = ran
    before = json.loads(in_process("noise", "loop.py:make", *words, "--json", cwd=folder).stdout)
    done = in_process("report", "s.sqlite", "--json", "-o", tmp_path / "again.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["results"] == before["results"]
    assert again["curves"] == before["curves"]
    assert (tmp_path / "again.html").stat().st_size > 1e6
    for verb, more, said in (
        ("report", ["--unit", "batch"], "No such option: --unit"),
        ("diff", ["s.sqlite"], "cannot be compared"),
    ):
        refused = in_process(verb, "s.sqlite", *more, cwd=folder)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert said in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loop.py:make", "--replicas", 2], "at least 3 are needed"),
        (["loop.py:make", "--level", "0.01"], "--replicas 99"),
        (["loop.py:make", "--variants", "contol"], "did you mean 'control'"),
        (["loop.py:make", "--switch", "treads=2"], "did you mean 'threads'"),
        (["loop.py:make", "--steps", 0], "--steps is 0; expected 1 or more"),
        (["loop.py:make", "--runs", 3], "No such option: --runs"),
        ([], "no training was named"),
        (["loop.py:make", "--with", "steps"], "expected key=value"),
        (["loop.py:make", "--output", "nowhere/x.html"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(ran, words, said):
    done = in_process("noise", *words, "--quiet", cwd=ran[0])
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_workload_that_is_no_training_leaves_nothing_behind(ran):
    done = in_process("noise", "digits-cnn", "--quiet", "--store", "none.sqlite", cwd=ran[0])
    assert done.returncode == 2
    assert "expected a training" in done.stderr
    assert not (ran[0] / "none.sqlite").exists()


@pytest.fixture(scope="module")
def result(ran):
    """The same as records."""
    folder = ran[0]
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    with ReplicaStore(folder / "s.sqlite") as store:
        return read_noise(NoiseQuestion(spec, (Switches(), Switches.parse("algo+impl")), 3), store)


def test_limits_that_say_nothing_are_not_told():
    def of(estimate, low, high):
        return Interval(estimate, low, high, 0.95, 3, "")

    assert interval_text(of(0.0, 0.0, max_possible_sd(3)), 100, max_possible_sd(3)) == "0 [0, –]"
    assert interval_text(of(0.0, 0.0, math.inf)) == "0 [0, –]"
    assert interval_text(of(1.25, 0.8, math.inf)) == "1.25 [0.80, –]"
    assert interval_text(of(0.3, 0.1, 1.0), 100, 1.0) == "30 [10, –]"
    assert interval_text(of(0.3, 0.1, 0.9), 100, 1.0) == "30 [10, 90]"
    assert interval_text(of(0.0, 0.0, 0.3), 100, 1.0) == "0 [0, 30]"


def test_the_headline_where_nothing_varies(result):
    same = result.variants[0]
    other = replace(same, name="threads=2", divergence_steps=(0, 0, 0))
    alike = replace(result, variants=(same, replace(same, name="onednn=off")))
    assert headline(alike) == "Runs with the same switches do not differ: their final states are bit-identical"
    for more, named in (((), "threads=2"), (("race=2",), "threads=2 and race=2"), (("a", "b"), "threads=2, a and b")):
        found = headline(replace(result, variants=(same, other, *(replace(other, name=name) for name in more))))
        assert (
            found == f"The replicas of each variant are bit-identical; replicas of {named} differ from the clean twin"
        )


def test_a_training_without_a_name_is_told_by_its_file(result):
    assert "loop.py:make" not in headline(result)
    nameless = replace(result, workload="custom")
    assert "Two runs of loop.py:make with" in headline(nameless)
    assert report(nameless).title == "Run-to-run variation of loop.py:make"
    assert "Two runs of made:up with" in headline(replace(nameless, spec={"workload": "made:up"}))


def test_steps_count_from_zero_in_the_figure(result):
    axis = plots_by_place(result)["parting"]["layout"]["xaxis"]
    assert axis["title"]["text"] == "step, counted from 0"
    assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True)) == {"0": 1, "1": 2, "2": 3, "5": 6}
    assert plots_by_place(result)["parting"]["data"][0]["x"][0] == result.curves[0].steps[0] + 1


def test_many_replicas_are_not_said_to_be_few(result):
    found = replace(result, variants=tuple(replace(one, n=10) for one in result.variants))
    assert not any("fewer than" in line for line in findings(found))
    fixed = replace(result, variants=(replace(result.variants[0], is_deterministic=True),))
    assert not any("fewer than" in line for line in findings(fixed))  # three runs of one thing are enough


def test_a_p_value_near_the_level_says_so(result):
    last = result.variants[1]
    (group, *rest) = last.groups
    for corrected, said in ((0.049, True), (0.052, True), (0.03, False), (0.07, False)):
        groups = (replace(group, name="here", corrected=corrected, p_standard_error=0.001), *rest)
        found = replace(result, variants=(replace(last, groups=groups),))
        assert (
            "ALGO+IMPL: significance is uncertain for here: p is within its Monte-Carlo error of 0.05"
            in list(findings(found))
        ) == said

"""What is told of findings, in words and in JSON, and while the command runs. No run is made: findings are made up."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from unsilent.cli.explain import COMMAND
from unsilent.explain.report import finding_summary_line, report
from unsilent.explain.results import (
    FoundSource,
    Machine,
    NondeterminismResult,
    ReproducibilityResult,
    RunDivergence,
    UserCodeLine,
)
from unsilent.render.report_json import report_json
from unsilent.render.report_terminal import render_report

MACHINE = Machine({}, 1, None)
PLACE = UserCodeLine("loops.py", 7, "train")


def explain_loop(ref: str, *, control: bool = False, as_json: bool = False, **more: object) -> int:
    """What the command does, by arguments."""
    code: int = COMMAND.call(loop=ref, check_only=control, json=as_json, **more)
    return code


def parting(kind: str, other: str = "", to_go: tuple[int, int] | None = None) -> RunDivergence:
    return RunDivergence(4, 2, "add", "forward", PLACE, None, "", kind, "", other, to_go)


def explained(*findings: FoundSource, runs: int = 3, steps: int = 5, **more: Any) -> NondeterminismResult:
    return NondeterminismResult("loops.py:train", runs, 9, 1234, steps, findings, MACHINE, 3.0, **more)


def controlled(
    first: str = "", switches: tuple[str, ...] = (), verified: bool = True, steps: int = 5
) -> ReproducibilityResult:
    return ReproducibilityResult("loops.py:train", 3, 3, steps, 4, first, switches, verified, None, MACHINE, 3.0)


def said(found: Any, plain: bool = False) -> str:
    out = io.StringIO()
    render_report(report(found), Console(file=out, width=300), plain)
    return " ".join(out.getvalue().split())


def as_json(found: Any) -> dict[str, Any]:
    told = report_json(report(found))
    assert isinstance(told, dict)
    return told


def test_sources_are_told_by_what_they_are():
    text = said(explained(FoundSource("hash", parting("data"), None, 9), FoundSource(None, parting("data"), None, 3)))
    assert "Runs differ because of the order of sets (Python's randomised string hash); an unknown source " in text


def test_plain_has_a_row_for_each_source_and_lines_that_name_it():
    text = io.StringIO()
    found = explained(FoundSource("hash", parting("data"), None, 9), FoundSource(None, parting("data"), None, 3))
    render_report(report(found), Console(file=text, width=60), True)
    rows = [line.split() for line in text.getvalue().splitlines() if not line.startswith("#")]
    assert rows == [
        ["source", "step", "phase", "operation", "place", "kind", "pinned"],
        ["hash", "2", "forward", "add", "loops.py:7", "data", "agree"],
        ["unknown", "2", "forward", "add", "loops.py:7", "data", "unknown"],
    ]
    assert "# 2. an unknown source: where: step 2, add at loops.py:7 (train)\n" in text.getvalue()
    agreed = io.StringIO()
    render_report(report(explained()), Console(file=agreed, width=60), True)
    assert all(line.startswith("# ") for line in agreed.getvalue().splitlines())


def test_names_from_outside_are_only_names():
    bad = "\x1b[31m\u202e[red]x[/red]"
    place = UserCodeLine(bad, 7, bad)
    found = FoundSource(
        "clock", RunDivergence(4, 2, bad, "backward", place, place, bad, "path", "", bad, (20, 30)), None, 9
    )
    every = NondeterminismResult(bad, 3, 9, 12, 2, (found,), Machine({}, 1, bad), 3.0, pin_failures={"threads": bad})
    for text in (said(every), said(every, plain=True), finding_summary_line(found)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b[31m\\u202e[red]x[/red]" in text


def test_what_may_be_chance_is_told_so():
    sure, unsure = (
        explained(FoundSource("clock", parting("path"), None, 9, may_be_chance=unsure)) for unsure in (False, True)
    )
    assert "may be chance, because runs differ rarely; compare more runs with --runs" in said(unsure)
    assert "because of the clock (may be chance)" in said(unsure)
    assert "chance" not in said(sure)
    assert [as_json(found)["results"]["findings"][0]["may_be_chance"] for found in (sure, unsure)] == [False, True]


@pytest.mark.parametrize(("source", "is_said"), [("kernels", True), ("threads", True), (None, True), ("memory", False)])
def test_the_step_of_a_race_is_said_to_be_random(source: str | None, is_said: bool):
    text = said(explained(FoundSource(source, parting("kernel"), None, 9)))
    assert ("the step at which runs first differ is random" in text) == is_said


@pytest.mark.parametrize(
    ("other", "to_go", "words"),
    [
        ("", (7, 0), "one run has ended; the other continues with 7 operations more"),
        (
            "detach at loops.py:9",
            (80, 1),
            "one run is almost over (1 operation left, next detach at loops.py:9) while the other continues (80 left)",
        ),
        (
            "mul at loops.py:9",
            (2, 30),
            "one run is almost over (2 operations left) while the other continues (30 left, next mul at loops.py:9)",
        ),
        (
            "mul at loops.py:9",
            (20, 30),
            "the runs execute different operations: the other run executes mul at loops.py:9",
        ),
    ],
)
def test_where_runs_do_other_operations(other: str, to_go: tuple[int, int], words: str):
    found = explained(FoundSource("clock", parting("path", other, to_go), None, 9))
    assert words in said(found)
    assert as_json(found)["results"]["findings"][0]["parting"]["operations_left"] == list(to_go)


def test_a_clean_verdict_tells_how_little_it_shows():
    three = "3 runs agree; a difference that occurs in one run of ten would be missed with a probability of 73 %"
    assert three in said(explained())
    assert three in said(controlled())
    assert "10 runs agree" in said(explained(runs=10))
    assert "missed with a probability of 35 %" in said(explained(runs=10))
    assert as_json(controlled())["results"]["would_miss"] == {"shows_in": 0.1, "missed": pytest.approx(0.73)}
    differ = explained(FoundSource("clock", parting("data"), None, 9))
    assert "would be missed" not in said(differ)
    assert as_json(differ)["results"]["would_miss"] is None


def test_a_loop_in_which_no_optimizer_made_a_step_is_told():
    for found in (explained, controlled):
        assert "No optimizer made a step" in said(found(steps=0))
        assert "No optimizer made a step" not in said(found(steps=1))


def test_changes_that_make_runs_agree():
    text = said(controlled("a weight", ("numpy",)))
    assert "With these changes runs end with the same bits: call np.random.seed(SEED)" in text
    text = said(controlled("a weight", ("numpy",), verified=False))
    assert "Changes that help but do not suffice: call np.random.seed(SEED)" in text
    cut_short = replace(controlled("a weight", ("numpy",), verified=False), interrupted=True)
    assert "Changes that help; whether they suffice was not tested: call np.random.seed(SEED)" in said(cut_short)


@pytest.mark.parametrize("quiet", [False, True])
def test_each_run_is_told_though_nothing_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
):
    def made_up(ref: str, notify: Callable[[str], None], **asked: Any) -> NondeterminismResult:
        notify("run 1")
        return explained()

    monkeypatch.setattr("unsilent.explain.explain_run_differences", made_up)
    assert explain_loop("loops.py:train", as_json=True, quiet=quiet) == 0
    text = capsys.readouterr()
    assert text.err == ("" if quiet else "unsilent: run 1\n")
    assert text.out.startswith("{")

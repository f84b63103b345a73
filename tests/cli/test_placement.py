"""``unsilent placement``: what it prints, its JSON and page, and bad input."""

from __future__ import annotations

import json

import pytest

from unsilent.cli.main import run

ASKED = ("placement", "a100:2", "--axes", "data=8,tensor=4", "--reduce", "data", "--bytes", "2GiB")


def answer(capsys, *words):
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_the_fastest_placement_is_named_with_its_link(capsys):
    out = " ".join(answer(capsys, *ASKED).split())
    assert "the fastest placement is [[1 8] [2 2]] (data over 8 gpus, tensor over 2 nodes x 2 gpus)" in out
    assert "the slowest of 2 placements" in out
    assert "4 groups share the link out of each node (12.5 GB/s)" in out


def test_json_has_placements_programs_and_the_time_it_took(capsys):
    result = json.loads(answer(capsys, *ASKED, "--algorithm", "ring", "--json"))
    assert result["schema"] == "unsilent/placement/2"
    assert result["placements"] == len(result["results"]) == 2
    assert 0 < result["search_seconds"] <= result["seconds"]
    best, slow = result["results"]
    assert best["seconds"] < slow["seconds"]
    [programs] = slow["programs"]
    assert [step["statement"]["collective"] for step in programs[0]["steps"]] == [
        "reduce-scatter",
        "all-reduce",
        "all-gather",
    ]
    assert programs[0]["ratio"] == pytest.approx(programs[0]["flat_seconds"] / programs[0]["seconds"])
    step = programs[0]["steps"][1]
    assert step["cost"].pop("seconds") > 0
    assert step == {
        "statement": {"collective": "all-reduce", "grouping": {"form": "parallel", "level": 1, "ancestor": 0}},
        "payload": 2**29, "cost": {"level": 0, "flows": 16, "algorithm": "ring"},
    }  # fmt: skip
    assert result["system"]["levels"][0]["name"] == "node"


def test_the_page_draws_the_machine(capsys, tmp_path):
    out = answer(capsys, *ASKED, "-o", tmp_path / "p.html")
    assert f"Report: {tmp_path / 'p.html'}" in "".join(out.split("\n"))
    page = (tmp_path / "p.html").read_text()
    assert "hierarchy0" in page
    assert "node 0, 12.5 GB/s" in page
    assert page.count("d0t0") == 1


def test_names_of_a_description_are_escaped(capsys, tmp_path):
    (tmp_path / "m.toml").write_text(
        'name = "<script>alert(1)</script>"\n[[level]]\nname = "<b>n"\ncount = 2\nbandwidth = "1GB/s"\n'
        '[[level]]\nname = "gpu"\ncount = 2\nbandwidth = "2GB/s"\n'
    )
    answer(capsys, "placement", tmp_path / "m.toml", "--axes", "a=2,b=2", "--reduce", "a", "-o", tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "<script>alert(1)" not in page
    assert "<b>n" not in page


def test_several_reductions_have_their_own_bytes_and_weights(capsys):
    words = ("--reduce", "tensor:64MiB:48", "--reduce", "data,tensor", "--json")
    result = json.loads(answer(capsys, *ASKED, *words))
    assert result["reductions"] == [
        {"axes": ["data"], "payload": 2**31, "weight": 1.0, "goal": "all-reduce"},
        {"axes": ["tensor"], "payload": 2**26, "weight": 48.0, "goal": "all-reduce"},
        {"axes": ["data", "tensor"], "payload": 2**31, "weight": 1.0, "goal": "all-reduce"},
    ]
    for row in result["results"]:
        times = [programs[0]["seconds"] for programs in row["programs"]]
        assert row["seconds"] == pytest.approx(times[0] + 48 * times[1] + times[2])


def test_code_is_python_alone(capsys):
    out = answer(capsys, *ASKED, "--code")
    compile(out, "printed", "exec")
    assert "reduce_data = ProgramRunner(" in out


@pytest.mark.parametrize("model", ["alpha-beta", "nccl-2.7.5", "nccl-2.20.3"])
@pytest.mark.parametrize("goal", ["all-reduce", "reduce-scatter", "all-gather"])
def test_every_cost_model_and_goal_gives_an_answer(capsys, model, goal):
    result = json.loads(answer(capsys, *ASKED, "--cost", model, "--goal", goal, "--json"))
    assert all(row["seconds"] > 0 for row in result["results"])


def test_an_axis_of_one_component_has_nothing_to_reduce(capsys):
    out = answer(capsys, "placement", "a100:1", "--axes", "data=1,tensor=16", "--reduce", "data")
    assert "nothing to reduce" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a100:2", "--axes", "data=8", "--reduce", "data"), "multiply to 8 (data=8), but the system has 32 devices"),
        (("a100:2", "--axes", "data=8,tensor=4", "--reduce", "date"), "unknown axis 'date'; did you mean 'data'"),
        (("a100:2", "--axes", "data=8,tensor=4"), "nothing is reduced"),
        (("a100:2", "--reduce", "data"), "no axes were given"),
        (("a100:2", "--axes", "data=0,tensor=4", "--reduce", "data"), "axis data has size 0"),
        (("a100:2", "--axes", "data", "--reduce", "data"), "--axes has 'data'; expected a name and a size"),
        (("a100:2", "--axes", "data=8,data=4", "--reduce", "data"), "has data twice"),
        (("a100:2", "--axes", "data=32", "--reduce", "data", "--bytes", "2XB"), "cannot read '2XB' as a number of bytes"),
        (("a100:2", "--axes", "data=32", "--reduce", "data:0"), "expected more than 0 of both"),
        (("a100:2", "--axes", "data=32", "--reduce", "data:1GiB:x"), "has the weight 'x'"),
        (("a100:2", "--axes", "data=32", "--reduce", "data:1:2:3"), "expected AXES, AXES:BYTES or AXES:BYTES:WEIGHT"),
        (("a100:2", "--axes", "data=32", "--reduce", "data,data"), "names an axis twice"),
        (("a100:2", "--axes", "data=32", "--reduce", "data", "--cost", "nccl"), "unknown cost model 'nccl'"),
        (("a100:2", "--axes", "data=32", "--reduce", "data", "--max-steps", "6"), "--max-steps is 6"),
        (("a100:2", "--axes", "data=32", "--reduce", "data", "-o", "no/folder/p.html"), "its folder does not exist"),
        (("b100", "--axes", "data=32", "--reduce", "data"), "unknown system 'b100'"),
        ((), "no system was given"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(capsys, words, message):
    assert run(["placement", *words]) == 2
    out, err = capsys.readouterr()
    if words:
        assert out == ""
        assert err.startswith("unsilent: error: ")
        assert err.count("\n") == 1
        assert message in err


def test_each_reduction_has_a_function_of_its_own(capsys):
    asked = ["--reduce", "a,b", "--reduce", "a_b", "--reduce", "a", "--reduce", "a:1MiB"]
    out = answer(capsys, "placement", "a100:2", "--axes", "a=2,b=2,a_b=8", *asked, "--code")
    names = [line.split(" = ")[0] for line in out.splitlines() if line.startswith("reduce_")]
    assert names == ["reduce_a_b", "reduce_a_b_2", "reduce_a", "reduce_a_2"]
    compile(out, "script", "exec")

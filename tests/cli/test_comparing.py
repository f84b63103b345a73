"""``unsilent report`` with two stores and with cards, end to end."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from cli.test_bad_input import refused
from conftest import TINY, in_process
from unsilent.render.pages import is_unsilent_page

pytestmark = pytest.mark.slow

ESTIMATE = {"estimate", "low", "high", "confidence", "n", "unit"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two campaigns of the tiny workload, in float32 and in bfloat16, and one with other flips."""
    folder = tmp_path_factory.mktemp("stores")
    (folder / "tiny.py").write_text(TINY)
    for name, more in (("a", ()), ("b", ("--dtype", "bfloat16")), ("c", ("--flips", "2"))):
        flips = () if more[:1] == ("--flips",) else ("--flips", "1,16")
        words = ("tiny.py:make", "--trials", 60, *flips, *more, "--store", f"{name}.sqlite", "--quiet")
        done = in_process("pvf", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def rows_of(folder, store, *more):
    told = json.loads(in_process("report", store, "--json", "-o", "x.html", *more, cwd=folder).stdout)
    return {(r["level"], r["target"], r["flips"]): r for r in told["results"]}


def test_a_comparison_agrees_with_both_reports(stores):
    done = in_process("diff", "a.sqlite", "b.sqlite", "--json", cwd=stores)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    a, b = rows_of(stores, "a.sqlite"), rows_of(stores, "b.sqlite")
    assert len(told["results"]) == len(a) == len(b)
    for row in told["results"]:
        key = row["level"], row["target"], row["flips"]
        assert row["estimate"] == pytest.approx(b[key]["estimate"] - a[key]["estimate"])
        assert row["low"] < row["estimate"] < row["high"]
        assert (
            row["ratio"]["estimate"] == pytest.approx(b[key]["estimate"] / a[key]["estimate"]) or not a[key]["estimate"]
        )
        assert {k: row["a"][k] for k in ESTIMATE} == {k: a[key][k] for k in ESTIMATE}
        assert not row["is_paired"]
    assert {c["what"] for c in told["changes"]} == {"dtype", "weights", "inputs", "golden"}
    assert told["report"] == "a-vs-b.html"
    assert is_unsilent_page(stores / "a-vs-b.html")
    assert told["command"] == "unsilent diff a.sqlite b.sqlite"


def test_the_order_of_the_stores_is_the_sign(stores):
    there, back = (
        {
            (r["level"], r["target"], r["flips"]): r
            for r in json.loads(in_process("diff", *names, "--json", cwd=stores).stdout)["results"]
        }
        for names in (("a.sqlite", "b.sqlite"), ("b.sqlite", "a.sqlite"))
    )
    for key, row in there.items():
        assert (row["estimate"], row["low"], row["high"]) == pytest.approx(
            (-back[key]["estimate"], -back[key]["high"], -back[key]["low"]), abs=1e-9
        )
        assert row["differs"] == back[key]["differs"]


def test_plain_and_rich(stores):
    plain = in_process("diff", "a.sqlite", "b.sqlite", "--plain", "-o", "cmp.html", cwd=stores)
    assert plain.returncode == 0
    assert "\x1b" not in plain.stdout
    table = [line.split() for line in plain.stdout.splitlines() if line and line[0] != "#"]
    assert len({len(line) for line in table}) == 1
    assert table[0][-1] == "paired"
    assert plain.stdout.endswith("# Report: cmp.html\n")
    rich = in_process("diff", "a.sqlite", "b.sqlite", cwd=stores)
    assert "A and B also differ in: dtype (A float32, B bfloat16)" in " ".join(rich.stdout.split())
    assert "Report: a-vs-b.html" in rich.stdout


def test_a_store_and_itself(stores):
    done = in_process("diff", "a.sqlite", "a.sqlite", "--unit", "batch", "--json", cwd=stores)
    told = json.loads(done.stdout)
    assert told["identical"]
    assert told["headline"] == "A and B have the same trials with the same outcomes, so every difference is 0."
    assert {r["estimate"] for r in told["results"]} == {0.0}
    assert all(r["is_paired"] and r["unit"] == "batch" for r in told["results"])


def test_other_flips_are_refused_in_one_line(stores, monkeypatch, capsys):
    monkeypatch.chdir(stores)
    said = refused(capsys, "diff", "a.sqlite", "c.sqlite")
    assert "flips is 1,16 in A and 2 in B" in said
    assert not (stores / "a-vs-c.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.sqlite", "nowhere.sqlite"), "there is no store nowhere.sqlite"),
        (("a.sqlite", "tiny.py"), "not an Unsilent store"),
        (("a.sqlite", "b.sqlite", "-o", "b.sqlite"), "would overwrite the store b.sqlite"),
        (("a.sqlite", "b.sqlite", "-o", "a.sqlite"), "would overwrite the store a.sqlite"),
        (("a.sqlite", "b.sqlite", "-o", "no/such.html"), "its folder does not exist"),
        (("a.sqlite", "b.sqlite", "--fit-per-bit", "-1"), "--fit-per-bit is -1.0; expected a rate of 0 or more"),
        (("a.sqlite", "b.sqlite", "--card"), "No such option: --card"),
        (("net.pt", "b.sqlite"), "net.pt is a checkpoint by its name; use unsilent checkpoint diff A B"),
        (
            ("events.jsonl", "b.sqlite"),
            "events.jsonl is events of a monitored training; use unsilent report events.jsonl",
        ),
        (("a.sqlite",), "two stores are needed"),
        (("net.pt",), "net.pt is a checkpoint by its name; use unsilent checkpoint inspect net.pt"),
        (("fault.csv",), "fault.csv is a published injection by its name; use unsilent replay-injection fault.csv"),
        (("a.sqlite", "--card", "-o", "card"), "ends in .json"),
        (("a.sqlite", "--card", "-o", "no/card.json"), "its folder does not exist"),
        (("a.sqlite", "--card", "-o", "foreign.json"), "foreign.card.html exists and is not an Unsilent page"),
        (("foreign.json",), "is not a PVF card"),
        (
            ("foreign.json", "b.sqlite"),
            "foreign.json is a card; use the command that unsilent report foreign.json shows",
        ),
        (
            ("a.sqlite", "foreign.json"),
            "foreign.json is a card; use the command that unsilent report foreign.json shows",
        ),
        (("foreign.json", "--unit", "batch"), "No such option: --unit"),
    ],
)
def test_bad_words(stores, monkeypatch, capsys, words, said):
    (stores / "foreign.card.html").write_text("somebody else's")
    (stores / "foreign.json").write_text("{}")
    monkeypatch.chdir(stores)
    for name in ("net.pt", "fault.csv"):
        (stores / name).write_bytes(b"x")
    (stores / "events.jsonl").write_text('{"event": "started"}')
    is_of_one = (len(words) == 1 and said[:3] != "two") or "--card" in words[:2] or "--unit" in words[:2]
    assert said in refused(capsys, "report" if is_of_one else "diff", *words)
    assert (stores / "foreign.card.html").read_text() == "somebody else's"
    assert not (stores / "c.json").exists()


def test_a_store_is_no_checkpoint(stores, monkeypatch, capsys):
    monkeypatch.chdir(stores)
    assert "a.sqlite is the store of a campaign; use unsilent report a.sqlite" in refused(
        capsys, "checkpoint", "inspect", "a.sqlite"
    )


def test_a_card_goes_round(stores, tmp_path):
    done = in_process("report", "a.sqlite", "--card", "-o", tmp_path / "a.json", cwd=stores)
    assert done.returncode == 0, done.stderr
    assert f"Card: {tmp_path / 'a.json'}\nPage: {tmp_path / 'a.card.html'}" in done.stdout
    assert "Report:" not in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "a.card.html"}
    assert is_unsilent_page(tmp_path / "a.card.html")
    HTMLParser().feed((tmp_path / "a.card.html").read_text())
    assert (tmp_path / "a.card.html").stat().st_size < 50_000, "small enough to send"

    told = json.loads((tmp_path / "a.json").read_text())
    shown = in_process("report", tmp_path / "a.json")
    assert shown.returncode == 0, shown.stderr
    assert "PVF card of tiny.py:make" in shown.stdout
    assert "checksum verified" in shown.stdout
    assert json.loads(in_process("report", tmp_path / "a.json", "--json").stdout) == told
    rows = rows_of(stores, "a.sqlite")
    for row in told["rows"]:
        assert row["estimate"] == rows[row["level"], row["target"], row["flips"]]["estimate"]

    again = in_process("report", "a.sqlite", "--card", "-o", tmp_path / "again.json", cwd=stores)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "a.json").read_bytes()

    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace('"seed": 0', '"seed": 1'))
    bad = in_process("report", tmp_path / "a.json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "checksum" in bad.stderr
    assert bad.stderr.count("\n") == 1


def test_a_card_leaves_the_report_alone(stores, tmp_path, monkeypatch, capsys):
    """Under the same name, under one that ends in .card, and beside a store whose own report would be the page."""
    report = (stores / "a.html").read_bytes()
    for name in ("a.json", "a.card.json"):
        done = in_process("report", "a.sqlite", "--card", "-o", name, cwd=stores)
        assert done.returncode == 0, done.stderr
        assert "Page: a.card.html\n" in done.stdout
        assert (stores / "a.html").read_bytes() == report
        (stores / "a.card.html").unlink()
    (tmp_path / "x.card.sqlite").write_bytes((stores / "a.sqlite").read_bytes())
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "report", "x.card.sqlite", "--card", "-o", "x.json")
    assert "the card's page and the report of x.card.sqlite would both be written to x.card.html" in said


def test_a_card_runs_nothing_and_loads_no_torch(stores, tmp_path):
    import subprocess
    import sys

    assert in_process("report", "a.sqlite", "--card", "-o", tmp_path / "a.json", cwd=stores).returncode == 0
    code = (
        "import sys; from unsilent.cli.main import run; code = run(['report', sys.argv[1]]);"
        "assert code == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = code.replace("sys.argv[1]", "*sys.argv[1:]").replace("['report', ", "['diff', '-o', 'y.html', ")
    done = subprocess.run(
        [sys.executable, "-c", code, "a.sqlite", "b.sqlite"], capture_output=True, text=True, cwd=stores
    )
    assert done.returncode == 0, done.stderr

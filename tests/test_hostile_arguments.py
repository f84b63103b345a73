"""Arguments and files of absurd size: one short line, soon."""

from __future__ import annotations

import time

import pytest

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import parse_toml
from unsilent.cli.main import MOST_MESSAGE, run

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--sampling", f"fixed:{DIGITS}", "x.py"],
        ["run", "--budget", DIGITS, "x.py"],
        ["pvf", "digits-cnn", "--samples", DIGITS],
        ["pvf", "digits-cnn", "--trials", DIGITS],
        ["pvf", "digits-cnn", "--device", f"cuda:{DIGITS}"],
        ["pvf", "digits-cnn", "--assert", f"model@{DIGITS}<=1"],
        ["pvf", "digits-cnn", "--fault", f"bitflip:count={DIGITS}"],
        ["pvf", "digits-cnn", "--fault", f"bitflip:bits={DIGITS}"],
        ["pvf", "digits-cnn", "--with", f"eval={DIGITS}"],
        ["pvf", f"digits-cnn{DIGITS}"],
        ["noise", "train-resnet", "--switch", f"threads={DIGITS}"],
        ["placement", f"a100:{DIGITS}", "--axes", "data=2", "--reduce", "data"],
        ["placement", "a100:1", "--axes", f"data={DIGITS}", "--reduce", "data"],
        ["placement", "a100:1", "--axes", "data=8", "--reduce", f"data:{DIGITS}"],
        ["placement", "a100:1", "--axes", "data=8", "--reduce", "data", "--bytes", DIGITS],
        ["placement", "a100:1", "--axes", "data=8", "--reduce", "data", "--top", DIGITS],
        ["checkpoint", "inspect", "x" * 5000],
        ["training", "train-resnet", "--steps", DIGITS],
    ],
)
def test_absurd_arguments_are_refused_in_one_short_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert len(error) <= MOST_MESSAGE + 40


@pytest.mark.parametrize("count", [1, 2, 7, 16, 31, 60, 200])
@pytest.mark.parametrize("size", [1, 2])
def test_placements_of_many_axes_end_or_are_refused(count, size, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    axes = ",".join(f"x{number}={size if number < 5 else 1}" for number in range(count))
    begun = time.process_time()
    code = run(["placement", "a100:2", "--axes", axes, "--reduce", "x0"])
    error = capsys.readouterr().err
    assert code in (0, 2)
    assert "Traceback" not in error
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "line",
    ["a." * 50_000 + "a = 1", "1." * 50_000 + "1 = 1", '"a,"."b=".' * 20_000 + "a = 1", "[" + "a." * 50_000 + "a]",
     "x = {" + "a." * 50_000 + "a = 1}", "a = " + "[" * 50_000, "a = " + "{a=" * 50_000],
)  # fmt: skip
def test_toml_of_deep_names_is_refused_at_once(line):
    begun = time.process_time()
    with pytest.raises(UsageError) as caught:
        parse_toml(line.encode(), "x.toml")
    assert time.process_time() - begun < 1
    assert len(str(caught.value)) < 300


def test_toml_of_long_lists_is_read():
    numbers = [round(0.1 * n, 1) for n in range(500)]
    text = f"values = {numbers}\nname.of.it = 'a sentence. Another one.'\n"
    assert parse_toml(text.encode(), "x.toml") == {
        "values": numbers,
        "name": {"of": {"it": "a sentence. Another one."}},
    }

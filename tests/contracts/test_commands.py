"""One row in the table of commands gives a system help, JSON, plain columns, options from a file, a page and a function."""

from __future__ import annotations

import inspect
import json
import shlex
import sqlite3
from pathlib import Path

import pytest
import typer

from conftest import in_process
from contracts import toy_system
from contracts.toy_system import COMMAND
from docs.test_examples import blocks
from unsilent.basics.errors import UsageError
from unsilent.basics.options import options_of
from unsilent.cli.main import make_app
from unsilent.cli.table import COMMANDS, load_command
from unsilent.command import GROUPS
from unsilent.studies.campaign_kinds import KINDS

MOST_OPTIONS = 40
LONGEST_LINE = 160
TYPED = "unsilent flips 0.5 --bits 30,31"


# -- a system of its own -------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(COMMANDS, "flips", "contracts.toy_system:COMMAND")


def typed(*words):
    done = in_process("flips", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_help_lists_its_options_by_panel_with_an_example(toy):
    shown = typed("--help")
    assert [line for line in shown.splitlines() if line.endswith(":")] == [
        "Arguments:",
        "Faults:",
        "Output:",
        "Options:",
    ]
    for text in ("what a float32 number becomes", "Example: unsilent flips 0.5 --bits 30,31", "NUMBER", "--bits", "[default: 31]",
                 "--json", "--plain", "--config", "--output"):  # fmt: skip
        assert text in shown


def test_the_overview_lists_it_in_its_group(toy):
    shown = in_process("--help").stdout
    assert shown.index("Explain:") < shown.index("flips") < shown.index("Files:")


def test_json_is_one_object_with_the_command_and_a_row_for_each_result(toy):
    shown = json.loads(typed("0.5", "--bits", "30,31", "--json"))
    assert (shown["schema"], shown["command"]) == ("unsilent/flips/1", TYPED)
    assert [row["bit"] for row in shown["results"]] == [30, 31]
    assert shown["results"][1]["value"] == -0.5


def test_plain_mode_prints_columns_and_the_command_that_repeats_it(toy):
    lines = typed("0.5", "--bits", "30,31", "--plain").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows[0] == ["bit", "value"]
    assert rows[2] == ["31", "-0.5"]
    assert f"# repeat with: {TYPED}" in lines


def test_options_come_from_a_file_and_the_command_line_takes_precedence(toy, tmp_path):
    (tmp_path / "flip.toml").write_text("bits = [0]\n")
    bits = [
        [row["bit"] for row in json.loads(typed("2", "--config", "flip.toml", "--json", *more))["results"]]
        for more in ((), ("--bits", "1"))
    ]
    assert bits == [[0], [1]]


def test_a_page_is_written_and_named(toy, tmp_path):
    assert "Report: page.html" in typed("0.5", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Flips of 0.5" in page
    assert "unsilent flips 0.5" in page


def test_its_python_function_has_its_options_as_arguments(toy, tmp_path):
    flips = COMMAND.function()
    assert str(inspect.signature(flips)) == (
        "(number: float, *, bits: int | str | collections.abc.Sequence[int] = (31,))"
    )
    assert flips.__name__ == "flips"
    assert inspect.getdoc(flips).startswith("Show what a float32 number becomes when one of its bits flips.")
    assert "bits: Bits, each flipped alone" in flips.__doc__
    result = flips(number=0.5, bits=[30, 31])
    assert result.values[31] == -0.5
    assert flips(number=0.5).values == {31: -0.5}
    assert result.write_html("page.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no number was given; give one, like 0.5"),
        (("x",), "NUMBER is 'x'; expected a number"),
        (("0.5", "--bits", "32"), "--bits is 32; expected 0 or more, and at most 31"),
        (("0.5", "--bit", "3"), "No such option: --bit"),
        (("0.5", "-o", "none/page.html"), "cannot write none/page.html"),
        (("0.5", "--config", "none.toml"), "none.toml"),
    ],
)
def test_errors_are_one_line(toy, words, message):
    done = in_process("flips", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("unsilent: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize("call", [COMMAND.call, COMMAND.function()], ids=["call", "function"])
def test_errors_in_python_name_arguments(call):
    with pytest.raises(UsageError, match="^bits= is 32; expected 0 or more, and at most 31$"):
        call(number=0.5, bits=[32])
    with pytest.raises(UsageError, match="^number= is 'x'; expected a number$"):
        call(number="x")
    with pytest.raises(TypeError, match="'bit'"):
        call(number=0.5, bit=3)
    with pytest.raises(TypeError, match="'number'"):
        call()


def test_the_page_on_architecture_shows_this_system():
    shown = next(block.body for block in blocks("docs/architecture.md") if block.title == "flips.py")
    assert shown.strip() in Path(toy_system.__file__).read_text(encoding="utf-8")


# -- all rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=COMMANDS)
def command(request):
    loaded = load_command(request.param)
    assert loaded.name == request.param
    return loaded


def words_after_the_name(command):
    words = shlex.split(command.example)
    name = ["unsilent", *command.name.split()]
    assert words[: len(name)] == name
    return words[len(name) :]


def test_a_command_has_a_group_and_one_sentence_of_help(command):
    assert command.group in GROUPS
    first = command.help.strip().partition("\n")[0]
    assert len(first) < LONGEST_LINE
    assert first.endswith(".")
    assert ". " not in first


def test_an_example_has_the_arguments_that_are_needed_and_only_options_that_there_are(command):
    words_after_the_name(command)
    app = make_app(shlex.split(command.example)[1:])
    parsed = typer.main.get_command(app.app).make_context(app.name, list(app.words), obj=app.script)
    needed = [name for name, one in options_of(*command.all_option_classes()).items() if one.option.missing_error]
    assert [name for name in needed if not parsed.params[name]] == []


def store_of(kind, folder):
    """A file that is marked as a store of a kind."""
    path = folder / f"{kind.name}.sqlite"
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA application_id = {kind.application_id}")
        file.execute("CREATE TABLE trials (trial)")
    file.close()
    return str(path)


def test_a_command_has_few_options_whatever_its_arguments_are(command, tmp_path):
    arguments = [[], *([store_of(kind, tmp_path)] for kind in KINDS)]
    options = [options_of(*command.all_option_classes(words)) for words in arguments]
    counts = [sum(not one.is_argument for one in each.values()) for each in options]
    assert max(counts) <= MOST_OPTIONS
    if command.name in ("report", "diff"):
        assert all(len(of_store) > len(options[0]) for of_store in options[1:])


@pytest.mark.parametrize("words", [("--", "workloads"), ("checkpoint", "--", "verify")])
def test_dashes_in_front_of_a_verb_change_nothing(words):
    plain = [word for word in words if word != "--"]
    with_dashes, without = in_process(*words), in_process(*plain)
    assert (with_dashes.returncode, with_dashes.stdout, with_dashes.stderr) == (
        without.returncode, without.stdout, without.stderr,
    )  # fmt: skip
    assert with_dashes.stdout + with_dashes.stderr

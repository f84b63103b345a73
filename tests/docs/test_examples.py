"""The examples of the documentation work: every page with code is run from top to bottom, in a folder of its own.

A block with a title is a file, a ``console`` block is typed into a shell, a ``python`` block runs in the page's own namespace.
What a page shows below a command must be in its output, with any numbers; ``…`` stands for anything. A block that cannot run here
has a comment before it, ``<!-- not run: REASON -->``, with one of a few reasons.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from unsilent.command import Command

ROOT = Path(__file__).parents[2]
EVERY = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PAGES = [
    page
    for page in EVERY
    if re.search(r"^ *```(python|console)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
]
REASONS = re.compile(
    r"needs a GPU|needs several machines|needs Lightning|needs a Trainer|needs a file of yours"
    r"|takes more than a minute|sets up an environment"
    r"|(?P<how>run|a whole script is run) in (?P<page>\S+\.md)"
)
_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^>]*?) -->\s*)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"[-+−]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?")
OTHERS = {"--target", "--allowNaNValues", "--saveInjectionSequence"}
"""Options of other programs that pages name: of pip and of hdf5_corrupter."""
SHELL = 'unsilent() { "$PYTHON" -m unsilent "$@"; }\npython() { "$PYTHON" "$@"; }\n'


@dataclass(frozen=True)
class Block:
    """A block of code of a page; ``reason``: why it is not run, None where it is."""

    language: str
    title: str | None
    body: str
    line: int
    reason: str | None

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines that are shown below it."""
        typed = re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]
        result = []
        for text in typed:
            command, _, shown = text.replace("\\\n", " ").partition("\n")
            result.append((command, [line for line in shown.splitlines() if line.strip()]))
        return result


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            found["language"],
            found["title"],
            textwrap.dedent(found["body"]),
            text[: found.start("body")].count("\n") + 1,
            (found["note"] or "").partition("not run: ")[2] or None,
        )
        for found in _BLOCK.finditer(text)
    ]


def plain(text: str) -> str:
    """Any number is one number, and blanks do not matter."""
    return " ".join(_NUMBER.sub("#", text).split())


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_has_a_reason(page):
    fences = re.findall(r"^ *```\w", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(blocks(page)) == len(fences), f"{page} has a block that would not be seen here"
    for block in blocks(page):
        if block.reason is None:
            continue
        reason = REASONS.fullmatch(block.reason)
        assert reason, f"{page}:{block.line}: {block.reason!r} is no reason; known: {REASONS.pattern}"
        if reason["how"] == "run":
            elsewhere = [
                command
                for other in blocks(f"docs/{reason['page']}")
                for command, _ in other.commands
                if not other.reason
            ]
            assert [command for command, _ in block.commands if command not in elsewhere] == []
        elif reason["page"]:
            assert any(other.title and not other.reason for other in blocks(f"docs/{reason['page']}"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{page}:{block.line}"
        if block.title is not None:
            (tmp_path / block.title).write_text(block.body, encoding="utf-8")
        elif block.reason is not None:
            print(f"{where}: not run: {block.reason}")
        elif block.language == "python":
            exec(compile("\n" * block.line + block.body, where, "exec"), namespace)
        elif block.language == "console":
            for command, shown in block.commands:
                check(command, shown, where)


def check(command: str, shown: list[str], where: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "COLUMNS": "100"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["bash", "-c", SHELL + command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:6.1f} CPU s  {where}: {command}")
    assert done.returncode == 0, f"{where}: {command}: exit code {done.returncode}\n{done.stdout}"
    output = plain(done.stdout)
    lacking = [line for line in shown if not all(part.strip() in output for part in plain(line).split("…"))]
    assert not lacking, f"{where}: {command} does not print {lacking}, but\n{done.stdout}"


# -- commands of all pages, also of those that are not run ---------------------------------------------------------------


def known_commands() -> dict[str, Command]:
    """All commands, with the study and the system that pages explain how to write among them, and with options for any store."""
    from contracts.pi import PI
    from contracts.toy_system import COMMAND
    from unsilent.campaigns.options import AnalysisOptions
    from unsilent.cli.campaign import CampaignVerb
    from unsilent.cli.replay import TraceOptions
    from unsilent.cli.report import CardOptions
    from unsilent.cli.table import COMMANDS, load_command
    from unsilent.studies.campaign_kinds import KINDS

    of_stores = [cls for kind in KINDS for cls in (kind.analysis_options, kind.report_options)]
    further: dict[str, list[type]] = {
        "report": [*of_stores, CardOptions], "diff": [*of_stores, AnalysisOptions], "replay": [TraceOptions]
    }  # fmt: skip
    commands = [*map(load_command, COMMANDS), CampaignVerb(PI).command, COMMAND]
    return {
        command.name: replace(
            command, option_classes=(*command.option_classes, *further.get(command.name, ())), options_by_arguments=None
        )
        for command in commands
    }


def known_options() -> dict[str, set[str]]:
    """Options of all commands."""
    from unsilent.basics.options import options_of

    return {
        name: {"--help"} | {
            flag
            for option in options_of(*command.all_option_classes()).values()
            for flag in (option.flag, f"-{option.option.short_flag}")
        }
        for name, command in known_commands().items()
    }  # fmt: skip


BETWEEN_COMMANDS = re.compile(r"""[|;&](?=(?:[^"]*"[^"]*")*[^"]*$)""")
"""What separates commands of a line, outside quotes."""


@pytest.fixture(scope="module")
def commands():
    return known_commands()


@pytest.mark.parametrize("page", [*EVERY, "CHANGELOG.md"])
def test_every_command_that_is_named_can_be_parsed(page, commands):
    text = (ROOT / page).read_text(encoding="utf-8").partition("### Changed")[0]  # what there was before
    named = [c for block in blocks(page) if block.language == "console" for c, _ in block.commands]
    named += [code for code in re.findall(r"`(unsilent [^`]+)`", text) if "\n" not in code]
    for line in named:
        for part in re.split(BETWEEN_COMMANDS, line.partition("<(")[0]):
            words = shlex.split(part.partition(">")[0], comments=True)
            if words[:1] != ["unsilent"] or len(words) < 2 or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
                continue
            name = " ".join(words[1:3]) if " ".join(words[1:3]) in commands else words[1]
            if any(known.startswith(f"{name} ") for known in commands) and name not in commands:
                continue  # several commands by their first word
            assert name in commands, f"{page}: {line}"
            error = parsing_error(commands[name], words[1 + len(name.split()) :])
            assert not error, f"{page}: {line}: {error}"


@pytest.mark.parametrize("page", [page for page in EVERY if "evidence/" not in page])
def test_every_option_that_is_named_alone_exists(page):
    """Pages of evidence name options of benchmarks as well."""
    known = set().union(*known_options().values()) | OTHERS
    text = (ROOT / page).read_text(encoding="utf-8")
    alone = re.findall(r"(?<!`)`(--[^`\n]+)`(?!`)", text)
    assert {word for code in alone for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)} <= known


def parsing_error(command: Command, words: list[str]) -> str:
    """What the command line says of words that it does not understand; empty where it does."""
    import typer

    from unsilent.cli.typer_options import make_command_app

    own, script = command.split_script(words) if command.split_script else (words, ())
    if "--help" in own:
        return ""
    try:
        typer.main.get_command(make_command_app(command, own)).make_context(command.name, list(own), obj=script)
    except typer.BadParameter.__mro__[2] as error:  # of typer's own click, or of the installed one
        text = str(error.format_message())
        return "" if text.endswith("requires an argument.") else text  # prose names an option without its value
    return ""

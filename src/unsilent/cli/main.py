"""The entry point of the command line, which runs a command and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the check found a problem or the monitor stopped the job because of its checkpoint or its data or the
program, 2 wrong usage or input, 16 the monitor stopped the job after an alarm that is not confirmed for a device, 17 a
self-test found a wrong answer; or the guard or the monitor stopped the job because of a fault that is permanent or confirmed
for a device; or because of bits that changed without a trace in torch; or after an alarm that is undetermined twice in the same
step on the same device (nothing is confirmed then; the job is not started again), 130 interrupted, 141 the reader of a pipe
closed it.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import typer

from unsilent.basics.error_origin import unexpected_error
from unsilent.basics.errors import InternalError, Interrupted, StoreError, UnsilentError, UsageError, UserCodeError
from unsilent.basics.printable import escape_unprintable
from unsilent.cli.signals import end_silently_on_interrupt, interrupt_on_ending, repeat_swallowed_interrupts

# Typer brings its own click or uses the installed one, by version; the base of its exceptions is right in both.
_CommandError = cast(type[Exception], typer.BadParameter.__mro__[2])

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk behind stdout or a file."""
INTERRUPTED = 130
MOST_MESSAGE = 1200
"""Most characters of an error message."""
READER_LEFT = 141
"""Exit code of a shell for a program ended by SIGPIPE. The signal itself would also end this program when a worker dies."""


def _version(show: bool) -> None:
    if show:
        from unsilent import __version__

        typer.echo(f"unsilent {__version__}")
        raise typer.Exit


class App(NamedTuple):
    """A typer application with its full name, its command line words and the arguments of the user's script."""

    name: str
    app: typer.Typer
    words: Sequence[str]
    script: tuple[str, ...] = ()


def root(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
) -> None:
    """Inject hardware faults into deep learning workloads and measure what they do."""


def make_app(arguments: Sequence[str] = ()) -> App:
    """The application for a command line: that of one command, or the overview of all commands."""
    from unsilent.cli.table import COMMANDS, find_command_name, load_command
    from unsilent.cli.typer_options import make_command_app, make_overview_app

    name = find_command_name(arguments)
    if name is None and "--" in arguments[:2]:  # before a verb it separates nothing
        arguments = [word for number, word in enumerate(arguments) if number != list(arguments).index("--")]
        name = find_command_name(arguments)
    if name is None:
        first = next((word for word in arguments[:1] if any(known.startswith(f"{word} ") for known in COMMANDS)), "")
        return App(f"unsilent {first}".strip(), make_overview_app(first, root), arguments[1 if first else 0 :])
    command, words = load_command(name), list(arguments[len(name.split()) :])
    command_words, script = command.split_script(words) if command.split_script else (words, ())
    return App(f"unsilent {name}", make_command_app(command, command_words), command_words, script)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the ``unsilent`` command; never returns."""
    interrupt_on_ending()
    repeat_swallowed_interrupts()
    open_missing_output()
    escape_unencodable_output()
    given_words = sys.argv[1:] if arguments is None else arguments
    code = run(given_words)
    if given_words[:1] != ["run"]:  # a script's own handlers may still have to run
        end_silently_on_interrupt()
    sys.exit(code)


def open_missing_output() -> None:
    """Replace a closed stdout or stderr (``>&-``) by the null device.

    Otherwise a store that is opened next would get its file descriptor, and prints would go there.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def escape_unencodable_output() -> None:
    """Print characters that the terminal cannot encode as escapes instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # while a closed pipe can still be noticed
    except BrokenPipeError:
        return _drop_output(READER_LEFT)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _fail(f"the name of a file is too long: {str(error.filename)[:80]!r}…; give a shorter one", 2)
        if error.errno not in UNWRITABLE:
            raise
        return _drop_output(_fail(f"cannot write {_place(error)}: {error.strerror}; free space, or write elsewhere", 2))
    return code


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit code, before output is flushed."""
    name = "unsilent"
    try:
        app = make_app(arguments)
        name = app.name
        command = typer.main.get_command(app.app)
        code: Any = command.main(list(app.words), prog_name=app.name, standalone_mode=False, obj=app.script)
        return _end_interrupted() if code == INTERRUPTED else int(code or 0)
    except _CommandError as error:
        message = str(getattr(error, "format_message")())  # noqa: B009
        if "Usage:" in message:  # no arguments at all: the message is the help text
            print(message)
            return 2
        return _fail(_message_with_hint(message, getattr(getattr(error, "ctx", None), "command_path", name)), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _end_interrupted()
    except Interrupted as error:
        return _end_interrupted(str(error))
    except (UserCodeError, InternalError) as error:
        return _defect(error)
    except (UsageError, StoreError) as error:
        return _fail(str(error), 2)
    except UnsilentError as error:
        return _fail(str(error), 1)
    except SystemExit as end:  # how click and rich end when they cannot write
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    except Exception as error:
        if getattr(error, "errno", None) in (errno.EPIPE, errno.ENAMETOOLONG, *UNWRITABLE):
            raise
        return _end_interrupted() if _is_interrupt(error) else _defect(unexpected_error(error))


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error was caused by Ctrl-C, directly or through other errors."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _message_with_hint(message: str, command: str) -> str:
    """The message of a usage error, extended by a hint on the command's help."""
    from unsilent.cli.table import PYTHON_FUNCTIONS

    for name, text in PYTHON_FUNCTIONS.items():
        if message.startswith(f"No such command '{name}'"):
            message = f"{name} is a function of Python, not a command: {text}"
    if command == "unsilent run" and message.startswith("No such option"):
        message = f"{message.rstrip('.')}; arguments of the script go after the script"
    if command == "unsilent report" and message.startswith("Got unexpected extra argument"):
        message = f"{message.rstrip('.')}; two stores are compared by unsilent diff"
    end = " See" if message.endswith("?") else "; see"
    return f"{message.rstrip('.')}{end} {command} --help"


def _drop_output(code: int) -> int:
    """Discard all output that is not flushed yet, and return the exit code.

    Called if the reader has closed the output (``unsilent … | head``) or the disk is full.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _place(error: OSError) -> str:
    """The name of the file that could not be written, for an error message."""
    return str(error.filename) if error.filename else "what was printed"


def _end_interrupted(message: str = "interrupted") -> int:
    print(f"unsilent: {message}\n", end="", file=sys.stderr)  # one write, as other ranks may print between two
    return INTERRUPTED


def _fail(message: str, code: int) -> int:
    line = escape_unprintable(message)
    if len(line) > MOST_MESSAGE:  # the finding is at the beginning, and the advice at the end
        line = f"{line[: MOST_MESSAGE // 2]} … {line[-MOST_MESSAGE // 2 :]}"
    print(f"unsilent: error: {line}\n", end="", file=sys.stderr)
    return code


def _defect(error: InternalError | UserCodeError) -> int:
    users = isinstance(error, UserCodeError)
    _frame(error.traceback_text, "your code raised" if users else "unsilent raised")
    return _fail(str(error), 2 if users else 1)


def _frame(trace: str, title: str) -> None:
    """Print a traceback on stderr inside a frame."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(Panel(Text(trace.rstrip()), title=title, border_style="red"))
    else:
        print(f"--- {title} ---\n{trace.rstrip()}\n---", file=sys.stderr)

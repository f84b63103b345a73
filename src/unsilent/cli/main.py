"""``unsilent VERB``: sets up the verbs, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the check found a problem, 2 bad usage or input, 16 the monitor stopped the job, 17 the guard or the monitor
stopped the job because of a fault that stays or because of bits that changed without a trace in torch, 130 interrupted, 141 the
reader of a pipe left.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import typer

from unsilent.cli.signals import interrupt_on_ending
from unsilent.error_origin import unexpected_error
from unsilent.errors import InternalError, Interrupted, StoreError, UnsilentError, UsageError, UserCodeError
from unsilent.options import options_of
from unsilent.printable import escape_unprintable

# Typer brings its own click or uses the installed one, by version; the base of its exceptions is right in both.
_CommandError = cast(type[Exception], typer.BadParameter.__mro__[2])

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk behind stdout or a file."""
CHECKPOINT_HELP = "Inspect, corrupt, undo, compare and verify checkpoint files."
INTERRUPTED = 130
MOST_MESSAGE = 1200
"""Characters of an error."""
READER_LEFT = 141
"""What a shell says of a program that SIGPIPE ended; the signal itself would end us when a worker dies, too."""


def _version(show: bool) -> None:
    if show:
        from unsilent import __version__

        typer.echo(f"unsilent {__version__}")
        raise typer.Exit


def root(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
) -> None:
    """Inject hardware faults into deep learning workloads and measure what they do."""


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """All verbs: of each registered kind one, and those on stores. Only the one that is asked for gets its options."""
    from unsilent.cli import export, listing, merge, replay, report, status, watch
    from unsilent.cli.campaign import Verb
    from unsilent.cli.coverage import CoverageVerb
    from unsilent.cli.noise import NoiseVerb
    from unsilent.cli.pvf import PvfVerb
    from unsilent.cli.training import TrainingVerb
    from unsilent.cli.typer_options import Panels, make_typer_function
    from unsilent.studies.campaign_kinds import KINDS, installed_kinds, load_installed_kind

    settings: dict[str, Any] = {
        "no_args_is_help": True,
        "add_completion": False,
        "pretty_exceptions_enable": False,
        "rich_markup_mode": None,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    app = typer.Typer(**settings)
    app.callback()(root)
    asked = next((word for word in arguments if not word.startswith("-")), "")
    verbs: dict[str, Callable[..., Any]] = {
        "report": report.report, "status": status.status, "replay": replay.replay, "export": export.export,
        "merge": merge.merge, "watch": watch.watch, "workloads": listing.workloads, "faults": listing.faults,
        "detectors": listing.detectors,
    }  # fmt: skip
    about = {kind.name: kind.command_help for kind in KINDS if kind.command_words == kind.name} | {
        name: str(verb.__doc__) for name, verb in verbs.items()
    }
    others = {} if asked in about else {name: kind for name, kind in installed_kinds().items() if name not in about}
    about |= {
        name: f"Run the study of {entry.module}, which is not part of unsilent." for name, entry in others.items()
    }
    if asked == "report":
        verbs["report"] = report.make_report_command(arguments)
    kinds = [*KINDS, *(load_installed_kind(entry) for name, entry in others.items() if name == asked)]
    for kind in (kind for kind in kinds if kind.name == kind.command_words == asked):
        own = {"pvf": PvfVerb, "training": TrainingVerb, "noise": NoiseVerb, "coverage": CoverageVerb}
        verb = own.get(kind.name, Verb)(kind)
        verbs[kind.name] = make_typer_function(verb.option_fields, verb, verb.about)
    if asked == "checkpoint":
        from unsilent.cli.checkpoint import make_checkpoint_app

        app.add_typer(make_checkpoint_app(**settings), name="checkpoint", help=CHECKPOINT_HELP)
    else:
        about["checkpoint"] = CHECKPOINT_HELP
    about["plan"] = "Choose which parameters to protect with a given amount of memory."
    if asked == "plan":
        from unsilent.cli import plan

        verbs["plan"] = make_typer_function(options_of(*plan.OPTION_CLASSES), plan.plan, plan.HELP)
    about["placement"] = "Rank placements of parallelism axes and reduction programs on a machine."
    if asked == "placement" and arguments[list(arguments).index(asked) + 1 :][:1] == ["measure"]:
        from unsilent.cli.placement import make_measure_app

        app.add_typer(make_measure_app(**settings), name=asked, help=about.pop(asked))
    elif asked == "placement":
        from unsilent.cli import placement

        verbs["placement"] = make_typer_function(
            options_of(*placement.OPTION_CLASSES), placement.placement, placement.HELP
        )
    about["run"] = "Run a training script under the monitor, without changing it."
    if asked == "run":
        from unsilent.cli.run import HELP, OPTION_CLASSES, run

        verbs["run"] = make_typer_function(options_of(*OPTION_CLASSES), run, HELP)
    about["profile"] = "Write the profile of a model's clean activations that unsilent.protect needs."
    if asked == "profile":
        from unsilent.cli import profile

        verbs["profile"] = make_typer_function(options_of(profile.ProfileOptions), profile.profile, profile.HELP)
    for name, text in about.items():
        function = verbs[asked] if name == asked else root
        app.command(name, short_help=text.partition("\n")[0], cls=Panels)(function)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the ``unsilent`` command; never returns."""
    interrupt_on_ending()
    open_missing_output()
    escape_unencodable_output()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def open_missing_output() -> None:
    """Without stdout or stderr (``>&-``) what is printed goes nowhere, and no store is opened in their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def escape_unencodable_output() -> None:
    """Print characters that the terminal's encoding lacks as escapes, where Python would raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # while a reader who left can still be noticed
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
    """The same, where what is printed may still have to be flushed."""
    own, of_script = _split(arguments)
    try:
        command = typer.main.get_command(make_app(arguments))
        code: Any = command.main(own, prog_name="unsilent", standalone_mode=False, obj=of_script)
        return _interrupted() if code == INTERRUPTED else int(code or 0)
    except _CommandError as error:
        message = str(getattr(error, "format_message")())  # noqa: B009
        if "Usage:" in message:  # no arguments at all: the message is the help text
            print(message)
            return 2
        return _fail(_explained(message, getattr(getattr(error, "ctx", None), "command_path", "unsilent")), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except Interrupted as error:
        return _interrupted(str(error))
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
        return _defect(unexpected_error(error))


def _explained(message: str, command: str) -> str:
    """What a command cannot understand, and where to find what it does."""
    if command == "unsilent run" and message.startswith("No such option"):
        message = f"{message.rstrip('.')}; arguments of the script go after the script"
    end = " See" if message.endswith("?") else "; see"
    return f"{message.rstrip('.')}{end} {command} --help"


def _split(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our own arguments, and those after ``--``, which are the user's script's where a verb runs one."""
    if arguments[:1] == ["run"]:
        from unsilent.cli.run import split_arguments

        own, of_script = split_arguments(arguments[1:])
        return ["run", *own], of_script
    if arguments[:1] != ["noise"] or "--" not in arguments:
        return arguments, ()
    at = arguments.index("--")
    return arguments[:at], tuple(arguments[at + 1 :])


def _drop_output(code: int) -> int:
    """Nobody reads what we print (``unsilent … | head``), or it has no room: end without what is still to be flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _place(error: OSError) -> str:
    """What could not be written."""
    return str(error.filename) if error.filename else "what was printed"


def _interrupted(message: str = "interrupted") -> int:
    print(f"unsilent: {message}", file=sys.stderr)
    return INTERRUPTED


def _fail(message: str, code: int) -> int:
    line = escape_unprintable(message)
    if len(line) > MOST_MESSAGE:  # what was found is at its beginning, what to do at its end
        line = f"{line[: MOST_MESSAGE // 2]} … {line[-MOST_MESSAGE // 2 :]}"
    print(f"unsilent: error: {line}", file=sys.stderr)
    return code


def _defect(error: InternalError | UserCodeError) -> int:
    users = isinstance(error, UserCodeError)
    _frame(error.traceback_text, "your code raised" if users else "unsilent raised")
    return _fail(str(error), 2 if users else 1)


def _frame(trace: str, title: str) -> None:
    """A traceback, set apart."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(Panel(Text(trace.rstrip()), title=title, border_style="red"))
    else:
        print(f"--- {title} ---\n{trace.rstrip()}\n---", file=sys.stderr)

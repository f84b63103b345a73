"""Builds the Python function that runs a campaign of a kind, with the kind's options as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unsilent.basics.errors import UsageError
from unsilent.basics.option_function import OBSERVER, Argument, option_function
from unsilent.basics.options import Request, options_of
from unsilent.campaigns.campaign_run import CampaignRun, open_executor_of_options
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.options import store_or_temporary
from unsilent.campaigns.store import open_store

T = TypeVar("T")
STORE = Argument("store", str | Path | None, "File that stores the trials, to continue from. Default: none is kept.")


def campaign_function(
    kind: Kind[Any, Any, Any],
    result: type[T],
    summary: str,
    *,
    live_executor: Callable[[Any, CampaignRun, Any], AbstractContextManager[Executor]] | None = None,
    check: Callable[[Mapping[str, Any]], None] = lambda arguments: None,
    further: Sequence[Argument] = (),
) -> Callable[..., T]:
    """The Python function that runs a campaign of a kind.

    Its arguments are the kind's options, ``store`` and ``observer``.

    Args:
        result: The class of the result of the kind's ``run``.
        summary: The first line of the docstring.
        live_executor: Runs the trials of a workload that is an object; ``None`` if workloads are given by name.
        check: Function that raises ``UsageError`` for arguments that no option describes.
        further: Arguments that accept more values than the option with the same name.
    """

    # Long because the created function uses nearly all of these arguments.
    def run(call_arguments: Mapping[str, Any]) -> T:
        arguments = dict(call_arguments)
        check(arguments)
        workload: Any = arguments.get("workload")
        observer, make_executor = arguments["observer"], open_executor_of_options
        live = None if isinstance(workload, str) else live_executor
        if live is not None:
            arguments["workload"] = workload.name
            make_executor = partial(live, workload)
        wanted = Request.from_call(kind.option_classes, arguments)
        spec = kind.checked_spec(wanted)
        if live is not None and wanted[kind.execution_options].jobs not in (None, 1):
            raise UsageError(
                "a workload object runs in this process, so jobs must be 1; name it as 'file.py:name' to use more jobs"
            )
        command = wanted.python_call(name, *kind.command_classes) if live is not None else kind.command_line(wanted)
        with store_or_temporary(arguments["store"]) as path, open_store(path, kind, write=True) as store:
            campaign = CampaignRun(
                kind, wanted, spec, store, command, lambda noun: nullcontext(observer), make_executor
            )
            done: T = kind.run(campaign)
            return done

    name = kind.name.replace("-", "_")
    text = (
        f"{summary}\n\nArguments are the options of ``unsilent {kind.command_words}``, by the same names and with the same "
        "defaults."
    )
    files = [
        replace(argument, hint=str | Path | None)
        for argument in map(Argument.of_option, options_of(kind.spec).values())
        if argument.name in getattr(kind.spec, "FILES", ())
    ]
    further = (*files, STORE, OBSERVER, *further)
    module = kind.run.__module__
    return option_function(name, run, kind.option_classes, text, module=module, further=further, returns=result)

"""``unsilent plan STORE``: choose the parameters to protect with a given amount of memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Request
from unsilent.cli.file_sorts import STORE_WANTED, refuse_other_files
from unsilent.cli.paths import check_writable
from unsilent.command import MEASURE, Command, DisplayOptions
from unsilent.studies.plan.spec import PlanOptions, PlanOutputOptions

ENDINGS = (".json", ".toml")


def plan(request: Request) -> int:
    """Choose which parameters to put into protected memory, or to duplicate, and predict the failure rate that remains.

    Reads the store of a campaign of unsilent pvf, best with --per tensor --strata bits.

    With --validate, a second campaign checks the prediction.
    """
    from unsilent.cli.paths import report_path, writable_page
    from unsilent.cli.report_output import show_report
    from unsilent.studies.campaign_kinds import kind_of_store
    from unsilent.studies.plan.report import report
    from unsilent.studies.plan.study import make_plan, protected_list
    from unsilent.studies.pvf.kind import PVF

    options, plan_output, display = request[PlanOptions], request[PlanOutputOptions], request[DisplayOptions]
    check_output(plan_output.output, options)
    for store in filter(None, (options.store, options.truth)):
        refuse_other_files(store, STORE_WANTED)
        if (kind := kind_of_store(store)) is not PVF:
            raise UsageError(f"{store} is a store of unsilent {kind.command_words}; a plan needs one of unsilent pvf")
    page = report_path(options.store, plan_output.page or options.store.with_suffix(".plan.html"))
    page_path = writable_page(page, plan_output.page)
    command = request.command_line("plan", PlanOptions)
    result = make_plan(options, command, request.observer)
    if plan_output.output is not None:
        write_list(protected_list(result), plan_output.output)
    files = {"List": plan_output.output, "Validation store": result.validation_store}
    show_report(report(result), page_path, display.as_json, display.plain, files)
    return 0


def check_output(output: Path | None, options: PlanOptions) -> None:
    """Raise ``UsageError`` if the list of protected parameters cannot be written at the path."""
    if output is None:
        return
    if output.suffix not in ENDINGS:
        raise UsageError(f"--output is {str(output)!r}; expected a name that ends in {' or '.join(ENDINGS)}")
    inputs = [path for path in (options.store, options.truth, options.accelerator) if path is not None]
    if os.path.realpath(output) in map(os.path.realpath, inputs):
        raise UsageError(f"the list would overwrite {output}; give another --output")
    check_writable(output, "the list ")


def write_list(values: Mapping[str, Any], path: Path) -> None:
    """Write the list of protected parameters as JSON or TOML."""
    from unsilent.render.pages import write_file

    text = json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else toml_text(values)
    write_file(text.encode(), path, "the list")


def toml_text(values: Mapping[str, Any]) -> str:
    """The list of protected parameters as TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if name != "budget"]
    for budget in values["budget"]:
        lines += ["", "[[budget]]", f"name = {json.dumps(budget['name'])}"]
        for table in ("bytes", "blocks"):
            lines += ["", f"[budget.{table}]"]
            lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in budget[table].items()]
    return "\n".join(lines) + "\n"


COMMAND = Command(
    "plan", MEASURE, "unsilent plan STORE.sqlite --budget 5%", (PlanOptions, PlanOutputOptions, DisplayOptions), plan,
    is_long=True,
)  # fmt: skip

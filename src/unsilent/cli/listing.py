"""Verbs that list what there is: ``workloads``, ``faults``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence

from unsilent.cli import options as o


def workloads(as_json: o.Json = False) -> int:
    """List the built-in workloads and their options."""
    from unsilent.workloads import ZOO

    entries = [
        {
            "name": e.name,
            "description": e.description,
            "options": dict(e.options),
            "data": e.data,
            "weights": e.weights,
        }
        for e in ZOO.values()
    ]
    if as_json:
        print(json.dumps(entries, indent=2))
        return 0
    _table(
        [(e.name, e.description + _needs(e.data, e.weights), ", ".join(e.options)) for e in ZOO.values()],
        ("workload", "what it is", "options (--with)"),
    )
    print("\nYour own: file.py:name or package.module:name (a workload, or a function making one),")
    print("hf:DIR for a local transformers folder, or FILE.pt2 for a program of torch.export.")
    return 0


def _needs(data: str, weights: str) -> str:
    files = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "required"]
    optional = [f"--{n} FILE" for n, need in (("weights", weights), ("data", data)) if need == "optional"]
    return (f"; needs {', '.join(files)}" if files else "") + (f"; takes {', '.join(optional)}" if optional else "")


def faults(as_json: o.Json = False) -> int:
    """List the fault models and their parameters."""
    from unsilent.faults import FAULT_MODELS

    entries = [
        {
            "name": name,
            "description": inspect.cleandoc(factory.__doc__ or "").splitlines()[0],
            "parameters": {p.name: repr(p.default) for p in inspect.signature(factory).parameters.values()},
        }
        for name, factory in FAULT_MODELS.items()
    ]
    if as_json:
        print(json.dumps(entries, indent=2))
        return 0
    _table(
        [(e["name"], e["description"], ", ".join(e["parameters"])) for e in entries],  # type: ignore[misc]
        ("fault model", "what a struck element becomes", "parameters (name:key=value,…)"),
    )
    return 0


def _table(rows: Sequence[tuple[str, str, str]], heads: tuple[str, str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)

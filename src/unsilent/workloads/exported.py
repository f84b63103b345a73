"""``FILE.pt2``: a program written by ``torch.export.save``, with inputs from the user.

Such a file is code, like a user's Python file: torch compiles its content, and unpickles parts of it. It is loaded only
if the user names it, and never because a store names it. Inputs are only read as data.

Invariant: the program runs as it was exported. Inputs are checked against the names, sizes and types that are fixed in
it, and never adapted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import open_plain
from unsilent.outcomes import judge_for_output
from unsilent.workloads.base import Workload, call_model
from unsilent.workloads.exported_inputs import FORMS, ProgramInputs
from unsilent.workloads.model_fitting import isolated_training, parameter_count
from unsilent.workloads.program import Program, code_of, graph_running_modules, warnings_off

INPUTS = "inputs.pt"
"""Name of the file of inputs next to a program."""


def exported(*, program: str, data: str | None = None) -> Workload:
    """The workload of an exported program on the batches of ``data``.

    The judge follows from the shape of the output.

    Args:
        program: File written by ``torch.export.save``.
        data: File written by ``torch.save`` or safetensors file; default: ``inputs.pt`` next to the program.

    Raises:
        UsageError: the program cannot be loaded or was exported in training mode; inputs are missing or do not fit.
    """
    ref, path = program, Path(program).expanduser()
    inputs = Path(data).expanduser() if data else path.with_name(INPUTS)
    with isolated_training(0):
        module, takes = _load(ref, path)
        _check_mode(ref, module)
        if data is None and not inputs.exists():
            raise UsageError(
                f"workload {ref!r} needs inputs: save them with torch.save as {INPUTS} in its folder, or give --data FILE; "
                f"expected {FORMS}"
            )
        batches = takes.read(inputs)
        output = _try_out(ref, module, batches[0])
    return Workload(
        module,
        batches,
        judge=judge_for_output(output),
        name=ref,
        info={
            "description": f"exported program {path.name}",
            "data": f"{inputs.name}, {len(batches)} batch{'es' if len(batches) > 1 else ''} of the user's own",
            "parameters": parameter_count(module),
        },
    )


def load_program(ref: str) -> Program:
    """The program of a file, without inputs.

    Raises ``UsageError`` if it cannot be loaded or was exported in training mode.
    """
    with isolated_training(0):
        module, _ = _load(ref, Path(ref).expanduser())
        _check_mode(ref, module)
    return module


def _check_mode(ref: str, module: Program) -> None:
    dropouts = (code_of(body).first_active_dropout() for body in graph_running_modules(module))
    if name := next(filter(None, dropouts), None):
        raise UsageError(f"workload {ref!r} was exported in training mode ({name} is on); export model.eval()")


def _load(ref: str, path: Path) -> tuple[Program, ProgramInputs]:
    file = open_plain(path)
    try:
        with file, warnings_off(), _silent():
            loaded = torch.export.load(file)
            module = Program(loaded)
            return module, ProgramInputs(loaded, module)
    except Exception as error:  # a damaged file, or a file of another version, can raise any exception
        text = first_line(error)
        why = "" if "warnings above" in text else f" ({text})"
        raise UsageError(
            f"workload {ref!r} is not an exported program that torch {torch.__version__} can load{why}; "
            "save it again with torch.export.save of this version"
        ) from None


@contextmanager
def _silent() -> Iterator[None]:
    """Context without log messages.

    Torch logs a traceback for each file format that it tries without success.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@torch.no_grad()
def _try_out(ref: str, module: Program, batch: dict[str, Any]) -> Any:
    """The output of one run of a batch.

    Raises ``UsageError`` in one line if the inputs do not fit the program.
    """
    try:
        return call_model(module, batch)
    except Exception as error:
        raise UsageError(f"workload {ref!r} cannot run on batch 0 of its inputs: {first_line(error)}") from None

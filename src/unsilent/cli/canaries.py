"""``unsilent canaries make|check``: store a model's answers to a few inputs, and check them later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, WORKLOAD_PANEL, Option, Request
from unsilent.campaigns.options import DATA, WEIGHTS, WORKLOAD_OPTION
from unsilent.cli.tables import show_lines, show_result
from unsilent.command import WATCH, Command, DisplayOptions, Result, output_option

NO_WORKLOAD = (
    "no workload was given; expected unsilent canaries make WORKLOAD, such as digits-cnn (see unsilent workloads)"
)
NO_FILE = "no file was given; expected unsilent canaries check FILE MODEL"
NO_MODEL = "no model was given; expected unsilent canaries check FILE MODEL: a workload, a checkpoint or an adapter such as int8"
DEVICE = Option("auto, cpu or cuda[:i].", EXECUTION_PANEL)


@dataclass(frozen=True)
class MakeOptions:
    """Options of ``unsilent canaries make``."""

    workload: Annotated[
        str,
        Option("The workload: built in, file.py:name, package.module:name or hf:DIR.", "", missing_error=NO_WORKLOAD),
    ]
    count: Annotated[int, Option("Number of canaries.", WORKLOAD_PANEL, "count", short_flag="k")] = 16
    choice: Annotated[
        str,
        Option("boundary (nearest to another answer), random, or constructed (moved close to another answer).", WORKLOAD_PANEL),
    ] = "boundary"  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, WEIGHTS] = None
    seed: Annotated[int, Option("Seed of random choices.", WORKLOAD_PANEL)] = 0
    device: Annotated[str, DEVICE] = "cpu"
    output: Annotated[Path | None, output_option("Where to write the canaries.", "WORKLOAD.canaries")] = None


@dataclass(frozen=True)
class CheckOptions:
    """Options of ``unsilent canaries check``."""

    file: Annotated[Path, Option("A file that unsilent canaries make wrote.", "", missing_error=NO_FILE)]
    model: Annotated[
        str,
        Option("A workload, a checkpoint, or an adapter such as int8.", "", missing_error=NO_MODEL),
    ]
    compare: Annotated[
        str,
        Option("bits, labels, or the largest allowed difference, as a share of a tensor's largest magnitude.", WORKLOAD_PANEL),
    ] = "bits"  # fmt: skip
    workload: Annotated[
        str | None,
        Option("The workload that a checkpoint or an adapter belongs to.", WORKLOAD_PANEL, default_text="that of the canaries"),
    ] = None  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, WEIGHTS] = None
    device: Annotated[str, DEVICE] = "cpu"


def make(request: Request) -> int:
    """Store a few inputs of a workload with its model's answers, for canaries check."""
    from unsilent.compare.canaries import make_canaries
    from unsilent.engine.device_placement import resolve_device
    from unsilent.workloads.base import UNNAMED
    from unsilent.workloads.registry import load

    options = request[MakeOptions]
    device = resolve_device(options.device)
    workload = load(options.workload, dict(options.options), data=options.data, weights=options.weights)
    canaries = make_canaries(
        workload, options.count, options.choice, seed=options.seed, device=device, name=options.workload
    )
    own_name = options.workload.rpartition(":")[2] if workload.name == UNNAMED else workload.name
    path = options.output or Path(f"{own_name}.canaries")
    canaries.save(path)
    values = {"workload": canaries.workload, "canaries": canaries.count, "choice": canaries.choice,
              "environment": canaries.environment, "weights": canaries.weights, "file": str(path)}  # fmt: skip
    if request[DisplayOptions].as_json:
        show_result(request, "unsilent/canaries-make/1", "canaries make", {"results": [values]})
        return 0
    show_lines(
        f"Canaries: {canaries.count:,} of {canaries.workload}, {canaries.choice}",
        f"Bits can be compared on: {canaries.environment}",
        f"File: {path}",
    )
    return 0


def check(request: Request) -> Result:
    """Compare what a model answers to canaries with their stored answers.

    The exit code is 1 if the answer to a canary changed, otherwise 0.
    """
    from unsilent.compare.adapters.names import is_adapter
    from unsilent.compare.canaries import BITS, BITS_MAY_DIFFER, check_canaries, load_canaries, parse_comparison
    from unsilent.compare.models import load_models
    from unsilent.engine.device_placement import resolve_device
    from unsilent.workloads.registry import is_weights_file

    options = request[CheckOptions]
    comparison, device = parse_comparison(options.compare), resolve_device(options.device)
    canaries, text = load_canaries(options.file), options.model
    is_checkpoint, adapts, is_program = is_weights_file(text), is_adapter(text), text.endswith(".pt2")
    if adapts and comparison == BITS:
        raise UsageError(f"{options.file}: {text} adapts a model: {BITS_MAY_DIFFER}")
    needs_basis = is_checkpoint or adapts or is_program
    basis = options.workload or (_stored_workload(canaries.workload) if needs_basis else text)
    pair = load_models(
        text if is_checkpoint else basis,
        text,
        basis,
        options=dict(options.options),
        data=options.data,
        weights=options.weights,
    )
    for compared_model in (pair.original, pair.deployed):
        if compared_model.module is not None:
            compared_model.module.to(device)
    model = None if adapts else pair.deployed.module  # an adapted copy has other weights on purpose
    try:
        for module in (pair.original.module, None if is_program else model):
            if module is not None:
                canaries.check_architecture(module)
        return check_canaries(canaries, pair.deployed.run, comparison, model=model, name=text, device=device)
    except UsageError as error:
        raise UsageError(f"{options.file}: {error}") from None


def _stored_workload(name: str) -> str:
    """The built-in workload that a file of canaries names; raises ``UsageError`` for any other workload.

    Loading another one would run code that the file chooses.
    """
    from unsilent.workloads.zoo import ZOO

    if name not in ZOO:
        raise UsageError(
            f"the canaries are of {name!r}, which is not built in; give it with --workload, if you trust it"
        )
    return name


MAKE = Command(
    "canaries make", WATCH, "unsilent canaries make digits-cnn -k 16 -o digits.canaries", (MakeOptions, DisplayOptions),
    make,
)  # fmt: skip
CHECK = Command(
    "canaries check", WATCH, "unsilent canaries check digits.canaries digits-cnn", (CheckOptions,), check,
    has_report=True,
)  # fmt: skip

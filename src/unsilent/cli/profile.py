"""``unsilent profile WORKLOAD``: write a profile of a model's clean activations, for `unsilent.protect`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, Option, Request
from unsilent.cli.tables import show_lines, show_result
from unsilent.command import WATCH, Command, DisplayOptions, output_option

NO_WORKLOAD = "no workload was given; expected unsilent profile WORKLOAD, such as digits-cnn (see unsilent workloads)"


@dataclass(frozen=True)
class ProfileOptions:
    """Options of ``unsilent profile``."""

    workload: Annotated[
        str | None,
        Option("The workload: built in, file.py:name, package.module:name or hf:DIR.", "", missing_error=NO_WORKLOAD),
    ] = None
    workload_options: Annotated[
        tuple[str, ...], Option("An option of the workload: key=value.", EXECUTION_PANEL, "with", is_repeatable=True)
    ] = ()
    data: Annotated[str | None, Option("Data for a workload that takes some.", EXECUTION_PANEL)] = None
    weights: Annotated[str | None, Option("Weights for a workload that takes some.", EXECUTION_PANEL)] = None
    detector: Annotated[
        str, Option("The detector, or several joined by +, like dr-dna+weight-integrity+abft.", EXECUTION_PANEL)
    ] = "dr-dna"
    rate: Annotated[
        float, Option("Share of clean samples that may raise a false alarm in a call.", EXECUTION_PANEL)
    ] = 0.01
    samples: Annotated[int, Option("Maximum number of clean samples to use.", EXECUTION_PANEL)] = 1000
    layers: Annotated[
        tuple[str, ...],
        Option(
            "Layers that are read, as a glob over names of modules; may be repeated.", EXECUTION_PANEL, "layer",
            default_text="a choice that keeps the cost low", is_repeatable=True,
        ),
    ] = ()  # fmt: skip
    seed: Annotated[int, Option("Seed for the random choice of what the detector reads.", EXECUTION_PANEL)] = 0
    device: Annotated[str, Option("auto, cpu or cuda[:i].", EXECUTION_PANEL)] = "auto"
    output: Annotated[Path | None, output_option("Where to write the profile.", "WORKLOAD.profile")] = None


def profile(options: Request) -> int:
    """Write the profile of a model's clean activations that unsilent.protect needs."""
    chosen = options[ProfileOptions]
    if chosen.workload is None:
        raise UsageError(NO_WORKLOAD)
    if chosen.samples < 1:
        raise UsageError(f"--samples is {chosen.samples}; expected 1 or more")
    from unsilent.campaigns.options import read_pairs
    from unsilent.engine.device_placement import place, place_model, resolve_device
    from unsilent.protection.detector import check_can_be_stored, make_detector
    from unsilent.protection.profile import make_profile
    from unsilent.workloads.base import CALIBRATION, CalibratedWorkload
    from unsilent.workloads.registry import load

    start = time.perf_counter(), time.process_time()
    check_can_be_stored(make_detector(chosen.detector))
    pairs = dict(read_pairs(chosen.workload_options))
    workload = load(chosen.workload, pairs, data=chosen.data, weights=chosen.weights)
    if not isinstance(workload, CalibratedWorkload):
        raise UsageError(
            f"workload {workload.name!r} has no clean inputs; expected a method clean_batches(part, samples), or call "
            "unsilent.protect(model, batches) with batches of your own"
        )
    device = resolve_device(chosen.device)
    model = place_model(workload.model(), device, None)
    batches = [place(batch, device, None) for batch in workload.clean_batches(CALIBRATION, chosen.samples)]
    result = make_profile(
        model,
        batches,
        chosen.detector,
        rate=chosen.rate,
        layers=chosen.layers,
        run=workload.run,
        seed=chosen.seed,
    )
    path = chosen.output or Path(f"{workload.name}.profile")
    result.save(path)
    values = {
        "workload": chosen.workload, "detector": result.detector.name, "rate": result.rate, "threshold": result.threshold,
        "threshold_samples": result.samples, "layers": result.layer_names, "detector_bytes": result.detector.nbytes,
        "model": result.model, "profile": str(path),
    }  # fmt: skip
    if options[DisplayOptions].as_json:
        seconds = {"seconds": time.perf_counter() - start[0], "cpu_seconds": time.process_time() - start[1]}
        show_result(options, "unsilent/profile/1", "profile", {"seed": chosen.seed, **seconds, "results": [values]})
        return 0
    show_lines(
        f"Detector: {result.detector.name}, {len(result.layer_names)} layers, {result.detector.nbytes:,} bytes",
        f"Threshold: {result.threshold:.4g}, for a rate of {result.rate:g} false alarms per sample and call, taken from "
        f"{result.samples:,} samples",
        f"Profile: {path}",
    )
    return 0


COMMAND = Command("profile", WATCH, "unsilent profile digits-cnn", (ProfileOptions, DisplayOptions), profile)

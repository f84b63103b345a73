"""Measures and searches what ``unsilent training-example`` shows: noise floors, and a fault that ends in each class.

``python tools/training_examples.py [STORE]`` writes them into the package. It takes about ten minutes on one core; STORE keeps
the fault-free runs. Of each class the first candidate that ends in it is stored, with its elements and values; a class without
one is printed and left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

from unsilent.basics.errors import InjectionError
from unsilent.faults import fault_model
from unsilent.faults.naming import SiteName, parse_site
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.outcomes.training import Thresholds
from unsilent.replicas import ReplicaStore, Switches
from unsilent.replicas.noise_floors import run_noise_floors
from unsilent.studies.training.example import CLASSES, EXAMPLE_TRIAL, FILE, class_name
from unsilent.studies.training.fault_sampler import SampledFault
from unsilent.studies.training.judging import TrainingJudge, replica_spec
from unsilent.studies.training.runner import TrainingRunner
from unsilent.studies.training.spec import InjectionPoint, TrainingSpec

SPEC = TrainingSpec("train-resnet", (("steps", "400"),))
"""The training of the examples: so short that both runs and loading take less than a minute of one core."""
NOISE = "impl"
MIDDLE, LATER, LAST = (0.7,), (0.85, 0.9, 0.7), (0.985, 0.95)
LARGE = ("set:value=1e37", "set:value=1e25", "set:value=1e9", "set:value=1e3")
MOMENTS = ("scale:factor=1e3,rate=1", "scale:factor=30,rate=1", "set:value=10")
WEIGHTS = ("scale:factor=-1,rate=1", "scale:factor=30,rate=1", "zero:rate=1", "scale:factor=3,rate=1", *LARGE)
CANDIDATES = {
    "masked": (MIDDLE, ("fwd", "grad_wt"), ("bitflip:bits=22", "bitflip:bits=0")),
    "immediate-nan": (MIDDLE, ("fwd",), ("set:value=nan", "set:value=inf")),
    "short-term-nan": (MIDDLE, ("grad_wt", "grad_in"), ("set:value=nan", *LARGE)),
    "slow-degrade": (LATER, ("exp_avg",), ("set:value=100", *MOMENTS)),
    "sharp-degrade": (LATER, ("param",), WEIGHTS),
    "sharp-slow-degrade": (LATER, ("exp_avg", "param"), (*MOMENTS, *WEIGHTS)),
    "low-test": (LAST, ("fwd",), ("set:value=1e18", "set:value=1e6", "set:value=1e3")),
}
"""Places to try for each class: shares of the run, a kind of site, fault models; the first, middle and last such site."""


def candidates(runner: TrainingRunner, wanted: str) -> Iterator[SampledFault]:
    """Faults that may end in a class."""
    steps = runner.golden.steps
    shares, kinds, models = CANDIDATES[wanted]
    for share, model, kind in product(shares, models, kinds):
        sites = list(sites_of_kind(runner, kind))
        for site in (sites[-1], sites[len(sites) // 2], sites[0]):
            parsed = parse_site(site)
            layer = parsed.layer if parsed.kind == "op" else SiteName("param", parsed.name).layer
            point = InjectionPoint(int(share * steps), site, kind, layer, model)
            yield SampledFault(point, (UnresolvedFault(site, fault_model(model)),))


def sites_of_kind(runner: TrainingRunner, kind: str) -> Iterator[str]:
    """Sites of a phase, of weights of several axes, or of a kind of moments of these, in the order of the step."""
    for region in runner.sampler.regions:
        held = region.site.startswith("param:") if kind == "param" else region.site.endswith(f"/{kind}")
        if held and len(region.shape) > 1 and not region.site.startswith("op:"):
            yield region.site
    for place in runner.sampler.everywhere:
        if place.phase == kind:
            yield f"op:{place.operation}/{kind}/out"


def main() -> None:
    """Measure the floors, search an example of each class, and write the file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ReplicaStore(Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/floor.sqlite"), write=True) as store,
    ):
        floors = run_noise_floors(replica_spec(SPEC), store, Switches.parse(NOISE), jobs=1)
    runner = TrainingRunner(SPEC)
    judge = TrainingJudge(runner.establish_baseline(), floors, Thresholds())
    examples = {}
    for wanted in CLASSES:
        for number, candidate in enumerate(candidates(runner, wanted)):
            try:
                row = runner.run_faults(EXAMPLE_TRIAL, candidate)
            except InjectionError as error:
                print(f"{wanted} {number}: {error}", flush=True)
                continue
            ended = class_name(judge.judge(row).outcome)
            i = candidate.injection
            print(
                f"{wanted} {number}: {i.model} at {i.site}, step {i.step}: {ended} {row.test_accuracy:.3f}", flush=True
            )
            faults = json.loads(row.faults)
            if ended in CLASSES and ended not in examples and isinstance(faults, list):  # not the digest of a long one
                examples[ended] = {"injection": i._asdict(), "faults": faults}
            if wanted in examples:
                break
        else:
            print(f"{wanted}: none of the candidates ends in this class", flush=True)
    data = {
        "workload": SPEC.workload, "options": dict(SPEC.options),
        "floors": [asdict(floors.implementation), asdict(floors.seeds)],
        "examples": {name: examples[name] for name in CLASSES if name in examples},
    }  # fmt: skip
    FILE.write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

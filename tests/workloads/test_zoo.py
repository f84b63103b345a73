"""Every built-in workload keeps the contract: one table, all names."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import json
import subprocess
import sys

import pytest
import torch

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.outcomes.tensors import leaves
from unsilent.workloads import HF, ZOO, InferenceWorkload, load
from unsilent.workloads.base import call_model
from unsilent.workloads.registry import PASSED

from .conftest import QUICK, TRAINED, fresh

NAMES = few(sorted(ZOO), *QUICK)
OWN_RUN = ("scenes-segformer", "scenes-detector")
"""Workloads whose output is computed from that of the model."""


def _equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_contract(zoo, name):
    workload = zoo(name)
    assert isinstance(workload, InferenceWorkload)
    assert workload.name == name
    model = workload.model()
    assert model is workload.model()
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for batch in workload.batches():
            output = workload.run(model, batch)
            assert all(torch.isfinite(leaf).all() for leaf in leaves(output))
            assert name in OWN_RUN or all(map(torch.equal, leaves(output), leaves(call_model(model, batch))))
            verdict = workload.judge(output, output, batch)
            assert not verdict.incorrect.any()
            assert (verdict.severity == 0).all()
            assert {len(leaf) for leaf in leaves(output)} == {len(verdict.incorrect)}


@pytest.mark.parametrize("name", NAMES)
def test_second_load_has_the_same_bits(zoo, name, cifar_files):
    first, second = zoo(name), fresh(name, cifar_files)
    assert first.model() is not second.model()
    ours, theirs = first.model().state_dict(), second.model().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(_equal(ours[key], theirs[key]) for key in ours)
    assert len(first.batches()) == len(second.batches())
    assert all(_equal(a, b) for a, b in zip(first.batches(), second.batches(), strict=True))
    assert first.info == second.info


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_exactly_one_component(zoo, name):
    workload = zoo(name)
    for parameter, _ in workload.model().named_parameters():
        matching = [
            component
            for component, globs in workload.components.items()
            if any(fnmatch.fnmatchcase(parameter, glob) for glob in globs)
        ]
        assert len(matching) == 1, (parameter, matching)
    for globs in workload.components.values():
        for glob in globs:
            assert any(fnmatch.fnmatchcase(n, glob) for n, _ in workload.model().named_parameters()), glob


@pytest.mark.parametrize("name", NAMES)
def test_info_is_json_and_complete(zoo, name):
    info = zoo(name).info
    assert json.loads(json.dumps(info)) == info
    assert {"description", "data", "accuracy", "parameters", "samples", "citation"} <= info.keys()
    assert info["parameters"] == sum(p.numel() for p in zoo(name).model().parameters())
    assert info["accuracy"]["value"] >= TRAINED.get(name, 0)


@pytest.mark.parametrize("entry", [*ZOO.values(), HF], ids=lambda e: e.name)
def test_declared_options_are_those_of_the_factory(entry):
    module, _, function = entry.factory_path.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    fixed = {"folder"} if entry is HF else set(entry.fixed_options)
    assert set(parameters) - set(PASSED) - fixed == set(entry.options)
    for key, need in (("data", entry.data), ("weights", entry.weights)):
        assert (key in parameters) == (need != "no")
        assert need != "required" or parameters[key].default is inspect.Parameter.empty
    for option, text in entry.options.items():
        default = parameters[option].default
        if isinstance(default, int) and default:
            assert f"({default})" in text


@pytest.mark.parametrize("name", sorted(TRAINED))
@pytest.mark.parametrize("count", ["0", "-3", "9999999"])
def test_number_of_samples_is_checked_before_anything_is_trained(name, count):
    with pytest.raises(UsageError, match=rf"workload '{name}': option 'eval' is {count}; expected 1 to \d+"):
        load(name, {"eval": count})


def test_fewer_samples_are_the_same_model(zoo):
    few = load("digits-cnn", {"eval": "5"})
    assert torch.equal(few.batches()[0], zoo("digits-cnn").batches()[0][:5])
    assert _equal(few.model().state_dict(), zoo("digits-cnn").model().state_dict())


def test_listing_imports_no_torch():
    code = (
        "import sys; from unsilent.workloads import ZOO; assert len(ZOO) == 14;"
        "assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

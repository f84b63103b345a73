"""``unsilent training-example`` as a user meets it: what it prints of each stored fault, and errors in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from campaigns.faulty_loop import write_loop
from conftest import in_process
from unsilent.faults import Fault
from unsilent.outcomes.training import TrainingOutcome
from unsilent.replicas.noise_floor_records import ReplicaDifferences
from unsilent.studies.training import example
from unsilent.studies.training.example import CLASSES, class_name

FLOOR = ReplicaDifferences("within", (0.0,) * 20, (0.0,) * 20, (0.0,) * 20, (False,) * 20, 10, (0.1, 0.1))
STEPS, STEP = 12, 4
AS_STORED = "as it did when it was stored"
SAME_BITS = "the same bits as when the fault was stored"


def shown(*words):
    done = in_process("training-example", *words, "--quiet", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A file whose only fault writes NaN into a weight of a tiny training, stored as a class in which it cannot end."""
    nan = np.array([np.nan], dtype=np.float32).view(np.uint32)
    fault = Fault("param:fc.weight", "float32", (3, 144), np.array([5]), "set", nan)
    injection = {"step": STEP, "site": fault.site, "phase": "param", "layer": "fc", "model": "set:value=nan"}
    floors = [FLOOR.to_json(), replace(FLOOR, switches="init").to_json()]
    record = {
        "workload": write_loop(tmp_path), "options": {"steps": str(STEPS)}, "floors": floors,
        "examples": {"low-test": {"injection": injection, "faults": [fault.to_json()]}},
    }  # fmt: skip
    monkeypatch.setattr(example, "FILE", tmp_path / "examples.json")
    example.FILE.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no class of outcomes was named; give one like low-test"),
        (("low-tset",), "unknown class of outcomes 'low-tset'; did you mean 'low-test'? Known: immediate-nan, "),
        (("masked",), "no fault that ends in masked is stored: a search of candidates came upon none; choose low-test"),
    ],
)
def test_a_class_without_an_example_is_refused_in_one_line(stored, words, said):
    done = in_process("training-example", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_that_ends_in_another_class_is_reported_as_such(stored, tmp_path):
    page = tmp_path / "page.html"
    done = in_process("training-example", "low-test", "--plain", "-o", page)
    assert done.returncode == 0
    assert "ended in immediate-nan; when it was stored, it ended in low-test" in done.stdout
    assert "can end in another class on another CPU" in done.stdout
    assert f"Injected in step {STEP} of {STEPS} (the first is 0): set:value=nan at param:fc.weight" in done.stdout
    assert f"loss is not finite at step {STEP}" in done.stdout
    assert "unsilent training-example low-test" in page.read_text()


def test_both_runs_are_in_the_json(stored):
    found = shown("low-test")
    assert (found["stored_class"], found["class"]) == ("low-test", "immediate-nan")
    assert found["fault_free_run_as_stored"] is False  # the floors are of no run
    losses = found["losses"]
    assert len(losses["without the fault"]) == STEPS
    assert losses["with the fault"] == [None]
    accuracies = found["held_out_accuracy"]
    assert accuracies["with the fault"] is None
    assert 0 <= accuracies["without the fault"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_stored_fault_ends_in_its_class_where_the_fault_free_run_has_the_stored_losses(name, tmp_path):
    page = tmp_path / "page.html"
    done = in_process("training-example", name, "--plain", "--quiet", "-o", page)
    assert (done.returncode, done.stderr) == (0, "")
    ended, how = re.search(r"ended in ([a-z-]+)[,;] (.*)", done.stdout).groups()
    has_stored_class = class_name(TrainingOutcome(ended)) == name
    assert how == (AS_STORED if has_stored_class else f"when it was stored, it ended in {name}")
    if SAME_BITS in page.read_text() or name == "immediate-nan":
        assert has_stored_class
    assert re.search(r"Injected in step \d+ of 400 \(the first is 0\): \S+ at (op|param|optim):", done.stdout)
    accuracies = dict(re.findall(r"^(with(?:out)?)_the_fault +held_out_accuracy +(\S+)", done.stdout, re.MULTILINE))
    assert float(accuracies["without"]) > 0.9
    assert ("with" in accuracies) == (not ended.endswith("-nan"))

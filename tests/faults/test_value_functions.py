"""Python functions as value models, and mixtures of fault models."""

import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from unsilent import value_model
from unsilent.basics.errors import UsageError, ValueModelError
from unsilent.faults import Fault, Region, fault_model
from unsilent.faults.fault_texts import function_file, with_function_file, without_folder
from unsilent.faults.mixtures import Mixture, asked_fault_model

SOURCE = """
import numpy as np
import unsilent

@unsilent.value_model("increment")
def _(words):
    return words + words.dtype.type(1)

@unsilent.value_model("coin")
def coin(words, random):
    return np.where(random % np.uint64(2) == 0, words, ~words)

@unsilent.value_model("by-dtype")
def by_dtype(words, random, dtype):
    return np.full_like(words, len(dtype))

@unsilent.value_model("wide")
def wide(words):
    return words.astype(np.uint64)

@unsilent.value_model("raises")
def raises(words):
    raise KeyError("gone")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_faults.py"
    path.write_text(SOURCE)
    return path


def draw(text, region=None, seed=0):
    region = region or Region("param:w", "float32", (6, 7))
    (fault,) = asked_fault_model(str(text)).draw([region], np.random.default_rng(seed))
    return fault


def test_a_function_makes_new_words_of_the_old_ones(file):
    fault = draw(f"{file}:increment:count=5")
    words = np.arange(5, dtype=np.uint32)
    assert fault.apply(words).tolist() == [1, 2, 3, 4, 5]
    assert words.tolist() == [0, 1, 2, 3, 4]
    assert fault.describe() == "param:w function on 5 elements"
    assert asked_fault_model(f"{file}:increment:count=5").text == f"{file}:increment:count=5"


def test_random_bits_are_fixed_by_the_fault_and_belong_to_elements(file):
    fault = draw(f"{file}:coin:count=40")
    words = np.arange(40, dtype=np.uint32)
    result = fault.apply(words)
    assert fault.apply(words).tolist() == result.tolist()
    assert 0 < (result == words).sum() < 40
    part = replace(fault, elements=fault.elements[7:9], operands=fault.operands[7:9])
    assert part.apply(words[7:9]).tolist() == result[7:9].tolist()


def test_a_function_may_know_the_dtype_that_is_held(file):
    fault = draw(f"{file}:by-dtype", Region("param:w", "bfloat16", (3,)))
    assert fault.apply(np.zeros(1, np.uint16)).tolist() == [len("bfloat16")]


def test_a_record_names_no_file(file):
    fault = draw(f"{file}:coin:count=3")
    text = json.dumps(fault.to_json())
    assert "my_faults" not in text
    again = Fault.from_json(json.loads(text))
    assert again == fault == pickle.loads(pickle.dumps(fault))
    assert again.apply(np.zeros(3, np.uint32)).tolist() == fault.apply(np.zeros(3, np.uint32)).tolist()


@pytest.mark.parametrize("function", [None, "os.system@0123456789abcdef", "coin", "coin@0123", 7])
def test_records_with_other_functions_are_refused(file, function):
    record = draw(f"{file}:coin").to_json() | {"function": function}
    with pytest.raises(UsageError, match="fault record: function"):
        Fault.from_json(record)


def test_a_function_that_is_not_loaded_is_not_looked_for(file):
    record = draw(f"{file}:coin").to_json() | {"function": "coin@0123456789abcdef"}
    with pytest.raises(ValueModelError, match="needs the value model coin, which this process has not loaded"):
        Fault.from_json(record).apply(np.zeros(1, np.uint32))


def test_a_file_that_is_changed_has_other_faults(file):
    before = draw(f"{file}:coin").function
    file.write_text(SOURCE.replace("== 0", "== 1"))
    assert draw(f"{file}:coin").function != before


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("wide", ValueModelError, r"value model wide returned uint64 of shape \(1,\); expected uint32 of shape \(1,\)"),
        ("raises", ValueModelError, "value model raises raised KeyError: 'gone'"),
        ("con", UsageError, "unknown value model of .*my_faults.py 'con'; did you mean 'coin'"),
        ("coin:rate=2", UsageError, "rate=2.0; expected a probability"),
        ("coin:bits=3", UsageError, "unknown parameter of fault model 'coin': 'bits'"),
    ],
)
def test_what_goes_wrong_in_a_file(file, name, error, message):
    with pytest.raises(error, match=message):
        draw(f"{file}:{name}").apply(np.zeros(1, np.uint32))


def test_what_cannot_be_a_value_model(tmp_path):
    with pytest.raises(UsageError, match="expected letters, digits, - and _, a letter first"):
        value_model("a b")
    with pytest.raises(UsageError, match=r"value model many takes \(a, b, c, d\); expected \(words, random, dtype\)"):
        value_model("many")(lambda a, b, c, d: a)
    with pytest.raises(UsageError, match=r"takes \(\*words\)"):
        value_model("any")(lambda *words: words)
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="has no value model; decorate a function with"):
        draw(tmp_path / "empty.py:x")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match="value model .*broken.py' raised ZeroDivisionError"):
        draw(tmp_path / "broken.py:x")


def test_a_text_from_elsewhere_runs_no_file(file):
    with pytest.raises(UsageError, match="cannot read 'coin'"):
        fault_model(f"{file}:coin")


def test_a_mixture_draws_its_parts_by_their_weights():
    model = asked_fault_model("3*bitflip + 1*burst:length=3")
    assert isinstance(model, Mixture)
    assert model.text == "3*bitflip + 1*burst:length=3"
    rng, region = np.random.default_rng(2), Region("param:w", "float32", (9,))
    flips = Counter(len(model.choose(rng).draw([region], rng)[0].bit_positions()) for _ in range(2000))
    assert set(flips) == {1, 3}
    assert stats.binomtest(flips[1], 2000, 0.75).pvalue > 1e-4


@pytest.mark.parametrize(
    ("text", "lasts"),
    [
        ("bitflip:lasts=3", 3),
        ("bitflip:count=2,lasts=3", 3),
        ("zero:lasts=end", None),
        ("zero:run=4,lasts=end", None),
        ("zero:lasts=1", 1),
        ("zero", 1),
    ],
)
def test_how_long_a_fault_lasts(text, lasts):
    model = asked_fault_model(text)
    assert model.lasts == lasts
    assert asked_fault_model(model.text) == model
    assert asked_fault_model("zero:lasts=2,run=4").text == "zero:run=4,lasts=2"


def test_what_a_fault_cannot_last():
    for value in ("0", "-1", "", "x", "1.5"):
        with pytest.raises(UsageError, match="expected a number of batches or steps, 1 or more, or end"):
            asked_fault_model(f"zero:lasts={value}")
    with pytest.raises(UsageError, match="unknown parameter"):
        fault_model("zero:lasts=2")  # where nothing could last


@pytest.mark.parametrize(
    ("text", "begins", "canonical"),
    [
        ("bitflip:from=3", (3, 3), "bitflip:from=3"),
        ("bitflip:count=2,from=0..4", (0, 4), "bitflip:count=2,from=0..4"),
        ("zero:from=2,run=4", (2, 2), "zero:run=4,from=2"),
        ("zero:lasts=end,from=2..2", (2, 2), "zero:from=2,lasts=end"),
        ("zero", None, "zero"),
    ],
)
def test_when_a_fault_begins(text, begins, canonical):
    model = asked_fault_model(text)
    assert (model.begins, model.text) == (begins, canonical)
    assert asked_fault_model(model.text) == model


def test_when_a_fault_cannot_begin():
    for value in ("-1", "", "x", "1.5", "3..2", "1..", "..2", "end", "1...2", "\u0663"):
        with pytest.raises(UsageError, match="expected the number of a batch or step, 0 or more, or a range like 2..5"):
            asked_fault_model(f"zero:from={value}")
    with pytest.raises(UsageError, match="unknown parameter"):
        fault_model("zero:from=2")  # where there is no moment


def test_texts_of_faults_with_functions():
    text = "0.5*a/my.py:f:count=3 + 2*zero:whole=row"
    assert function_file(text) == "a/my.py"
    assert without_folder(text) == "0.5*my.py:f:count=3 + 2*zero:whole=row"
    assert with_function_file("a/my.py:f", "b.py") == "b.py:f"
    assert function_file("bitflip:bits=1+3") is None
    with pytest.raises(UsageError, match="names functions of 2 files"):
        function_file("1*a.py:f + 1*b.py:f")
    with pytest.raises(UsageError, match=r"--fault 0\*zero has weight 0"):
        asked_fault_model("1*bitflip + 0*zero")


@pytest.mark.parametrize("before", ["", "0.7*bitflip + 0.3*", "0.7*bitflip:count=2 +  "])
@pytest.mark.parametrize("after", ["", ":count=2", " + 2*zero"])
def test_a_path_that_looks_like_a_mixture_is_refused(tmp_path, monkeypatch, before, after):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir with + sign").mkdir()
    (tmp_path / "dir with + sign" / "f.py").write_text(SOURCE)
    with pytest.raises(UsageError) as refused:
        asked_fault_model(f"{before}dir with + sign/f.py:increment{after}")
    assert str(refused.value) == (
        "--fault names dir with + sign/f.py, but ' + ' in a path separates the parts of a mixture; rename the folder or file, "
        "or run the command in its folder and give f.py:increment"
    )
    monkeypatch.chdir(tmp_path / "dir with + sign")
    assert "f.py:increment" in asked_fault_model(f"{before}f.py:increment{after}").text


def test_a_sign_without_blanks_may_be_in_a_path(tmp_path):
    path = tmp_path / "a+b.py"
    path.write_text(SOURCE)
    assert len(asked_fault_model(f"1*bitflip + 1*{path}:increment").parts) == 2


IMPURE = """
import numpy as np
import unsilent

calls = []

@unsilent.value_model("counts")
def counts(words):
    calls.append(1)
    return words ^ words.dtype.type(len(calls) % 7)

@unsilent.value_model("draws")
def draws(words):
    return np.random.default_rng().integers(0, 2**32, len(words), np.uint32)

@unsilent.value_model("changes")
def changes(words, random):
    random += np.uint64(1)
    words[:] = random.astype(words.dtype)
    return words
"""


@pytest.mark.parametrize("name", ["counts", "draws"])
def test_a_function_that_is_not_pure_is_refused(tmp_path, name):
    path = tmp_path / "impure.py"
    path.write_text(IMPURE)
    with pytest.raises(ValueModelError) as refused:
        draw(f"{path}:{name}:count=5").apply(np.arange(5, dtype=np.uint32))
    assert str(refused.value) == (
        f"value model {name} returned different values for the same bits; it must be a pure function of its arguments, without "
        "state and without random numbers of its own: use the argument random"
    )


def test_a_function_may_write_into_its_arguments(tmp_path):
    path = tmp_path / "impure.py"
    path.write_text(IMPURE)
    fault = draw(f"{path}:changes:count=5")
    words = np.arange(5, dtype=np.uint32)
    first = fault.apply(words)
    assert first.tolist() == fault.apply(words).tolist()
    assert words.tolist() == [0, 1, 2, 3, 4]

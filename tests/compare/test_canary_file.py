"""Files of canaries: an answer keeps its nesting, and whatever a file says, it is read or refused in one line."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.compare.canaries import check_canaries, load_canaries, make_canaries
from unsilent.compare.canary_choice import RANDOM
from unsilent.protection.hashed_file import FileKind
from unsilent.workloads.base import Workload

JUDGES = ("top1", "topk:k=2", "threshold", "threshold:logits=true", "next-token", "exact-sequence", "tolerance",
          "segmentation", "detections")  # fmt: skip


def run(model, batch):
    """An answer whose decision is not its first tensor."""
    scores = model(batch)
    return {"hidden": scores.flip(1), "logits": scores}


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3).eval()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Text and arrays of a file of canaries, and the folder that it is in."""
    folder = tmp_path_factory.mktemp("canaries")
    inputs = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    make_canaries(Workload(model(), [inputs], name="net", run=run), 3).save(folder / "c")
    with safe_open(str(folder / "c"), framework="pt") as file:
        text = json.loads(file.metadata()["canaries"])
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    del text["xxh3-128"]
    return folder, text, arrays


def load_written(folder, text, arrays):
    """What is read of a file with this text and a right hash."""
    kind = FileKind("canaries", "unsilent/canaries/", int(text["format"].rpartition("/")[2]), "", "")
    kind.write(folder / "hostile", {key: value for key, value in text.items() if key != "format"}, arrays)
    return load_canaries(folder / "hostile")


def refusal(call):
    """What a refused call says; empty where it is not refused."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def use(folder, text, arrays):
    """Read such a file and check a model with it by every comparison."""
    own = model()
    canaries = load_written(folder, text, arrays)
    canaries.check_architecture(own)
    canaries.save(folder / "again")
    for comparison in ("bits", "labels", 0.1):
        said = refusal(
            lambda how=comparison: check_canaries(canaries, lambda batch: run(own, batch), how, model=own).report()
        )
        assert "\n" not in said


def places(value, path=()):
    """Paths to all values of a nested one."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def changed(text, path, value):
    """A copy of nested text with another value at a place."""
    text = copy.deepcopy(text)
    inner = text
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return text


ODD = st.sampled_from([None, True, False, -1, 0, 5, 10**30, 0.5, "x", "", [], {}, [-1], [1, 2], [2**40, 2**40], [10**30],
                       {"a": [-1]}, {"a": None}, [[]], [None], ["float32"], {"tensor of the file": "0/0"}, *JUDGES])  # fmt: skip
DTYPES = st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float64, torch.float16, torch.float8_e4m3fn])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_text_with_a_right_hash_is_used_or_refused_in_one_line(content, data):
    folder, text, arrays = content
    path = data.draw(st.sampled_from([path for path in places(text) if path not in ((), ("format",))]))
    dtype = data.draw(st.none() | DTYPES)
    kept = arrays if dtype is None else {key: array.to(dtype) for key, array in arrays.items()}
    hostile = changed(text, path, data.draw(ODD))
    assert "\n" not in refusal(lambda: use(folder, hostile, kept))


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("shapes",), {"a": [-1]}, "a shape that no tensor has"),
        (("shapes",), {"a": [10**30]}, "a shape that no tensor has"),
        (("shapes",), {"a": [2**40, 0, 2**40]}, "a shape that no tensor has"),
        (("shapes",), [], "is not a file of canaries"),
        (("shapes",), None, "is not a file of canaries"),
        (("shapes",), "x", "is not a file of canaries"),
        (("dtypes",), None, "is not a file of canaries"),
        (("dtypes",), [1], "a name in it is no text"),
        (("dtypes",), "float32", "its dtypes are no list"),
        (("judge",), 5, "a name in it is no text"),
        (("choice",), "best", "its choice of inputs is unknown"),
        (("parts",), [], "it holds no canary"),
        (("parts", 0, "answer", 0), "x", "an answer is no list of tensors"),
        (("parts", 0, "nesting"), 5, "does not name each of its tensors once"),
        (("parts", 0, "nesting"), [True, 0], "does not name each of its tensors once"),
    ],
)
def test_a_text_that_is_none_of_canaries_is_refused(content, path, value, problem):
    folder, text, arrays = content
    with pytest.raises(UsageError, match=problem):
        load_written(folder, changed(text, path, value), arrays)


def test_an_answer_that_is_not_finite_is_refused(content):
    folder, text, arrays = content
    with pytest.raises(UsageError, match="an answer has NaN or infinity"):
        load_written(folder, text, {key: array / 0 for key, array in arrays.items()})


@pytest.mark.parametrize("rule", ["top1", "threshold:logits=true"])
def test_whole_numbers_and_truth_values_are_compared_by_label(content, tmp_path, rule):
    width = 3 if rule == "top1" else 1
    inputs = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    own = nn.Linear(4, width).eval()
    for dtype in (torch.bool, torch.uint8, torch.int64):
        workload = Workload(own, [inputs], judge=rule, run=lambda model, batch, to=dtype: (model(batch) > 0).to(to))
        make_canaries(workload, 3, RANDOM).save(tmp_path / "c")
        assert check_canaries(load_canaries(tmp_path / "c"), lambda x, w=workload: w.run(own, x), "labels").changed == 0


# -- answers with several tensors ----------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Boxes, scores and labels of two objects an image; ``shift`` moves the boxes."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x):
        corner = x[:, :1, None].abs() + torch.arange(2.0)[:, None] + self.shift
        boxes = torch.cat([corner, corner, corner + 1, corner + 1], 2)
        return {
            "boxes": boxes,
            "scores": torch.full((len(x), 2), 0.9),
            "labels": torch.ones(len(x), 2, dtype=torch.long),
        }


def test_detections_are_compared_as_sets_of_objects(tmp_path):
    inputs = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    make_canaries(Workload(Detector().eval(), [inputs], judge="detections"), 4, RANDOM).save(tmp_path / "c")
    canaries = load_canaries(tmp_path / "c")
    results = {shift: check_canaries(canaries, Detector(shift).eval(), "labels") for shift in (0.0, 0.01, 30.0)}
    assert {shift: result.changed for shift, result in results.items()} == {0.0: 0, 0.01: 0, 30.0: 4}


def test_a_judge_of_numbers_reads_the_logits_as_it_does_elsewhere(tmp_path):
    inputs, own = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), model()
    make_canaries(Workload(own, [inputs], judge="tolerance", run=run), 4, RANDOM).save(tmp_path / "c")

    def other_hidden(batch):
        return {**run(own, batch), "hidden": own(batch)}

    assert check_canaries(load_canaries(tmp_path / "c"), other_hidden, "labels").changed == 0


def test_a_judge_of_the_user_is_no_part_of_a_file(tmp_path):
    inputs, own = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), model()
    rule = lambda golden, faulty, batch: (golden != faulty).any(1)  # noqa: E731 - a rule as a user writes it
    make_canaries(Workload(own, [inputs], judge=rule), 4, RANDOM).save(tmp_path / "c")
    canaries = load_canaries(tmp_path / "c")
    assert check_canaries(canaries, own, "bits").changed == 0
    with pytest.raises(
        UsageError, match=r"which is not built in, so that labels cannot be compared; give --compare bits"
    ):
        check_canaries(canaries, own, "labels")

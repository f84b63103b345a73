"""The number of samples of a batch, whatever it is nested in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.workloads import Workload
from unsilent.workloads.base import own_originals
from unsilent.workloads.batch_samples import check_samples, count_samples, take_samples

IMAGES, LABELS, NUMBERS = torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64), torch.zeros(5, 7)
LISTED = [torch.zeros(3, 8, 8 + i) for i in range(7)]
DICTS = [{"image": torch.zeros(3, 8, 8), "height": 8} for _ in range(4)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (IMAGES, 5),
        ((IMAGES, LABELS), 5),
        ([IMAGES, LABELS], 5),
        ({"ids": LABELS, "mask": LABELS}, 5),
        ((NUMBERS, [LABELS[:3], LABELS[:2]]), 5),
        ((NUMBERS, NUMBERS), 5),
        (((), {"x": NUMBERS}), 5),
        (LISTED, 7),
        (LISTED[:3], 3),
        ((LISTED,), 7),
        (((LISTED,), {"threshold": 0.5}), 7),
        (((LISTED,), {"limit": torch.tensor(0.5)}), 7),
        ({"images": LISTED, "sizes": NUMBERS}, 7),
        (DICTS, 4),
        ((torch.tensor(0.5), IMAGES), 5),
    ],
)
def test_a_list_of_tensors_has_one_sample_per_tensor_and_inputs_have_one_per_row(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize("batch", [None, "text", [], {}, [1, 2], torch.tensor(1.0)])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="has no tensor with a dimension; expected tensors with samples"):
        count_samples(batch)


def test_two_inputs_in_a_list_are_refused_once_the_answer_shows_that_they_are_no_samples() -> None:
    with pytest.raises(
        UsageError, match="read as 2 samples, but the model answers with 5; give the inputs .* as a tuple"
    ):
        check_samples([NUMBERS, NUMBERS], {"logits": torch.zeros(5, 2)})


def test_samples_in_a_tuple_are_refused_once_the_answer_shows_that_they_are_no_inputs() -> None:
    with pytest.raises(UsageError, match="read as 3 samples, but the model answers with 7; .*or the samples as a list"):
        check_samples((tuple(LISTED),), [{"boxes": torch.zeros(2, 4)} for _ in LISTED])


@pytest.mark.parametrize(
    ("batch", "output"),
    [
        ((NUMBERS, NUMBERS), torch.zeros(5, 2)),
        ((LISTED,), [torch.zeros(2, 4)] * 7),
        (LISTED, torch.zeros(7, 2)),
        ((NUMBERS,), torch.zeros(1)),
        ((NUMBERS, NUMBERS), torch.zeros(9, 5, 2)),
        ((NUMBERS, NUMBERS), (torch.zeros(9, 5), torch.zeros(9, 5))),
    ],
)
def test_an_answer_that_agrees_or_shows_nothing_is_taken(batch: Any, output: Any) -> None:
    check_samples(batch, output)


def test_samples_are_taken_from_lists_and_from_rows_and_all_else_is_left() -> None:
    rows = torch.arange(5)
    taken = take_samples({"x": rows, "scale": torch.tensor(2.0)}, torch.tensor([4, 0]))
    assert taken["x"].tolist() == [4, 0]
    assert taken["scale"] == 2
    images, threshold = take_samples((LISTED, 0.5), torch.tensor([6, 1, 1]))
    assert [image.shape[-1] for image in images] == [14, 9, 9]
    assert threshold == 0.5


def by_name(model: torch.nn.Module, batch: Any) -> Any:
    return model(batch)


@pytest.mark.parametrize(("run", "samples"), [({}, 5), ({"run": by_name}, 2)])
def test_the_items_of_a_list_are_inputs_of_a_model_that_is_called_with_them(
    run: dict[str, Callable[..., Any]], samples: int
) -> None:
    workload = Workload(torch.nn.Identity(), [[NUMBERS, NUMBERS]], clean={"test": [[NUMBERS, NUMBERS]]}, **run)
    assert [count_samples(batch) for batch in workload.batches()] == [samples]
    assert [len(one) for one in own_originals(workload.clean_batches("test", 1))] == [samples]

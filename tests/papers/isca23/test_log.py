"""The log's lines, letter by letter, and receipts of any kind in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault
from unsilent.faults.corruption_log import channels_last_indices, corrupted_log_lines
from unsilent.faults.receipts import Receipt
from unsilent.papers.isca23 import log
from unsilent.sites.corrupting import corrupt


def test_lines_of_steps_and_epochs():
    assert log.header(7, 35, "weights.pt") == [
        "Inject to epoch: 7",
        "Inject to step: 35",
        "Load weights from weights.pt",
    ]
    assert (
        log.PublishedStepRecord(7, 35, 1.1808666, 0.5634765).line
        == "Epoch: 7/80, step: 35/49, loss: 1.18087, accuracy: 0.56348"
    )
    assert (
        log.PublishedStepRecord(7, 35, float("nan"), 0.0).line
        == "Epoch: 7/80, step: 35/49, loss: nan, accuracy: 0.00000"
    )
    assert not log.PublishedStepRecord(7, 35, float("inf"), 0.0).finite
    told = log.epoch_line(7, (1.5, 0.25), (1.024, 0.5))
    assert told == (
        "End of epoch: 7/80, train loss: 1.50000, train accuracy: 0.25000, valid loss: 0.12500, valid accuracy: 0.50000"
    )
    assert log.NOT_FINITE == "Encounter NaN! Terminate training!"


def corrupted(tensor, elements, values):
    words = np.array(values, np.float32).view(np.uint32)
    fault = Fault("op:fc#addmm.0/fwd/out", "float32", tuple(tensor.shape), np.array(elements), "set", words)
    return Receipt((corrupt(tensor, fault),))


def test_what_was_corrupted_in_the_order_of_the_tensor():
    receipt = corrupted(torch.tensor([[0.1, 2.0], [3.0, -4.0]]), [0, 3], [8.5, 2.5e24])
    positions = np.array([[1, 1], [0, 1]])  # as someone else counts
    assert corrupted_log_lines(receipt, 5, "fc", (2, 2), positions, [8.5, 2.5e24]) == [
        "Inject worker: 5",
        "Inject layer: fc",
        "Shape for target layer is (2, 2)",
        "Position is (0, 1), Golden data is -4.0, inject data is 2.5e+24",
        "Position is (1, 1), Golden data is 0.10000000149011612, inject data is 8.5",
    ]
    read_back = corrupted_log_lines(receipt, 5, "fc", (2, 2), positions)
    assert read_back[3] == f"Position is (0, 1), Golden data is -4.0, inject data is {float(np.float32(2.5e24))}"
    with pytest.raises(UsageError, match="1 positions and 2 values for 2 corrupted elements"):
        corrupted_log_lines(receipt, 5, "fc", (2, 2), positions[:1])


def test_any_fault_with_its_channels_last():
    tensor = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    receipt = corrupted(tensor.clone(), [7, 99], [1.0, 2.0])
    shape, positions = channels_last_indices(receipt.applied_faults[0].fault)
    assert shape == (2, 4, 5, 3)
    assert tensor.permute(0, 2, 3, 1)[tuple(positions.T)].tolist() == [7.0, 99.0]
    matrix = corrupted(torch.zeros(3, 4), [5], [1.0]).applied_faults[0].fault
    shape, positions = channels_last_indices(matrix)
    assert (shape, positions.tolist()) == ((3, 4), [[1, 1]])

"""A training under DDP out of its traces: which collectives carry gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kineto_traces import MIB, ddp_job_files
from unsilent.basics.errors import UsageError
from unsilent.timeline.ddp.buckets import _whole_gradients
from unsilent.timeline.ddp.traces import ddp_job
from unsilent.timeline.load import load_job


def read(folder, **options):
    return ddp_job(load_job([ddp_job_files(folder, **options)]))


def test_the_recorded_buckets_and_steps_are_found(tmp_path):
    ddp = read(tmp_path, buckets=((MIB // 2, MIB // 2), (2 * MIB,)))
    assert ddp.buckets == [[0, 1], [2]]
    assert ddp.cost(np.array([1.0, 2.0]) * MIB) == pytest.approx([154.9e-6, 259.7e-6], rel=0.05)
    assert abs(ddp.error) < 0.02
    assert ddp.item_bytes == 4


@pytest.mark.parametrize("buckets", [((MIB,), (2 * MIB,)), ((MIB, MIB), (MIB, MIB))])
def test_what_a_communication_hook_sends_is_not_taken_for_gradients(tmp_path, buckets):
    """In the second job half of two gradients has the bytes of one."""
    with pytest.raises(UsageError, match="communication hook") as error:
        read(tmp_path, buckets=buckets, sent=2)
    assert "\n" not in str(error.value)


def test_collectives_that_carry_no_gradients_are_no_buckets_and_say_nothing_of_their_cost(tmp_path):
    """As the broadcasts of batch norm before a step, and a mean of the loss after it."""
    alone = read(tmp_path / "alone")
    ddp = read(tmp_path / "more", before=64, after=4 * MIB)
    assert ddp.buckets == alone.buckets
    assert (ddp.cost.latency, ddp.cost.per_byte) == pytest.approx((alone.cost.latency, alone.cost.per_byte), rel=0.02)
    assert ddp.replayed() == pytest.approx(alone.replayed(), rel=0.02)
    assert any("collectives that carry no gradients" in note for note in ddp.notes)
    assert not any("collectives that carry no gradients" in note for note in alone.notes)


def test_buckets_that_change_from_step_to_step_are_refused(tmp_path):
    def buckets(step):
        return ((2 * MIB,), (MIB,)) if step else ((2 * MIB, MIB),)

    with pytest.raises(UsageError, match="warmup"):
        read(tmp_path, buckets=buckets)


def test_a_job_of_one_rank_is_refused(tmp_path):
    with pytest.raises(UsageError, match="one rank") as error:
        read(tmp_path, ranks=1)
    assert "\n" not in str(error.value)


def test_ranks_that_were_not_read_are_named(tmp_path):
    assert any("1 of 2 ranks" in note for note in read(tmp_path, ranks=1, world_size=2).notes)


def test_buckets_that_begin_in_another_order_than_they_are_filled_are_found():
    sizes = np.array([1, 2, 3, 10])
    assert _whole_gradients([13, 3], sizes) == ([[0, 1], [2, 3]], [1, 0])
    assert _whole_gradients([7, 3, 13], sizes) == ([[0, 1], [2, 3]], [1, 2])

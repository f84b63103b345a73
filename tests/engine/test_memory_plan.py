"""What is held of the golden values: within the budget, the more the better, and never visible in the bits."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.basics.free_memory import available_memory_bytes
from unsilent.basics.sizes import as_byte_count, human_bytes, parse_bytes
from unsilent.engine import PlainEngine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.fault_propagation import PropagationStart, costs, propagate_faults, set_weights
from unsilent.engine.memory_plan import (
    UNKNOWN,
    _Graph,
    _sources,
    default_budget,
    minimum_memory,
    parameter_fault_weights,
    plan_memory,
)
from unsilent.engine.plain import same_outputs
from unsilent.engine.tape import Node, StorageWindow, Tape, Value
from unsilent.engine.tape_replay import Replayer

# -- synthetic tapes ---------------------------------------------------------------------------------------------------


def window(value):
    return StorageWindow(value, torch.float32, (1,), (1,), 0)


def tape_of(operations, constants=()):
    """A tape from triples: values read (as distances back, 0: a new parameter), bytes made, seconds."""
    tape = Tape()

    def value(producer, nbytes):
        tape.values.append(Value(len(tape.values), producer, nbytes, window(len(tape.values))))
        return len(tape.values) - 1

    for nbytes in constants:
        tape.externals[value(None, nbytes)] = torch.zeros(nbytes, dtype=torch.uint8)
    start = value(None, 64)
    tape.by_storage[-1] = start
    made = [start]
    for index, (reads, nbytes, seconds) in enumerate(operations):
        found = []
        for back in reads:
            found.append(made[-1 - (back - 1) % len(made)] if back else value(None, 100))
            if not back:
                tape.by_storage[found[-1]] = found[-1]
        node = Node(index, f"n#{index}", print, (), {}, (), tuple(map(window, found)))
        node.seconds, node.new_values = seconds, (value(index, nbytes),)
        made.append(node.new_values[0])
        tape.nodes.append(node)
        for read in sorted(set(found)):
            tape.values[read].readers.append(index)
    tape.values[made[-1]].output = True
    return tape


OPERATIONS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=1, max_size=3),
        st.integers(0, 1000),
        st.floats(1e-6, 1e-2),
    ),
    min_size=1,
    max_size=25,
)
TAPES = st.lists(st.builds(tape_of, OPERATIONS, st.lists(st.integers(0, 50), max_size=2)), min_size=1, max_size=3)
EVERYTHING = 1 << 60


def remake_seconds(tape, keep, operations=0.0):
    """Expected seconds in which one trial makes golden values again, when those of ``keep`` are held."""
    sources, odds = _sources(tape, parameter_fault_weights(tape), operations)
    again = _Graph(tape).demand(propagate_faults(tape, sources).needed, set(keep))[1]
    return float(set_weights(again, odds) @ costs(tape))


def cost(tapes, plan, **more):
    return sum(remake_seconds(tape, keep, **more) for tape, keep in zip(tapes, plan.kept_values, strict=True))


@given(TAPES, st.lists(st.floats(0, 1), min_size=2, max_size=6), st.sampled_from([0.0, 0.3]))
def test_a_plan_fits_and_a_larger_budget_never_costs_more(tapes, shares, operations):
    full = plan_memory(tapes, EVERYTHING, operations=operations)
    assert full.held == full.unlimited_bytes >= full.minimum == sum(map(minimum_memory, tapes))
    assert cost(tapes, full, operations=operations) == 0
    last = None
    for share in sorted([0, *shares]):
        budget = full.minimum + int(share * (full.unlimited_bytes - full.minimum))
        plan = plan_memory(tapes, budget, operations=operations)
        kept = sum(tape.values[v].nbytes for tape, keep in zip(tapes, plan.kept_values, strict=True) for v in keep)
        assert plan.held == plan.minimum + kept <= budget
        assert (plan.minimum, plan.unlimited_bytes) == (full.minimum, full.unlimited_bytes)
        now = cost(tapes, plan, operations=operations)
        if last is not None:
            assert all(a <= b for a, b in zip(last[0].kept_values, plan.kept_values, strict=True))
            assert now <= last[1] + 1e-12
        last = plan, now
    assert plan_memory(tapes, full.unlimited_bytes, operations=operations) == full
    if full.unlimited_bytes > full.minimum:
        assert plan_memory(tapes, full.unlimited_bytes - 1, operations=operations).held < full.held


@given(st.builds(tape_of, OPERATIONS), st.floats(0, 1))
def test_the_expected_cost_is_what_trials_cost(tape, share):
    """Against one obvious simulation of every fault: walk the tape, ask for what is clean, make it again recursively."""
    full = plan_memory([tape], EVERYTHING)
    (keep,) = plan_memory([tape], int(share * full.unlimited_bytes)).kept_values
    law = parameter_fault_weights(tape)
    expected = 0.0
    for corrupted, weight in law.items():
        dirty, again = {corrupted}, set()

        def ask(value, again=again):
            producer = tape.values[value].producer
            if producer is not None and value not in keep and producer not in again:
                again.add(producer)
                for read in tape.nodes[producer].values:
                    ask(read)

        for node in tape.nodes:
            if dirty.intersection(node.values):
                for read in set(node.values) - dirty:
                    ask(read)
                dirty.update(node.new_values)
        expected += weight / sum(law.values()) * sum(tape.nodes[n].seconds for n in again)
    assert remake_seconds(tape, keep) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(st.lists(st.sets(st.integers(0, 40)), max_size=30), st.lists(st.floats(0, 1), min_size=41, max_size=41))
def test_sets_of_faults_are_weighed_like_sets(sets, weights):
    bits = [sum(1 << m for m in s) for s in sets]
    assert set_weights(bits, weights) == pytest.approx([sum(weights[m] for m in s) for s in sets])


def test_a_value_is_compared_only_where_nothing_else_is_open():
    # n0 -> n1 -> n2, n3 adds the results of n0 and n2: inside of the branch a comparison ends nothing.
    tape = tape_of([((1, 0), 8, 1.0), ((1,), 8, 1.0), ((1,), 8, 1.0), ((1, 3), 8, 1.0)])
    made = [n.new_values[0] for n in tape.nodes]
    found = propagate_faults(tape, [PropagationStart(nodes=(0,)), PropagationStart(nodes=(1,))])
    assert [found.may_end_at[v] for v in made] == [0b01, 0b10, 0b10, 0b11]
    assert [found.ran[n] for n in range(4)] == [0b01, 0b11, 0b11, 0b11]
    assert found.needed[made[0]] == 0b10  # by n1, and as the other side of the sum


def test_what_is_dear_to_make_again_is_held_and_what_is_cheap_is_not():
    operations = [((1, 0), 100, 1.0), ((1,), 100, 1e-6), ((1, 0), 100, 1.0), ((1,), 100, 1e-6), ((1, 0), 100, 1.0)]
    tape = tape_of(operations)
    (keep,) = plan_memory([tape], 200).kept_values
    assert remake_seconds(tape, keep) < 1e-3  # one of each pair: the second is made from the first


def test_the_budget_is_shared_between_tapes():
    cheap = tape_of([((1, 0), 500, 1e-6), ((1, 0), 500, 1e-6)])
    dear = tape_of([((1, 0), 400, 1.0), ((1, 0), 400, 1.0)])
    plan = plan_memory([cheap, dear], 900)
    assert plan.kept_values[0] == frozenset()
    assert len(plan.kept_values[1]) == 2


def test_batches_of_one_shape_are_planned_alike():
    tapes = [tape_of([((1, 0), 100, 1e-3)] * 30) for _ in range(8)]
    full = plan_memory(tapes, EVERYTHING)
    plan = plan_memory(tapes, full.unlimited_bytes // 2)
    assert max(map(len, plan.kept_values)) - min(map(len, plan.kept_values)) <= 1


def test_a_budget_below_the_minimum_is_told_in_one_line():
    tape = tape_of([((1,), 8, 1.0)], constants=(5000,))
    with pytest.raises(
        UsageError, match=r"^--memory 1000 B is too small: 1 batch needs 4.89 KiB for .*; give at least 4.89 KiB,"
    ):
        plan_memory([tape], 1000)
    assert plan_memory([tape], 5000).held == 5000


def test_a_budget_of_several_workers_is_told_as_the_whole():
    tape = tape_of([((1,), 8, 1.0)], constants=(5120,))
    said = (
        "--memory 5.86 KiB is 2.93 KiB for each of 2 workers: 1 batch needs 5 KiB for outputs and constants; "
        "give at least 10 KiB"
    )
    with pytest.raises(UsageError, match=said):
        plan_memory([tape], 6000, worker_count=2)
    assert plan_memory([tape], parse_bytes("10 KiB"), worker_count=2).held == 5120
    with pytest.raises(UsageError, match="2 batches need 10 KiB for .*; give at least 30 KiB"):
        plan_memory([tape, tape_of([((1,), 8, 1.0)], constants=(5120,))], 6000, worker_count=3)


@pytest.mark.parametrize(
    ("value", "number"),
    [(None, None), (7, 7), (np.int64(8), 8), (2e9, 2_000_000_000), ("2GB", 2_000_000_000), ("1KiB", 1024)],
)
def test_bytes_are_given_as_numbers_or_texts(value, number):
    found = as_byte_count(value)
    assert found == number
    assert type(found) is type(number)


BAD_BYTES = [True, False, -1, -0.5, 2.5, float("nan"), float("inf"), 1 << 80, "lots", "-1", "", b"2GB", [1], {}]


@pytest.mark.parametrize("value", BAD_BYTES, ids=repr)
def test_what_is_no_number_of_bytes_is_refused_before_anything_runs(value):
    with pytest.raises(UsageError, match="bytes") as caught:
        unsilent.pvf(unsilent.Workload(lambda: pytest.fail("the workload was built"), [torch.ones(1)]), memory=value)
    assert "\n" not in str(caught.value)


def test_a_tape_without_operations_needs_nothing():
    tape = Tape()
    plan = plan_memory([tape, tape_of([((1,), 8, 0.0)])], 0)  # nor does it matter that nobody measured
    assert plan.kept_values == (frozenset(), frozenset())
    assert remake_seconds(tape, ()) == 0
    assert plan_memory([], 0).held == 0


def test_five_thousand_operations_are_planned_quickly():
    tape = tape_of([((1, 0) if i % 3 else (1, 7), 1 + i % 11 * 100, 1e-5 * (1 + i % 5)) for i in range(5000)])
    full = plan_memory([tape], EVERYTHING)
    start = time.process_time()
    plan_memory([tape], full.unlimited_bytes // 20)
    assert time.process_time() - start < 10  # about 0.3 s; a quadratic algorithm takes minutes


# -- recorded models ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Residual convolutions with batch norm, written in place, then attention over the places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x).relu_()
        for block in self.blocks:
            x = x + block(x)
        x = x.flatten(2).transpose(1, 2)
        query, key, value = self.project(x).split(8, dim=-1)
        x += nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(x.mean(1)) * torch.tensor(0.5)


@pytest.fixture(scope="module")
def engines():
    torch.manual_seed(0)
    data = [torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 1)]
    workload = unsilent.Workload(Mixed().eval(), data)
    return PlainEngine(workload), CachedEngine(workload)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_bits_do_not_depend_on_what_is_held(engines, share):
    plain, cached = engines
    tapes = [r.tape for r in cached.replayers]
    full = plan_memory(tapes, EVERYTHING)
    assert 0 < full.minimum < full.unlimited_bytes
    plan = plan_memory(tapes, full.minimum + int(share * (full.unlimited_bytes - full.minimum)))
    for batch, (tape, keep) in enumerate(zip(tapes, plan.kept_values, strict=True)):
        replayer = Replayer(tape)
        with torch.no_grad():
            replayer.run_golden(keep.__contains__)
        assert sum(h.untyped_storage().nbytes() for h in replayer.kept.values()) == sum(
            tape.values[v].nbytes for v in keep
        )
        cached.replayers[batch] = replayer
    diverged, changed = cached.diverged_count, 0
    rng = np.random.default_rng(1)
    for region in plain.parameters.select("param:*"):
        for text in ("bitflip", "set:value=3"):
            faults = unsilent.fault_model(text).draw((region,), rng)
            for batch in range(len(tapes)):
                expected = plain.output(batch, faults)
                assert same_outputs(expected, cached.output(batch, faults)), (region.site, text)
                changed += not same_outputs(expected, plain.golden[batch])
    assert changed > 50
    assert cached.diverged_count == diverged


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("500MB", 500_000_000),
        ("1e9", 10**9),
        ("1.5 kib", 1536),
        (" 12 ", 12),
        ("7b", 7),
        ("0", 0),
        (".5k", 512),
        ("1TB", 10**12),
    ],
)
def test_bytes_are_read(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "nan", "inf", "1e400", "2 X", "1_000", "2GiB!", "0x10", "1e99G", "٣"]
)
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(UsageError, match="number of bytes"):
        parse_bytes(text)


@given(st.integers(0, 1 << 52))
def test_bytes_are_shown_in_three_digits(number):
    # Rounded to three digits, and reading cuts off what is less than a byte.
    assert abs(parse_bytes(human_bytes(number)) - number) <= 0.0051 * number + 1
    assert parse_bytes(human_bytes(number, math.ceil)) >= number
    digits = human_bytes(number).split()[0]
    assert len(digits.replace(".", "")) <= 4
    assert "e" not in digits


# -- free memory -------------------------------------------------------------------------------------------------------


def files(root, **contents):
    for path, text in contents.items():
        target = root / path.replace("__", "/").replace("-", ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def test_free_memory_respects_control_groups(tmp_path):
    assert available_memory_bytes(tmp_path) is None
    files(tmp_path, proc__meminfo="MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    group = tmp_path / "sys/fs/cgroup/jobs"
    (group / "mine").mkdir(parents=True)
    (group / "mine/memory.max").write_text("max\n")
    (group / "mine/memory.current").write_text("5\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    assert available_memory_bytes(tmp_path) == 300_000
    (group / "memory.stat").write_text("anon 3\ninactive_file 100000\n")
    assert available_memory_bytes(tmp_path) == 400_000


def test_free_memory_knows_the_first_version_of_control_groups(tmp_path):
    files(tmp_path, proc__meminfo="MemAvailable: 4000 kB\n", proc__self__cgroup="9:cpu:/x\n4:memory:/box\nodd\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("2000000\n")
    (folder / "memory.usage_in_bytes").write_text("2500000\n")
    assert available_memory_bytes(tmp_path) == 0
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024


def test_a_quarter_of_free_memory_is_the_default():
    free = available_memory_bytes()
    assert free is None or 0 < default_budget("cpu") <= free // 2
    assert default_budget(torch.device("meta")) == UNKNOWN

"""Memory faults between two steps: every bit is noticed, writes of the program are not taken for faults."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monitor.trainings import TRAININGS, plain, sgd, state_of
from monitor.unreachable import Unreachable
from unsilent.monitor import Monitor
from unsilent.monitor.program_writes import FIRST_COMPARISONS, FIRST_STEPS, ProgramWrites
from unsilent.monitor.signals.fingerprints import COUNTERS
from unsilent.recovery.digests import SMALL, device_digests, digests_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def bytes_of(tensor):
    """The memory of a tensor that fills its storage from an offset."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    start = tensor.storage_offset() * tensor.element_size()
    return whole[start : start + tensor.numel() * tensor.element_size()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(size=st.integers(1, 40), offset=st.integers(0, 9), seed=st.integers(0, 99), bit=st.integers(0, 10**9))
def test_every_single_bit_is_noticed(dtype, size, offset, seed, bit):
    content = np.random.default_rng(seed).integers(0, 256, (size + offset) * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        content %= 2
    memory = torch.from_numpy(content.copy()).view(dtype)
    tensor = memory[offset : offset + size]
    (before,), (before_on_device,) = digests_of([tensor]).tolist(), device_digests([tensor]).tolist()
    own = content.copy()
    place, shift = divmod(bit % (size * dtype.itemsize * 8), 8)
    own[offset * dtype.itemsize + place] ^= 1 << (0 if dtype is torch.bool else shift)
    other = torch.from_numpy(own).view(dtype)[offset : offset + size]
    assert digests_of([other]).tolist() != [before]
    assert digests_of([tensor, other, torch.ones(3)])[0] == before
    assert device_digests([other]).tolist() != [before_on_device]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [SMALL, SMALL + 1, 3 * SMALL + 3])
@pytest.mark.parametrize("digests", [digests_of, device_digests])
def test_sizes_around_those_that_are_read_together(dtype, size, digests):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digests([tensor, tensor[:5]])
    for place in (0, size - 1, size // 2):
        bytes_of(tensor)[place * dtype.itemsize] ^= 1
        assert digests([tensor])[0] != before[0]
        bytes_of(tensor)[place * dtype.itemsize] ^= 1
    assert torch.equal(digests([tensor, tensor[:5]]), before)


@pytest.mark.parametrize(
    "make", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.expand(2, *t.shape), lambda t: t[:0]]
)
def test_strided_tensors_have_the_fingerprint_of_their_elements(make):
    tensor = make(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(digests_of([tensor]), digests_of([tensor.contiguous()]))
    assert digests_of([]).tolist() == []


# -- in a training -------------------------------------------------------------------------------------------------------


def flip(tensor, element=0, bit=20):
    """One bit in memory; torch does not know."""
    tensor.detach().view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy()[element] ^= (
        1 << bit
    )


def alarms_of(training, spoil, steps=12, **options):
    """Steps and tensors of alarms of the fingerprint."""
    with Monitor(
        training.model, training.optimizers, rule="nonfinite", **{"fingerprint": "full", **options}
    ) as monitor:
        for number in range(steps):
            training.step(number)
            spoil(training, number)
    return [(alarm.step, alarm.tensor) for alarm in monitor.alarms if alarm.feature == "fingerprint"]


@pytest.mark.parametrize(
    "name", ["plain", "momentum", "two-optimizers", "sparse-and-tied", "adversarial", "scaler-bfloat16"]
)
@pytest.mark.parametrize("kind", ["parameter", "state"])
@pytest.mark.parametrize("mode", ["lagged", "strict"])
def test_a_flip_between_two_steps_is_named(name, kind, mode):
    training = TRAININGS[name]()
    optimizer = training.optimizers[-1]
    parameter = optimizer.param_groups[0]["params"][0]

    def spoil(training, number):
        if number == 8:
            table = optimizer.state[parameter]
            key = next((key for key in ("exp_avg_sq", "momentum_buffer") if key in table), None)
            flip(parameter if kind == "parameter" else table[key])

    owner = next(n for n, p in training.model.named_parameters() if p is parameter)
    ((_, tensor),) = alarms_of(training, spoil, mode=mode)
    assert tensor.startswith(owner)
    assert ("/" in tensor) == (kind == "state")


def test_step_counters_and_frozen_parameters_are_compared():
    training = TRAININGS["sparse-and-tied"]()
    counter = lambda: training.optimizers[0].state[training.model["out"].weight]["step"]  # noqa: E731
    assert alarms_of(training, lambda t, n: n == 8 and flip(counter())) == [(9, f"{COUNTERS} of optimizer 0")]
    training = TRAININGS["sparse-and-tied"]()
    assert alarms_of(training, lambda t, n: n == 8 and flip(t.model["frozen"].weight)) == [(9, "frozen.weight")]


@pytest.mark.slow
def test_a_rotating_fingerprint_watches_every_tensor_now_and_then():
    caught = set()
    for at in range(26, 32):
        training = plain()
        spoil = lambda t, n, at=at: n == at and flip(t.model.last.weight)  # noqa: E731
        found = alarms_of(training, spoil, 36, fingerprint="rotating", sampling="fixed:6")
        caught |= {at} if found else set()
        assert found in ([], [(at + 1, "last.weight")])
    assert len(caught) == 1


def ema_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def swap(model, average):
    with torch.no_grad():
        for name, p in model.named_parameters():
            own = p.clone()
            p.copy_(average[name])
            average[name] = own


def swap_memory(model, average):
    for name, p in model.named_parameters():
        p.data, average[name] = average[name], p.data


def multiply(t, n):
    with torch.no_grad():
        t.model.last.weight.mul_(0.999)


def reload_all(t, n):
    t.model.load_state_dict(copy.deepcopy(t.model.state_dict()))
    t.optimizers[0].load_state_dict(copy.deepcopy(t.optimizers[0].state_dict()))


def swapped(how):
    average = {}

    def write(t, n):
        if n == 8:
            average.update({name: p / 2 for name, p in ema_of(t.model).items()})
        if n >= 8:
            how(t.model, average)

    return write


def reset_state(t, n):
    if n == 8:
        t.optimizers[0].state.clear()


WRITES = {
    "multiply": lambda: multiply,
    "load state": lambda: reload_all,
    "average swapped in and out": lambda: swapped(swap),
    "memory swapped": lambda: swapped(swap_memory),
    "optimizer reset": lambda: reset_state,
    "clamped": lambda: lambda t, n: t.model.last.weight.data.clamp_(-0.01 * n, 0.01 * n),
    "all clamped": lambda: lambda t, n: [p.data.mul_(0.99) for p in t.model.parameters()],
    "all replaced": lambda: lambda t, n: n == 30 and [p.data.copy_(0.5 * p) for p in t.model.parameters()],
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("options", [{}, {"fingerprint": "rotating", "sampling": "fixed:5"}, {"mode": "strict"}])
def test_writes_of_the_program_are_no_faults(name, options):
    assert alarms_of(plain(make=sgd), WRITES[name](), 40, **options) == []


def test_what_the_program_writes_to_is_named_once_and_the_rest_is_still_compared(caplog):
    def write(t, n):
        t.model.last.bias.data.mul_(0.99)
        if n == 20:
            flip(t.model.first.bias)
        if n == 25:
            t.optimizers[0].load_state_dict(copy.deepcopy(t.optimizers[0].state_dict()))
        if n == 30:
            flip(t.optimizers[0].state[t.model.first.bias]["exp_avg"])

    assert alarms_of(plain(), write, 40) == [(21, "first.bias"), (31, "first.bias/exp_avg")]
    assert len([r for r in caplog.records if "last.bias changed between two of the first steps" in r.getMessage()]) == 1


def test_old_optimizer_state_is_not_kept_alive():
    import weakref

    training = plain()
    (optimizer,) = training.optimizers
    with Monitor(training.model, optimizer, fingerprint="full"):
        for number in range(4):
            training.step(number)
        old = [weakref.ref(table["exp_avg"]) for table in optimizer.state.values()]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        training.step(4)
        assert not any(ref() is not None for ref in old)


def test_a_parameter_of_one_element_and_one_without_state():
    torch.manual_seed(0)
    model = nn.ModuleDict({"scale": nn.Linear(1, 1, bias=False), "fc": nn.Linear(3, 1)})
    optimizer = torch.optim.Adam(model.parameters())
    with Monitor(model, optimizer, fingerprint="full") as monitor:
        for number in range(10):
            optimizer.zero_grad()
            model["scale"](model["fc"](torch.ones(2, 3))).sum().backward()
            optimizer.step()
            if number == 7:
                flip(optimizer.state[model["scale"].weight]["exp_avg"], bit=3)
    assert [a.step for a in monitor.alarms] == [8]


def test_writes_are_told_from_faults(caplog):
    writes, all_names = ProgramWrites(), list("abcdefgh")
    assert writes.faults(0, ["a"], all_names) == ()  # a habit
    assert writes.faults(1, ["a", "b"], all_names) == ()
    for step in range(2, FIRST_COMPARISONS + 1):
        assert writes.faults(step, [], all_names) == ()
    assert writes.faults(6, ["a", "c"], all_names) == ("c",)
    assert writes.faults(7, all_names[:5], all_names) == ()  # more than half
    assert writes.faults(8, all_names[2:6], all_names) == tuple(all_names[2:6])  # half
    assert writes.faults(9, ["c", "d"], ["c", "d"]) == ("c", "d")  # too few to tell
    assert writes.faults(10, all_names[:5], all_names) == ()
    (line,) = [one.getMessage() for one in caplog.records if "at once" in one.getMessage()]
    assert line.startswith("step 7: bits of 5 tensors, more than half of those compared, changed at once")


def test_a_first_comparison_late_in_the_run_may_be_a_habit_but_not_the_second():
    writes = ProgramWrites()
    assert writes.faults(FIRST_STEPS + 1, ["a"], ["a", "b", "c"]) == ()
    assert writes.faults(FIRST_STEPS + 2, ["b"], ["a", "b", "c"]) == ("b",)


# -- executing steps again ------------------------------------------------------------------------------------------------


PLACES = {
    "weight": lambda t: flip(t.model.last.weight, bit=29),
    "moment": lambda t: flip(t.optimizers[0].state[t.model.last.weight]["exp_avg"], bit=29),
    "small bit": lambda t: flip(t.model.first.bias, bit=0),
    "gradient": None,
}


class Steps(Unreachable):
    """Counts steps that were begun, to know when to inject. Nothing leads to what it counts, which is no part of the loop."""

    def __init__(self):
        self.begun, self.spoils_gradient = 0, False


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [30, 33, 39])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("uses_iterate", [False, True])
def test_steps_that_are_executed_again_end_with_the_bits_of_a_clean_run(place, at, late, uses_iterate, monkeypatch):
    golden = plain()
    for number in range(40):
        golden.step(number)
    training, steps = plain(), Steps()
    training.model.last.weight.register_hook(lambda g: g * 1e9 if steps.spoils_gradient else g)

    def step(number):
        is_faulty = steps.begun == at
        steps.begun += 1
        steps.spoils_gradient = is_faulty and place == "gradient"
        if is_faulty and PLACES[place]:
            PLACES[place](training)
        return training.step(number)

    monitor = Monitor(
        training.model, training.optimizers, on_alarm="rerun", fingerprint="full", sampling="fixed:1", strict=True
    )
    monkeypatch.setattr(monitor, "_is_late", late)
    with monitor:
        if uses_iterate:
            for number in monitor.iterate(range(40)):
                step(number)
        else:
            for number in range(40):
                monitor.step(step, number)
    assert steps.begun > 40
    assert [v.action for v in monitor.verdicts] == ["rerun"]
    for one, other in zip(state_of(training), state_of(golden), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["two-optimizers", "adversarial"])
@pytest.mark.parametrize("which", [0, 1])
def test_steps_of_several_optimizers_are_executed_again(name, which):
    golden, training, steps = TRAININGS[name](), TRAININGS[name](), Steps()
    for number in range(40):
        golden.step(number)
    parameter = training.optimizers[which].param_groups[0]["params"][0]

    def step(number):
        if steps.begun == 33:
            flip(parameter, bit=3)
        steps.begun += 1
        return training.step(number)

    options = {"rule": ("nonfinite",), "fingerprint": "full", "sampling": "fixed:2", "strict": True}
    with Monitor(training.model, training.optimizers, on_alarm="rerun", **options) as monitor:
        for number in range(40):
            monitor.step(step, number)
    assert steps.begun > 40
    assert [v.action for v in monitor.verdicts] == ["rerun"]
    for one, other in zip(state_of(training), state_of(golden), strict=True):
        assert torch.equal(one, other)

"""A loop over a DataLoader is executed again after an alarm without a change of the loop."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from events import made_events as made
from monitor.unreachable import Unreachable
from unsilent.launch.rerun_loops import RerunLoops
from unsilent.monitor import Monitor, alarm_replay
from unsilent.monitor.exchange import RankRow
from unsilent.monitor.rerun_check import alarm_of
from unsilent.recovery import fault_verdict

EPOCHS, ROWS = 3, 160


class Fault(Unreachable):
    """Multiplies one loss, once. Nothing leads to what it counts, which is no part of the loop."""

    def __init__(self, when):
        self.calls, self.when = 0, when

    def __call__(self, loss):
        self.calls += 1
        return loss * 1e5 if self.calls == self.when else loss


def train(monitored=False, fault=None, seen=None, on_alarm="rerun"):
    """The final parameters; ``fault``: epoch and batch whose gradient is multiplied, once."""
    corrupt = Fault(None if fault is None else fault[0] * ROWS // 4 + fault[1] + 1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 6), torch.randint(3, (ROWS,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    monitor = Monitor(model, optimizer, on_alarm=on_alarm, sampling="fixed:1") if monitored else None
    loops = RerunLoops(lambda: monitor)
    loops.start()
    try:
        for _ in range(EPOCHS):
            model.train()
            for inputs, labels in loader:
                optimizer.zero_grad()
                corrupt(nn.functional.cross_entropy(model(inputs), labels)).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                counted = sum(len(labels) for _, labels in DataLoader(data, batch_size=50))
            if seen is not None:
                seen.append(counted)
    finally:
        loops.stop()
        if monitor is not None:
            monitor.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), monitor


@pytest.mark.parametrize(
    ("on_alarm", "consequence"),
    [("rerun", "an alarm is only logged"), ("replay", "an alarm ends the job without executing its step again")],
)
def test_a_loop_that_cannot_be_executed_again_is_warned_of_once(caplog, on_alarm, consequence):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with Monitor(model, optimizer, on_alarm=on_alarm):
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    (line,) = [record.getMessage() for record in caplog.records if "executed again" in record.getMessage()]
    assert line.startswith("steps cannot be executed again: the script has no `for batch in loader`")
    assert line.endswith(f"; {consequence}")
    caplog.clear()
    train(monitored=True)
    assert "executed again" not in caplog.text


def test_the_recovery_names_what_the_verdict_names():
    alarms = [made.alarm(5, feature="fingerprint", tensor="a"), made.alarm(5, tensor="b")]
    of_bits = made.verdict(5, tensor="fingerprint of a")
    assert alarm_of(of_bits, [RankRow(5)], alarms) is alarms[0]
    assert alarm_of(made.verdict(5, tensor="gradient b max"), [RankRow(5)], alarms) is alarms[1]
    assert "bits of a changed" in alarm_of(of_bits, [RankRow(5)], []).summary
    other = alarm_of(made.verdict(5, tensor="gradient c l2", reason="own history"), [RankRow(5, score=4.0)], alarms)
    assert other.summary == "step 5: gradient c l2 (score) is 4 (own history)"


@pytest.mark.parametrize("fault", [(1, 5), (2, 0), (2, 39)])
def test_a_faulty_step_leaves_no_trace(fault):
    clean, _ = train()
    recovered, monitor = train(monitored=True, fault=fault)
    assert len(monitor.verdicts) == 1
    assert torch.equal(clean, recovered)
    assert not torch.equal(clean, train(fault=fault)[0])


@pytest.mark.slow
def test_a_step_that_is_executed_again_to_be_compared_changes_nothing(caplog, monkeypatch):
    monkeypatch.setattr(
        alarm_replay, "judge", lambda known: replace(fault_verdict.judge(known), exit_code=0)
    )  # it goes on
    faulty, _ = train(fault=(2, 0))
    replayed, monitor = train(monitored=True, fault=(2, 0), on_alarm="replay")
    assert len(monitor.verdicts) == 1
    assert "the last steps are executed again to be compared" in caplog.text
    assert torch.equal(faulty, replayed)


def test_a_clean_training_is_left_as_it_is():
    seen = []
    clean, monitored = train()[0], train(monitored=True, seen=seen)[0]
    assert torch.equal(clean, monitored)
    assert seen == [ROWS] * EPOCHS


def test_a_loop_has_the_length_and_the_attributes_of_that_of_torch():
    loader = DataLoader(list(range(7)), batch_size=2)
    loops = RerunLoops(lambda: None)
    loops.start()
    try:
        batches = iter(loader)
        assert (len(batches), iter(batches)) == (4, batches)
        assert next(batches).tolist() == [0, 1]
        assert batches._num_yielded == 1
        assert [one.tolist() for one in batches] == [[2, 3], [4, 5], [6]]
    finally:
        loops.stop()


def test_loops_of_frameworks_are_left_alone():
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain = DataLoader.__iter__
    loops = RerunLoops(lambda: None)
    loops.start()
    try:

        class Shard(DataLoader):
            pass

        assert isinstance(iter(Shard([1, 2])), _BaseDataLoaderIter)
    finally:
        loops.stop()
    assert DataLoader.__iter__ is plain

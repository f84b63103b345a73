"""transformers' Trainer under the guard: a planted fault is caught, and the run ends as if it had not happened. And monitored."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from unsilent.basics.errors import UsageError  # noqa: E402
from unsilent.guard import Guard, GuardStop  # noqa: E402
from unsilent.integrations.transformers import GuardCallback, MonitorCallback  # noqa: E402
from unsilent.monitor import MonitorStop, backward_hooks  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


class Corrupted(transformers.TrainerCallback):
    """Sets an element of a gradient just before some updates, counted as they are made."""

    def __init__(self, when, value):
        self.when, self.value, self.count = set(when), value, 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        if state.global_step in self.when:
            self.when.discard(state.global_step)
            next(iter(model.parameters())).grad.view(-1)[3] = self.value


def train(folder, corrupted=None, guarded=False, twice=False, options=None, **arguments):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": (ids := torch.randint(64, (12,), generator=generator)), "labels": ids} for _ in range(96)]
    settings = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=30, learning_rate=1e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=0, warmup_steps=5, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows[:8])
    if corrupted is not None:
        trainer.add_callback(corrupted)
    callback = GuardCallback(trainer, **(options or {})) if guarded else None
    if callback:
        trainer.add_callback(callback)
    if twice:
        trainer.add_callback(GuardCallback(trainer))
    try:
        trainer.train()
    finally:
        if callback and callback.guard:
            callback.guard.close()
    return [p.detach().clone() for p in model.parameters()], callback and callback.guard


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_a_planted_fault_leaves_nothing(tmp_path, arguments):
    golden, _ = train(tmp_path, **arguments)
    harmed, _ = train(tmp_path, Corrupted([17], 1e12), **arguments)
    assert not all(torch.equal(a, b) for a, b in zip(golden, harmed, strict=True))
    saved, guard = train(tmp_path, Corrupted([17], 1e12), guarded=True, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(golden, saved, strict=True))
    assert guard.recoveries == 1
    assert guard.alarms[0].step == 17
    clean, guard = train(tmp_path, guarded=True, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(golden, clean, strict=True))
    assert guard.alarms == []


@pytest.mark.parametrize("when", [9, 10, 17, 29])
def test_late_readings_are_settled_before_an_evaluation(tmp_path, when):
    arguments = {"eval_strategy": "steps", "eval_steps": 10}
    golden, _ = train(tmp_path, **arguments)
    saved, guard = train(
        tmp_path, Corrupted([when], float("nan")), guarded=True, options={"delayed_check": True}, **arguments
    )
    assert all(torch.equal(a, b) for a, b in zip(golden, saved, strict=True))
    assert [a.step for a in guard.alarms] == [when]


def test_a_second_callback_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has a guard already"):
        train(tmp_path, guarded=True, twice=True)


def test_a_guard_is_not_put_around_another(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    guard = Guard(model, optimizer)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return 5

    for _ in range(12):
        assert guard.step(step) == 5

    def broken():
        step()
        optimizer.state[model.weight]["exp_avg"].fill_(1e20)

    with pytest.raises(GuardStop):
        guard.step(broken)
    with pytest.raises(UsageError, match="has a guard already"):
        Guard(model, optimizer)
    guard.close()


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_a_monitor_reports_a_planted_fault(tmp_path, arguments):
    monitored = MonitorCallback(sampling="fixed:1")
    train(tmp_path, monitored, **arguments)
    assert monitored.monitor.alarms == []
    assert len(monitored.monitor.series) > 10
    faulty = MonitorCallback(sampling="fixed:1", on_alarm="stop")
    with pytest.raises(MonitorStop):
        train(tmp_path, NaNLoss(17, faulty), **arguments)
    assert faulty.monitor.alarms[0].step == 17
    del faulty
    gc.collect()
    assert backward_hooks._listeners == []  # it ended with the callback


class NaNLoss(transformers.TrainerCallback):
    """Makes a parameter NaN before one update, and passes everything on to a callback that it stands before."""

    def __init__(self, when, following):
        self.when, self.following = when, following

    def on_train_begin(self, args, state, control, **given):
        self.following.on_train_begin(args, state, control, **given)

    def on_step_begin(self, args, state, control, model=None, **given):
        if state.global_step == self.when:
            with torch.no_grad():
                next(iter(model.parameters())).view(-1)[3:].fill_(float("nan"))

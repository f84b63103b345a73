"""Lightning's Trainer under the guard: a planted fault is caught, and the run ends as if it had not happened."""

from __future__ import annotations

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")

from monitor.segments import executed_again, oldest_kept  # noqa: E402
from unsilent.basics.errors import UsageError  # noqa: E402
from unsilent.guard import GuardStop  # noqa: E402
from unsilent.integrations.lightning import GuardCallback, MonitorCallback  # noqa: E402
from unsilent.monitor import MonitorStop, backward_hooks  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BATCHES = 12
"""Of an epoch; three epochs."""


class Module(lightning.LightningModule):
    def __init__(self, kind, interval, corrupts=(), value=1e12):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
        )  # fmt: skip
        self.kind, self.interval, self.corrupts, self.value = kind, interval, set(corrupts), value
        self.seen, self.scale = [], 1.0

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = float(torch.rand(()))  # drawn again when the batch is done again

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        loss = torch.nn.functional.cross_entropy(self.net(x + 0.1 * self.scale * torch.randn_like(x)), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + 0 * torch.rand(()))

    def on_before_optimizer_step(self, optimizer):
        if self.global_step in self.corrupts:
            self.corrupts -= {self.global_step} if self.value != float("inf") else set()
            self.net[4].weight.grad[0, 0] = self.value

    def configure_optimizers(self):
        make = {
            "adam": lambda p: torch.optim.Adam(p, 1e-2),
            "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        }
        optimizer = make[self.kind](self.parameters())
        if self.interval == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97 if self.interval == "step" else 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def data():
    x = torch.randn(BATCHES * 8, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


def fit(folder, kind="adam", interval="step", corrupts=(), guarded=False, value=1e12, callbacks=(), **arguments):
    options = arguments.pop("options", {})
    torch.manual_seed(0)
    module = Module(kind, interval, corrupts, value)
    loader = torch.utils.data.DataLoader(data(), batch_size=8, shuffle=True)
    callback = GuardCallback(**options)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        num_sanity_val_steps=0, enable_model_summary=False, default_root_dir=folder,
        callbacks=[*([callback] if guarded else []), *callbacks], **arguments,
    )  # fmt: skip
    trainer.fit(module, loader, torch.utils.data.DataLoader(data(), batch_size=32))
    rates = [g["lr"] for o in trainer.optimizers for g in o.param_groups]
    state = [t.detach().clone() for t in module.state_dict().values()]
    moments = [
        v.clone() for e in trainer.optimizers[0].state.values() for v in e.values() if isinstance(v, torch.Tensor)
    ]
    return (*state, *moments, torch.random.get_rng_state()), rates, trainer.global_step, callback.guard, module


def same(one, other):
    tensors = all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    return tensors and one[1:3] == other[1:3]


CASES = [("adam", "step"), ("sgd", "step"), ("adam", "epoch"), ("sgd", "plateau")]


@pytest.mark.parametrize(("kind", "interval"), CASES)
def test_a_planted_fault_leaves_nothing(tmp_path, kind, interval):
    golden = fit(tmp_path, kind, interval)
    clean = fit(tmp_path, kind, interval, guarded=True)
    assert same(clean, golden)
    assert clean[3].alarms == []
    # In the middle of an epoch, at its last batch (schedules by epoch move with it) and at the first of the next.
    for when in (17, 23, 24, 35):
        assert not same(fit(tmp_path, kind, interval, [when]), golden)
        saved = fit(tmp_path, kind, interval, [when], guarded=True)
        assert same(saved, golden)
        assert [a.step for a in saved[3].alarms] == [when]
        seen = saved[4].seen
        place = when % BATCHES  # states are forgotten at the end of an epoch
        assert len(seen) == 3 * BATCHES + executed_again(place)
        first = when - place + oldest_kept(place)
        assert seen[when + 1 :][: when + 1 - first] == seen[first : when + 1]


@pytest.mark.parametrize("when", [12, 17, 23, 35])
def test_late_readings_and_validation_within_an_epoch(tmp_path, when):
    arguments = {"val_check_interval": 3, "gradient_clip_val": 5.0}
    golden = fit(tmp_path, **arguments)
    # A clipped gradient is not large; NaN is.
    value = float("nan")
    saved = fit(tmp_path, corrupts=[when], guarded=True, value=value, options={"delayed_check": True}, **arguments)
    assert same(saved, golden)
    assert [a.step for a in saved[3].alarms] == [when]


def test_those_who_come_after_see_the_batch_as_it_ended(tmp_path):
    class Reader(lightning.Callback):
        def __init__(self):
            self.losses = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.losses.append(outputs["loss"].item())

    golden, saved = Reader(), Reader()
    fit(tmp_path, callbacks=[golden])
    fit(tmp_path, corrupts=[17], guarded=True, callbacks=[saved])
    assert saved.losses == golden.losses


def test_a_fault_that_stays_stops_the_training(tmp_path):
    with pytest.raises(GuardStop) as raised:
        fit(tmp_path, corrupts=range(15, 99), guarded=True, value=float("inf"))
    assert raised.value.first.step == 15
    # The guard let go of the module, and the loop is its own again.
    fit(tmp_path, guarded=True)


def test_what_cannot_be_guarded_is_refused(tmp_path):
    with pytest.raises(UsageError, match="accumulate_grad_batches is 2; expected 1, because GuardCallback"):
        fit(tmp_path, guarded=True, accumulate_grad_batches=2)
    with pytest.raises(UsageError, match="has a guard already"):
        fit(tmp_path, guarded=True, callbacks=[GuardCallback()])

    class Manual(Module):
        automatic_optimization = False

    trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[GuardCallback()], enable_checkpointing=False,
                                enable_model_summary=False)  # fmt: skip
    with pytest.raises(UsageError, match="optimizes manually"):
        trainer.fit(Manual("adam", "step"), torch.utils.data.DataLoader(data(), batch_size=8))


class Fault(lightning.Callback):
    """Makes a parameter NaN before a batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 30:
            with torch.no_grad():
                pl_module.net[4].weight.fill_(float("nan"))


def test_a_monitor_reports_a_planted_fault(tmp_path):
    clean = MonitorCallback(sampling="fixed:1")
    fit(tmp_path, callbacks=[clean])
    assert clean.monitor.alarms == []
    faulty = MonitorCallback(sampling="fixed:1", on_alarm="stop")
    with pytest.raises(MonitorStop):
        fit(tmp_path, callbacks=[Fault(), faulty])
    assert {alarm.step for alarm in faulty.monitor.alarms} == {30}
    assert backward_hooks._listeners == []

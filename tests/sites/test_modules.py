"""Which models are refused for being in training mode: those that compute something else in it."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.protection.profile import load_profile, make_profile
from unsilent.protection.protect import ProtectedModel, protect
from unsilent.sites.modules import mode_readers, reject_training_mode


class OwnDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, training=self.training)


class InHelper(nn.Module):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class Inherited(InHelper):
    pass


SENSITIVE = [nn.Dropout, lambda: nn.BatchNorm1d(4), lambda: nn.LSTM(4, 4), OwnDropout, InHelper, Inherited, nn.RReLU]


@pytest.mark.parametrize("make", SENSITIVE)
def test_a_module_that_reads_its_mode_is_refused_in_training_mode(make):
    model = nn.Sequential(nn.Linear(4, 4), make())
    with pytest.raises(UsageError, match=r"module '1' \(\w+\) is in training mode; call model.eval\(\) first"):
        reject_training_mode(mode_readers(model))
    reject_training_mode(mode_readers(model.eval()))


def test_one_module_in_training_mode_is_enough():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).eval()
    model[1][0].train()
    with pytest.raises(UsageError, match=r"module '1.0' \(Dropout\)"):
        reject_training_mode(mode_readers(model))


def test_modules_that_do_not_read_their_mode_may_be_in_either():
    assert not mode_readers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.LayerNorm(4), nn.GroupNorm(1, 2)))


def test_one_rule_for_campaigns_profiles_and_protected_models(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    batches = [torch.randn(50, 4) for _ in range(6)]
    refused = pytest.raises(UsageError, match=r"module '1' \(BatchNorm1d\) is in training mode; call model.eval\(\)")
    with refused:
        unsilent.pvf(unsilent.Workload(model, batches), trials=1, store=tmp_path / "s.sqlite")
    assert model.training  # nobody has changed it
    with refused:
        protect(model, batches)
    profile = make_profile(model.eval(), batches, "weight-integrity")
    profile.save(tmp_path / "p")
    guarded = protect(model, batches, "weight-integrity")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for call in (
        lambda: guarded(batches[0]),
        lambda: load_profile(tmp_path / "p", model),
        lambda: ProtectedModel(model, profile),
    ):
        with pytest.raises(UsageError, match=r"module '1' \(BatchNorm1d\) is in training mode; call model.eval\(\)"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    guarded(batches[0])
    assert not guarded.verdict.flagged.any()


class Locked(nn.Module):
    """Cannot be copied or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lock = nn.Linear(4, 2), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.net(x)


def quantised(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this function will move
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


BATCHES = [torch.randn(50, 4, generator=torch.Generator().manual_seed(n)) for n in range(6)]


def test_a_model_whose_weights_are_all_packed_says_where_they_are():
    with pytest.raises(
        UsageError, match=r"no parameters or buffers, only values in 0._packed_params._packed_params, 2._p"
    ):
        unsilent.pvf(unsilent.Workload(quantised(), BATCHES), trials=1)
    with (
        pytest.raises(UsageError, match="no parameters or buffers, only values in"),
        unsilent.inject(quantised(), "param:0.weight[0]", bit=3),
    ):
        pass


def test_a_model_without_any_weights_says_so():
    with pytest.raises(UsageError, match="the model has no parameters or buffers; expected a model with weights"):
        unsilent.pvf(unsilent.Workload(nn.Sequential(nn.ReLU()), BATCHES), trials=1)


def test_packed_weights_are_refused_by_what_could_not_check_or_restore_them():
    mixed = quantised(nn.LayerNorm(4), nn.Linear(4, 2))
    for given in ({"detector": "weight-integrity"}, {"recovery": "repair"}, {"recovery": "golden"}):
        with pytest.raises(
            UsageError, match=r"1\._packed_params\._packed_params holds weights of a quantised module in p"
        ):
            protect(mixed, BATCHES, **given)
    with protect(mixed, BATCHES, "dr-dna") as guarded, torch.no_grad():
        assert torch.equal(guarded(BATCHES[0]), mixed(BATCHES[0]))


def test_the_profile_of_a_quantised_model_is_of_its_packed_weights():
    profile = make_profile(quantised(), BATCHES, "ranger")
    ProtectedModel(quantised(), profile)
    with pytest.raises(UsageError, match="the profile is of a model with other weights"):
        ProtectedModel(quantised(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), profile)


def test_what_cannot_be_copied_is_named():
    model = nn.Sequential(Locked(), nn.Linear(2, 2)).eval()
    message = (
        r"cannot be copied: attribute 'lock' of module '0' \(Locked\) \(TypeError: cannot pickle .*that copy.deepcopy"
    )
    with pytest.raises(UsageError, match=message):
        protect(model, BATCHES, "duplication")
    with pytest.raises(UsageError, match=message):
        protect(model, BATCHES, recovery="elsewhere", elsewhere="cpu")
    with pytest.raises(UsageError, match=message):
        unsilent.pvf(unsilent.Workload(model, BATCHES), trials=1, dtype="float64")
    assert unsilent.pvf(unsilent.Workload(model, BATCHES), trials=3) is not None

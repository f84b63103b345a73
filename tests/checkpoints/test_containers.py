"""The same weights and moments have the same names, whatever container and key they were saved in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from conftest import in_process
from unsilent import verified_save
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.comparing import SAME, compare
from unsilent.checkpoints.drawing import corruptible
from unsilent.checkpoints.formats import torch_zip
from unsilent.checkpoints.formats.known import Format
from unsilent.checkpoints.memory_hashes import hashes_in_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


class Net(nn.Module):
    """A model with nested modules, buffers and a name that reminds of random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
        self.random_features = nn.Linear(8, 3)

    def forward(self, x):
        return self.random_features(self.body(x))


def trained():
    """A model and its optimizer after one step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def deepspeed_folder(net, path):
    path.mkdir()
    torch.save({"module": net.state_dict(), "global_steps": 1}, path / "mp_rank_00_model_states.pt")


def saved_by_dcp(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)


MODEL_CONTAINERS = {
    "state dict": lambda net, path: torch.save(net.state_dict(), path),
    "model": lambda net, path: torch.save({"model": net.state_dict(), "epoch": 3}, path),
    "state_dict": lambda net, path: torch.save({"state_dict": net.state_dict()}, path),
    "whole module": torch.save,
    "whole module under a key": lambda net, path: torch.save({"model": net, "epoch": 3}, path),
    "legacy": lambda net, path: torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False),
    "whole module, legacy": lambda net, path: torch.save(net, path, _use_new_zipfile_serialization=False),
    "TorchScript": lambda net, path: torch.jit.script(net).save(str(path)),
    "safetensors": lambda net, path: save_file(net.state_dict(), path),
    "DCP, flat": lambda net, path: saved_by_dcp(net.state_dict(), path),
    "DCP, nested": lambda net, path: saved_by_dcp({"app": {"model": net.state_dict()}}, path),
    "DeepSpeed": deepspeed_folder,
}


OPTIMIZER_CONTAINERS = {
    "alone": lambda net, state: state,
    "optimizer": lambda net, state: {"optimizer": state},
    "opt": lambda net, state: {"opt": state, "epoch": 3},
    "adamw": lambda net, state: {"adamw": state},
    "optimizers[0]": lambda net, state: {"optimizers[0]": state},
    "a list of one": lambda net, state: [state],
    "Lightning": lambda net, state: {"optimizer_states": [state], "lr_schedulers": [{"last_epoch": 1}]},
    "nested": lambda net, state: {"state": {"trainers": {"main": {"opt": state}}}},
    "the same mapping as others": lambda net, state: {**state, "epoch": 3},
}


def is_tensor(stored):
    return not (stored.is_number or stored.is_object)


def tensors_of(path):
    """Dtype and shape of every tensor by its name."""
    with Checkpoint(path) as checkpoint:
        return {t.name: (t.dtype, t.shape) for t in checkpoint.tensors.values() if is_tensor(t)}


def described(tensors):
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}


def differing(first, second):
    """Names of the tensors that are not the same in both."""
    with Checkpoint(first) as one, Checkpoint(second) as two:
        return {d.name for d in compare(one, two) if d.kind == "tensor" and d.status != SAME}


@pytest.fixture(scope="module")
def in_containers(tmp_path_factory):
    """A model's state dict, and the files of each container: with these weights, and with one bit of one of them flipped."""
    folder = tmp_path_factory.mktemp("containers")
    net, _ = trained()
    changed = Net()
    changed.load_state_dict(net.state_dict())
    changed.random_features.weight.detach().view(torch.int32)[1, 2] ^= 1 << 7
    files = {}
    for number, (container, save) in enumerate(MODEL_CONTAINERS.items()):
        files[container] = (folder / f"{number}.pt", folder / f"{number}.changed.pt")
        for model, path in zip((net, changed), files[container], strict=True):
            save(model, path)
    return net.state_dict(), files


@pytest.mark.parametrize("container", MODEL_CONTAINERS)
def test_the_same_weights_are_equal_in_every_container(container, in_containers):
    state, files = in_containers
    whole, _ = files[container]
    assert tensors_of(whole) == described({f"model/{name}": tensor for name, tensor in state.items()})
    for other, changed in files.values():
        assert differing(whole, other) == set()
        assert differing(whole, changed) == {"model/random_features.weight"}


def state_of(optimizer):
    """Its tensors by the names that its state dict gives."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer/{n}/{key}": tensor for n, states in state.items() for key, tensor in states.items()}


@pytest.mark.parametrize("container", OPTIMIZER_CONTAINERS)
def test_an_optimizer_is_known_by_its_structure(container, tmp_path):
    net, optimizer = trained()
    torch.save(OPTIMIZER_CONTAINERS[container](net, optimizer.state_dict()), tmp_path / "o.pt")
    assert tensors_of(tmp_path / "o.pt") == described(state_of(optimizer))
    with Checkpoint(tmp_path / "o.pt") as checkpoint:
        assert checkpoint.tensors["optimizer/param_groups/0/lr"].value == 0.001


@pytest.mark.parametrize("key", ["optimizer", "adamw", "optimizers[0]"])
def test_an_optimizer_beside_its_model_has_the_names_of_the_parameters(key, tmp_path):
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), key: optimizer.state_dict()}, tmp_path / "c.pt")
    names = [name for name, _ in net.named_parameters()]
    expected = {f"optimizer/{name}/{state}" for name in names for state in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name in tensors_of(tmp_path / "c.pt") if name.startswith("optimizer/")} == expected


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda g, d: [g, d], ("0", "1")),
        (lambda g, d: {"optimizer_states": [g, d]}, ("0", "1")),
        (lambda g, d: {"optimizer_g": g, "optimizer_d": d}, ("optimizer_g", "optimizer_d")),
        (lambda g, d: {"trainer": {"g": g, "d": d}}, ("g", "d")),
    ],
)
def test_several_optimizers_are_told_apart_by_the_keys_in_which_they_differ(make, names, tmp_path):
    (net, first), (_, second) = trained(), trained()
    torch.save({"model": net.state_dict(), "all": make(first.state_dict(), second.state_dict())}, tmp_path / "o.pt")
    expected = {
        f"optimizer/{name}/{rest.removeprefix('optimizer/')}": tensor
        for name, optimizer in zip(names, (first, second), strict=True)
        for rest, tensor in state_of(optimizer).items()
    }
    found = {name: about for name, about in tensors_of(tmp_path / "o.pt").items() if name.startswith("optimizer/")}
    assert found == described(expected)


@pytest.mark.parametrize("key", ["optim", "adamw"])
def test_a_flattened_training_state_is_that_of_the_nested_one(key, tmp_path):
    net, optimizer = trained()
    model, nested = get_state_dict(net, optimizer)
    _, flat = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dotted = {f"model.{n}": t for n, t in model.items()} | {f"{key}.{n}": t for n, t in flat.items()}
    torch.save({"model": model, key: nested}, tmp_path / "0.pt")
    torch.save({"model": model, key: flat}, tmp_path / "1.pt")
    torch.save({"model": net.state_dict(), key: optimizer.state_dict()}, tmp_path / "2.pt")
    torch.save(dotted, tmp_path / "3.pt")
    saved_by_dcp({"model": model, key: nested}, tmp_path / "4.pt")
    saved_by_dcp({"model": model, key: flat}, tmp_path / "5.pt")
    saved_by_dcp(dotted, tmp_path / "6.pt")
    expected = set(tensors_of(tmp_path / "2.pt"))
    assert "optimizer/random_features.weight/exp_avg" in expected
    for number in range(7):
        assert set(tensors_of(tmp_path / f"{number}.pt")) == expected, number
        assert differing(tmp_path / "2.pt", tmp_path / f"{number}.pt") == set()


def test_the_moments_are_not_drawn_from_where_the_model_is_meant(tmp_path):
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "c.pt")
    with Checkpoint(tmp_path / "c.pt") as checkpoint:
        assert all(region.site.startswith("file:model/") for region in corruptible(checkpoint))


def test_a_file_and_a_state_in_memory_have_the_same_names(tmp_path):
    net, optimizer = trained()
    for number, state in enumerate(
        (optimizer.state_dict(), {"model": net.state_dict(), "opt": optimizer.state_dict()})
    ):
        torch.save(state, tmp_path / f"{number}.pt")
        assert set(hashes_in_memory(state)) == set(tensors_of(tmp_path / f"{number}.pt"))


def diff(first, second):
    """Exit code and output of ``unsilent checkpoint diff``."""
    done = in_process("checkpoint", "diff", first, second, "--plain")
    return done.returncode, done.stdout


@pytest.mark.parametrize("container", MODEL_CONTAINERS)
def test_the_command_finds_a_copy_equal_and_names_what_only_one_file_has(container, in_containers, tmp_path):
    _, files = in_containers
    whole, _ = files[container]
    net, _ = trained()
    MODEL_CONTAINERS[container](net, tmp_path / "copy.pt")
    assert diff(whole, tmp_path / "copy.pt")[0] == 0
    code, shown = diff(whole, files["state dict"][0])
    assert "9 tensors and numbers in both checkpoints are identical" in shown
    with Checkpoint(whole) as checkpoint:
        only = [t for t in checkpoint.tensors.values() if not is_tensor(t)]
    assert code == bool(only)


def test_numbers_in_a_model_have_the_same_names_under_a_key_around_it(tmp_path):
    net, _ = trained()
    for number, state in enumerate((net, {"model": net}, {"state_dict": net})):
        torch.save(state, tmp_path / f"{number}.pt")
        assert diff(tmp_path / "0.pt", tmp_path / f"{number}.pt")[0] == 0


def test_another_code_of_torchscript_is_a_difference(tmp_path):
    class Doubled(Net):
        def forward(self, x):
            return 2 * self.random_features(self.body(x))

    net, doubled = Net(), Doubled()
    doubled.load_state_dict(net.state_dict())
    for name, model in (("net", net), ("doubled", doubled)):
        torch.jit.script(model).save(str(tmp_path / f"{name}.pt"))
    with Checkpoint(tmp_path / "net.pt") as one, Checkpoint(tmp_path / "doubled.pt") as two:
        assert {d.name for d in compare(one, two) if d.status != SAME} == {"other/code and constants"}


def values_of(path):
    """The values of every tensor by its name."""
    with Checkpoint(path) as checkpoint:
        return {
            name: torch.frombuffer(bytearray(b"".join(checkpoint.content(t))), dtype=torch.float32).tolist()
            for name, t in checkpoint.tensors.items()
            if is_tensor(t)
        }


def two_parameters(state, groups=({"lr": 0.1, "params": [0, 1]},), key="opt"):
    """A model of two parameters, and an optimizer with this state."""
    model = {"fc.weight": torch.full((2, 3), 1.0), "fc.bias": torch.full((3,), 2.0)}
    return {"model": model, key: {"state": state, "param_groups": list(groups)}}


LIKE_NUMBERS = [
    ("0", "00"), ("00", "0"), ("0", "\u0660"), (0, "0"), ("0", "00", "000"), (0, "fc.weight"), ("fc.weight", 0),
    ("0", "optimizer/0"), (("a", "b"), "a.b"), ("a.b", ("a", "b")), (0, 1.5, None, True),
]  # fmt: skip


@pytest.mark.parametrize("keys", LIKE_NUMBERS)
def test_no_tensor_is_hidden_by_another_of_its_name(keys, tmp_path):
    moments = {key: torch.full((2, 3), 3.0 + n) for n, key in enumerate(keys)}
    state = two_parameters({key: {"exp_avg": moment} for key, moment in moments.items()})
    torch.save(state, tmp_path / "c.pt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for file in ("c.pt", "legacy.pt"):
        listed = [value for name, value in values_of(tmp_path / file).items() if name.startswith("optimizer/")]
        assert sorted(listed) == sorted(moment.flatten().tolist() for moment in moments.values())
    assert set(hashes_in_memory(state)) == set(tensors_of(tmp_path / "c.pt"))
    verified_save(state, tmp_path / "verified.pt")
    for key, moment in moments.items():
        moment[1, 2] = float("nan")
        torch.save(state, tmp_path / "changed.pt")
        assert len(differing(tmp_path / "c.pt", tmp_path / "changed.pt")) == 1, key
        moment[1, 2] = moment[0, 0]


def test_a_format_that_gives_two_tensors_one_name_hides_none(tmp_path, monkeypatch):
    torch.save(
        {"a": torch.full((2,), 1.0), "b": torch.full((2,), 2.0), "model/w'1": torch.full((2,), 3.0)}, tmp_path / "c.pt"
    )

    def alike(files):
        return [
            replace(t, name="model/w'1" if t.stored_as.startswith("model") else "model/w")
            for t in torch_zip.tensors(files)
        ]

    monkeypatch.setattr(
        "unsilent.checkpoints.checkpoint.format_of", lambda files: Format(torch_zip.NAME, torch_zip.matches, alike)
    )
    assert sorted(values_of(tmp_path / "c.pt").values()) == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


def of_frozen(net):
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])


UNKNOWN_ORDER = {
    "the first layer is frozen": of_frozen,
    "the last parameters are left out": lambda net: torch.optim.AdamW(list(net.parameters())[:4]),
    "two groups": lambda net: torch.optim.AdamW(
        [{"params": net[2].parameters(), "weight_decay": 0.1}, {"params": net[:2].parameters()}]
    ),
    "another parameter": lambda net: torch.optim.AdamW([*net.parameters(), nn.Parameter(torch.ones(2, 2))]),
}


@pytest.mark.parametrize("case", UNKNOWN_ORDER)
def test_numbers_stay_where_the_file_does_not_say_whose_they_are(case, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = UNKNOWN_ORDER[case](net)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "opt": optimizer.state_dict()}
    torch.save(state, tmp_path / "c.pt")
    saved_by_dcp(state, tmp_path / "dcp")
    expected = set(state_of(optimizer)) | {f"model/{name}" for name in net.state_dict()}
    for file in ("c.pt", "dcp"):
        assert set(tensors_of(tmp_path / file)) == expected, file
    assert set(hashes_in_memory(state)) == expected


@pytest.mark.parametrize("with_model", [True, False])
def test_a_parameter_that_moved_to_the_next_group_is_a_difference(with_model, tmp_path):
    """Its number stays, and so do all other numbers: only where the groups begin tells."""
    for name, first in (("one.pt", 1), ("other.pt", 2)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        groups = [{"params": part} for part in (list(model.parameters())[:first], list(model.parameters())[first:])]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        beside = {"model": {"w": torch.ones(2)}} if with_model else {}
        torch.save({"optimizer": optimizer.state_dict(), **beside}, tmp_path / name)
    code, shown = diff(tmp_path / "one.pt", tmp_path / "other.pt")
    assert (code, "optimizer/param_groups/1/params/0" in shown) == (1, True)


@pytest.mark.parametrize("order", [("ema", "model"), ("model", "ema")])
def test_a_moving_average_beside_the_model_is_not_taken_for_its_parameters(order, tmp_path):
    state = two_parameters({0: {"exp_avg": torch.ones(2, 3)}})
    state["ema"] = dict(state["model"])
    torch.save({**{key: state[key] for key in order}, "opt": state["opt"]}, tmp_path / "c.pt")
    assert "optimizer/fc.weight/exp_avg" in tensors_of(tmp_path / "c.pt")


def test_a_state_that_has_a_tensor_for_a_few_parameters_has_their_names(tmp_path):
    state = two_parameters({1: {"step": 3, "exp_avg": torch.ones(3)}})
    torch.save(state, tmp_path / "c.pt")
    saved_by_dcp(state, tmp_path / "dcp")
    for file in ("c.pt", "dcp"):
        with Checkpoint(tmp_path / file) as checkpoint:
            assert {"optimizer/fc.bias/step", "optimizer/fc.bias/exp_avg"} <= set(checkpoint.tensors), file
    assert "optimizer/fc.bias/exp_avg" in hashes_in_memory(state)


LISTS_OF_MODULES = {
    "state dict": lambda weights: weights,
    "beside an optimizer": lambda weights: {"model": weights, "optimizer": two_parameters({})["opt"]},
    "nested": lambda weights: {"model": {"param_groups": [weights], "state": {"a": weights}}},
    "under one prefix": lambda weights: {f"net.{name}": weight for name, weight in weights.items()},
}


@pytest.mark.parametrize("container", LISTS_OF_MODULES)
def test_a_model_whose_modules_have_names_of_an_optimizer_is_a_model(container, tmp_path):
    net = nn.ModuleDict({"state": nn.ModuleList([nn.Linear(2, 2)]), "param_groups": nn.ModuleList([nn.LayerNorm(2)])})
    state = LISTS_OF_MODULES[container](net.state_dict())
    torch.save(state, tmp_path / "c.pt")
    names = tensors_of(tmp_path / "c.pt")
    assert names
    assert all(name.startswith("model/") for name in names)
    assert set(hashes_in_memory(state)) == set(names)


def test_an_optimizer_without_settings_or_with_tensors_in_its_groups_is_one(tmp_path):
    for number, settings in enumerate(({}, {"lr": torch.tensor(0.1)}, {"buffer": torch.zeros(2, 3)})):
        state = two_parameters({0: {"exp_avg": torch.ones(2, 3)}}, ({**settings, "params": [0, 1]},))
        torch.save(state, tmp_path / f"{number}.pt")
        assert "optimizer/fc.weight/exp_avg" in tensors_of(tmp_path / f"{number}.pt")
        assert set(hashes_in_memory(state)) == set(tensors_of(tmp_path / f"{number}.pt"))

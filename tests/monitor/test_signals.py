"""Signals against an oracle: float64 arithmetic of numpy on the tensors that the loop itself sees."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monitor.trainings import TRAININGS, batch
from unsilent.basics.errors import UsageError
from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NORM_INPUT_GRADIENT, NUMBER, UPDATE, VALUE
from unsilent.guard.magnitudes import local_tensor, norms_and_largest
from unsilent.monitor import watch_gradient
from unsilent.monitor.backward_hooks import _listeners
from unsilent.monitor.sampling import SampleIntervals
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.row import MOST_PARTS, SignalRow


def norm(tensor):
    return float(np.sqrt(np.sum(np.square(array(tensor)))))


def largest(tensor):
    return float(np.abs(array(tensor)).max(initial=0))


def array(tensor):
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(torch.float64).numpy()


def read(collector):
    """The signals of the step that ended, by feature, tensor and statistic."""
    signals = collector.take_row().read(len(collector.series))
    return {
        one[:3]: float(v) for one, v, seen in zip(collector.series, signals.values, signals.seen, strict=True) if seen
    }


class LlamaRMSNorm(nn.Module):
    """Uses its input twice, as those of transformers do."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class MyNorm(nn.Module):
    def forward(self, *, values):
        return {"scaled": (values / values.norm(), 3)}


class Block(nn.Module):
    def __init__(self, make_norm):
        super().__init__()
        self.norm, self.fc, self.use_norm = make_norm(8), nn.Linear(8, 8), nn.Module.__call__

    def forward(self, x):
        return x + self.fc(self.use_norm(self.norm, x)).tanh()


class Net(nn.Module):
    def __init__(self, make_norm=nn.LayerNorm):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block(make_norm) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(make_norm=nn.LayerNorm, seed=0):
    torch.manual_seed(seed)
    return Net(make_norm)


def loss_of(model, seed=1):
    return model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean()


def test_gradients_updates_and_loss_are_those_of_float64():
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            signals = read(collector)
            assert signals[LOSS, "", NUMBER] == loss.item()
            for name, parameter in model.named_parameters():
                for feature, tensor in ((GRADIENT, parameter.grad), (UPDATE, before[name] - parameter)):
                    assert signals[feature, name, L2] == pytest.approx(norm(tensor), rel=1e-5)
                    assert signals[feature, name, LARGEST] == largest(tensor)


@pytest.mark.parametrize(
    "make_norm", [nn.LayerNorm, LlamaRMSNorm, nn.RMSNorm, lambda size: nn.GroupNorm(2, size), nn.BatchNorm1d]
)
def test_the_gradient_of_a_norm_layers_input_is_that_through_the_layer_alone(make_norm):
    model = made(make_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oracle = copy.deepcopy(model)
    views = []

    def use_norm(layer, x):
        views.append(x.view_as(x))
        views[-1].retain_grad()
        return layer(views[-1])

    for block in oracle.blocks:
        block.use_norm = use_norm
    loss_of(oracle).backward()
    with SignalCollector(model, [optimizer]) as collector:
        loss_of(model).backward()
        signals = read(collector)
    for number, view in enumerate(views):
        name = f"blocks.{number}.norm"
        assert signals[NORM_INPUT_GRADIENT, name, L2] == pytest.approx(norm(view.grad), rel=1e-4)
        assert signals[NORM_INPUT_GRADIENT, name, LARGEST] == pytest.approx(largest(view.grad), rel=1e-4)


def test_a_norm_layer_of_the_users_with_keywords_and_nested_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), MyNorm()

        def forward(self, x):
            return self.norm(values=self.fc(x))["scaled"][0]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        inner = model.fc(torch.ones(2, 4))
        inner.retain_grad()
        model.norm(values=inner)["scaled"][0].pow(3).sum().backward()
        signals = read(collector)
    assert signals[NORM_INPUT_GRADIENT, "norm", L2] == pytest.approx(norm(inner.grad), rel=1e-5)


def test_a_second_input_of_a_norm_layer_is_no_way_to_the_first():
    class AdaptiveNorm(nn.Module):
        def forward(self, x, shift):
            return 2 * x + shift

    torch.manual_seed(0)
    inner, outer, layer = nn.Linear(3, 3), nn.Linear(3, 3), AdaptiveNorm()
    model = nn.ModuleList([inner, outer, layer])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        x = inner(torch.ones(2, 3))
        out = layer(x, outer(x).exp())
        out.retain_grad()
        out.square().sum().backward()
        signals = read(collector)
    assert signals[NORM_INPUT_GRADIENT, "2", L2] == pytest.approx(norm(2 * out.grad), rel=1e-5)


def test_gradient_accumulation_gives_the_largest_of_the_micro_batches():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        expected, losses = [], []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            losses.append(loss.item())
            expected.append(norm(model.first.weight.grad))
        optimizer.step()
        signals = read(collector)
    assert signals[GRADIENT, "first.weight", L2] == pytest.approx(max(expected), rel=1e-5)
    assert signals[LOSS, "", NUMBER] == max(losses)
    assert collector.backwards == 3


def test_rows_of_very_many_micro_batches_do_not_grow():
    row, values = SignalRow(0), np.random.default_rng(0).normal(size=(3 * MOST_PARTS, 2))
    values[70, 1] = np.nan
    for one in values:
        row.add((4, 1), torch.from_numpy(one))
        assert len(row._parts) <= MOST_PARTS
    row.begin_copy()
    signals = row.read(6)
    assert signals.seen.tolist() == [False, True, False, False, True, False]
    assert signals.values[4] == values[:, 0].max()
    assert np.isnan(signals.values[1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = made(LlamaRMSNorm), reentrant

    def forward(self, x):
        x = self.inner.first(x)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_signals(reentrant):
    plain, saved = made(LlamaRMSNorm), Checkpointed(reentrant)
    found = []
    for model in (plain, saved):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with SignalCollector(model, [optimizer]) as collector:
            loss_of(model).backward()
            optimizer.step()
            signals = read(collector)
        found.append({(f, t.removeprefix("inner."), s): v for (f, t, s), v in signals.items()})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert found[1][key] == pytest.approx(value, rel=1e-4), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_scaler_is_divided_out(dtype):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with SignalCollector(model, [optimizer]) as collector:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model)
        (scaler.scale(loss) / 1).backward()
        scaler.unscale_(optimizer)
        gradient = model.first.weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        signals = read(collector)
    assert signals[LOSS, "", NUMBER] == pytest.approx(loss.item(), rel=1e-6)
    assert signals[GRADIENT, "first.weight", L2] == pytest.approx(norm(gradient), rel=1e-4)
    assert signals[NORM_INPUT_GRADIENT, "blocks.0.norm", LARGEST] < 1


def test_two_losses_may_be_scaled_before_the_first_is_differentiated():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with SignalCollector(model, [optimizer]) as collector:
        first, second = scaler.scale(loss_of(model, 1)), scaler.scale(loss_of(model, 2))
        for loss in (first, second):
            loss.backward()
            assert read(collector)[LOSS, "", NUMBER] == pytest.approx(loss.item() / 2**10, rel=1e-6)
        plain = loss_of(model, 3)
        plain.backward()
        assert read(collector)[LOSS, "", NUMBER] == plain.item()


def test_a_step_that_the_scaler_leaves_out_gives_no_values():
    model = made()
    halves = list(model.first.parameters()), [p for n, p in model.named_parameters() if not n.startswith("first")]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with SignalCollector(model, optimizers) as collector:
        scaler.scale(loss_of(model)).backward()
        model.last.weight.grad[0, 0] = torch.inf
        scaler.scale(loss_of(model)).backward()  # of the second optimizer alone
        for optimizer in optimizers:
            scaler.step(optimizer)
        signals = read(collector)
        scaler.update()
        assert (GRADIENT, "last.weight", L2) not in signals
        assert (GRADIENT, "first.weight", L2) in signals
        assert (UPDATE, "last.weight", L2) not in signals
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad.fill_(torch.nan)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert read(collector) == {(LOSS, "", NUMBER): pytest.approx(loss.item(), rel=1e-6)}


@pytest.mark.parametrize(
    ("loss", "dtype", "scale", "is_seen"),
    [
        (2.0, torch.float32, 10, True),
        (torch.nan, torch.float32, 10, True),
        (torch.inf, torch.float32, 10, True),
        (-torch.inf, torch.float32, 10, True),
        (1e10, torch.float32, 120, False),  # infinite by the scale alone
        (torch.nan, torch.float32, 120, True),
        (2.0, torch.float16, 10, True),
        (torch.nan, torch.float16, 10, True),
        (1000.0, torch.float16, 10, False),
        (torch.inf, torch.float16, -30, True),
    ],
)
def test_a_loss_that_is_not_finite_is_seen_unless_its_scale_may_be_the_cause(loss, dtype, scale, is_seen):
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**scale)
    with SignalCollector(nn.ParameterList([weight]), [optimizer]) as collector:
        scaler.scale(weight * loss).backward()
        signals = read(collector)
    assert ((LOSS, "", NUMBER) in signals) is is_seen
    if is_seen:
        assert signals[LOSS, "", NUMBER] == pytest.approx(abs(loss), nan_ok=True)


def test_half_precision_does_not_overflow_in_the_norm():
    tensors = [
        (torch.arange(-500, 500) * 100).to(torch.float16),
        torch.full((300,), 200.0).to(torch.bfloat16),
        torch.ones(2),
    ]
    values = norms_and_largest(tensors).tolist()
    assert values[:3] == pytest.approx([norm(t) for t in tensors], rel=2**-8)
    assert values[3:] == [largest(t) for t in tensors]
    doubles = norms_and_largest([torch.full((2,), 1e100, dtype=torch.float64)]).tolist()
    assert doubles == pytest.approx([2**0.5 * 1e100, 1e100])


def test_unusual_parameters():
    """Tied, sparse, empty, frozen, without a gradient, of bfloat16, not contiguous, and outside of the model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.tied = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3)
            self.out = nn.Linear(3, 6, bias=False)
            self.out.weight = self.tied.weight
            self.empty, self.unused = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())

        def forward(self, x):
            return (
                self.out(self.table(x) + self.tied(x) * self.narrow * self.frozen + self.turned.mean(0))
                + self.empty.sum()
            )

    torch.manual_seed(0)
    model, outside = Model(), nn.Parameter(torch.ones(2))
    dense = [p for n, p in model.named_parameters() if n != "table.weight"]
    optimizers = [
        torch.optim.AdamW([*dense, outside], lr=0.1),
        torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
    ]
    with SignalCollector(model, optimizers) as collector:
        for _ in range(2):
            for one in optimizers:
                one.zero_grad()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            (model(torch.tensor([1, 2, 1])).square().mean() + outside.sum()).backward()
            for one in optimizers:
                one.step()
            signals = read(collector)
            for name, p in model.named_parameters():
                if p.grad is None:
                    assert not [key for key in signals if key[1] == name]
                    continue
                assert signals[GRADIENT, name, L2] == pytest.approx(norm(p.grad), rel=2**-8)
                assert signals[GRADIENT, name, LARGEST] == largest(p.grad)
                if p.numel():
                    assert signals[UPDATE, name, L2] == pytest.approx(norm(before[name] - p), rel=2**-8)
            assert signals[GRADIENT, f"optimizer 0, parameter {len(dense)}", L2] == pytest.approx(2**0.5)


def test_complex_parameters_are_read_as_pairs_of_numbers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.phase = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
            self.inner = nn.Identity()

        def forward(self, x):
            return (self.inner(self.fc(x).to(torch.cfloat)) @ self.phase).abs().square().mean()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = []
    model.inner.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    with SignalCollector(model, [optimizer], values=["inner:input", "inner:gradient"]) as collector:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).backward()
            before = model.phase.detach().clone()
            optimizer.step()
            signals = read(collector)
            change = torch.view_as_real(before - model.phase.detach())
            for key, tensor in ((GRADIENT, torch.view_as_real(model.phase.grad)), (UPDATE, change)):
                assert signals[key, "phase", L2] == pytest.approx(norm(tensor), rel=1e-5)
                assert signals[key, "phase", LARGEST] == pytest.approx(largest(tensor), rel=1e-5)
            assert signals[VALUE, "inner:input", L2] == pytest.approx(norm(torch.view_as_real(inputs[-1])), rel=1e-5)
            assert (VALUE, "inner:gradient", L2) in signals
    assert {"phase", "phase/exp_avg"} <= set(collector.state_names)
    conjugated = torch.randn(3, dtype=torch.cfloat).conj()
    assert torch.equal(local_tensor(conjugated), torch.stack([conjugated.real, conjugated.imag], -1))


def test_comparisons_of_very_many_steps_do_not_grow():
    row, rng = SignalRow(0), np.random.default_rng(0)
    expected, names = dict.fromkeys("abcde", False), [list("abc"), list("dea")]
    for number in range(3 * MOST_PARTS):
        changed = rng.random(3) < 0.002
        row.add_comparison(names[number % 2], torch.from_numpy(changed))
        row.add_replicas(torch.tensor([number]))
        expected |= {name: True for name, one in zip(names[number % 2], changed, strict=True) if one}
        assert max(len(row._compared), len(row._compared_names), len(row._replicas)) <= MOST_PARTS + 1
    row.begin_copy()
    signals = row.read(0)
    assert set(signals.changed) == {name for name, one in expected.items() if one}
    assert set(signals.compared) == set("abcde")
    assert 0 < len(set(signals.changed)) < 5
    assert signals.replica_sums[-1] == 3 * MOST_PARTS - 1


def test_adversarial_networks_with_an_optimizer_each():
    torch.manual_seed(0)
    both = nn.ModuleDict({"make": nn.Linear(2, 2), "judge": nn.Linear(2, 1)})
    make, judge = (torch.optim.Adam(both[name].parameters(), lr=0.1) for name in ("make", "judge"))
    with SignalCollector(both, [make, judge]) as collector:
        for _ in range(3):
            judge.zero_grad()
            (-both["judge"](both["make"](torch.ones(3, 2)).detach()).mean()).backward()
            expected = norm(both["judge"].weight.grad)
            judge.step()
            signals = read(collector)
            assert signals[GRADIENT, "judge.weight", L2] == pytest.approx(expected, rel=1e-5)
            assert (UPDATE, "judge.weight", L2) in signals
            assert (UPDATE, "make.weight", L2) not in signals
            make.zero_grad()
            both["judge"](both["make"](torch.ones(3, 2))).mean().backward()
            make.step()
            signals = read(collector)
            assert signals[GRADIENT, "make.weight", L2] == pytest.approx(norm(both["make"].weight.grad), rel=1e-5)
            assert (UPDATE, "make.weight", L2) in signals


@pytest.mark.parametrize("is_reset", [True, False])
def test_steps_of_optimizers_during_a_backward_pass_are_read(is_reset):
    """An optimizer for each parameter, whose step is made as soon as the gradient is there."""
    model = made()
    optimizers = {name: torch.optim.Adam([p], lr=0.01) for name, p in model.named_parameters()}
    names, gradients = {p: name for name, p in model.named_parameters()}, {}

    def step(parameter):
        gradients[names[parameter]] = parameter.grad.clone()
        optimizers[names[parameter]].step()
        if is_reset:
            parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    with SignalCollector(model, list(optimizers.values())) as collector:
        for number in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            loss = loss_of(model)
            loss.backward()
            assert collector.backwards == number + 1
            signals = read(collector)
            assert signals[LOSS, "", NUMBER] == loss.item()
            assert (NORM_INPUT_GRADIENT, "blocks.0.norm", L2) in signals
            for name, parameter in model.named_parameters():
                assert signals[GRADIENT, name, L2] == pytest.approx(norm(gradients[name]), rel=1e-5)
                assert signals[UPDATE, name, LARGEST] == largest(before[name] - parameter)
    for hook in hooks:
        hook.remove()


def test_a_closure_is_part_of_the_step():
    model = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        return loss

    with SignalCollector(model, [optimizer]) as collector:
        for _ in range(2):
            losses.clear()
            optimizer.step(closure)
            assert read(collector)[LOSS, "", NUMBER] == max(losses)


def test_parameters_that_are_added_later_are_read():
    model = made()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        loss_of(model).backward()
        optimizer.step()
        assert (GRADIENT, "first.weight", L2) not in read(collector)
        optimizer.add_param_group({"params": model.first.parameters()})
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            signals = read(collector)
        assert signals[GRADIENT, "first.weight", L2] == pytest.approx(norm(model.first.weight.grad), rel=1e-5)
        assert (UPDATE, "first.bias", LARGEST) in signals


def test_named_values():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ["blocks.*.fc:output", "last:input", "first:gradient", "blocks.0.fc:output"]
    kept = {}

    def keep(module, args, output):
        kept[module] = args[0], output
        if output.requires_grad:
            output.retain_grad()

    hooks = [
        module.register_forward_hook(keep)
        for module in (*[block.fc for block in model.blocks], model.first, model.last)
    ]
    with SignalCollector(model, [optimizer], values=names) as collector:
        loss_of(model).backward()
        signals = read(collector)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            loss_of(model)
        assert read(collector) == {}
    expected = {
        "blocks.0.fc:output": kept[model.blocks[0].fc][1],
        "blocks.1.fc:output": kept[model.blocks[1].fc][1],
        "last:input": kept[model.last][0],
        "first:gradient": kept[model.first][1].grad,
    }
    assert {key[1] for key in signals if key[0] == VALUE} == set(expected)
    for name, tensor in expected.items():
        assert signals[VALUE, name, L2] == pytest.approx(norm(tensor), rel=1e-5)


@pytest.mark.parametrize("wanted", ["blocks:nothing", "first", "frist:input", ":input"])
def test_names_that_match_nothing_are_refused(wanted):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="watch is"):
        SignalCollector(model, [optimizer], values=[wanted])
    assert not _listeners
    assert not model.first._forward_hooks


def test_watch_gradient_inside_a_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            x = self.fc(x)
            self.before = x
            return x + watch_gradient(x, "inner").square()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.equal(watch_gradient(torch.ones(3), "nobody"), torch.ones(3))  # no monitor
    with torch.no_grad():
        model(torch.ones(3))
    with SignalCollector(model, [optimizer]) as collector:
        with torch.no_grad():
            model(torch.ones(3))
        assert VALUE not in {one.feature for one in collector.series}
        model(torch.ones(3)).sum().backward()
        signals = read(collector)
    assert signals[VALUE, "inner:gradient", L2] == pytest.approx(norm(2 * model.before), rel=1e-5)


def test_a_backward_pass_of_another_model_is_no_part_of_a_step():
    one, other = made(seed=0), made(seed=1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    with SignalCollector(one, optimizers[:1]) as first, SignalCollector(other, optimizers[1:]) as second:
        loss_of(one).backward()
        assert (first.backwards, second.backwards) == (1, 0)
        loss = 1e6 * loss_of(other)
        loss.backward()
        assert (first.backwards, second.backwards) == (1, 1)
        assert read(first)[LOSS, "", NUMBER] < 1e3
        assert read(second)[LOSS, "", NUMBER] == loss.item()


def test_a_backward_pass_that_reaches_one_parameter_of_many_is_one_of_this_model():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with SignalCollector(model, [optimizer]) as collector:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            optimizer.zero_grad()
            parameter.requires_grad_()
            model(torch.ones(3, 2)).square().mean().backward()
            parameter.requires_grad_(False)
            assert collector.backwards == number + 1
            signals = read(collector)
            assert {key[1] for key in signals} == {"", name}
            assert signals[GRADIENT, name, L2] == pytest.approx(norm(parameter.grad), rel=1e-5)


@pytest.mark.parametrize("interval", [2, 3, 7])
def test_every_tensor_is_seen_within_the_interval(interval):
    model = made()
    optimizer = torch.optim.Adam(model.parameters())
    with SignalCollector(model, [optimizer], values=["first:output"]) as collector:
        collector.intervals = SampleIntervals(interval, interval, interval)
        seen, compared = [], []
        for _ in range(3 * interval):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            signals = collector.take_row().read(len(collector.series))
            seen.append(signals.seen)
            compared.append(set(signals.compared))
        for start in range(interval, 2 * interval):
            assert np.any(seen[start : start + interval], axis=0).all()
            assert set.union(*compared[start : start + interval]) == set(collector.state_names)
        per_step = np.sum(seen, axis=1)
        assert per_step.max() < 0.75 * len(collector.series) if interval > 2 else True


@pytest.mark.parametrize("interval", [2, 4, 5])
@pytest.mark.parametrize("turns", [("judge", "make"), ("judge", "judge", "judge", "make")])
def test_every_tensor_is_seen_where_optimizers_take_turns(interval, turns):
    training = TRAININGS["adversarial"]()
    model, (make, judge) = training.model, training.optimizers
    rows = []
    with SignalCollector(model, [make, judge], values=["make.first:output", "judge.0:output"]) as collector:
        collector.intervals = SampleIntervals(interval, interval, interval)
        for number in range(3 * interval * len(turns)):
            own, optimizer = turns[number % len(turns)], make if turns[number % len(turns)] == "make" else judge
            optimizer.zero_grad()
            made = model["make"](batch(number))
            model["judge"](made if own == "make" else made.detach()).mean().backward()
            optimizer.step()
            signals = collector.take_row().read(len(collector.series))
            rows.append((own, signals.seen, signals.compared))
        for own in set(turns):
            mine = np.any([seen for one, seen, _ in rows if one == own], axis=0)
            read_in_own_steps = {one[:2] for one, was_seen in zip(collector.series, mine, strict=True) if was_seen}
            for feature in (GRADIENT, UPDATE):
                names = {f"{own}.{name}" for name, _ in model[own].named_parameters()}
                assert {(feature, name) for name in names} <= read_in_own_steps
        assert set.union(*(set(compared) for _, _, compared in rows)) == set(collector.state_names)
        everything = np.any([seen for _, seen, _ in rows], axis=0)
        assert [one for one, was_seen in zip(collector.series, everything, strict=True) if not was_seen] == []


def test_optimizers_of_one_parameter_each_are_not_read_all_in_the_same_step():
    model = made()
    optimizers = [torch.optim.Adam([parameter]) for parameter in model.parameters()]
    with SignalCollector(model, optimizers) as collector:
        collector.intervals = SampleIntervals(4, 4, 4)
        counts = []
        for _ in range(8):
            loss_of(model).backward()
            for optimizer in optimizers:
                optimizer.step()
            signals = collector.take_row().read(len(collector.series))
            counts.append([np.count_nonzero(signals.seen), len(signals.compared)])
    assert np.ptp(counts[2:], axis=0).max() <= 8


def test_a_watched_model_can_be_copied_and_saved():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer], values=["first:output"]) as collector:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
        copy.deepcopy(optimizer)
        for one in copies:
            loss_of(one).backward()
        assert read(collector) == {}
        assert collector.backwards == 0


class Refusing(nn.Module):
    """Compiled as it is, its layers are not seen."""

    def __init__(self):
        super().__init__()
        self.inner = made(LlamaRMSNorm)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.slow
def test_compiled_models_are_read_from_outside():
    results = []
    for monitored in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Refusing()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        collector = SignalCollector(compiled, [optimizer], values=["inner.first:output"]) if monitored else None
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(compiled).backward()
            optimizer.step()
            if collector:
                collector.intervals = SampleIntervals(2, 2, 1)  # no guard depends on it
                signals = collector.take_row().read(len(collector.series))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    seen = {one.feature for one, was_seen in zip(collector.series, signals.seen, strict=True) if was_seen}
    assert seen == {GRADIENT, LOSS, UPDATE}
    collector.close()


def test_gradients_for_other_purposes_are_not_counted():
    """A gradient penalty by torch.autograd.grad goes through norm layers as well."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SignalCollector(model, [optimizer]) as collector:
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(1e6 * model(x).sum(), x, create_graph=True)
        ((slope / 1e6).square().sum() + loss_of(model)).backward()
        signals = read(collector)
    assert signals[NORM_INPUT_GRADIENT, "blocks.0.norm", L2] < 1e3


def test_nothing_is_left_after_an_error_in_the_forward_or_backward_pass():
    plain = torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.update
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(gradient):
        raise ZeroDivisionError

    with SignalCollector(model, [optimizer]) as collector:
        loss = loss_of(model)
        model_output = model(torch.ones(1, 4))
        model_output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model_output.sum().backward()
        assert collector.backwards == 0
        loss.backward()
        assert collector.backwards == 1
    assert plain == (torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.update)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks

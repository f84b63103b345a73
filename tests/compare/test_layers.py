"""Two networks layer by layer: alignment, accumulated and local differences, the first layer that differs, and memory."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from compare.quantised_networks import images, network, quantised
from unsilent.basics.errors import UsageError
from unsilent.compare.alignment import ROOT, align
from unsilent.compare.layers import compare_layers
from unsilent.compare.lock_step import WaitingPass


class Scaled(nn.Module):
    """What wraps a network, as parallel and compiled ones do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Branches(nn.Module):
    """Two branches, in the order that is asked for, joined by a function that is no module's."""

    def __init__(self, reverse=False, factor=1.0):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reverse, self.factor = reverse, factor

    def forward(self, x):
        if self.reverse:
            right, left = self.right(x), self.left(x)
        else:
            left, right = self.left(x), self.right(x)
        return self.out(torch.relu(left) * self.factor + right)


def by_name(result):
    return {row.name: row for row in result.rows}


def test_equal_networks_agree_bit_for_bit_in_every_layer():
    model = network()
    result = compare_layers(model, copy.deepcopy(model), [images(), images(5, 2)])
    assert [row.name for row in result.rows] == [str(i) for i in range(9)]
    assert all(row.accumulated.has_same_bits and row.accumulated.error == 0 for row in result.rows)
    assert result.first_difference is None
    assert result.first_beyond_floor is None
    assert not result.suspects


@pytest.mark.parametrize("layer", ["0", "3", "5", "8"])
def test_the_corrupted_layer_and_its_operation_are_named_first(layer):
    model = network()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(layer).weight.view(-1)[2] += 0.5
    result = compare_layers(model, other, [images()])
    assert result.first_difference.name == result.first_beyond_floor.name == layer
    assert result.first_beyond_floor.operation == ("addmm" if layer == "8" else "convolution")
    assert [row.name for row in result.rows if row.local is not None and not row.local.has_same_bits] == [layer]


def test_differences_are_those_of_a_plain_computation_in_float64():
    model, x = network(), images()
    deployed = quantised(model, x)
    result = by_name(compare_layers(model, deployed, [x]))
    with torch.no_grad():
        before, after = (run[:6](x).double() for run in (model, deployed))
        inputs = model[:5](x)
        alone = deployed[5](inputs).double()
    expected = 10 * torch.log10(before.square().sum() / (after - before).square().sum())
    cosine = torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), 0)
    local = 10 * torch.log10(before.square().sum() / (alone - before).square().sum())
    assert result["5"].accumulated.sqnr == pytest.approx(float(expected), rel=1e-6)
    assert result["5"].accumulated.cosine == pytest.approx(float(cosine), rel=1e-9)
    assert result["5"].local.sqnr == pytest.approx(float(local), rel=1e-6)


@pytest.mark.parametrize("change", [lambda w: w.flip(0), lambda w: -w], ids=["order", "sign"])
def test_swapped_and_negated_outputs_are_seen(change):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.copy_(change(other[0].weight))
    result = compare_layers(model.eval(), other.eval(), [torch.randn(3, 4)])
    first, second = result.rows[0].accumulated.hashes
    assert first != second
    assert result.first_difference.name == "0"


@pytest.mark.parametrize("wrapped", ["deployed", "original", "both"])
def test_layers_are_aligned_through_what_wraps_a_network(wrapped):
    model = network()
    one, other = (
        Scaled(each) if wrapped in (name, "both") else each
        for name, each in (("original", model), ("deployed", copy.deepcopy(model)))
    )
    aligned = align(one.eval(), other.eval())
    assert len(aligned.original) == len(aligned.deployed) == 9
    assert not aligned.unaligned
    result = compare_layers(one, other, [images()])
    assert len(result.rows) == 9
    assert result.first_difference is None


def test_layers_are_aligned_by_path_where_lists_of_layers_differ():
    model = network()
    other = copy.deepcopy(model)
    del other[2]  # the indices of what follows move
    other = nn.Sequential(*other)
    named = nn.Sequential()
    for name, module in model.named_children():
        if name != "2":
            named.add_module(name, copy.deepcopy(module))
    result = compare_layers(model, named.eval(), [images()])
    assert "2" in result.unaligned
    assert result.first_difference.name == "3"
    assert by_name(result)["3"].local.has_same_bits  # what differs is done before it


def test_branches_that_run_in_another_order_are_compared_by_name():
    torch.manual_seed(0)
    model = Branches().eval()
    other = Branches(reverse=True).eval()
    other.load_state_dict(model.state_dict())
    result = compare_layers(model, other, [torch.randn(3, 4)])
    assert [row.name for row in result.rows] == ["left", "right", "out"]
    assert result.first_difference is None


def test_a_difference_between_layers_is_not_called_one_of_a_layer():
    torch.manual_seed(0)
    model, other = Branches().eval(), Branches(factor=1.5).eval()
    other.load_state_dict(model.state_dict())
    first = compare_layers(model, other, [torch.randn(3, 4)]).first_difference
    assert first.name == "out"
    assert first.local.has_same_bits
    assert not first.operation


def test_one_tensor_given_as_several_inputs_remains_one():
    """Self-attention computes otherwise for three tensors than for one tensor given three times."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()
    other, batch = copy.deepcopy(model), torch.randn(6, 5, 8)
    assert all(row.local.has_same_bits for row in compare_layers(model, other, [batch]).rows)
    with torch.no_grad():
        other[1].layers[1].self_attn.in_proj_weight[3, 2] += 0.1
    first = compare_layers(model, other, [batch]).first_beyond_floor
    assert (first.name, first.operation) == ("1.layers.1.self_attn", "_native_multi_head_attention")


def test_a_second_call_of_a_layer_has_a_row_of_its_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    model = Twice().eval()
    result = compare_layers(model, copy.deepcopy(model), [torch.randn(2, 4)] * 2)
    assert [row.name for row in result.rows] == ["layer", "layer#2"]


def test_a_layer_that_overwrites_its_inputs_leaves_the_outputs_as_they_are():
    model = network()
    with torch.no_grad():
        expected = model(images())
        kept = []
        handle = model[8].register_forward_hook(lambda m, args, output: kept.append(output.clone()))
        result = compare_layers(model, copy.deepcopy(model), [images()])
        handle.remove()
    assert torch.equal(kept[0], expected)
    assert by_name(result)["4"].local is None
    assert "overwrites" in by_name(result)["4"].local_problem


def test_one_pair_of_outputs_is_held_however_deep_the_networks_are():
    held, most = weakref.WeakSet(), []

    class Watched(nn.Module):
        def forward(self, x):
            y = x + 1
            held.add(y.untyped_storage())
            most.append(len(held))
            return y

    def highest(depth):
        most.clear()
        gc.collect()
        model = nn.Sequential(*(Watched() for _ in range(depth))).eval()
        compare_layers(model, copy.deepcopy(model), [torch.zeros(4, 3)])
        return max(most)

    assert highest(40) <= highest(4) + 1


def test_a_bfloat16_copy_differs_in_every_layer_and_has_no_suspects():
    model = network()
    other = copy.deepcopy(model).bfloat16()
    result = compare_layers(model, other, [images()], lambda m, x: m(x.to(next(m.parameters()).dtype)))
    assert result.differs_everywhere
    assert result.first_beyond_floor is None
    assert not result.suspects
    assert all(not row.local_problem or "overwrites" in row.local_problem for row in result.rows)


def test_compiled_and_unrelated_networks_say_why_layers_cannot_be_read():
    model = network()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    assert "torch.compile" in compare_layers(model, compiled, [images()]).unreadable
    assert (
        "path"
        in compare_layers(nn.Sequential(nn.Linear(3, 3)).eval(), Branches().eval(), [torch.zeros(1, 3)]).unreadable
    )


def test_wrong_input_is_refused():
    model = network()
    with pytest.raises(UsageError, match="no batch"):
        compare_layers(model, model, [])
    with pytest.raises(UsageError, match="training mode"):
        compare_layers(model, copy.deepcopy(model).train(), [images()])


def test_an_error_in_either_network_ends_both_passes_and_is_the_reason():
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(nn.Linear(3, 3), Broken(3, 3)).eval()
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    for pair in ((model, copy.deepcopy(plain)), (plain, model)):
        result = compare_layers(*pair, [torch.zeros(1, 3)], lambda m, x: m(x))
        assert "broken" in result.unreadable
        assert not result.rows


def test_answers_in_a_dict_with_its_keys_in_another_order_do_not_differ():
    class Answers(nn.Module):
        def __init__(self, keys):
            super().__init__()
            self.a, self.b, self.keys = nn.Linear(4, 4), nn.Linear(4, 4), keys

        def forward(self, x):
            return {key: self.get_submodule(key)(x) for key in self.keys}

    torch.manual_seed(0)
    model, other = Answers("ab").eval(), Answers("ba").eval()
    other.load_state_dict(model.state_dict())
    assert not compare_layers(model, other, [torch.randn(2, 4)]).answers_differ


class Repeated(nn.Module):
    """A layer called several times, each time with whatever it raises caught."""

    def __init__(self, calls):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), calls

    def forward(self, x):
        for _ in range(self.calls):
            try:
                x = self.layer(x)
            except:  # noqa: E722
                pass
        return x


def test_further_calls_of_the_deployed_network_are_listed():
    torch.manual_seed(0)
    model, other = Repeated(1).eval(), Repeated(3).eval()
    other.load_state_dict(model.state_dict())
    result = compare_layers(model, other, [torch.randn(2, 4)])
    assert result.further_calls == ("layer#2", "layer#3")
    assert result.answers_differ
    assert result.first_difference is None


def test_a_pass_that_catches_what_ends_it_ends_all_the_same():
    model = Repeated(3).eval()
    ended = []
    with WaitingPass([("layer", model.layer)], lambda: ended.append(model(torch.zeros(1, 4)))) as other:
        other.reach("layer")
    assert len(ended) == 1


def test_settings_of_the_thread_hold_in_both_networks():
    model = network()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compare_layers(model, copy.deepcopy(model), [images()])
    assert result.first_difference is None
    with torch.inference_mode():
        seen = []
        other = copy.deepcopy(model)
        other[0].register_forward_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
        compare_layers(model, other, [images()])
    assert set(seen) == {True}


class Two(nn.Module):
    """A layer with two outputs, the second of which is moved."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return x, x + self.shift


class TwoUsed(nn.Module):
    def __init__(self, shift=0.0):
        super().__init__()
        self.two, self.out = Two(shift), nn.Linear(4, 4)

    def forward(self, x):
        first, second = self.two(x)
        return self.out(first), second


def test_all_outputs_of_a_layer_are_compared():
    torch.manual_seed(0)
    model, other = TwoUsed().eval(), TwoUsed(1.0).eval()
    other.load_state_dict(model.state_dict())
    result = compare_layers(model, other, [torch.randn(3, 4)])
    assert result.first_difference.name == "two"
    assert not by_name(result)["two"].local.has_same_bits


def test_layers_that_only_the_deployed_network_has_are_listed_and_parts_of_replaced_ones_are_not():
    model = network()
    other = nn.Sequential(*copy.deepcopy(model), nn.Linear(10, 10), nn.Sequential(nn.ReLU()))
    other[3] = nn.Sequential(other[3])
    result = compare_layers(model, other.eval(), [images()])
    assert result.added == ("9", "10.0")
    assert result.answers_differ
    assert result.first_difference is None


@pytest.mark.parametrize("wrapped", ["deployed", "original"])
def test_a_wrapped_network_with_parameters_of_its_own_is_not_listed(wrapped):
    class Shifted(Branches):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(4))

    model, other = (
        Scaled(each) if wrapped == name else each for name, each in (("original", Shifted()), ("deployed", Shifted()))
    )
    aligned = align(model, other)
    assert [name for name, _ in aligned.original] == [
        ("module." if wrapped == "original" else "") + name for name in ("left", "right", "out")
    ]
    assert not aligned.added
    assert not aligned.unaligned


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a if tied else nn.Linear(4, 4)
        self.c = nn.Linear(4, 2)

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


@pytest.mark.parametrize("tied", [True, False], ids=["original", "deployed"])
def test_layers_that_one_network_ties_are_matched_by_each_of_their_paths(tied):
    torch.manual_seed(0)
    model, other = Tied(tied).eval(), Tied(not tied).eval()
    for one in (model, other):
        one.load_state_dict(Tied(True).state_dict() if one is model else model.state_dict())
    assert model.b is model.a or torch.equal(model.b.weight, model.a.weight)
    result = compare_layers(model, other, [torch.randn(3, 4)])
    assert [row.name for row in result.rows] == ["a", "b", "c"]
    assert result.first_difference is None
    with torch.no_grad():
        (model if not tied else other).b.weight.mul_(2)
    result = compare_layers(model, other, [torch.randn(3, 4)])
    assert result.first_difference.name == "b"
    assert not result.added
    assert not result.unaligned


def test_a_network_of_one_layer_is_compared():
    model = nn.Linear(4, 3).eval()
    assert compare_layers(model, copy.deepcopy(model), [torch.randn(2, 4)]).first_difference is None
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.bias[1] += 1
    result = compare_layers(model, other, [torch.randn(2, 4)])
    assert result.first_beyond_floor.name == ROOT
    assert result.first_beyond_floor.operation == "addmm"


class Stubbed(nn.Module):
    """A network that PyTorch's own eager quantisation quantises, with one layer that it fuses."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.a, self.relu, self.b = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.after(self.b(self.relu(self.a(self.before(x)))))


@pytest.mark.parametrize("fused", [False, True])
def test_a_network_with_quantised_tensors_is_compared(fused):
    torch.manual_seed(0)
    model, batch = Stubbed().eval(), torch.randn(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        copied = copy.deepcopy(model)
        if fused:
            torch.ao.quantization.fuse_modules(copied, [["a", "relu"]], inplace=True)
        copied.qconfig = torch.ao.quantization.default_qconfig
        prepared = torch.ao.quantization.prepare(copied)
        prepared(batch)
        deployed = torch.ao.quantization.convert(prepared)
    result = compare_layers(model, deployed, [batch])
    rows = by_name(result)
    assert all(row.local is not None and row.local.sqnr > 20 for row in rows.values())
    assert set(rows) | set(result.problems) == {"before", "a", "relu", "b", "after"}
    assert set(result.problems) == ({"a"} if fused else set())


def test_one_layer_that_cannot_be_compared_is_left_out_with_its_reason():
    class Unreadable(nn.Module):
        def forward(self, x):
            return x.to("meta")

    class Network(Branches):
        def __init__(self):
            super().__init__()
            self.between = Unreadable()

        def forward(self, x):
            self.between(x)
            return super().forward(x)

    model = Network().eval()
    result = compare_layers(model, copy.deepcopy(model), [torch.randn(3, 4)])
    assert [row.name for row in result.rows] == ["left", "right", "out"]
    assert all(row.floor.relative for row in result.rows)
    assert list(result.problems) == ["between"]

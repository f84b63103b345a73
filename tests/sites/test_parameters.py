"""Parameters as sites: what is counted, how faults land, and that nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import Fault, fault_model
from unsilent.sites import Parameters
from unsilent.sites.memory import TensorMemory


class Odd(nn.Module):
    """Every kind of memory a model can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.vector = nn.Parameter(torch.arange(6.0))
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.strided = nn.Parameter(torch.arange(20.0)[::2])
        self.tied = nn.Linear(4, 5)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tied.weight
        self.register_buffer("counter", torch.tensor(7))
        self.register_buffer("view", self.tied.weight.detach().t())
        self.register_buffer("spread", torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 100))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("flag", torch.tensor([True]))

    def forward(self, x):
        return self.head(self.tied(x)[:, :4]) + self.scalar


@pytest.fixture
def model():
    return Odd().eval()


def bits(tensor):
    return tensor.detach().clone().contiguous().flatten().view(torch.uint8)


def test_each_element_of_memory_is_counted_once(model):
    regions = {r.site: r for r in Parameters(model).select("*")}
    assert set(regions) == {
        f"param:{n}" for n in ("scalar", "vector", "turned", "strided", "tied.weight", "tied.bias", "spread")
    }
    assert sum(r.eligible_count for r in regions.values()) == 1 + 6 + 12 + 10 + 20 + 5 + 3


def test_a_tied_weight_goes_by_its_first_name(model):
    (region,) = Parameters(model).select("head.weight")
    assert region.site == "param:tied.weight"


def test_a_view_of_other_memory_is_refused_by_name_and_passed_over_by_globs(model):
    with pytest.raises(UsageError, match="view of the memory of 'tied.weight'"):
        Parameters(model).select("view")
    assert [r.site for r in Parameters(model).select("*ie*.*")] == ["param:tied.weight", "param:tied.bias"]


def test_partial_overlap_gives_the_rest_only():
    model = nn.Module()
    base = torch.arange(10.0)
    model.register_buffer("first", base[:6])
    model.register_buffer("second", base[4:])
    regions = {r.site: r for r in Parameters(model).select("*")}
    assert regions["param:first"].eligible_count == 6
    assert regions["param:second"].elements.tolist() == [2, 3, 4, 5]


def test_memory_of_several_dtypes_that_overlaps_is_counted_once():
    model = nn.Module()
    base = torch.arange(4.0)
    model.register_buffer("floats", base)
    model.register_buffer("halves", base.view(torch.int16)[:4])
    assert [r.site for r in Parameters(model).select("*")] == ["param:floats"]


@pytest.mark.parametrize(
    ("address", "index"),
    [("scalar", ()), ("vector[5]", (5,)), ("turned[3,2]", (3, 2)), ("strided[-1]", (9,)), ("tied.weight[7]", (1, 3))],
)
def test_one_line_flips_exactly_that_bit(model, address, index):
    tensor = model.get_parameter(address.split("[")[0])
    before = tensor.detach().clone()
    with unsilent.inject(model, f"param:{address}", bit=30) as receipt:
        changed = (tensor != before).nonzero()
        assert changed.shape[0] == 1
        assert tuple(changed[0].tolist()) == index
        words = (
            before.contiguous().view(torch.int32).numpy()[index],
            tensor.contiguous().view(torch.int32).numpy()[index],
        )
        assert words[0] ^ words[1] == 1 << 30
        assert (receipt.requested_elements, receipt.verified_elements, receipt.changed_bits) == (1, 1, 1)
    assert torch.equal(bits(tensor), bits(before))


def test_bit_means_every_addressed_element(model):
    with unsilent.inject(model, "param:turned[1,:]", bit=0) as receipt:
        assert receipt.verified_elements == 3


def test_expanded_memory_is_one_element_a_row(model):
    with unsilent.inject(model, "param:spread[1,0]", bit=31):
        assert model.spread[:, ::33].tolist() == [[1.0] * 4, [-2.0] * 4, [3.0] * 4]
    assert (model.spread[1] == 2).all()


def test_autograd_does_not_notice(model):
    version = model.vector._version
    with unsilent.inject(model, "param:vector", seed=1):
        pass
    assert model.vector._version == version


def test_nested_injections_come_off_in_order(model):
    start = bits(model.vector)
    with unsilent.inject(model, "param:vector[0]", bit=3):
        middle = bits(model.vector)
        with unsilent.inject(model, "param:vector[0]", bit=3):
            assert torch.equal(bits(model.vector), start)
        assert torch.equal(bits(model.vector), middle)
    assert torch.equal(bits(model.vector), start)


def test_an_active_injection_cannot_be_entered_twice(model):
    injection = unsilent.inject(model, "param:vector[0]", bit=3)
    with injection, pytest.raises(InjectionError, match="already active"):
        injection.__enter__()


def test_undo_that_cannot_restore_is_an_error(model, monkeypatch):
    def leave_without_restoring():
        with unsilent.inject(model, "param:vector[0]", bit=3):
            monkeypatch.setattr(TensorMemory, "write", lambda *a: None)  # memory that takes nothing any more

    with pytest.raises(InjectionError, match="undo did not restore"):
        leave_without_restoring()


def test_a_fault_that_does_not_land_is_an_error(model, monkeypatch):
    monkeypatch.setattr(TensorMemory, "write", lambda *a: None)
    with (
        pytest.raises(InjectionError, match="0 of 1 elements corrupted"),
        unsilent.inject(model, "param:vector[0]", bit=3),
    ):
        pass


def test_a_wrong_site_leaves_nothing_changed(model):
    start = Parameters(model).hash()
    good = fault_model("bitflip").draw(Parameters(model).select("vector"), np.random.default_rng(0))[0]
    bad = Fault("param:nowhere", good.dtype, good.shape, good.elements, good.operation, good.operands)
    with pytest.raises(UsageError, match="unknown parameter 'nowhere'"), unsilent.inject(model, [good, bad]):
        pass
    assert Parameters(model).hash() == start


def test_a_fault_for_another_shape_is_refused(model):
    fault = fault_model("bitflip").draw(Parameters(model).select("vector"), np.random.default_rng(0))[0]
    other = Fault("param:strided", fault.dtype, fault.shape, fault.elements, fault.operation, fault.operands)
    with pytest.raises(UsageError, match=r"float32\[6\].*float32\[10\]"), unsilent.inject(model, other):
        pass


def test_replayed_fault_gives_the_same_bits(model):
    with unsilent.inject(model, "param:*", "bitflip:count=5", seed=4) as first:
        faults = [Fault.from_json(h.fault.to_json()) for h in first.applied_faults]
        corrupted = Parameters(model).hash()
    with unsilent.inject(model, faults):
        assert Parameters(model).hash() == corrupted


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("param:vectr", "did you mean 'vector'"),
        ("param:nothing.*", "matches nothing"),
        ("input:0", "does not corrupt input: sites"),
        ("op:conv*", "can match several operations"),
        ("stored:conv", "unknown kind of site 'stored'"),
        ("param:vector[9]", r"index \[9\] is outside 'vector' of shape \[6\]"),
        ("param:vector[a]", r"cannot read index \[a\]"),
        ("param:vector[4:2]", "selects no element"),
        ("param:turned[1,2,3]", "outside"),
        ("param:empty", "cannot be corrupted"),
        ("param:flag", "cannot be corrupted"),
        ("param:", "has a kind but no name; expected param:\\*"),
    ],
)
def test_bad_addresses_say_what_is_wrong(model, address, found):
    with pytest.raises(UsageError, match=found) as error:
        unsilent.inject(model, address, bit=0)
    assert "\n" not in str(error.value)


def test_meta_tensors_are_refused():
    with pytest.raises(UsageError, match="meta device"):
        Parameters(nn.Linear(2, 2, device="meta"))


def test_memory_that_is_replaced_meanwhile_is_an_error():
    linear = nn.Linear(3, 2)
    with (
        pytest.raises(InjectionError, match="replaced or changed"),
        unsilent.inject(linear, "param:weight[0,0]", bit=30),
    ):
        linear.double()


def test_overlapping_injections_that_are_not_nested_are_an_error(model):
    first, second = (unsilent.inject(model, "param:vector[0]", bit=bit) for bit in (3, 4))
    first.__enter__()
    second.__enter__()
    with pytest.raises(InjectionError, match="overlap without being nested"):
        first.__exit__(None, None, None)


def test_a_tensor_that_overlaps_itself_is_counted_once():
    model = nn.Module()
    model.register_buffer("windows", torch.arange(8.0).unfold(0, 4, 1))  # [5, 4] over 8 numbers
    (region,) = Parameters(model).select("windows")
    assert region.eligible_count == 8
    with unsilent.inject(model, "param:windows", "bitflip:count=40") as receipt:
        assert receipt.changed_bits == 40
    assert model.windows[0].tolist() == [0, 1, 2, 3]


def test_an_index_keeps_to_the_elements_a_tensor_owns():
    model = nn.Module()
    base = torch.arange(14.0)
    model.register_buffer("first", base[:6])
    model.register_buffer("second", base[2:])
    assert Parameters(model).select("second[:]")[0].eligible_count == 8
    with pytest.raises(UsageError, match="belongs to an earlier parameter"):
        Parameters(model).select("second[0]")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["sparse", "csr", "negated view"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_memory_that_is_not_what_it_shows_is_passed_over(make):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", make())
    parameters = Parameters(model)
    assert "odd" in parameters.skipped
    assert {r.site for r in parameters.select("*")} == {"param:weight", "param:bias"}


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(UsageError, match="run the model once"):
        Parameters(nn.LazyLinear(3))

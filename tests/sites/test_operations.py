"""Operations, inputs and caches as sites: what can be corrupted, what a fault does to it, and that nothing else changes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sites.subjects import call, generate, gpt, seeded, subjects
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import Fault, fault_model
from unsilent.faults.naming import parse_site
from unsilent.sites import OperationInjector, Survey, TransientInjection

NAMES = ("cnn", "encoder", "fast encoder", "recurrent", "gpt")


def bits(tensor):
    return tensor.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def survey(model, batch, run=call):
    def evaluate(step, operations):
        with operations, torch.no_grad():
            run(model, batch)

    return Survey(model, [batch], evaluate)


def drawn(region, text="bitflip:bits=30", seed=0):
    (fault,) = fault_model(text).draw([region], np.random.default_rng(seed))
    return fault


def flip(site, shape, element, bit=30, **moment):
    mask = np.array([1 << bit], np.uint32)
    return Fault(site, "float32", tuple(shape), np.array([element], np.int64), "xor", mask, **moment)


def corrupted(model, batch, *faults, run=call):
    corrupt = TransientInjection(model, batch, faults)
    with corrupt, torch.no_grad():
        output = run(model, corrupt.batch)
    assert not corrupt.missed
    return output


def nothing_left(model):
    assert not _get_current_dispatch_mode_stack()
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_a_mode_without_faults_changes_no_bit_and_leaves_nothing(name):
    model, batch, run = subjects()[name]
    with torch.no_grad():
        golden = run(model, batch)
        with OperationInjector(model, on_site=lambda *_: None, operands=("first", "second")):
            watched = run(model, batch)
    assert bits(watched) == bits(golden)
    nothing_left(model)


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.LayerNorm(6),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": nn.Dropout,
    "flip": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(1)),
}


@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
def test_any_stack_of_layers_gives_the_same_bits_under_the_mode(layers, seed, double):
    torch.manual_seed(seed)
    model = nn.Sequential(*(LAYERS[name]() for name in layers)).eval()
    batch = torch.randn(3, 6)
    if double:
        model, batch = model.double(), batch.double()
    with torch.no_grad():
        golden = model(batch.clone())
        with OperationInjector(model):
            assert bits(model(batch.clone())) == bits(golden)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_every_site_is_hit(name):
    model, batch, run = subjects()[name]
    before = bits(batch)
    found = survey(model, batch, run)
    addresses = ["op:*/fwd/*", "input:*"] if name != "gpt" else ["op:*", "input:*", "kv:*"]
    regions = found.select_regions(addresses)
    assert len(regions) > 3
    for region in regions:
        fault = drawn(region, "bitflip:bits=0")
        corrupt = TransientInjection(model, batch, [fault])
        # A corrupted token or position may lie outside of its table: the model then raises, after the hit.
        with contextlib.suppress(IndexError), corrupt, torch.no_grad():
            run(model, corrupt.batch)
        assert (corrupt.landed_count, corrupt.missed) == (1, []), region.site
        assert found.has_site_of(0, fault)
    nothing_left(model)
    assert bits(batch) == before


def by_hand(model, x, *, out=None, first=None, second=None):
    """The CNN of the tests written out; the three hooks change a value of the multiplication."""
    with torch.no_grad():
        y = torch.relu(model.norm(model.conv(x))) + 1
        a, b = y.clone(), y.clone()
        if first:
            first(a)
        if second:
            second(b)
        z = a * b
        if out:
            out(z)
        return model.head(model.pool(torch.cat([z, x], 1)).flatten(1))


@pytest.mark.parametrize("operand", ["out", "first", "second"])
def test_a_corrupted_operand_gives_the_bits_of_a_run_by_hand(operand):
    model, x, _ = subjects()["cnn"]

    def flipped(tensor):
        words = tensor.view(-1).numpy().view(np.uint32)
        words[7] ^= 1 << 29

    fault = flip(f"op:(root)#mul.0/fwd/{operand}", (2, 4, 6, 6), 7, 29)
    assert bits(corrupted(model, x, fault)) == bits(by_hand(model, x, **{operand: flipped}))
    assert bits(corrupted(model, x, fault)) != bits(by_hand(model, x))


class InPlace(nn.Module):
    """``relu_`` on a buffer of its own, of which a view is read afterwards."""

    def forward(self, x):
        y = x * 1
        half = y[:, :2]
        torch.relu_(y)
        return torch.cat([half, y], 1)


@pytest.mark.parametrize(("operand", "sign"), [("out", -1.0), ("first", 0.0)])
def test_an_operation_in_place_is_corrupted_in_its_own_memory(operand, sign):
    x = torch.tensor([[1.0, 2.0, 3.0]])
    fault = flip(f"op:(root)#relu.0/fwd/{operand}", (1, 3), 1, bit=31)  # the sign of 2
    got = corrupted(InPlace(), x, fault)
    assert got.tolist() == [[1.0, 2.0 * sign, 1.0, 2.0 * sign, 3.0]]


class Payload(nn.Module):
    def forward(self, x):
        return (x * 1).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nan_payloads_arrive_unchanged(dtype):
    quiet = {4: 0x7FC12345, 8: 0x7FF812345678ABCD, 2: 0x7FC1 if dtype == torch.bfloat16 else 0x7E55}
    x = torch.ones(2, 3, dtype=dtype)
    region = survey(Payload(), x).select_regions(["op:(root)#mul.0"])[0]
    fault = drawn(region, f"set:value={quiet[x.element_size()]:#x}")
    got = corrupted(Payload(), x, fault).reshape(-1)
    word = got.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])[int(fault.elements[0])]
    assert int(word) == quiet[x.element_size()]


class Views(nn.Module):
    def forward(self, x):
        y = x.t().reshape(-1).view(6)
        scratch = torch.empty_like(y)
        scratch.copy_(y)
        kept = scratch.unsqueeze(0)
        kept.t_()
        return kept * (y > 0) + x[:0].sum() + torch.zeros(3, 6)[:, :6].t()[:6].sum()


def test_views_uninitialised_memory_and_what_has_no_codec_are_no_sites():
    found = survey(Views(), torch.randn(2, 3)).select_regions(["op:*/fwd/*"])
    names = {parse_site(r.site).name.partition("#")[2].partition(".")[0] for r in found}
    assert {"clone", "copy", "mul", "add", "zeros", "sum"} <= names
    assert not names & {"t", "view", "empty_like", "unsqueeze", "slice", "_unsafe_view", "alias", "detach"}
    outs = {r.site for r in found if r.site.endswith("/out")}
    assert "op:(root)#gt.0/fwd/first" in {r.site for r in found}
    assert "op:(root)#gt.0/fwd/out" not in outs  # bool


def test_an_expanded_operand_is_corrupted_once_a_memory_cell():
    class Model(nn.Module):
        def forward(self, x):
            return x[:, :1].expand(2, 3) + x

    x = torch.arange(6.0).reshape(2, 3)
    (region,) = survey(Model(), x).select_regions(["op:(root)#add.0/fwd/first"])
    assert (region.shape, region.elements.tolist()) == ((2, 3), [0, 3])
    got = corrupted(Model(), x, flip(region.site, (2, 3), 3, bit=31))
    assert got.tolist() == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]


def test_runs_in_inference_mode_can_be_corrupted():
    def run(model, batch):
        with torch.inference_mode():
            return model(batch)

    model, x, _ = subjects()["cnn"]
    for region in survey(model, x, run).select_regions(["op:*/fwd/*"]):
        corrupted(model, x, drawn(region), run=run)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (flip("op:(root)#mul.7/fwd/out", (2, 4, 6, 6), 0), "no operation with the name of the site ran"),
        (flip("op:(root)#mul.0/fwd/out", (2, 4, 6, 7), 0), r"float32\[2, 4, 6, 7\], found float32\[2, 4, 6, 6\]"),
        (flip("op:(root)#flatten.0/fwd/out", (2, 4, 6, 6), 0), "no operation with the name of the site"),
        (flip("op:pool#max_pool2d_with_indices.0/fwd/second", (2, 4, 6, 6), 0), "has no second tensor operand"),
        (flip("op:head#t.0/fwd/out", (54, 5), 0), "a view"),
        (flip("kv:0/key", (1, 1, 1, 1), 0, occurrence=1), "call 1 did not happen"),
    ],
)
def test_a_fault_that_does_not_land_is_told_with_its_site(fault, why):
    model, x, _ = subjects()["cnn"]
    corrupt = TransientInjection(model, x, [fault])
    with corrupt, torch.no_grad():
        model(corrupt.batch)
    ((missed, reason),) = corrupt.missed
    assert missed is fault
    error = corrupt.error(missed, reason)
    assert pytest.raises(InjectionError, match=why).matches(error)
    assert fault.site in str(error)
    assert "\n" not in str(error)


def test_an_input_that_is_not_there_is_an_error_at_once():
    model, x, _ = subjects()["cnn"]
    with pytest.raises(InjectionError, match="input:1: the batch has no such input; its inputs are 0"):
        TransientInjection(model, x, [flip("input:1", (2, 2, 6, 6), 0)])
    with pytest.raises(InjectionError, match=r"input:0: the fault is for float32\[2\]"):
        TransientInjection(model, x, [flip("input:0", (2,), 0)])
    with pytest.raises(UsageError, match="the fault names no call"):
        TransientInjection(model, x, [flip("kv:0/key", (2,), 0)])


def test_nothing_is_left_behind_when_the_model_raises():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            raise ArithmeticError(str(self.inner(x).shape))

    model, x = Raises(), torch.ones(2, 3)
    fault = flip("op:inner#addmm.0/fwd/out", (2, 3), 0)
    with pytest.raises(ArithmeticError), TransientInjection(model, x, [fault]), torch.no_grad():
        model(x)
    nothing_left(model)
    never = flip("op:(root)#mul.0/fwd/out", (2, 3), 0)
    with pytest.raises(ArithmeticError), TransientInjection(model, x, [never]), torch.no_grad():
        model(x)  # raised before the site was reached: the model's own error
    with pytest.raises(InjectionError, match="was not hit"), TransientInjection(model, x, [flip(fault.site, (9,), 0)]):
        model(x)
    nothing_left(model)


def test_inputs_are_corrupted_in_copies_wherever_they_are_nested():
    class Model(nn.Module):
        def forward(self, a, more):
            return a + more["x"][0] + more["x"][1]

    shared = torch.ones(2, 3)
    batch = {"a": shared[:, ::2], "more": {"x": [torch.zeros(2, 2), torch.zeros(2, 2)], "text": "kept"}}
    run = lambda model, inputs: model(**inputs)  # noqa: E731
    found = survey(Model(), batch, run).select_regions(["input:*"])
    assert [r.site for r in found] == ["input:a", "input:more.x.0", "input:more.x.1"]
    golden = Model()(**batch)
    for region in found:
        got = corrupted(Model(), batch, drawn(region, "set:value=5", seed=3), run=run)
        assert int((got != golden).sum()) == 1
        assert bits(shared) == bits(torch.ones(2, 3))
        assert not batch["more"]["x"][0].any()


def test_calls_of_the_cache_are_corrupted_as_a_decoder_by_hand_would():
    model, ids = gpt(), torch.randint(0, 39, (2, 4), generator=seeded(2))
    found = survey(model, ids, generate).select_regions(["kv:*"])
    assert {(r.site, r.occurrence, r.shape) for r in found} == {
        (f"kv:{layer}/{entry}", t, (2, 2, 3 + t, 4)) for layer in (0, 1) for entry in ("key", "value") for t in (1, 2)
    }
    golden = generate(model, ids).tolist()
    changed = 0
    for seed in range(4):
        for region in found:
            fault = drawn(region, "set:value=30000", seed)
            got = corrupted(model, ids, fault, run=generate).tolist()
            assert got == decode(model, ids, fault)
            changed += got != golden
    assert changed


def decode(model, ids, fault):
    """Greedy decoding written out, with a fault in the cache before the call that it names."""
    from transformers import DynamicCache

    cache, tokens, step = DynamicCache(), ids, ids
    site = parse_site(fault.site)
    for t in range(3):
        if t == fault.occurrence:
            layer = cache.layers[int(site.name)]
            memory = layer.keys if site.operand == "key" else layer.values
            index = np.unravel_index(int(fault.elements[0]), memory.shape)
            memory[index] = 30000.0
        with torch.no_grad():
            step = model(step, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
    return tokens.tolist()


def test_a_cache_of_tuples_and_one_of_lists_are_known():
    from types import SimpleNamespace

    from unsilent.sites.caches import kv_cache_entries

    key, value = torch.ones(1), torch.zeros(2)
    assert kv_cache_entries(((key, value), (None, value))) == {"0/key": key, "0/value": value, "1/value": value}
    assert kv_cache_entries(SimpleNamespace(key_cache=[key], value_cache=[value])) == {"0/key": key, "0/value": value}
    assert kv_cache_entries(object()) == {}


@pytest.mark.parametrize(
    ("address", "sites"),
    [
        ("op:conv", ["op:conv#convolution.0/fwd/out"]),
        ("op:conv/fwd/second", ["op:conv#convolution.0/fwd/second"]),
        ("op:conv#convolution.0", ["op:conv#convolution.0/fwd/out"]),
        ("op:(root)#mul.*", ["op:(root)#mul.0/fwd/out"]),
        ("op:conv.*", ["op:conv#convolution.0/fwd/out"]),
        ("op:*conv*/fwd/*", [f"op:conv#convolution.0/fwd/{o}" for o in ("out", "first", "second", "third")]),
    ],
)
def test_addresses_of_operations(address, sites):
    model, x, _ = subjects()["cnn"]
    assert sorted(r.site for r in survey(model, x).select_regions([address])) == sorted(sites)


def test_an_index_selects_elements_and_addresses_join():
    model, x, _ = subjects()["cnn"]
    found = survey(model, x)
    (region,) = found.select_regions(["op:conv[0,1,:,0]", "op:conv[1]"])
    assert region.elements.tolist() == [1, 36, 42, 48, 54, 60, 66]
    (region,) = found.select_regions(["op:conv[0]", "op:conv"])
    assert region.elements is None
    assert [r.site for r in found.select_regions(["op:conv", "input:0[3]"])] == [
        "input:0",
        "op:conv#convolution.0/fwd/out",
    ]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("op:cnv", "unknown module with operations 'cnv'; did you mean 'conv'"),
        ("op:conv#conv.0", "unknown operation of 'conv' 'conv#conv.0'; did you mean 'conv#convolution.0'"),
        ("op:nothing*", "matches no operation"),
        ("op:(root)", "3 operations of '(root)' can be corrupted; name one (op:(root)#add.0"),
        ("op:head#t.0", "'head#t.0' cannot be corrupted at 'out': it is a view"),
        (
            "op:conv/bwd/out",
            "unknown phase of an operation 'bwd'; did you mean 'fwd'? Known: fwd, grad_in, grad_wt, optim.",
        ),
        (
            "op:conv/fwd/fourth",
            "unknown operand of an operation 'fourth'; did you mean 'out'? Known: first, out, second, third.",
        ),
        ("op:conv/grad_in/out", "phase 'grad_in' exists only in a training step; the only phase here is fwd"),
        ("op:conv/fwd", "expected op:MODULE#OP.k/PHASE/OPERAND"),
        (
            "op:(root)#add.0/fwd/second",
            "'(root)#add.0' has no second tensor operand that can be corrupted, only out",
        ),
        ("op:pool/fwd/second", "'pool#max_pool2d_with_indices.0' has no second tensor operand"),
        ("op:", "address 'op:' has a kind but no name; expected op:* or op:layer1.*"),
        ("kv:", "expected kv:* or kv:0/key"),
        ("input:", "expected input:* or input:0"),
        ("op:conv[9,9,9,9]", "index [9,9,9,9] is outside"),
        ("input:1", "unknown input '1'. Known: 0."),
        ("kv:*", "no key/value cache to corrupt: no module is called with non-empty past_key_values"),
        ("kv:*", "add --with generate=N, for your own workload give a run= that calls generate()"),
        ("ip:0", "unknown kind of site 'ip'"),
    ],
)
def test_addresses_that_select_nothing_say_what_there_is(address, message):
    model, x, _ = subjects()["cnn"]
    with pytest.raises(UsageError) as error:
        survey(model, x).select_regions([address])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_layer_of_the_cache_that_is_not_there_is_told_as_one():
    model, batch, run = subjects()["gpt"]
    with pytest.raises(UsageError, match=r"^unknown cache layer 5; expected one of 0, 1$"):
        survey(model, batch, run).select_regions(["kv:5"])


def test_operations_are_listed_in_the_order_of_their_numbers():
    class Sums(nn.Module):
        def forward(self, x):
            for _ in range(12):
                x = x + 1
            return x

    with pytest.raises(UsageError) as error:
        survey(Sums(), torch.ones(2)).select_regions(["op:(root)#add.77"])
    listed = str(error.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert listed == [f"(root)#add.{k}" for k in range(12)]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("front", "--at 'param:conv.*' --at 'param:norm.*'"),
        ("param:front.*", "--at 'param:conv.*'"),
        ("op:front", "--at 'op:conv.*' --at 'op:norm.*'"),
        ("op:front/fwd/first", "--at 'op:conv.*'"),
    ],
)
def test_a_component_is_no_address(address, said):
    import unsilent
    from unsilent.engine import PlainEngine

    model, x, _ = subjects()["cnn"]
    parts = {"front": ["conv.*", "norm.*"], "head": ["head.*"]}
    engine = PlainEngine(unsilent.Workload(model, [x], components=parts))
    with pytest.raises(UsageError) as error:
        engine.select_regions([address])
    assert "'front' is a component, which is not an address; address what it contains, like" in str(error.value)
    assert said in str(error.value)
    with pytest.raises(UsageError, match=r"^'head' is a module, not a parameter"):
        engine.select_regions(["head"])


def test_a_container_points_to_its_children():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(UsageError, match=r"select those of its children with 'op:0\.\*'"):
        survey(model, torch.ones(2, 3)).select_regions(["op:0"])
    assert len(survey(model, torch.ones(2, 3)).select_regions(["op:0.*"])) == 2


@pytest.mark.parametrize(
    "text",
    ["param:fc.weight", "op:a.b#add.0/fwd/out", "op:(run)#mylib.scan.3/fwd/second", "input:more.x.0", "kv:3/value"],
)
def test_a_site_is_read_back_as_written(text):
    assert parse_site(text).text == text


@pytest.mark.parametrize(
    "text", ["op:conv", "op:conv#a.0", "op:conv#a.0/fwd/fourth", "kv:key", "kv:1/keys", "op:#a/fwd/out"]
)
def test_a_site_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="cannot read site"):
        parse_site(text)

"""Lists of faults: files written by hand in each format, everything that can be wrong with them, and a round trip of our own."""

import io
import json
import os
import pickle
import struct
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.test_record import faults
from unsilent.basics.errors import UsageError
from unsilent.faults import Fault, Region
from unsilent.faults.lists import ModelTensors, files, kind_of_list, read_entries, read_list_bytes, resolve_entry
from unsilent.faults.lists.pickled import NotAnArray, read_array

SHAPES = {"first": (4, 2, 3, 3), "deep": (2, 3, 2, 2, 2), "body.last": (3, 5)}
KINDS = {"first": "conv2d", "deep": "conv3d", "body.last": "fcc", "half": "fcc", "count": "fcc"}
REGIONS = [
    *(Region(f"param:{name}.weight", "float32", shape) for name, shape in SHAPES.items()),
    Region("param:half.weight", "float16", (2, 2)),
    Region("param:count.weight", "int8", (3,)),
    Region("op:first#convolution.0/fwd/out", "float32", (7, 4, 5, 5), None, 0),
    Region("op:first#convolution.0/fwd/out", "float32", (6, 4, 5, 5), None, 1),
    Region("kv:0/key", "float32", (2, 2), None, 0, 3),
]
MODEL = ModelTensors(
    {(r.site, r.step, r.occurrence): r for r in REGIONS},
    {f"{name}.weight": f"{name}.weight" for name in KINDS} | {"head.weight": "body.last.weight"},
    {"flags.weight": "bool, torch.strided"},
    [(kind, name) for name, kind in KINDS.items()],
    batches=2,
)
SCIFI = "Injection,Layer,TensorIndex,Bit\n"
ALFI = "pytorchalfi:rnd_mode=weights,rnd_value_type=bitflip,layer_types=conv2d+fcc"


def read(content, how=None, name="LIST"):
    """Every trial of a list, resolved."""
    content = content.encode() if isinstance(content, str) else content
    return [resolve_entry(entry, MODEL, name) for entry in read_entries(content, name, how)]


def error(content, how=None, name="LIST"):
    with pytest.raises(UsageError) as caught:
        read(content, how, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def told(fault):
    """Site, coordinates and words of a fault of one element."""
    index = tuple(int(i) for i in np.unravel_index(int(fault.elements[0]), fault.shape))
    return fault.site, index, fault.operation, int(fault.operands[0])


# -- SCI-FI ----------------------------------------------------------------------------------------------------------


def test_scifi_by_flat_position_and_by_coordinates():
    text = SCIFI + '0,first,71,30\n1,first,"(1, 0, 2, 1)",0\n2,body.last,14,31\n3,count,2,7\n4,head,5,3\n'
    assert [told(f) for (f,) in read(text)] == [
        ("param:first.weight", (3, 1, 2, 2), "xor", 1 << 30),
        ("param:first.weight", (1, 0, 2, 1), "xor", 1),
        ("param:body.last.weight", (2, 4), "xor", 1 << 31),
        ("param:count.weight", (2,), "xor", 1 << 7),
        ("param:body.last.weight", (1, 0), "xor", 1 << 3),  # by the name that the tied weight goes by
    ]
    assert read("\ufeff" + text.replace("\n", "\r\n")) == read(text, "sci-fi") == read(text)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,frist,0,0", "LIST line 2, Layer: unknown layer 'frist'; did you mean 'first'? Known: body.last, count, deep"),
        ("0,flags,0,0", "LIST line 2, Layer: 'flags.weight' cannot be corrupted: bool"),
        ("0,first,72,0", "LIST line 2, TensorIndex: 72 is outside 'first.weight' of shape [4, 2, 3, 3]; expected 0-71"),
        ('0,first,"(0, 2, 0, 0)",0', "TensorIndex: 2 is outside 'first.weight' of shape [4, 2, 3, 3]; expected 0-1"),
        ('0,first,"(0, 2)",0', "LIST line 2, TensorIndex: 2 coordinates are given, but 'first.weight' has shape [4, 2, 3, 3]"),
        ('0,first,"()",0', "LIST line 2, TensorIndex: found '()'; expected a position like 17"),
        ('0,first,"(-1, 0, 0, 0)",0', "expected a position like 17"),
        ("0,first,-1,0", "LIST line 2, TensorIndex: found '-1'"),
        ("0,first,1.5,0", "LIST line 2, TensorIndex: found '1.5'"),
        ("0,first,__import__('os'),0", "LIST line 2, TensorIndex: found"),
        ("0,first,0,32", "LIST line 2, Bit: bit 32 is outside float32; 'first.weight' has bits 0-31"),
        ("0,half,0,16", "LIST line 2, Bit: bit 16 is outside float16; 'half.weight' has bits 0-15"),
        ("0,first,0,x", "LIST line 2, Bit: found 'x'; expected the number of a bit"),
        ("0,first,0,²", "LIST line 2, Bit: found '\\xb2'; expected the number of a bit"),
        ("a,first,0,0", "LIST line 2, Injection: found 'a'; expected a whole number"),
        ("0,first,0", "LIST line 2: has 3 columns; expected 4: Injection, Layer, TensorIndex, Bit"),
        ("0,first,0,0,1", "LIST line 2: has 5 columns"),
        ('0,"first,0,0', "LIST line 2: cannot be read as CSV"),
        ("0,first," + "9" * 200_000 + ",0", "LIST line 2: cannot be read as CSV"),
        ("0,first," + "9" * 5000 + ",0", "LIST line 2, TensorIndex: found '9999"),
        ("", "LIST: holds no fault"),
    ],
)  # fmt: skip
def test_scifi_that_cannot_be(row, said):
    assert said in error(SCIFI + row + "\n")


def test_scifi_headers():
    neurons = 'Injection,LayerName,LayerIndex,FeatureMapIndex,Value\n0,first,0,"[(0, 1, 2)]","[0.5]"\n'
    assert "LIST line 1: this list of neuron faults does not contain the faulty values" in error(neurons)
    assert "LIST line 1: found the header 'Injection,Layer,Bit'; expected" in error("Injection,Layer,Bit\n0,first,0\n")
    assert "it is not text" in error(SCIFI.encode() + b"0,\xff,0,0\n")


# -- PyTorchALFI -----------------------------------------------------------------------------------------------------


def columns(*faults):
    """The matrix of faults given column by column."""
    return np.array(faults, np.int64).T


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


CONV, LINEAR = (0, 3, 1, -1, 2, 0, 1), (1, -1, -1, -1, 2, 4, 0)


@pytest.mark.parametrize("write", [npy, *(lambda a, p=p: pickle.dumps(a, protocol=p) for p in (3, 4, 5))])
def test_alfi_matrix(write):
    found = read(write(columns(CONV, LINEAR)), ALFI)
    assert [told(f) for (f,) in found] == [
        ("param:first.weight", (3, 1, 2, 0), "xor", 1 << 30),
        ("param:body.last.weight", (2, 4), "xor", 1 << 31),
    ]


def test_alfi_counts_bits_from_the_sign():
    """What its ``single_bit_flip`` does to the text of a float's bits is what the fault does to its word."""
    for value in range(32):
        ((fault,),) = read(npy(columns((*CONV[:-1], value))), ALFI)
        bits = "".join(f"{byte:08b}" for byte in struct.pack("!f", -0.7265625))
        flipped = bits[:value] + ("0" if bits[value] == "1" else "1") + bits[value + 1 :]
        (word,) = fault.apply(np.array([int(bits, 2)], np.uint32))
        assert int(word) == int(flipped, 2)


def test_alfi_counts_only_the_layers_of_its_scenario():
    kinds = {"conv3d": "deep", "fcc": "body.last", "conv2d+conv3d+fcc": "first", "conv3d+fcc": "deep"}
    for types, layer in kinds.items():
        index = {2: (-1, -1, -1), 4: (0, 0, -1), 5: (0, 0, 0)}[len(SHAPES[layer])]
        ((fault,),) = read(npy(columns((0, *index, 1, 1, 31))), f"{ALFI.rpartition('=')[0]}={types}")
        assert fault.site == f"param:{layer}.weight"
        assert fault.operands[0] == 1


def test_alfi_numbers_and_several_faults_an_image():
    numbers = ALFI.replace("bitflip", "number")
    ((fault,),) = read(npy(columns((*LINEAR[:-1], 1200))), numbers)
    assert told(fault) == ("param:body.last.weight", (2, 4), "set", int(np.float32(1200).view(np.uint32)))
    together = f"{ALFI},max_faults_per_image=3"
    same = (*CONV[:-1], 31)
    ((conv, linear),) = read(npy(columns(CONV, LINEAR, same)), together)
    assert told(conv) == ("param:first.weight", (3, 1, 2, 0), "xor", (1 << 30) | 1)
    assert told(linear)[0] == "param:body.last.weight"
    ((nothing,),) = read(npy(columns(CONV, CONV)), f"{ALFI},max_faults_per_image=2")
    assert told(nothing)[-1] == 0  # flipped forth and back
    assert "LIST column 0-1, row 6 (value): element 69 of 'param:first.weight' is set twice" in error(
        npy(columns(CONV, CONV)), f"{numbers},max_faults_per_image=2"
    )
    assert "LIST: has 3 columns, which is not a multiple of max_faults_per_image=2" in error(
        npy(columns(CONV, CONV, CONV)), f"{ALFI},max_faults_per_image=2"
    )


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ((9, *CONV[1:]), "column 0, row 0 (layer): there is no layer 9; the model has 4 layers of kind conv2d, fcc: "
         "0 first, 1 body.last"),
        ((-1, *CONV[1:]), "column 0, row 0 (layer): found -1; expected 0 or more"),
        ((0, 4, *CONV[2:]), "column 0, row 1 (k): 4 is outside 'first.weight' of shape [4, 2, 3, 3]; expected 0-3"),
        ((*CONV[:2], 2, *CONV[3:]), "column 0, row 2 (channel): 2 is outside"),
        ((*CONV[:5], 3, 0), "column 0, row 5 (width): 3 is outside"),
        ((1, -1, -1, -1, 3, 0, 0), "column 0, row 4 (height): 3 is outside 'body.last.weight' of shape [3, 5]; expected 0-2"),
        ((*CONV[:3], 0, *CONV[4:]), "row 5 (width): 5 coordinates are given, but 'first.weight' has shape [4, 2, 3, 3]"),
        ((0, -1, -1, -1, 0, 0, 0), "row 5 (width): 2 coordinates are given, but 'first.weight'"),
        ((0, -1, 1, -1, 0, 0, 0), "column 0, row 1 (k): found -1; expected 0 or more"),
        ((*CONV[:4], -1, 0, 0), "column 0, row 4 (height): found -1"),
        ((*CONV[:-1], 32), "column 0, row 6 (value): found 32; expected a bit from 0 (the sign) to 31"),
        ((*CONV[:-1], -1), "found -1 (-1: the bit was drawn during the run)"),
        ((2, -1, -1, -1, 0, 0, 0), "column 0, row 6 (value): 'half.weight' is float16; expected float32 for such a bit"),
    ],
)  # fmt: skip
def test_alfi_that_cannot_be(column, said):
    assert said in error(npy(columns(column)), ALFI)


def test_alfi_matrices_that_are_none():
    sound = columns(CONV)
    assert (
        "looks like a matrix of PyTorchALFI, which does not contain its settings; add --faults-as pytorchalfi:"
        in error(npy(sound))
    )
    assert "add --faults-as pytorchalfi:" in error(pickle.dumps(sound))
    assert "expected 7 rows (layer, k, channel, depth, height, width, value)" in error(npy(sound.T), ALFI)
    assert "an updated_rs file repeats faults for every image" in error(npy(np.zeros((11, 4))), ALFI)
    assert "has shape [7]" in error(npy(sound[:, 0]), ALFI)
    assert "column 0, row 4 (height): found 1.5; expected a whole number" in error(
        npy(sound + np.eye(7)[:, [4]] / -2), ALFI
    )
    assert "column 0, row 2 (channel): found nan; expected a number" in error(
        npy(np.where(np.arange(7)[:, None] == 2, np.nan, sound)), ALFI
    )
    assert "holds no fault" in error(npy(np.zeros((7, 0))), ALFI)
    assert "holds complex128; expected whole numbers" in error(npy(np.zeros((7, 1), complex)), ALFI)
    assert "expected the matrix as a pickle" in error(SCIFI, ALFI)
    assert "the file name says neuron faults" in error(
        npy(sound), ALFI, "runs/LeNet_test_random_sbf_neurons_inj_1_fault_locs.bin"
    )
    numbers = ALFI.replace("bitflip", "number").replace("fcc", "conv3d+fcc")
    assert "'count.weight' is int8; expected floating point" in error(npy(columns((4, -1, -1, -1, 0, 0, 5))), numbers)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "pytorchalfi",
            "give rnd_mode, rnd_value_type, layer_types from its scenario file, like --faults-as pytorchalfi:",
        ),
        ("pytorchalfi:rnd_mode=weights,rnd_value_type=bitflip", "give layer_types from"),
        (
            ALFI.replace("weights", "neurons"),
            "neuron faults name a position in a batch but not the images of the batch",
        ),
        (ALFI.replace("weights", "wieghts"), "unknown rnd_mode 'wieghts'; did you mean 'weights'"),
        (ALFI.replace("bitflip", "stuckat_1"), "unknown rnd_value_type 'stuckat_1'. Known: bitflip, number."),
        (ALFI.replace("conv2d", "conv1d"), "unknown kind in layer_types 'conv1d'; did you mean"),
        (f"{ALFI},max_faults_per_image=0", "expected 1 or more"),
        ("pytorch-alfi", "unknown format of a list of faults 'pytorch-alfi'; did you mean 'pytorchalfi'"),
        ("sci-fi:bit=3", "unknown parameter of format of a list of faults 'sci-fi': 'bit'"),
    ],
)
def test_formats_that_cannot_be(how, said):
    assert said in error(npy(columns(CONV)), how)


# -- pickles, without unpickling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickled_arrays_are_read_as_numpy_reads_them(protocol):
    for array in (
        np.full((7, 3), -1),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(6, dtype=">i2"),
        np.zeros((7, 0), "u1"),
    ):
        found = read_array(pickle.dumps(array, protocol=protocol))
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    new = pickle.dumps(np.full((7, 3), -1), protocol=4)
    old = new.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    frame = slice(new.index(b"\x95") + 1, new.index(b"\x95") + 9)
    size = int.from_bytes(new[frame], "little") - len(new) + len(old)
    old = old[: frame.start] + size.to_bytes(8, "little") + old[frame.stop :]
    np.testing.assert_array_equal(read_array(old), np.full((7, 3), -1))


class Runs:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return open, ("was-run", "w")


HOSTILE = {
    "code": pickle.dumps(Runs()),
    "code in an array": pickle.dumps(np.array([[Runs()]], object)),
    "objects": pickle.dumps(np.array([[1, None]], object)),
    "a list": pickle.dumps([[1, 2]]),
    "a class": pickle.dumps(OrderedDict(a=1)),
    "a number": pickle.dumps(5),
    "a scalar of numpy": pickle.dumps(np.int64(5)),
    "text": pickle.dumps(np.array(["x"])),
    "protocol 2": pickle.dumps(np.full((7, 3), -1), protocol=2),
    "cut": pickle.dumps(np.full((7, 3), -1))[:-40],
    "cut at the end": pickle.dumps(np.full((7, 3), -1))[:-1],
    "a long one": b"\x80\x04" + b"K\x01" * 10_000 + b".",
    "an empty stack": b"\x80\x04R.",
    "no mark": b"\x80\x04K\x01t.",
    "a memo that is not there": b"\x80\x04h\x07.",
    "several": b"\x80\x04K\x01K\x01.",
    "a size that lies": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "noise": b"\x80\x04" + bytes(range(256)),
    "nothing": b"\x80",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_other_pickles_are_refused_and_nothing_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotAnArray):
        read_array(HOSTILE[name])
    said = error(HOSTILE[name], ALFI)
    assert "so loading it could run code; if you trust the file, convert it: numpy.save(" in said
    assert not list(tmp_path.iterdir())


@given(st.binary(max_size=80), st.integers(0, 400))
def test_damaged_pickles_never_raise_anything_else(noise, at):
    content = pickle.dumps(np.full((7, 3), -1), protocol=4)
    try:
        read_array(content[:at] + noise + content[at + len(noise) :])
    except NotAnArray:
        pass


@given(st.integers(0, 127), st.binary(min_size=1, max_size=8))
def test_damaged_npy_is_told(at, noise):
    content = npy(columns(CONV))
    try:
        read(content[:at] + noise + content[at + len(noise) :], ALFI)
    except UsageError as told:
        assert "\n" not in str(told)  # noqa: PT017 - where it is still sound, it is read


def test_a_npy_that_claims_to_be_huge():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (7, 10**12)})
    assert "is not a valid .npy file" in error(file.getvalue() + bytes(56), ALFI)
    assert "holds no fault" in error(file.getvalue().replace(b"1000000000000", b"0            "), ALFI)


# -- our own ---------------------------------------------------------------------------------------------------------


def record(**changes):
    values = {
        "version": 1, "site": "param:body.last.weight", "dtype": "float32", "shape": [3, 5], "elements": [7],
        "operation": "xor", "operands": ["0x40000000"],
    }  # fmt: skip
    return {**values, **changes}


def lines(*values):
    return "\n".join(json.dumps(v) for v in values) + "\n"


def test_own_lines():
    conv = record(site="first.weight", shape=[4, 2, 3, 3], elements=[0, 71], operands=["0x00000001", "0x80000000"])
    tied = record(site="param:head.weight")
    run = record(site="op:first#convolution.0/fwd/out", shape=[6, 4, 5, 5], step=1)
    cache = record(site="kv:0/key", shape=[2, 2], elements=[3], step=0, occurrence=3)
    row = {"trial": "a/x1/0", "faults": [record(), conv], "codes": "00"}
    head = {"campaign": "0" * 32, "fingerprint": {}, "spec": {}}
    text = lines(head, record(), [conv, record()], row, tied, run, cache, record(step=1)) + "\n  \n"
    found = read(text)
    assert found == read(text, "unsilent")
    assert [len(trial) for trial in found] == [1, 2, 2, 1, 1, 1, 1]
    assert found[0] == (Fault.from_json(record()),)
    assert found[1][0].site == "param:first.weight"
    assert found[3] == found[0]  # by the name that the tied weight goes by
    assert found[4][0].step == 1
    assert found[6][0].step == 1
    whole = json.dumps({"spec": {}, "description": {}, "trials": [row, row]})
    assert read(whole) == [found[2], found[2]]


@given(st.lists(faults().filter(lambda fault: fault.function is None), min_size=1, max_size=4))
def test_own_round_trip(written):
    """Whatever fault of a parameter is written, the model that has such a tensor gets exactly that one back."""
    unique = [f for i, f in enumerate(written) if f.micro_step is None and f.occurrence is None and f.step is None]
    named = [Fault(f"param:t{i}", f.dtype, f.shape, f.elements, f.operation, f.operands) for i, f in enumerate(unique)]
    if not named:
        return
    regions = {(f.site, None, None): Region(f.site, f.dtype, f.shape) for f in named}
    model = ModelTensors(regions, {f.site.removeprefix("param:"): f.site.removeprefix("param:") for f in named})
    for text, trials in (
        (lines(*(f.to_json() for f in named)), [(f,) for f in named]),
        (lines([f.to_json() for f in named]), [tuple(named)]),
        (lines({"faults": [f.to_json() for f in named]}), [tuple(named)]),
    ):
        assert [resolve_entry(e, model, "LIST") for e in read_entries(text.encode(), "LIST")] == trials


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "LIST line 2: cannot be read as JSON ("),
        ("[" * 100_000, "LIST line 2: cannot be read as JSON ("),
        ('{"version": ' + "9" * 5000 + "}", "LIST line 2: cannot be read as JSON ("),
        ("7", "LIST line 2: found 7; expected a fault record, or a list of them"),
        ("[]", "LIST line 2: the list of faults is empty; leave the line out"),
        ('{"faults": []}', "LIST line 2: the list of faults is empty"),
        (
            '{"faults": {"digest": "x", "elements": 9000}}',
            "LIST line 2: this fault is too large for a store",
        ),
        ('{"faults": 3}', "LIST line 2: faults is 3; expected a list"),
        ('{"spec": 1, "trials": [3]}', "LIST line 2, trial 1: faults is None"),
        (record(site="param:nowhere"), "LIST line 2, site: unknown parameter 'nowhere'"),
        (record(site="param:body.lats.weight"), "did you mean 'body.last.weight'?"),
        (record(site="param:flags.weight"), "LIST line 2, site: 'flags.weight' cannot be corrupted: bool"),
        (record(dtype="float16", operands=["0x4000"]),
         "the fault is for float16[3, 5], but 'param:body.last.weight' of the workload is float32[3, 5]"),
        (record(shape=[5, 3]), "the fault is for float32[5, 3], but 'param:body.last.weight' of the workload is float32[3, 5]"),
        (record(elements=[15]), "LIST line 2: fault record: elements is 15; expected a list of at least one position in 0-14"),
        (record(operands=["0x4000"]), "LIST line 2: fault record: operands is '0x4000'"),
        (record(operation="xro"), "did you mean 'xor'"),
        (record(rank=1), "LIST line 2: rank is 1, but a campaign on param: sites does not support rank; leave it out"),
        (record(first_step=0), "LIST line 2: first_step is 0, but a campaign on param: sites does not"),
        (record(phase="bwd"), "LIST line 2: phase is 'bwd', but"),
        (record(step=2), "LIST line 2, step: there is no batch 2; the workload has 2 batches, counted from 0"),
        ([record(step=0), record(step=1)], "LIST line 2: the faults of one line act in several batches"),
        ([record(), record(site="param:head.weight")], "LIST line 2: names 'param:body.last.weight' in two records"),
        (record(site="op:first"), "LIST line 2: cannot read site 'op:first'"),
        (record(site="op:first#convolution.0/fwd/out"), "lacks step, needed to tell in which evaluation it acts"),
        (record(site="kv:0/key", step=0), "lacks occurrence, needed to tell in which evaluation it acts"),
        (record(site="op:first#convolution.1/fwd/out", step=0), "site: unknown site 'op:first#convolution.1/fwd/out'; did you"),
        (record(site="op:first#convolution.0/fwd/out", step=5), "convolution.0/fwd/out' is not in batch 5; it is in 0, 1"),
        (record(site="kv:0/key", step=0, occurrence=1), "is not in batch 0 at call 1; it is in 0"),
        (record(version=2), "LIST line 2: fault record: version is 2"),
        (record(site="param:a\x1b[2Jb"), "LIST line 2: fault record: site is 'param:a\\x1b[2Jb'"),
    ],
)  # fmt: skip
def test_own_lines_that_cannot_be(line, said):
    text = lines(record()) + (line if isinstance(line, str) else json.dumps(line)) + "\n"
    assert said in error(text)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "\n \n", "hello", "PK\x03\x04", "trial,target,flips\n"])
def test_what_is_no_list_is_told(content):
    assert "holds no fault" in error(content) or "is not a known list of faults" in error(content)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot read the list of faults .*: No such file"):
        read_list_bytes(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot read the list of faults .*: Is a directory"):
        read_list_bytes(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        read_list_bytes(str(tmp_path / "pipe"))
    with pytest.raises(UsageError, match="is not a regular file"):
        read_list_bytes("/dev/zero")


def test_limits(tmp_path, monkeypatch):
    path = tmp_path / "list.jsonl"
    path.write_text(lines(*[record()] * 4))
    monkeypatch.setattr(files, "MOST_FAULTS", 3)
    assert "LIST line 4: the list has more than 3 faults" in error(path.read_bytes())
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="is larger than"):
        read_list_bytes(str(path))


def test_the_kind_of_a_list(tmp_path):
    for name, content in {
        "param": lines(record(), record()), "op": lines(record(site="op:first#convolution.0/fwd/out", step=0)),
        "kv": lines([record(site="kv:0/key", step=0, occurrence=3)]), "input": lines(record(site="input:0", step=0)),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(content)
        assert kind_of_list(str(tmp_path / name)) == name
    (tmp_path / "list.csv").write_text(SCIFI + "0,first,0,0\n")
    assert kind_of_list(str(tmp_path / "list.csv")) == "param"

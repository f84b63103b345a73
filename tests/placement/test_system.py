"""Descriptions of machines: presets, TOML, units, the topology of GPUs, and what is wrong with them."""

from __future__ import annotations

import pytest

from unsilent.basics.errors import UsageError
from unsilent.placement.loading import load_system
from unsilent.placement.system import parse_system
from unsilent.placement.topology import parse_topology, this_machine

GOOD = """
name = "two racks"
[[level]]
name = "rack"
count = 2
bandwidth = "400Gb/s"
latency = "20us"
[[level]]
name = "node"
count = 4
bandwidth = "12.5 GB/s"
latency = "0.01 ms"
shared_by = 4
[[level]]
name = "gpu"
count = 8
bandwidth = "1GiB/s"
"""


def described(text):
    return parse_system(text.encode(), "m.toml")


def test_a_description_is_read_with_its_units():
    system = described(GOOD)
    assert (system.name, system.counts, system.devices) == ("two racks", (2, 4, 8), 64)
    assert [level.bandwidth for level in system.levels] == [50e9, 12.5e9, 2**30]
    assert [level.latency for level in system.levels] == pytest.approx([20e-6, 10e-6, 0])
    assert [system.sharing(at) for at in range(3)] == [32, 4, 1]
    assert [level.link for level in system.levels] == ["network", "network", "nvlink"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 4", "count = 0", r"m.toml: level 2 \(node\): count is 0; expected a whole number of 1 or more"),
        ("count = 4", "count = true", "count is True"),
        ("count = 4", "count = 2.5", r"count is 2\.5"),
        ('"400Gb/s"', '"400Gbps"', r"bandwidth has the unknown unit 'Gbps'; expected one of B/s"),
        ('"20us"', '"20 hours"', "latency has the unknown unit 'hours'"),
        ('"20us"', "20", "latency is 20; expected a number with its unit, like 5us"),
        ('"20us"', '"-1us"', "latency is '-1us'"),
        ('"20us"', '"1e999us"', "latency is '1e999us', which no machine has"),
        ('"400Gb/s"', '"0Gb/s"', "expected more than 0"),
        ("shared_by = 4", "shared_by = 3", "shared_by is 3, which does not divide the 8 devices"),
        ("shared_by = 4", "shared = 4", "unknown key in m.toml: level 2: 'shared'"),
        ("shared_by = 4", 'link = "ib"', "unknown link in m.toml: level 2: 'ib'"),
        ('name = "node"', 'name = "rack"', "two levels have the same name"),
        ("count = 2", "count = 9999999", "expected at most 65,536"),
        ('name = "two racks"', "racks = 2", "unknown key in m.toml: 'racks'"),
        ('name = "two racks"', 'gpu = "b200"', "unknown gpu in m.toml: 'b200'"),
        ('name = "two racks"', "name = ", "cannot read m.toml as TOML"),
    ],
)
def test_a_wrong_description_is_named(old, new, message):
    with pytest.raises(UsageError, match=message) as caught:
        described(GOOD.replace(old, new, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "level = 3", "level = []", 'level = ["a"]'])
def test_a_description_without_levels_is_refused(text):
    with pytest.raises(UsageError, match="has no levels"):
        described(text)


def test_a_level_without_a_bandwidth_is_refused():
    with pytest.raises(UsageError, match=r"level 1 has no bandwidth"):
        described('[[level]]\nname = "a"\ncount = 2\n')


@pytest.mark.parametrize(
    ("which", "counts"), [("a100", (2, 16)), ("a100:4", (4, 16)), ("v100:3", (3, 8)), ("h100-nvl:1", (1, 4, 2))]
)
def test_presets_have_as_many_nodes_as_asked(which, counts):
    assert load_system(which).counts == counts


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("a200", "unknown system 'a200'; did you mean 'a100'"),
        ("a100:0", "'0' nodes; expected a whole number of 1 or more"),
        ("a100:x", "'x' nodes"),
        ("a100:99999", "expected at most 65,536"),
        ("missing.toml", "cannot read the system 'missing.toml'"),
        ("some/folder", "does not end in .toml, .json or .txt"),
    ],
)
def test_an_unknown_machine_is_refused(which, message):
    with pytest.raises(UsageError, match=message):
        load_system(which)


def topology(*rows):
    """The output of ``nvidia-smi topo -m`` with a network card and its legend, as drivers of 2024 print it."""
    names = [f"GPU{at}" for at in range(len(rows))]
    head = "\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    lines = [
        f"{name}\t" + "\t".join([*row.split(), "NODE", "0-31", "0", "N/A"])
        for name, row in zip(names, rows, strict=True)
    ]
    card = "NIC0\t" + "\t".join(["NODE"] * len(rows) + [" X "])
    return "\n".join([head, *lines, card, "", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe"])


def test_gpus_on_a_switch_are_one_level():
    rows = [" ".join("X" if a == b else "NV18" for b in range(8)) for a in range(8)]
    system = parse_topology(topology(*rows), "x")
    assert system.counts == (8,)
    assert system.levels[0].bandwidth == 18 * 25e9
    assert system.levels[0].link == "nvlink"


def test_pairs_with_a_bridge_are_a_level_of_their_own():
    rows = ["X NV12 NODE NODE SYS SYS SYS SYS", "NV12 X NODE NODE SYS SYS SYS SYS",
            "NODE NODE X NV12 SYS SYS SYS SYS", "NODE NODE NV12 X SYS SYS SYS SYS",
            "SYS SYS SYS SYS X NV12 NODE NODE", "SYS SYS SYS SYS NV12 X NODE NODE",
            "SYS SYS SYS SYS NODE NODE X NV12", "SYS SYS SYS SYS NODE NODE NV12 X"]  # fmt: skip
    system = parse_topology(topology(*rows), "x")
    assert system.counts == (2, 2, 2)
    assert [level.link for level in system.levels] == ["pci", "pci", "nvlink"]
    assert [level.name for level in system.levels] == ["numa", "group", "gpu"]


def test_one_gpu_is_a_machine_of_one_device():
    assert parse_topology(topology("X"), "x").counts == (1,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["X NV4 SYS", "NV4 X SYS", "SYS SYS X"], "GPUs form components of 2, 1"),
        (["X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X"], "CUDA_VISIBLE_DEVICES=0,2,1,3"),
        (["X WAT", "WAT X"], "unknown path 'WAT'"),
    ],
)
def test_an_irregular_topology_is_named(rows, message):
    with pytest.raises(UsageError, match=message):
        parse_topology(topology(*rows), "x")


def test_another_text_is_no_topology():
    with pytest.raises(UsageError, match="is not the output of nvidia-smi topo -m"):
        parse_topology("hello", "x.txt")


def test_this_machine_has_devices():
    assert this_machine().devices >= 1

"""What the system says of a GPU: from programs in the place of nvidia-smi and dmesg, and from none."""

from __future__ import annotations

import pytest

from unsilent.monitor import incident_writer
from unsilent.monitor.incident_writer import QUERIED, gpu_facts

UUID = "GPU-5e8a"
CELLS = {
    "uuid": UUID,
    "pci": "00000000:3B:00.0",
    "serial": "[N/A]",
    "driver": "550.1",
    "ecc mode": "Enabled",
    "ecc corrected": "3",
}
KERNEL = """[1.0] NVRM: loading
[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
[3.0] NVRM: Xid (PCI:0000:af:00): 31, pid=2, of another device
[4.0] NVRM: Xid (PCI:0000:3B:00): 63, pid=1, row remapping
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script in the place of a program; there are no others."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, lines):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)

    return put


def smi(**more):
    cells = {**CELLS, **more}
    return f"echo '{', '.join(cells.get(name, '[Not Supported]') for name in QUERIED)}'"


def test_what_is_said_is_taken_and_what_is_not_known_is_left_out(program):
    program("nvidia-smi", smi())
    program("dmesg", f"printf '%s' '{KERNEL}'")
    facts = gpu_facts(UUID)
    assert facts.pop("xid") == (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.; NVRM: Xid (PCI:0000:3B:00): 63, pid=1, row remapping"
    )
    assert facts == {name: value for name, value in CELLS.items() if name != "serial"}


@pytest.mark.parametrize("lines", ["exit 9", "echo 'No devices were found'", "echo", None])
def test_without_nvidia_smi_only_the_identity_is_known(lines, program):
    if lines is not None:
        program("nvidia-smi", lines)
    program("dmesg", f"printf '%s' '{KERNEL}'")
    assert gpu_facts(UUID) == {"uuid": UUID}


def test_a_log_of_the_kernel_that_may_not_be_read_is_left_out(program):
    program("nvidia-smi", smi())
    program("dmesg", "echo 'Operation not permitted' >&2; exit 1")
    assert "xid" not in gpu_facts(UUID)


def test_a_program_that_hangs_is_ended(program, monkeypatch):
    monkeypatch.setattr(incident_writer, "QUERY_SECONDS", 0.2)
    program("nvidia-smi", "while :; do :; done")
    assert gpu_facts(UUID) == {"uuid": UUID}

"""The fault codes: the meaning and the consequences of each. A code never changes its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["transient", "device", "checkpoint", "numerics", "benign", "data", "undetermined"]
Level = Literal["minor", "major"]
GOES_ON, SOFTWARE_EXIT_CODE, UNDETERMINED_EXIT_CODE, CONFIRMED_EXIT_CODE = 0, 1, 16, 17
"""Exit codes for four cases: the job continues; a failure that would occur on any device; and, as in Megatron-LM's rerun machine,
a restart of the job to find out more, and a fault that is confirmed for a device. A fault that is undetermined twice on one
device also gets the last code, so that the job is not restarted forever, although no fault is confirmed."""
ASD_CODE, ASD_LEVEL = "80818C00", "minor"
"""Code and level of every fault if environment variables of accuracy-sensitive detection (ASD) requested the monitor."""


@dataclass(frozen=True)
class FaultCode:
    """One fault code, with its meaning and consequences.

    Attributes:
        code: Text such as ``UNSILENT-T01``.
        kind: Kind of fault.
        level: ``major`` if the fault will occur again unless something is changed.
        exit_code: Exit code of the job; 0 if it continues.
        meaning: Meaning in words.
        action: Advice in words.
    """

    code: str
    kind: FaultKind
    level: Level
    exit_code: int
    meaning: str
    action: str


_EXCHANGE = "take the device out of the job, test it with unsilent selftest, continue from the last good checkpoint"
TRANSIENT = FaultCode(
    "UNSILENT-T01", "transient", "minor", UNDETERMINED_EXIT_CODE,
    "the step came to other values when it was executed again on the same device, without the alarm and each time alike",
    "continue from the last good checkpoint; the same device may be used, its next incident counts against it",
)  # fmt: skip
DEVICE_REPEATED = FaultCode(
    "UNSILENT-D01", "device", "major", CONFIRMED_EXIT_CODE,
    "the alarm came again on the same device and not on another one with the same state and batch", _EXCHANGE,
)  # fmt: skip
DEVICE_VARIES = FaultCode(
    "UNSILENT-D02", "device", "major", CONFIRMED_EXIT_CODE,
    "executions of the step on the same device differ, although most of them are alike", _EXCHANGE,
)  # fmt: skip
DEVICE_OPERATION = FaultCode(
    "UNSILENT-D03", "device", "major", CONFIRMED_EXIT_CODE,
    "the device computed an operation twice from the same inputs, with different results", _EXCHANGE,
)  # fmt: skip
DEVICE_STRIKES = FaultCode(
    "UNSILENT-D04", "device", "major", CONFIRMED_EXIT_CODE,
    "a transient fault on a device that had an incident before", _EXCHANGE,
)  # fmt: skip
CHECKPOINT = FaultCode(
    "UNSILENT-C01", "checkpoint", "major", SOFTWARE_EXIT_CODE,
    "the alarm comes again after the checkpoint that was loaded last, and not after the one before",
    "continue from the checkpoint before (unsilent checkpoint last-good), and verify the newest one",
)  # fmt: skip
NUMERICS = FaultCode(
    "UNSILENT-N01", "numerics", "minor", GOES_ON,
    "the alarm comes again in the dtype of the step, and not when its operations are computed in float64",
    "compute the named operation in a wider dtype, or lower the loss scale or the learning rate",
)  # fmt: skip
BENIGN = FaultCode(
    "UNSILENT-B01", "benign", "minor", GOES_ON,
    "the alarm comes again on another device, or in several ranks before any reduction, and in float64; parameters, "
    "gradients and moments are finite",
    "nothing, if the batch or the change of the training is meant; else look at the batch of this step",
)  # fmt: skip
DATA_BATCH = FaultCode(
    "UNSILENT-S01", "data", "major", SOFTWARE_EXIT_CODE,
    "something is wrong with the batch by itself",
    "mend or leave out the samples of this batch, and continue from the last good checkpoint",
)  # fmt: skip
DATA_EVERYWHERE = FaultCode(
    "UNSILENT-S02", "data", "major", SOFTWARE_EXIT_CODE,
    "the alarm comes again on another device and in float64, with values that are not finite",
    "look for the cause in the data or the program: another device would do the same",
)  # fmt: skip
DATA_ELSEWHERE = FaultCode(
    "UNSILENT-S03", "data", "major", SOFTWARE_EXIT_CODE,
    "the alarm comes again, as it did in the same step on another device in an earlier run",
    "look for the cause in the data, the checkpoint or the program: another device did the same",
)  # fmt: skip
NOT_EXECUTED = FaultCode(
    "UNSILENT-U01", "undetermined", "minor", UNDETERMINED_EXIT_CODE,
    "the step was not executed again, or not often enough to compare executions",
    "make the loop one that can be executed again; or start the job again, from a checkpoint of before this step and with its "
    "step in UNSILENT_FIRST_STEP: a second alarm in this step of the training decides more",
)  # fmt: skip
NO_OTHER_DEVICE = FaultCode(
    "UNSILENT-U02", "undetermined", "minor", UNDETERMINED_EXIT_CODE,
    "the alarm comes again, and no execution tells a device from the data",
    "start the job again on other devices: if the alarm comes again in this step, it is not a device",
)  # fmt: skip
CONTRADICTION = FaultCode(
    "UNSILENT-U03", "undetermined", "minor", UNDETERMINED_EXIT_CODE,
    "executions contradict each other in a way that no kind of fault explains",
    "test the device with unsilent selftest, and check that the step is deterministic (unsilent explain)",
)  # fmt: skip
UNDETERMINED_AGAIN = FaultCode(
    "UNSILENT-U04", "undetermined", "major", CONFIRMED_EXIT_CODE,
    "undetermined for the second time in the same step of the training on the same device; nothing is confirmed for a device",
    "give the job another device: if the alarm comes again in this step, it is not the device",
)  # fmt: skip
NO_OTHER_CHECKPOINT = FaultCode(
    "UNSILENT-U05", "undetermined", "minor", UNDETERMINED_EXIT_CODE,
    "soon after the load of a checkpoint, values that are not finite come again, and the checkpoint before was not tried",
    "continue from the checkpoint before the one that was loaded, not from one that was saved since, and verify that one",
)  # fmt: skip
FAULT_CODES = (
    TRANSIENT, DEVICE_REPEATED, DEVICE_VARIES, DEVICE_OPERATION, DEVICE_STRIKES, CHECKPOINT, NUMERICS, BENIGN, DATA_BATCH,
    DATA_EVERYWHERE, DATA_ELSEWHERE, NOT_EXECUTED, NO_OTHER_DEVICE, CONTRADICTION, UNDETERMINED_AGAIN,
    NO_OTHER_CHECKPOINT,
)  # fmt: skip

"""The process of one rank: ``python -m unsilent.workloads.distributed.rank FD PARENT-PID``.

Gang to rank: ``("start", settings, number)``, then `TrainOrder` and `ResumeOrder`. Rank to gang: ``("ready", None)``,
``("trained", None)``; for a resume ``("began", ResumeStart)``, ``("part", RankPart)`` at each evaluation, ``("ended", RankEnd)``.
Instead of an answer, ``("raised", text)`` describes an error caused by a fault, and ``("failed", error)`` means that
the order cannot be carried out. After either, the ranks may be in different states, so the gang ends them all.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from unsilent.basics.child_processes import exit_with_parent
from unsilent.basics.error_origin import internal_error
from unsilent.basics.errors import UnsilentError, kind_and_line
from unsilent.workloads.distributed.orders import RankEnd, ResumeOrder, TrainOrder

if TYPE_CHECKING:
    from unsilent.faults.receipts import AppliedFault
    from unsilent.workloads.distributed.rank_training import RankTraining
    from unsilent.workloads.trainings import StepRecord, TrainingState


def main(fd: int, parent: int) -> None:
    """Carry out the orders of the gang until it closes the connection.

    Output of user code goes to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.set_inheritable(fd, False)
    os.dup2(2, 1)
    exit_with_parent(parent)
    try:
        _serve(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the gang was closed; an orderly end would wait for the other ranks


def _serve(connection: Connection) -> None:
    from unsilent.basics.user_code import set_script_arguments
    from unsilent.workloads.distributed.rank_training import FaultEffect, RankTraining

    _, settings, number = connection.recv()
    set_script_arguments(settings.workload)
    try:
        training = RankTraining(settings, number)
        connection.send(("ready", None))
        _obey(connection, training)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except FaultEffect as effect:
        connection.send(("raised", kind_and_line(effect.error)))
    except Exception as error:
        connection.send(("failed", error if isinstance(error, UnsilentError) else internal_error(error)))
    connection.recv()  # until the gang ends us


def _obey(connection: Connection, training: RankTraining) -> None:
    """Carry out the orders from the connection one after the other."""
    clean: TrainingState | None = None
    while True:
        order = connection.recv()
        if isinstance(order, ResumeOrder):
            _resume(connection, training, order)
            continue
        assert isinstance(order, TrainOrder)
        if clean is None or clean.step > order.step:
            clean = training.started()
        while clean.step < order.step:
            training.step(clean)
        training.save(training.full_snapshot(clean), order.save_to)
        connection.send(("trained", None))


def _resume(connection: Connection, training: RankTraining, order: ResumeOrder) -> None:
    """Carry out a resume order and send the measurements."""
    state = training.restarted(order)
    start = training.began(state, order)
    connection.send(("began", start))
    connection.send(("part", training.evaluated(state, (), order)))
    records: list[StepRecord] = []
    applied: list[AppliedFault] = []
    stopped = False
    while state.step < order.until_step and not stopped:
        if order.remember_clean and state.step == order.until_step - 1:
            training.survey_next_step()
        record, landed = training.step(state, order.comm_faults)
        records.append(record)
        applied += landed
        stopped = training.is_true_anywhere(not math.isfinite(record.loss))
        due = order.evaluate_every and (state.step - start.step) % order.evaluate_every == 0
        if due or stopped or state.step == order.until_step:
            connection.send(("part", training.evaluated(state, records, order)))
            records = []
    connection.send(("ended", RankEnd(stopped, training.finish(state, order), tuple(applied), training.collectives)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

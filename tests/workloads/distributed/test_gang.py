"""Real ranks under each strategy: clean resumes are exact, faults reach whom they should, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from distributed_runs import CUT, END, TRAINING, altered, read, strategy_row
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.faults.models import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.workloads import load_training
from unsilent.workloads.distributed import Gang
from unsilent.workloads.distributed.rank_training import load_snapshot
from unsilent.workloads.distributed.strategy_names import PACKAGES
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

slow = pytest.mark.slow
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
PAYLOADS = {
    "ddp": "comm:all_reduce.0/in",
    "fsdp2": "comm:reduce_scatter_tensor.0/in",
    "zero1": "comm:all_reduce.0/in",
}
REPLICAS = [strategy_row("ddp"), strategy_row("horovod"), strategy_row("zero1")]
"""Every rank has all parameters."""
DISTRIBUTED = [*REPLICAS, strategy_row("fsdp2")]

OWN = """
import torch
from torch import nn
import unsilent


def make():
    batch = torch.linspace(0, 1, 24).reshape(4, 6), torch.tensor([0, 1, 0, 1])
    return unsilent.Training(
        model=lambda: nn.Sequential(nn.Linear(6, 2)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batches=[batch],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=[batch],
        name="own",
    )
"""


def test_two_ranks_start_resume_and_end(tmp_path):
    """The one test of processes in the fast tier, with a training that reads no data."""
    (tmp_path / "own.py").write_text(OWN)
    with Gang(f"{tmp_path}/own.py:make", strategy="ddp", world_size=2, folder=tmp_path) as gang:
        clean = gang.train_to(1, tmp_path / "clean.pt")
        record = gang.resume(clean, until_step=2)
        ids = gang.process_ids
    assert record.end == "finished", record.detail
    assert (record.start_step, record.losses.shape, record.evaluated_at.tolist()) == (1, (2, 1), [1, 2])
    assert (record.tensors, record.layers) == (("0.weight", "0.bias"), ("0",))
    assert np.isfinite(record.losses).all()
    assert (record.changed_parameters() == -1).all()
    assert not any(map(is_running, ids))


@slow
def test_single_is_the_training_itself(run):
    one = run("single", 1)
    training = load_training(*TRAINING)
    state = training.start(0)
    records = [training.step(state) for _ in range(END)]
    evaluation = training.evaluate(state)
    assert first_snapshot_difference(training.snapshot(state), load_snapshot(one.uninterrupted)) is None
    assert one.golden.losses.tolist() == [[record.loss for record in records[CUT:]]]
    assert one.golden.metrics["accuracy"].tolist() == [[record.metrics["accuracy"] for record in records[CUT:]]]
    assert one.golden.held_out["loss"][-1] == evaluation.loss
    assert one.golden.held_out["accuracy"][-1] == evaluation.metrics["accuracy"]


@slow
@pytest.mark.parametrize("restart", ["before", "after"])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        strategy_row("single", 1),
        strategy_row("ddp", 2),
        strategy_row("fsdp2", 2),
        strategy_row("horovod", 2),
        strategy_row("zero1", 2),
        strategy_row("horovod", 4),
    ],
)
def test_the_clean_resume_is_the_uninterrupted_run(run, strategy, ranks, restart):
    """With more ranks ddp's is not: its reducer orders buckets anew after a backward pass, and so the sums in them."""
    one = run(strategy, ranks)
    final = one.folder / f"final-{restart}.pt"
    record = one.resume(one.clean, restart=restart, evaluate_every=3, save_to=final)
    assert (record.end, record.start_step, record.evaluated_at.tolist()) == ("finished", CUT, [CUT, CUT + 3, END])
    assert first_snapshot_difference(read(one.uninterrupted), read(final)) is None
    assert record.hashes == one.golden.hashes
    assert not record.changed.any()
    assert not record.nonfinite.any()


@slow
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_other_ranks_than_0_are_as_in_the_uninterrupted_run_too(run, strategy):
    """Under all but ddp without their buffers: a checkpoint has those of rank 0 alone."""
    one = run(strategy, 2)
    whole = one.resume(one.gang.train_to(0, one.folder / "start.pt"))
    ours, theirs = whole.hashes[1], one.golden.hashes[1]
    assert whole.hashes[0] == one.golden.hashes[0]
    assert (ours["parameters"], ours["optimizers"]) == (theirs["parameters"], theirs["optimizers"])
    assert (ours["buffers"] == theirs["buffers"]) == (strategy == "ddp")


@slow
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_checkpoints_have_the_same_tensors_whatever_the_strategy(run, strategy):
    names = []
    for each in (run("single", 1), run(strategy, 2)):
        with Checkpoint(each.clean) as checkpoint:
            names.append({name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()})
    assert names[0] == names[1]
    assert {"model/stem.0.weight", "optimizer/stem.0.weight/exp_avg", "scheduler/0/last_epoch", "rng/init"} <= set(
        names[0]
    )


@slow
@pytest.mark.parametrize("strategy", [strategy_row("fsdp2"), strategy_row("horovod"), strategy_row("zero1")])
def test_two_ranks_have_the_bits_of_ddp(run, strategy):
    """Sums of two numbers commute; what clips the gradients here does not act."""
    ddp, other = run("ddp", 2), run(strategy, 2)
    assert first_snapshot_difference(read(ddp.clean), read(other.clean)) is None
    assert ddp.golden.hashes[0] == other.golden.hashes[0]
    assert np.array_equal(ddp.golden.losses, other.golden.losses)


@slow
@pytest.mark.parametrize("strategy", [strategy_row("horovod")])
def test_horovod_has_the_bits_of_ddp_where_gradients_are_clipped_too(tmp_path, strategy):
    models = []
    for name, clip in (("ddp", "0"), ("ddp", "1"), (strategy, "1")):
        options = {"steps": "40", "batch": "4", "clip": clip}
        with Gang("train-chargpt", options, strategy=name, world_size=2) as gang:
            models.append(read(gang.train_to(CUT, tmp_path / "clean.pt"))["model"])
    assert first_snapshot_difference(models[0], models[1]), "nothing was clipped"
    assert first_snapshot_difference(models[1], models[2]) is None


@slow
@pytest.mark.parametrize("strategy", REPLICAS)
def test_one_ranks_corrupted_model_stays_corrupted_after_wrapping_and_is_healed_before(run, strategy):
    one = run(strategy, 2)
    bad = altered(one.clean, one.folder / "model.pt", "model/head.2.weight")
    after = one.resume([one.clean, bad], restart="after", evaluate_every=3)
    column = after.tensors.index("head.2.weight")
    assert after.changed[:, 0, column].tolist() == [0, 1]
    assert after.changed[:, 0].sum() == 1
    assert after.extreme[1, 0, column] == 1
    assert not np.array_equal(after.losses[1], one.golden.losses[1])
    assert after.losses[0, 0] == one.golden.losses[0, 0]
    assert not np.array_equal(after.losses[0, 1:], one.golden.losses[0, 1:])  # through the averaged gradients
    before = one.resume([one.clean, bad], restart="before", evaluate_every=3)
    assert before.hashes == one.golden.hashes
    assert np.array_equal(before.losses, one.golden.losses)


@slow
@pytest.mark.parametrize("strategy", [strategy_row("zero1")])
@pytest.mark.parametrize(("tensor", "lasts"), [("head.2.weight", True), ("stem.0.weight", False)])
def test_zero1_repairs_a_rank_whose_part_does_not_have_the_element(run, strategy, tensor, lasts):
    """Rank 1's part of the row of parameters ends with the head and does not have the stem."""
    one = run(strategy, 2)
    bad = altered(one.clean, one.folder / "part.pt", f"model/{tensor}", "set:value=2000000")
    record = one.resume([one.clean, bad], restart="after", evaluate_every=1)
    extreme = record.extreme[:, :, record.tensors.index(tensor)]
    assert extreme[:, 0].tolist() == [0, 1]
    assert extreme[:, 1].tolist() == ([1, 1] if lasts else [0, 0])
    assert record.hashes[0]["parameters"] == record.hashes[1]["parameters"] != one.golden.hashes[0]["parameters"]


@slow
@pytest.mark.parametrize("strategy", [strategy_row("zero1")])
def test_zero1_leaves_an_update_out_where_a_gradient_is_not_finite(run, strategy):
    one = run(strategy, 2)
    fault = UnresolvedFault(PAYLOADS[strategy], fault_model("set:value=nan"), seed=3, rank=1, step=CUT + 1)
    final = one.folder / "skipped.pt"
    record = one.resume(one.clean, comm_faults=[fault], until_step=CUT + 2, save_to=final)
    before = one.folder / "before.pt"
    one.resume(one.clean, until_step=CUT + 1, save_to=before)
    assert record.end == "finished"
    for part in ("head.2.weight", "stem.0.weight"):
        assert torch.equal(read(final)["model"][part], read(before)["model"][part])


@slow
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_fault_in_the_file_of_all_ranks_reaches_all(run, strategy):
    one = run(strategy, 2)
    bad = altered(one.clean, one.folder / "all.pt", "model/head.2.weight")
    record = one.resume(bad, evaluate_every=3)
    assert record.changed[:, 0].sum() == (1 if strategy == "fsdp2" else 2)  # fsdp2: the rank that holds it
    assert (record.changed_parameters()[:, -1].sum(-1) > 0.5 * record.parameter_elements().sum(-1)).all()
    layers = record.by_layer(record.changed[:, 0])
    assert layers[:, record.layers.index("head.2")].sum() == layers.sum()


@slow
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_optimizer_of_rank_0_can_replace_that_of_all(run, strategy):
    one = run(strategy, 2)
    bad = altered(one.clean, one.folder / "optimizer.pt", "optimizer/stem.0.weight/exp_avg")
    replicated = strategy in ("ddp", "horovod")
    files = [one.clean, bad] if replicated else [bad, one.clean]  # else: the rank whose part has the element
    own = one.resume(files, until_step=CUT, restart="after")
    assert own.hashes[0]["parameters"] == own.hashes[1]["parameters"]
    if replicated:
        assert own.hashes[0]["optimizers"] != own.hashes[1]["optimizers"]
        healed = one.resume(files, restart="after", broadcast_optimizer=True, evaluate_every=3)
        assert healed.hashes == one.golden.hashes
    else:
        sent = one.resume(files, until_step=CUT, restart="after", broadcast_optimizer=True)
        assert sent.hashes[0]["optimizers"] == sent.hashes[1]["optimizers"] == own.hashes[0]["optimizers"]


@slow
@pytest.mark.parametrize("strategy", list(map(strategy_row, PAYLOADS)))
def test_a_payload_of_one_rank_is_corrupted(run, strategy):
    one = run(strategy, 2)
    fault = UnresolvedFault(PAYLOADS[strategy], fault_model("bitflip:bits=30"), seed=3, rank=1, step=CUT + 1)
    record = one.resume(one.clean, comm_faults=[fault], evaluate_every=1)
    (applied,) = record.applied_faults
    assert (applied.fault.rank, applied.fault.site) == (1, PAYLOADS[strategy])
    assert record.changed[:, 1].sum() == 0
    assert record.changed[:, 2].sum() > 0
    assert np.array_equal(record.losses[:, :2], one.golden.losses[:, :2])


@slow
def test_faults_that_cannot_act_are_errors(run):
    one = run("ddp", 2)
    model = fault_model("bitflip:bits=30")
    for site, more, text in (
        ("param:head.2.weight", {"step": CUT}, "not the payload of a collective"),
        ("comm:all_reduce.0/in", {"step": END}, "acts in no step"),
        ("comm:all_reduce.0/in", {"step": CUT, "rank": 2}, "expected 0 to 1"),
        ("comm:all_reduce.9/in", {"step": CUT}, "unknown collective"),
    ):
        with pytest.raises((UsageError, InjectionError), match=text):
            one.resume(one.clean, comm_faults=[UnresolvedFault(site, model, **more)])


@slow
def test_a_loss_that_is_not_finite_ends_the_run(run):
    one = run("ddp", 2)
    bad = one.folder / "nan.pt"
    snapshot = read(one.clean)
    snapshot["model"]["head.2.bias"][0] = float("nan")
    torch.save(snapshot, bad)
    record = one.resume([one.clean, bad], restart="after", evaluate_every=3)
    assert (record.end, record.losses.shape) == ("loss not finite", (2, 1))
    assert record.evaluated_at.tolist() == [CUT, CUT + 1]
    assert record.nonfinite[:, 0].sum() == 1
    assert record.nonfinite[:, 1].sum() > 100


@slow
def test_a_file_that_cannot_be_read_is_recorded_and_the_next_request_works(run):
    one = run("ddp", 2)
    bad = one.folder / "cut.pt"
    bad.write_bytes(one.clean.read_bytes()[:1000])
    record = one.resume([one.clean, bad])
    assert record.end == "raised"
    assert record.detail.startswith("rank 1: ")
    assert record.losses.shape == (2, 0)
    again = one.resume(one.clean, evaluate_every=3)
    assert again.hashes == one.golden.hashes
    assert (again.changed == 0).all()  # what the clean resume was is known to the new ranks


@slow
def test_a_rank_that_dies_or_hangs_is_reported_and_the_next_request_works(tmp_path):
    with Gang(*TRAINING, strategy="ddp", world_size=2, deadline=3) as gang:
        clean = gang.train_to(2, tmp_path / "clean.pt")
        golden = gang.resume(clean, until_step=4)
        os.kill(gang.process_ids[1], signal.SIGKILL)
        record = gang.resume(clean, until_step=4)
        assert (record.end, record.detail) == ("rank lost", "rank 1: ended by signal 9")
        assert gang.process_ids == []
        assert gang.resume(clean, until_step=4).hashes == golden.hashes
        ids = gang.process_ids
        os.kill(ids[0], signal.SIGSTOP)
        record = gang.resume(clean, until_step=4)
        assert (record.end, record.detail) == ("deadline", "no answer after 3 s")
        assert not any(map(is_running, ids))
        assert gang.resume(clean, until_step=4).hashes == golden.hashes


@slow
@pytest.mark.parametrize("strategy", REPLICAS)
def test_four_ranks(run, strategy):
    one = run(strategy, 4)
    assert one.golden.losses.shape == (4, END - CUT)
    assert one.resume(one.clean, restart="after", evaluate_every=3).hashes == one.golden.hashes


@slow
def test_ranks_end_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from unsilent.workloads.distributed import Gang\n"
        "if __name__ == '__main__':\n"
        f"    gang = Gang(*{TRAINING!r}, strategy='ddp', world_size=2)\n"
        "    print(*gang.process_ids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(ids) == 2
    limit = time.monotonic() + 20
    while any(map(is_running, ids)):
        assert time.monotonic() < limit, "ranks were left behind"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "dpp"}, "did you mean 'ddp'"),
        ({"strategy": "single"}, "expected 1"),
        ({"world_size": 0}, "expected 1 or more"),
    ],
)
def test_strategies_that_cannot_run_are_one_line(options, text):
    with pytest.raises(UsageError, match=text) as caught:
        Gang(*TRAINING, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_strategies_that_are_not_installed_are_one_line(monkeypatch, strategy):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = f"'{strategy}': {PACKAGES[strategy]} is not installed.*docs/concepts/checkpoints.md"
    with pytest.raises(UsageError, match=text) as caught:
        Gang(*TRAINING, strategy=strategy)
    assert "\n" not in str(caught.value)


@slow
@pytest.mark.parametrize("strategy", [strategy_row("zero1")])
def test_trainings_that_zero1_cannot_run_are_errors(tmp_path, strategy):
    with (
        Gang("train-resnet", {"width": "4", "amp": "bfloat16"}, strategy=strategy, world_size=2) as gang,
        pytest.raises(UsageError, match="'zero1' cannot train with mixed precision"),
    ):
        gang.train_to(1, tmp_path / "clean.pt")


@slow
@pytest.mark.parametrize(
    ("options", "text"),
    [({"batch": "15"}, "a batch has 15 rows; expected a multiple of the 2 ranks"), ({"steps": "x"}, "steps")],
)
def test_trainings_that_cannot_be_shared_are_errors(tmp_path, options, text):
    with (
        pytest.raises(UsageError, match=text),
        Gang("train-resnet", {"width": "4", **options}, strategy="ddp", world_size=2) as gang,
    ):
        gang.train_to(1, tmp_path / "clean.pt")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""Each query finds what is spoiled, names its place, and finds nothing in a quiet incident."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from events import made_events
from triage import made_triage as made
from unsilent import verified_save
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.manifest import manifest_path
from unsilent.events.incident_folder import SavedCheckpoint, read_incident, read_rank_part, write_record
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Outcome, Query
from unsilent.triage.queries.table import TEMPLATES, command_of, execute, json_schemas

FOLDER_QUERIES = [name for name, one in TEMPLATES.items() if not one.command]


def ask(path, name, **blanks):
    return execute(Bundle(path), Query(name, Blanks(**blanks)))


def place(finding):
    return finding.outcome, finding.ranks, finding.step


@pytest.mark.parametrize("name", FOLDER_QUERIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_is_found_in_a_quiet_incident(tmp_path, name, ranks):
    assert ask(made.folder(tmp_path, ranks), name).outcome in (Outcome.NOTHING, Outcome.UNANSWERED)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_rank_with_another_gradient_is_named(tmp_path, ranks):
    path = made.folder(tmp_path, ranks, {1: made.spoiled(1, 89, 0, 1e5)})
    found = ask(path, "compare-gradients")
    assert place(found) == (Outcome.LOCALISED, (1,), 89)
    assert found.tensor == "gradient fc.weight l2"
    assert ask(path, "compare-gradients", tensor="fc.bias").outcome is Outcome.NOTHING
    assert ask(path, "compare-gradients", steps=(90, 99)).outcome is Outcome.NOTHING


def test_gradients_that_grow_in_all_ranks_are_no_difference(tmp_path):
    path = made.folder(tmp_path, 2, {rank: made.spoiled(rank, 90, 0, 1e5) for rank in (0, 1)})
    assert ask(path, "compare-gradients").outcome is Outcome.NOTHING
    assert place(ask(path, "find-onset")) == (Outcome.DIFFERS, (0, 1), 90)


def test_a_gradient_that_alone_is_not_finite_is_named(tmp_path):
    found = ask(made.folder(tmp_path, 2, {0: made.spoiled(0, 90, 1, math.nan)}), "compare-gradients")
    assert place(found) == (Outcome.LOCALISED, (0,), 90)
    assert found.tensor == "gradient fc.bias l2"


def test_one_rank_has_no_other_to_compare_with(tmp_path):
    assert ask(made.folder(tmp_path, 1), "compare-gradients").outcome is Outcome.UNANSWERED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_value_that_is_not_finite_is_found(tmp_path, value):
    series = {0: made.spoiled(0, 92, 0, value), 1: made.spoiled(1, 91, 1, value)}
    path = made.folder(tmp_path, 2, series)
    found = ask(path, "scan-nonfinite")
    assert place(found) == (Outcome.LOCALISED, (1,), 91)
    assert found.tensor == "gradient fc.bias l2"
    assert ask(path, "scan-nonfinite", rank=0).step == 92
    assert ask(path, "scan-nonfinite", steps=(80, 90)).outcome is Outcome.NOTHING


def test_in_one_rank_it_is_a_difference_as_no_other_tells_it_apart(tmp_path):
    found = ask(made.folder(tmp_path, 1, {0: made.spoiled(0, 90, 0, math.nan)}), "scan-nonfinite")
    assert place(found) == (Outcome.DIFFERS, (0,), 90)


def test_a_value_that_was_not_seen_is_not_one_that_is_not_finite(tmp_path):
    from unsilent.detectors.series import load_recording

    path = made.folder(tmp_path, 2)
    file = path / "rank0" / "series.npz"
    recording = load_recording(file)
    recording.values[30, 0], recording.seen[30, 0] = np.nan, False
    recording.save(file)
    assert ask(path, "scan-nonfinite").outcome is Outcome.NOTHING
    assert ask(path, "find-onset").outcome is Outcome.NOTHING


def test_the_onset_is_the_first_step_far_from_the_past_and_localises_nothing(tmp_path):
    series = {0: made.spoiled(0, 93, 2, 50.0), 1: made.spoiled(1, 86, 1, 1e-4)}
    assert place(ask(made.folder(tmp_path, 2, series), "find-onset")) == (Outcome.DIFFERS, (1,), 86)


@pytest.mark.parametrize(
    "change",
    [
        lambda floats, whole: floats.view(-1)[0].fill_(math.nan),
        lambda floats, whole: floats.mul_(1e6),
        lambda floats, whole: whole[0].fill_(-3),
        lambda floats, whole: floats.fill_(0.5),
    ],
)
def test_a_batch_that_is_wrong_by_itself_is_found(tmp_path, change):
    batch = made.batch(1)
    change(*batch[0])
    path = made.folder(tmp_path, 2, batches={1: batch})
    assert place(ask(path, "inspect-batch")) == (Outcome.LOCALISED, (1,), 90)
    assert ask(path, "inspect-batch", rank=0).outcome is Outcome.NOTHING


@pytest.mark.parametrize(("ranks", "outcome", "found"), [(2, Outcome.DIFFERS, (0, 1)), (3, Outcome.LOCALISED, (1,))])
def test_one_number_in_all_elements_is_compared_between_ranks(tmp_path, ranks, outcome, found):
    """Weights of samples, or a scale of the loss: which is right is not known of two."""
    batches = {rank: [[torch.full((4,), 100.0 if rank == 1 else 1.0), torch.tensor(16.0)]] for rank in range(ranks)}
    finding = ask(made.folder(tmp_path, ranks, batches=batches), "inspect-batch")
    assert place(finding) == (outcome, found, 90)
    assert "and 1 in other ranks" in finding.text or "and 100 in other ranks" in finding.text


def test_looking_at_one_rank_does_not_tell_it_from_others_that_have_the_same(tmp_path):
    wrong = made.batch(1)
    wrong[0][0][0, 0] = math.nan
    path = made.folder(tmp_path, 3, batches={0: wrong, 1: wrong})
    assert place(ask(path, "inspect-batch")) == (Outcome.DIFFERS, (0, 1), 90)
    for rank in (0, 1):
        finding = ask(path, "inspect-batch", rank=rank)
        assert place(finding) == (Outcome.DIFFERS, (rank,), 90)
        assert "does not tell this one apart" in finding.text


def test_without_a_monitor_nothing_is_said_of_fingerprints(tmp_path):
    path = made.folder(tmp_path, 1, settings={})
    assert ask(path, "compare-parameters").outcome is Outcome.UNANSWERED


def test_a_state_that_steps_were_executed_again_for_is_no_cause(tmp_path):
    """On a sick device it may come out wrong although the step began with a good one."""
    wrong = made.state()
    wrong["model"]["fc.weight"][0, 0] = math.nan
    path = made.folder(tmp_path, 2, states={0: wrong, 1: wrong})
    assert ask(path, "inspect-state").outcome is Outcome.LOCALISED
    part = read_rank_part(path, 0)
    write_record(path / "rank0", replace(part, state_since=87))
    finding = ask(path, "inspect-state")
    assert finding.outcome is Outcome.DIFFERS
    assert "executed again on the same device, from step 87 on" in finding.text


@pytest.mark.parametrize("label", [-100, -1, None])
def test_labels_that_are_ignored_or_alike_by_chance_are_no_finding(tmp_path, label):
    batch = made.batch(0)
    if label is None:
        batch[0][1].fill_(3)
    else:
        batch[0][1][0] = label
    assert ask(made.folder(tmp_path, 2, batches={0: batch}), "inspect-batch").outcome is Outcome.NOTHING


@pytest.mark.parametrize("value", [math.inf, 1e30])
def test_a_parameter_that_is_extreme_is_named(tmp_path, value):
    state = made.state()
    state["model"]["fc.weight"][2, 1] = value
    path = made.folder(tmp_path, 2, states={1: state})
    found = ask(path, "inspect-state")
    assert (*place(found), found.tensor) == (Outcome.LOCALISED, (1,), 90, "model/fc.weight")
    assert ask(path, "inspect-state", tensor="fc.bias").outcome is Outcome.NOTHING
    everywhere = made.folder(tmp_path / "all", 2, states={0: state, 1: state})
    for rank in (None, 0, 1):  # also where one is looked at alone, it is said that the other has the same
        assert place(ask(everywhere, "inspect-state", rank=rank)) == (Outcome.LOCALISED, (0, 1), 90)


@pytest.mark.parametrize(("ranks", "outcome", "named"), [(2, Outcome.DIFFERS, (0, 1)), (3, Outcome.LOCALISED, (1,))])
def test_a_bit_that_one_rank_has_otherwise_is_found(tmp_path, ranks, outcome, named):
    state = made.state()
    state["model"]["fc.bias"][3] += 1e-6
    found = ask(made.folder(tmp_path, ranks, states={1: state}), "inspect-state")
    assert (*place(found), found.tensor) == (outcome, named, 90, "model/fc.bias")


def test_ranks_that_hold_shards_are_not_taken_for_replicas(tmp_path):
    other = made.state()
    for tensors in (other["model"], *other["optimizers"][0]["state"].values()):
        for tensor in tensors.values():
            tensor.mul_(2)
    assert ask(made.folder(tmp_path, 2, states={1: other}), "inspect-state").outcome is Outcome.NOTHING


def test_learning_rates_that_differ_are_found(tmp_path):
    found = ask(made.folder(tmp_path, 2, states={1: made.state(rate=0.2)}), "compare-settings")
    assert found.outcome is Outcome.DIFFERS
    assert "rank 0: 0.1; rank 1: 0.2" in found.text


def test_changed_bits_and_replicas_come_from_alarms(tmp_path):
    bits = made.alarm(88, 1, feature="fingerprint", rule="fingerprint")
    found = ask(made.folder(tmp_path / "a", 2, alarms={1: (bits,)}), "compare-parameters")
    assert (*place(found), found.tensor) == (Outcome.LOCALISED, (1,), 88, "fc.weight")
    unlike = made_events.replicas_alarm(90, 1, ranks=(1,), of=3)
    assert place(ask(made.folder(tmp_path / "b", 3, alarms={1: (unlike,)}), "compare-parameters")) == (
        Outcome.LOCALISED, (1,), 90,
    )  # fmt: skip
    undecided = made_events.replicas_alarm(90, 0)
    found = ask(made.folder(tmp_path / "c", 2, alarms={0: (undecided,)}), "compare-parameters")
    assert place(found) == (Outcome.DIFFERS, (0, 1), 90)


def test_fingerprints_that_were_off_answer_nothing(tmp_path):
    path = made.folder(tmp_path, 2, settings={"fingerprint": "off"})
    assert ask(path, "compare-parameters").outcome is Outcome.UNANSWERED


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [
        ("device", 1, (Outcome.LOCALISED, (1,), 90)),
        ("data", -1, (Outcome.DIFFERS, (), 90)),
        ("undetermined", 1, (Outcome.UNANSWERED, (), None)),
    ],
)
def test_the_recorded_verdict_answers_for_a_replay(tmp_path, kind, rank, expected):
    verdict = FaultVerdict(kind=kind, step=90, rank=rank, code="UNSILENT-X", reason="because")
    assert place(ask(made.folder(tmp_path, 2, fault_verdict=verdict), "read-verdict")) == expected


def saved(path, value, step):
    verified_save({"model": {"w": torch.full((64,), value)}}, path, step=step)
    return SavedCheckpoint(path=str(path), step=step, time=1.0, manifest=str(manifest_path(path)))


def with_checkpoints(tmp_path, *checkpoints):
    path = made.folder(tmp_path)
    write_record(path, replace(read_incident(path), checkpoints=checkpoints))
    return path


def test_a_checkpoint_that_changed_on_the_disk_is_found(tmp_path):
    old, new = saved(tmp_path / "80.pt", 1.0, 80), saved(tmp_path / "90.pt", 2.0, 90)
    path = with_checkpoints(tmp_path, old, new)
    found = ask(path, "verify-checkpoints")
    assert found.outcome is Outcome.NOTHING
    assert found.text.endswith("80.pt")  # the newest one from before step 90
    content = bytearray((tmp_path / "80.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "80.pt").write_bytes(content)
    found = ask(path, "verify-checkpoints")
    assert (found.outcome, found.step) == (Outcome.DIFFERS, 80)
    assert ask(path, "verify-checkpoints", steps=(85, 95)).outcome is Outcome.NOTHING
    (tmp_path / "90.pt").unlink()
    assert "90.pt" in ask(path, "verify-checkpoints").missing[0]


def test_what_is_new_in_the_newest_checkpoint_is_found(tmp_path):
    old, new = saved(tmp_path / "70.pt", 1.0, 70), saved(tmp_path / "80.pt", math.inf, 80)
    found = ask(with_checkpoints(tmp_path, old, new), "compare-checkpoints")
    assert (found.outcome, found.step, found.tensor) == (Outcome.DIFFERS, 80, "model/w")
    assert ask(with_checkpoints(tmp_path, new, new), "compare-checkpoints").outcome is Outcome.NOTHING
    assert ask(with_checkpoints(tmp_path, new), "compare-checkpoints").outcome is Outcome.UNANSWERED


def test_checkpoints_of_a_run_that_continued_a_training_count_steps_of_the_training(tmp_path):
    path = with_checkpoints(tmp_path, saved(tmp_path / "a.pt", 1.0, 1070), saved(tmp_path / "b.pt", math.inf, 1080))
    write_record(path, replace(read_incident(path), first_step=1000))  # the alarm is in step 1090 of the training
    assert ask(path, "verify-checkpoints").text.endswith(
        "from before step 1090 that is as it was written: " + str(tmp_path / "b.pt")
    )
    assert ask(path, "compare-checkpoints").step == 1080


def test_what_needs_code_or_a_device_prints_the_command(tmp_path):
    bundle = Bundle(made.folder(tmp_path, 2, suspect=1))
    assert command_of(bundle, Query("replay-step")) == (
        f"unsilent incident replay {bundle.folder} --code step.py:make --rank 1"
    )
    assert "--device cuda:1 " in command_of(bundle, Query("test-device", Blanks(rank=1, host="node-7")))
    for name in ("replay-step", "test-device", "rerun-seeded"):
        assert execute(bundle, Query(name)).outcome is Outcome.UNANSWERED
    words = command_of(bundle, Query("find-onset", Blanks(rank=1, steps=(80, 95))))
    assert words == f"unsilent triage query find-onset {bundle.folder} --rank 1 --steps 80..95"


def test_a_blank_that_a_query_does_not_take_is_refused(tmp_path):
    path = made.folder(tmp_path)
    with pytest.raises(UsageError, match="--tensor is no blank of inspect-batch; it takes --rank"):
        ask(path, "inspect-batch", tensor="fc.weight")
    with pytest.raises(UsageError, match="unknown query 'onset'"):
        ask(path, "onset")


def test_every_template_has_a_schema_of_its_blanks():
    schemas = json_schemas()
    assert [one["name"] for one in schemas] == list(TEMPLATES)
    for one in schemas:
        assert set(one["parameters"]["properties"]) == set(TEMPLATES[one["name"]].blanks) <= set(vars(Blanks()))

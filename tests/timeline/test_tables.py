"""Operation tables: made-up ones whose every start has a known reason, real ones, and bad ones."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from timeline.pipelines import Pipeline
from unsilent.basics.errors import UsageError
from unsilent.timeline.job import CHAIN, KINDS, LAUNCH, PIPELINE
from unsilent.timeline.replay import Replay, unexplained_gaps
from unsilent.timeline.tables import read_operation_table

SHARED = next(
    (one / "shared/data/timeline" for one in Path(__file__).parents if (one / "shared/data/timeline").is_dir()), Path()
)
REAL = pytest.mark.skipif(not (SHARED / "trace-AR.parquet").exists(), reason="real traces not there")

SHAPES = [
    Pipeline(), Pipeline(data_ranks=1), Pipeline(stages=1), Pipeline(data_ranks=1, stages=1), Pipeline(stages=4, micro_batches=8),
    Pipeline(stages=4, micro_batches=2), Pipeline(data_ranks=3, stages=3, steps=1), Pipeline(chunks=2),
    Pipeline(stages=3, chunks=3),
    Pipeline(overlapped=True), Pipeline(overlapped=True, chunks=2), Pipeline(has_data_parallel=False, data_ranks=1, stages=3),
    Pipeline(lists_unsent=True, stages=3), Pipeline(lists_unsent=True, chunks=2, stages=3), Pipeline(stages=1, chunks=2),
    Pipeline(seconds=lambda d, s, direction, m, step: 0.5 + ((7 * d + 5 * s + 3 * m + step + (direction == "forward")) % 8) / 8),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: repr(shape)[9:90])
def test_dependencies_explain_every_start(shape, tmp_path):
    """In a job without gaps each operation starts when the last one ends that it depends on, and a replay has its times."""
    job = read_operation_table(shape.write(tmp_path / "trace-x.parquet"))
    assert len(job.operations) == len(shape.rows())
    assert unexplained_gaps(job).max() < 1e-9
    replay = Replay(job)
    start, end = replay.run(replay.durations, np.zeros(len(job.operations)))
    assert np.allclose(start, job.operations.start, atol=1e-9)
    assert np.allclose(end, job.operations.end, atol=1e-9)
    assert replay.durations.min() > -1e-9


@pytest.mark.parametrize(("optype", "stage", "at"), [("forward-recv", 0, 0), ("forward-send", 2, -1)])
def test_an_unsent_message_may_be_missing_at_the_end_of_a_step(optype, stage, at, tmp_path):
    def change(rows):
        numbers = sorted({row["seq_id"] for row in rows if (row["optype"], row["stage"]) == (optype, stage)})
        return [row for row in rows if (row["optype"], row["stage"], row["seq_id"]) != (optype, stage, numbers[at])]

    shape = Pipeline(lists_unsent=True, chunks=2, stages=3)
    job = read_operation_table(shape.write(tmp_path / "trace-x.parquet", change))
    assert len(job.operations) == len(shape.rows()) - shape.steps * shape.data_ranks
    assert unexplained_gaps(job).max() < 1e-9


@pytest.mark.parametrize("kind", [CHAIN, LAUNCH, PIPELINE])
def test_every_kind_of_dependency_is_needed(kind, tmp_path):
    job = read_operation_table(Pipeline(stages=3).write(tmp_path / "trace-x.parquet"))
    assert unexplained_gaps(job, (kind,)).sum() > 1


def test_a_job_has_workers_steps_and_lanes(tmp_path):
    shape = Pipeline(data_ranks=2, stages=3)
    job = read_operation_table(shape.write(tmp_path / "trace-x.parquet"))
    operations = job.operations
    assert job.steps == (0, 1, 2)
    assert job.ranks == (0, 1, 2, 3, 4, 5)
    assert job.stages == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert job.world_size == 6
    assert [job.lanes[lane].rank for lane in operations.lane] == operations.rank.tolist()
    assert np.all(np.diff(operations.rank) >= 0)
    same_rank = np.diff(operations.rank) == 0
    assert np.all(np.diff(operations.start)[same_rank] >= 0)
    expected = Counter(row["optype"] for row in shape.rows())
    assert Counter(operations.names[name] for name in operations.name) == expected
    assert {KINDS[kind] for kind in operations.kind} == {"compute", "collective"}


def test_steps_that_overlap_by_their_clock_are_laid_one_after_the_other(tmp_path):
    job = read_operation_table(Pipeline().write(tmp_path / "trace-x.parquet"))
    begins = [job.operations.start[job.operations.step == at].min() for at in range(3)]
    ends = [job.operations.end[job.operations.step == at].max() for at in range(3)]
    assert begins == [0.0, *ends[:2]]
    assert any("clock begins anew with each step" in note for note in job.notes)


def later(rows):
    """With a clock that goes on: 100 s from step to step."""
    return [{**row, "start_ts": row["start_ts"] + 1e6 + 100 * row["step"]} for row in rows]


def test_one_clock_for_all_steps_is_kept(tmp_path):
    job = read_operation_table(Pipeline().write(tmp_path / "trace-x.parquet", later))
    assert [job.operations.start[job.operations.step == at].min() for at in range(3)] == [0, 100, 200]
    assert job.notes == ()


def test_metadata_beside_a_table_say_how_large_the_job_was(tmp_path):
    path = Pipeline().write(tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text("trial_name: x\nworld_size: 16\n")
    job = read_operation_table(path)
    assert job.world_size == 16
    assert any("4 of 16 ranks were recorded" in note for note in job.notes)
    for text in (
        "",
        "world_size: x",
        "world_size: -1",
        "[" * 4000,
        "a: &a [*a]",
        "world_size: !!python/object:os.system",
        "\0",
        "x" * 5000,
    ):
        (tmp_path / "meta-x.yaml").write_text(text)
        with pytest.raises(UsageError, match=r"world_size: 64|size limit"):
            read_operation_table(path)


def without(**wanted):
    """Without the first row that has these values."""

    def change(rows):
        index = next(at for at, row in enumerate(rows) if all(row[name] == value for name, value in wanted.items()))
        return rows[:index] + rows[index + 1 :]

    return change


def other_type(**wanted):
    """With another type in the first row that has these values."""

    def change(rows):
        row = next(row for row in rows if all(row[name] == value for name, value in wanted.items()))
        row["optype"] = "gc"
        return rows

    return change


@pytest.mark.parametrize("change", [
    without(step=1, optype="forward-compute"), without(step=1, optype="optimizer", dp_rank=1), without(step=1, stage=1),
    other_type(step=1, optype="optimizer"), lambda rows: rows + [row for row in rows if row["step"] == 1][:1],
])  # fmt: skip
def test_a_step_that_lacks_or_repeats_operations_is_left_out(change, tmp_path):
    job = read_operation_table(Pipeline().write(tmp_path / "trace-x.parquet", change))
    assert job.steps == (0, 2)
    assert "1 of 3 steps left out because a rank lacks or repeats operations there: 1" in job.notes
    assert unexplained_gaps(job).max() < 1e-9


def test_operations_of_other_types_are_left_out(tmp_path):
    def rename(rows):
        return [{**row, "optype": row["optype"].replace("optimizer-clip-main-grad", "loss\x1b[1m")} for row in rows]

    job = read_operation_table(Pipeline().write(tmp_path / "trace-x.parquet", rename))
    assert "12 operations of unknown types left out: loss\\x1b[1m" in job.notes


def each(**values):
    return lambda rows: [{**row, **values} for row in rows]


def first(**values):
    return lambda rows: [{**rows[0], **values}, *rows[1:]]


def only(keep):
    return lambda rows: [row for row in rows if keep(row)]


BAD = {
    "NaN": (first(start_ts=float("nan")), "start_ts of row 1 is nan; expected seconds"),
    "null": (first(duration=None), "duration of row 1 is nan; expected seconds of 0 or more"),
    "infinite": (first(duration=float("inf")), "duration of row 1 is inf"),
    "negative duration": (first(duration=-0.5), "duration of row 1 is -0.5; expected seconds of 0 or more"),
    "negative rank": (first(rank=-1), "rank of row 1 is -1; expected a whole number of 0 or more"),
    "broken rank": (each(rank=0.5), "rank of row 1 is 0.5; expected a whole number"),
    "huge stage": (first(stage=2**40), "stage of row 1 is 1.09951e+12"),
    "large stage": (first(stage=2**30, rank=77), "operations of 5 workers; expected 2 dp_rank x 1,073,741,825 stage"),
    "large step": (first(step=2**30), None),
    "many steps": (
        lambda rows: [{**row, "step": at} for at, row in enumerate(rows)], "expected operations of each rank in each step",
    ),
    "many workers": (
        lambda rows: [{**rows[0], "dp_rank": at, "rank": at} for at in range(2**14 + 1)], "workers; expected 16,384 at most",
    ),
    "large seq_id": (each(seq_id=2**31 - 1, step=1), "operations twice"),
    "text": (each(start_ts="soon"), "start_ts is string; expected numbers"),
    "nested": (each(start_ts=[1.0]), "start_ts is list"),
    "nested names": (each(optype=[1]), "optype is list<element: int64>; expected text"),
    "rank twice": (lambda rows: [{**row, "rank": 0} for row in rows], "rank 0 belongs to two workers"),
    "two ranks": (first(rank=9), "pair of dp_rank and stage 0, 0 belongs to two workers"),
    "missing rank": (only(lambda row: row["rank"] != 2), "operations of 3 workers; expected 2 dp_rank x 2 stage"),
    "missing stage": (only(lambda row: row["stage"] != 0), "operations of 2 workers; expected 2 dp_rank x 2 stage"),
    "all twice": (lambda rows: rows + rows, "has operations twice"),
    "unknown only": (each(optype="x"), "operations of 0 workers"),
    "no computation": (only(lambda row: row["optype"] == "optimizer"), "stage 0 computes nothing"),
    "no sends": (only(lambda row: row["optype"] != "forward-send"), "stage 0 has 0 operations forward-send; expected 4"),
    "no gmc": (each(gmc=None), "forward-recv"),
    "different ranks": (only(lambda row: row["dp_rank"] == 0 or row["optype"] != "optimizer"), "left out because a rank lacks"),
    "none": (lambda rows: rows, "expected 1 to 10,000,000 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_one_line(name, tmp_path, recwarn):
    change, message = BAD[name]
    path = Pipeline().write(tmp_path / "trace-x.parquet", change)
    if name == "none":
        parquet.write_table(parquet.read_table(path).slice(0, 0), path)
    if message is None:
        assert read_operation_table(path).steps == (1, 2)
        return
    with pytest.raises(UsageError) as raised:
        read_operation_table(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value).replace(str(tmp_path), "")) < 300


@pytest.mark.parametrize("column", ["dp_rank", "optype", "gmc"])
def test_a_missing_column_is_one_line(column, tmp_path):
    path = Pipeline().write(tmp_path / "trace-x.parquet", drop=[column])
    with pytest.raises(UsageError, match=f"lacks {column}; expected a table with dp_rank, stage, rank"):
        read_operation_table(path)


def test_names_of_any_length_are_never_written_out(tmp_path):
    """A file of a few kilobytes whose names, one for each row, would take 400 GB."""
    rows, path = Pipeline().rows(), tmp_path / "trace-x.parquet"
    columns = {name: np.resize([row[name] for row in rows], 100_000) for name in rows[0] if name != "optype"}
    long = arrow.DictionaryArray.from_arrays(np.zeros(100_000, np.int32), ["x" * 2**22])
    parquet.write_table(arrow.table({**columns, "optype": long}), path)
    with pytest.raises(UsageError, match="operations of 0 workers"):
        read_operation_table(path)


def test_two_columns_of_a_name_are_one_line(tmp_path):
    path = Pipeline().write(tmp_path / "trace-x.parquet")
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("rank", table["rank"]), path)
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        read_operation_table(path)


def test_names_may_be_of_any_kind_of_text(tmp_path):
    path = Pipeline().write(tmp_path / "trace-x.parquet")
    table = parquet.read_table(path)
    at = table.schema.get_field_index("optype")
    expected = read_operation_table(path).operations.name.tolist()
    for column in (table["optype"].dictionary_encode(), table["optype"].cast(arrow.large_string())):
        parquet.write_table(table.set_column(at, "optype", column), path, row_group_size=100)
        assert read_operation_table(path).operations.name.tolist() == expected


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"{}"])
def test_what_is_no_parquet_is_one_line(content, tmp_path):
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as Parquet") as raised:
        read_operation_table(tmp_path / "x.parquet")
    assert "\n" not in str(raised.value)


def test_a_damaged_table_is_read_or_refused(tmp_path):
    path = Pipeline().write(tmp_path / "x.parquet")
    whole = path.read_bytes()
    generator, messages = np.random.default_rng(0), []
    for _ in range(60):
        damaged = bytearray(whole)
        for at in generator.integers(len(whole), size=3):
            damaged[at] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            Replay(read_operation_table(path))
        except UsageError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def test_without_its_packages_the_extra_is_named(tmp_path, monkeypatch):
    path = Pipeline().write(tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text("world_size: 4\n")
    for module in ("yaml", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=r"pip install 'unsilent\[timeline\]'"):
            read_operation_table(path)


@REAL
@pytest.mark.parametrize(("name", "rows", "steps", "ranks"), [("ST", 6784, 32, 8), ("AR", 117216, 44, 16)])
def test_real_tables_are_read(name, rows, steps, ranks):
    job = read_operation_table(SHARED / f"trace-{name}.parquet")
    assert (len(job.operations), len(job.steps), len(job.ranks)) == (rows, steps, ranks)
    replay = Replay(job)
    recorded = replay.step_seconds(job.operations.start, job.operations.end)
    replayed = replay.step_seconds(*replay.run(replay.durations, np.zeros(rows)))
    assert np.all(replayed <= recorded * 1.0001)
    assert np.mean(replayed / recorded) > 0.98  # the published replay: 0.981 and 0.993

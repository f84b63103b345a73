"""``unsilent checkpoint``: look into checkpoint files, corrupt them, undo that, compare and verify them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsilent.cli import typer_options as o
from unsilent.cli.paths import shown_path
from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.checkpoints.corrupting import CheckpointEdit
    from unsilent.checkpoints.stored_tensors import StoredTensor


def _whole(path: Path) -> Path:
    """The path of a checkpoint; raises ``UsageError`` for the file of a folder that lists the others."""
    if path.name.endswith(".safetensors.index.json") or path.name == ".metadata":
        raise UsageError(
            f"{path} lists the files of a checkpoint that is a folder; expected all of it: give the folder {path.parent}"
        )
    return path


_PATH = typer.Argument(
    metavar="CHECKPOINT",
    help="A checkpoint file, or the folder of a sharded one.",
    show_default=False,
    callback=_whole,
)
CheckpointPath = Annotated[Path, _PATH]
HtmlPage = Annotated[
    Path | None, typer.Option(*o.OUTPUT_FLAGS, help="Write the report to this HTML page as well.", show_default=False)
]
Checksums = Annotated[
    str, typer.Option("--crc", help="Checksums in the file that cover a changed byte: stale (left, as by a fault in storage) "
                      "or fixed (made to fit, as by a fault in memory before saving).", metavar="stale|fixed")]  # fmt: skip


def inspect(
    path: CheckpointPath,
    section: Annotated[
        list[str] | None, typer.Option(help="Only this section: model, optimizer, scheduler, rng or other.")
    ] = None,
    output: HtmlPage = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """List the tensors of a checkpoint, and values that are not finite or very large."""
    from unsilent.checkpoints.editing import edits_of
    from unsilent.checkpoints.inspection import inspection_report, summarise
    from unsilent.cli.report_output import show_report
    from unsilent.report.text import count_text

    with _opened(path) as checkpoint:
        selected = checkpoint.select((), section or ())
        with _bytes_shown(_size_of(selected), "reading", quiet) as progress:
            values = {t.name: summarise(checkpoint, t, progress) for t in selected if not t.is_number}
        edits = [edit for edit in edits_of(path) if edit.state != "undone"]
        note = ""
        if any(edit.state == "interrupted" for edit in edits):
            note = (
                "An edit of this checkpoint was interrupted, so some of its bytes may be changed; "
                f"restore them with: unsilent checkpoint undo {path}"
            )
        elif edits:
            note = f"{count_text(len(edits), 'edit')} of this checkpoint can be undone: unsilent checkpoint undo {path}"
        show_report(inspection_report(checkpoint, selected, values, note), output, as_json, plain)
    return 0


def corrupt(
    path: CheckpointPath,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="Tensors to corrupt, by name or glob, with an index from 0 if wanted: 'fc.weight[3,5]'. Can be given more than "
            "once; faults are drawn from all of them together.",
            show_default="the model's",
        ),
    ] = None,
    section: Annotated[
        list[str] | None, typer.Option(help="Corrupt this section: model, optimizer, scheduler, rng or other.")
    ] = None,
    fault: Annotated[
        str,
        typer.Option(
            help="Fault model, as listed by unsilent faults, with count or rate, and bits: bitflip:bits=exponent,count=10, "
            "bitflip:rate=1e-6. Bit 0 is the lowest."
        ),
    ] = "bitflip",
    flips: Annotated[
        int | None,
        typer.Option(help="Number of flips (or elements) to draw.", show_default="1, or what --fault says"),
    ] = None,
    law: Annotated[str, typer.Option(help="Sampling law: per-element or per-tensor.")] = "per-element",
    probability: Annotated[float, typer.Option(help="Probability with which each drawn element is corrupted.")] = 1.0,
    keep_finite: Annotated[
        bool, typer.Option("--keep-finite", help="Draw again where a number would become NaN or infinite.")
    ] = False,
    keep_sign: Annotated[
        bool, typer.Option("--keep-sign", help="Draw again where a number would change its sign.")
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option(help="Draw by these YAML settings of hdf5_corrupter, instead of by the options above."),
    ] = None,
    crc: Checksums = "stale",
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write the injection to this file, for unsilent checkpoint replay.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; change nothing.")] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Draw faults and change the checkpoint in place; it can be undone."""
    from unsilent.checkpoints.corrupting import corrupt, corrupt_by_settings
    from unsilent.checkpoints.drawing import DrawOptions
    from unsilent.faults.models import fault_model

    options = DrawOptions(law, probability, keep_finite, keep_sign, seed)
    if settings is not None:
        if at or section or fault != "bitflip" or flips is not None or options != DrawOptions(seed=seed):
            raise UsageError(f"--settings {settings} says what is drawn; leave out --at, --section, --fault, --flips, "
                             "--law, --probability, --keep-finite and --keep-sign")  # fmt: skip
        return _show_edit(
            corrupt_by_settings(path, settings, seed=seed, crc=crc, dry_run=dry_run), save, dry_run, as_json, plain
        )
    model = fault_model(fault)
    if flips is not None:
        if model.has_explicit_count:
            raise UsageError(
                f"--flips and the {model.pattern.text} of --fault both set the number of flips; give only one"
            )
        if flips < 1:
            raise UsageError(f"--flips is {flips}; expected 1 or more")
        model = model.with_count(flips)
    edit = corrupt(path, at or (), section=section or (), fault=model, options=options, crc=crc, dry_run=dry_run)
    return _show_edit(edit, save, dry_run, as_json, plain)


def replay(
    path: CheckpointPath,
    injection: Annotated[
        Path,
        typer.Argument(
            help="An injection saved by corrupt, a list of fault records, or a sequence saved by hdf5_corrupter.",
            show_default=False,
        ),
    ],
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="OLD=NEW: the tensor, layer or section OLD of the injection "
            "is called NEW in this checkpoint. Repeat for several.",
            metavar="OLD=NEW",
        ),
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            help="OLD=1,0: the tensor OLD of the injection is transposed in this checkpoint: its axes are there in this "
            "order, as in numpy.transpose(OLD, (1, 0)). Repeat for several.",
            metavar="OLD=AXES",
        ),
    ] = None,
    same_bits: Annotated[
        bool,
        typer.Option(
            "--same-bits", help="Write the bits that the injection left, and refuse where the bits before differ."
        ),
    ] = False,
    crc: Checksums = "stale",
    seed: Annotated[int, typer.Option(help="Seed of what a sequence of hdf5_corrupter leaves open.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the injection to this file, as it was made here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; change nothing.")] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Repeat a saved injection in this checkpoint, or in another one of another format."""
    from unsilent.checkpoints.corrupting import replay

    names = dict(pair.partition("=")[::2] for pair in rename or [])
    if not all(names.values()):
        raise UsageError(f"--map is {' '.join(rename or [])}; expected OLD=NEW, like --map layer1=encoder.layer1")
    orders = dict(_order_of_axes(text) for text in axes or [])
    edit = replay(path, injection, names=names, axes=orders, same_bits=same_bits, seed=seed, crc=crc, dry_run=dry_run)
    return _show_edit(edit, save, dry_run, as_json, plain)


def _order_of_axes(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = text.partition("=")
    if not name or not re.fullmatch(r"\d{1,2}(,\d{1,2})*", numbers):
        raise UsageError(f"--axes is {text}; expected OLD=AXES, like --axes model/fc.weight=1,0")
    return name, tuple(int(number) for number in numbers.split(","))


def undo(
    path: CheckpointPath,
    everything: Annotated[bool, typer.Option("--all", help="Undo all edits, not only the last one.")] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Take back the last edit; the checkpoint is as before, byte for byte."""
    from unsilent.checkpoints.editing import undo_edit

    done = undo_edit(path, everything)
    changed = sum(len(patch.after) for edit in done for patch in edit.patches)
    if as_json:
        _print_json(
            "unsilent/checkpoint-undo/1", "checkpoint undo", edits=[edit.number for edit in done], bytes=changed
        )
    else:
        noun = "edit" if len(done) == 1 else "edits"
        _print_lines(plain, f"{len(done)} {noun} of {path} undone: {changed:,} bytes restored and read again")
    return 0


def diff(
    first: CheckpointPath,
    second: Annotated[
        Path,
        typer.Argument(metavar="OTHER", help="The checkpoint to compare with.", show_default=False, callback=_whole),
    ],
    output: HtmlPage = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Compare two checkpoints tensor by tensor, whatever their formats; the exit code is 1 where they differ."""
    from unsilent.checkpoints.comparing import SAME, compare
    from unsilent.checkpoints.difference_report import difference_report
    from unsilent.cli.report_output import show_report

    with (
        _opened(first) as one,
        _opened(second) as two,
        _bytes_shown(_size_of(one.tensors.values()), "comparing", quiet) as progress,
    ):
        differences = list(compare(one, two, progress))
    show_report(difference_report(first, second, differences), output, as_json, plain)
    return int(any(d.status != SAME for d in differences))


def manifest(
    path: CheckpointPath,
    output: Annotated[
        Path | None,
        typer.Option(*o.OUTPUT_FLAGS, help="Where to write the manifest.", show_default="CHECKPOINT.manifest.json"),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Compute the fast hash (xxh3-128) only, not SHA-256.")] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Hash every file, so that verify can tell later what has changed; the exit code is 1 where a folder holds links."""
    from unsilent.checkpoints.editing import refuse_interrupted
    from unsilent.checkpoints.hashes import hash_files, total_bytes
    from unsilent.checkpoints.manifest import make_manifest, manifest_path, not_covered, write_manifest
    from unsilent.checkpoints.replacing import put_manifest
    from unsilent.report.text import count_text

    target = output or manifest_path(path)
    refuse_interrupted(path)
    with _opened(path) as checkpoint, _bytes_shown(2 * total_bytes(checkpoint.files), "hashing", quiet) as progress:
        result = make_manifest(checkpoint, hash_files(checkpoint.files, progress, fast), progress)
        left_out = not_covered(checkpoint.files)
    if output is None:
        put_manifest(result, path)
    else:
        write_manifest(result, output)
    if as_json:
        _print_json("unsilent/checkpoint-manifest/2", "checkpoint manifest", manifest=str(target), files=len(result.files),
                    tensors=len(result.tensors), problems=left_out)  # fmt: skip
    else:
        what = f"{count_text(len(result.files), 'file')} with {count_text(len(result.tensors), 'tensor')}"
        _print_lines(plain, *left_out, f"Manifest of {what}: {shown_path(target)}")
    return int(bool(left_out))


def verify(
    path: CheckpointPath,
    manifest: Annotated[
        Path | None, typer.Option(help="The manifest.", show_default="CHECKPOINT.manifest.json")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Compare the fast hash (xxh3-128) only.")] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Compare every byte of a checkpoint with its manifest; the exit code is 1 where something has changed or is not covered."""
    from unsilent.checkpoints.checkpoint_files import CheckpointFiles
    from unsilent.checkpoints.editing import refuse_interrupted
    from unsilent.checkpoints.hashes import total_bytes
    from unsilent.checkpoints.manifest import read_manifest
    from unsilent.checkpoints.manifest import verify as differences_from
    from unsilent.checkpoints.replacing import verify_with_own_manifest
    from unsilent.report.text import count_text
    from unsilent.sizes import human_bytes

    with CheckpointFiles(path) as files:
        total = total_bytes(files) if files.exists() else 0
    with _bytes_shown(total, "hashing", quiet) as progress:
        if manifest is not None:
            expected = read_manifest(manifest)
            problems = differences_from(path, expected, progress, fast)
        else:
            problems, expected = verify_with_own_manifest(path, progress, fast)
    count, size = count_text(len(expected.files), "file"), human_bytes(expected.size)
    if as_json:
        _print_json("unsilent/checkpoint-verify/2", "checkpoint verify", verified=not problems, problems=problems,
                    files=len(expected.files), bytes=expected.size, tensors=len(expected.tensors))  # fmt: skip
    elif problems:
        _print_lines(
            plain, *problems, f"{count_text(len(problems), 'difference')} from the manifest of {count} ({size})"
        )
    else:
        how = ", by the fast hash, which does not show deliberate changes" if fast or expected.is_fast_only else ""
        _print_lines(plain, f"Every byte of {count} ({size}) is as the manifest says{how}")
    if problems:
        refuse_interrupted(path)
    return int(bool(problems))


VERBS: dict[str, Callable[..., int]] = {
    "inspect": inspect, "corrupt": corrupt, "undo": undo, "replay": replay, "diff": diff, "manifest": manifest, "verify": verify,
}  # fmt: skip


def make_checkpoint_app(**settings: Any) -> typer.Typer:
    """The verbs of ``unsilent checkpoint``; ``settings``: of the typer application."""
    from unsilent.cli.checkpoint_study import CheckpointStudyVerb
    from unsilent.cli.typer_options import make_typer_function
    from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY

    app = typer.Typer(**settings)
    study = CheckpointStudyVerb(CHECKPOINT_STUDY)
    app.command("study", cls=o.Panels)(make_typer_function(study.option_fields, study, study.about))
    for name, verb in VERBS.items():
        app.command(name, cls=o.Panels)(verb)
    return app


def _show_edit(edit: CheckpointEdit, save: Path | None, dry_run: bool, as_json: bool, plain: bool) -> int:
    """Save and print what one command changed."""
    from unsilent.plainfiles import replace_file
    from unsilent.report.text import count_text

    receipt, record = edit.receipt, edit.undo_record
    if save is not None:
        try:
            replace_file(save, json.dumps(edit.injection, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {save}: {error.strerror}; the checkpoint was changed, and its undo record holds the injection"
            ) from None
    if as_json:
        _print_json("unsilent/checkpoint-corrupt/1", "checkpoint corrupt", results=receipt.to_json(), bytes=edit.bytes_changed,
                    changed_bits=receipt.changed_bits, undo_record=record and str(record), dry_run=dry_run,
                    notes=list(edit.notes))  # fmt: skip
        return 0
    what = f"{count_text(receipt.changed_bits, 'bit')} of {count_text(receipt.requested_elements, 'element')}"
    where = f"{count_text(len({hit.fault.site for hit in receipt.applied_faults}), 'tensor')} of {edit.path}"
    hits = [f"  {hit}" for hit in receipt.applied_faults[:10]]
    if len(receipt.applied_faults) > 10:
        hits.append(f"  and {len(receipt.applied_faults) - 10:,} more tensors")
    notes = [f"Note: {note}" for note in edit.notes]
    if record is not None:
        notes.append(f"Undo it with: unsilent checkpoint undo {edit.path}")
    _print_lines(plain, f"{'Would change' if dry_run else 'Changed'} {what} in {where}", *hits, *notes)
    return 0


def _print_lines(plain: bool, *lines: str) -> None:
    """Lines that are never wrapped, for they have paths and commands; plain ones are comments, as those of other verbs."""
    print("\n".join(f"# {line.strip()}" if plain else line for line in lines))


def _print_json(schema: str, command: str, **fields: Any) -> None:
    print(json.dumps({"schema": schema, "command": command, **fields}, indent=2))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A checkpoint; the error of one that cannot be read says so where an edit of it was interrupted."""
    from unsilent.checkpoints.checkpoint import Checkpoint
    from unsilent.checkpoints.editing import refuse_interrupted

    try:
        with Checkpoint(path) as checkpoint:
            yield checkpoint
    except UsageError:
        refuse_interrupted(path)
        raise


def _size_of(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of the elements of tensors."""
    return sum(t.nbytes for t in tensors)


@contextmanager
def _bytes_shown(total: int, what: str, quiet: bool) -> Iterator[Any]:
    """A bar on a terminal while much is read, in bytes; yields what is called with numbers of bytes."""
    import sys

    if quiet or total < 2**28 or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)

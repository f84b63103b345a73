"""``unsilent checkpoint inspect|diff|manifest|verify``: inspect, compare and verify checkpoint files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.options import WORKLOAD_PANEL, Option, Request
from unsilent.basics.plainfiles import shown_path
from unsilent.cli.checkpoint.arguments import CHECKPOINT, bytes_shown, opened, size_of, whole_checkpoint
from unsilent.cli.tables import show_result
from unsilent.command import (
    AFTER_ALARM,
    FILES,
    Command,
    DisplayOptions,
    PageOptions,
    ProgressOptions,
    output_option,
)

if TYPE_CHECKING:
    from unsilent.checkpoints.last_good import LastGood


NO_FOLDER = "no folder was given; give the folder that checkpoints are in, like runs/"


@dataclass(frozen=True)
class LastGoodOptions:
    """Options of ``unsilent checkpoint last-good``."""

    folder: Annotated[Path, Option(
        "Folder with checkpoints; its subfolders are searched as well.", "", parser=whole_checkpoint, metavar="DIR",
        missing_error=NO_FOLDER)]  # fmt: skip
    before_step: Annotated[int | None, Option(
        "Only checkpoints from before this step, such as the step of an alarm.", WORKLOAD_PANEL)] = None  # fmt: skip


def last_good(request: Request) -> LastGood | int:
    """Find the newest checkpoint below a folder that still matches its manifest.

    The exit code is 1 if there is none, otherwise 0.
    """
    from unsilent.checkpoints.last_good import last_good_checkpoint

    options, display = request[LastGoodOptions], request[DisplayOptions]
    result = last_good_checkpoint(options.folder, before_step=options.before_step)
    if result.good is None and not display.as_json:
        print(f"{'# ' if display.plain else ''}{result.headline()}")
        return result.exit_code
    return result


LAST_GOOD = Command(
    "checkpoint last-good", AFTER_ALARM, "unsilent checkpoint last-good runs --before-step 812", (LastGoodOptions,),
    last_good, has_report=True,
)  # fmt: skip


@dataclass(frozen=True)
class InspectOptions:
    """Options of ``unsilent checkpoint inspect``."""

    path: Annotated[Path, CHECKPOINT]
    section: Annotated[tuple[str, ...], Option(
        "Only this section: model, optimizer, scheduler, rng or other.", WORKLOAD_PANEL, is_repeatable=True)] = ()  # fmt: skip


def inspect(request: Request) -> int:
    """List the tensors of a checkpoint, and values that are not finite or very large."""
    from unsilent.checkpoints.editing import edits_of
    from unsilent.checkpoints.inspection import inspection_report, summarise
    from unsilent.cli.report_output import show_report
    from unsilent.report.text import count_text

    options, display, quiet = request[InspectOptions], request[DisplayOptions], request[ProgressOptions].quiet
    path = options.path
    with opened(path) as checkpoint:
        selected = checkpoint.select((), options.section)
        with bytes_shown(size_of(selected), "reading", quiet) as progress:
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
        report = inspection_report(checkpoint, selected, values, note)
        show_report(report, request[PageOptions].output, display.as_json, display.plain)
    return 0


@dataclass(frozen=True)
class DiffOptions:
    """Options of ``unsilent checkpoint diff``."""

    first: Annotated[Path, CHECKPOINT]
    second: Annotated[Path, Option(
        "The checkpoint to compare with.", "", parser=whole_checkpoint, metavar="OTHER",
        missing_error="one checkpoint was named; give a second one to compare it with")]  # fmt: skip


def diff(request: Request) -> int:
    """Compare two checkpoints tensor by tensor, whatever their formats; the exit code is 1 if they differ."""
    from unsilent.checkpoints.comparing import SAME, compare
    from unsilent.checkpoints.difference_report import difference_report
    from unsilent.cli.report_output import show_report

    first, second = request[DiffOptions].first, request[DiffOptions].second
    display, quiet = request[DisplayOptions], request[ProgressOptions].quiet
    with (
        opened(first) as left,
        opened(second) as right,
        bytes_shown(size_of(left.tensors.values()), "comparing", quiet) as progress,
    ):
        differences = list(compare(left, right, progress))
    show_report(
        difference_report(first, second, differences), request[PageOptions].output, display.as_json, display.plain
    )
    return int(any(d.status != SAME for d in differences))


@dataclass(frozen=True)
class ManifestOptions:
    """Options of ``unsilent checkpoint manifest``."""

    path: Annotated[Path, CHECKPOINT]
    output: Annotated[Path | None, output_option("Where to write the manifest.", "CHECKPOINT.manifest.json")] = None
    fast: Annotated[bool, Option("Compute the fast hash (xxh3-128) only, not SHA-256.", WORKLOAD_PANEL)] = False


def manifest(request: Request) -> int:
    """Hash all files into a manifest, so that verify can tell what changed; the exit code is 1 if the folder contains links."""
    from unsilent.checkpoints.editing import refuse_interrupted
    from unsilent.checkpoints.hashes import hash_files, total_bytes
    from unsilent.checkpoints.manifest import make_manifest, manifest_path, not_covered, write_manifest
    from unsilent.checkpoints.replacing import put_manifest
    from unsilent.report.text import count_text

    options, quiet = request[ManifestOptions], request[ProgressOptions].quiet
    path, output = options.path, options.output
    target = output or manifest_path(path)
    refuse_interrupted(path)
    with opened(path) as checkpoint, bytes_shown(2 * total_bytes(checkpoint.files), "hashing", quiet) as progress:
        result = make_manifest(checkpoint, hash_files(checkpoint.files, progress, options.fast), progress)
        left_out = not_covered(checkpoint.files)
    if output is None:
        put_manifest(result, path)
    else:
        write_manifest(result, output)
    files, tensors = len(result.files), len(result.tensors)
    fields = {"manifest": str(target), "files": files, "tensors": tensors, "problems": left_out}
    counts_text = f"{count_text(files, 'file')} with {count_text(tensors, 'tensor')}"
    line = f"Manifest of {counts_text}: {shown_path(target)}"
    show_result(request, "unsilent/checkpoint-manifest/2", "checkpoint manifest", fields, *left_out, line)
    return int(bool(left_out))


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``unsilent checkpoint verify``."""

    path: Annotated[Path, CHECKPOINT]
    manifest: Annotated[Path | None, Option(
        "The manifest to compare with.", WORKLOAD_PANEL, default_text="CHECKPOINT.manifest.json")] = None  # fmt: skip
    fast: Annotated[bool, Option("Compare the fast hash (xxh3-128) only, not SHA-256.", WORKLOAD_PANEL)] = False


def verify(request: Request) -> int:
    """Compare every byte of a checkpoint with its manifest; the exit code is 1 if something changed or is not in the manifest."""
    from unsilent.basics.sizes import human_bytes
    from unsilent.checkpoints.checkpoint_files import CheckpointFiles
    from unsilent.checkpoints.editing import refuse_interrupted
    from unsilent.checkpoints.hashes import total_bytes
    from unsilent.checkpoints.manifest import read_manifest
    from unsilent.checkpoints.manifest import verify as differences_from
    from unsilent.checkpoints.replacing import verify_with_own_manifest
    from unsilent.report.text import count_text

    options, quiet = request[VerifyOptions], request[ProgressOptions].quiet
    path, manifest, fast = options.path, options.manifest, options.fast
    with CheckpointFiles(path) as files:
        total = total_bytes(files) if files.exists() else 0
    with bytes_shown(total, "hashing", quiet) as progress:
        if manifest is not None:
            expected = read_manifest(manifest)
            problems = differences_from(path, expected, progress, fast)
        else:
            problems, expected = verify_with_own_manifest(path, progress, fast)
    count, size = count_text(len(expected.files), "file"), human_bytes(expected.size)
    fields = {
        "verified": not problems, "problems": problems, "files": len(expected.files), "bytes": expected.size,
        "tensors": len(expected.tensors),
    }  # fmt: skip
    how = ", by the fast hash, which does not show deliberate changes" if fast or expected.is_fast_only else ""
    last = f"Every byte of {count} ({size}) is as the manifest says{how}"
    if problems:
        last = f"{count_text(len(problems), 'difference')} from the manifest of {count} ({size})"
    show_result(request, "unsilent/checkpoint-verify/2", "checkpoint verify", fields, *problems, last)
    if problems:
        refuse_interrupted(path)
    return int(bool(problems))


SHOWN = (DisplayOptions, ProgressOptions)
INSPECT = Command(
    "checkpoint inspect", FILES, "unsilent checkpoint inspect epoch-1.pt", (InspectOptions, PageOptions, *SHOWN),
    inspect,
)  # fmt: skip
DIFF = Command(
    "checkpoint diff", FILES, "unsilent checkpoint diff epoch-1.pt copy.safetensors",
    (DiffOptions, PageOptions, *SHOWN), diff,
)  # fmt: skip
MANIFEST = Command(
    "checkpoint manifest", FILES, "unsilent checkpoint manifest epoch-1.pt", (ManifestOptions, *SHOWN), manifest
)
VERIFY = Command("checkpoint verify", FILES, "unsilent checkpoint verify epoch-1.pt", (VerifyOptions, *SHOWN), verify)

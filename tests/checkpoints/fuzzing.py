"""Fuzzing of everything that reads or edits a checkpoint: damaged files, all operations on each, and what may come of it.

Allowed are success and an `UnsilentError` with one short printable line. Anything else is a `Finding`: another exception, more
than 10 seconds, more than 1 GiB, a file outside of the checkpoint that is written, code of the file that runs, an undo that
does not restore every byte. Every case follows from its seed and number.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoints.fuzz_mutations import mutated
from checkpoints.fuzz_seeds import MAKERS
from unsilent.basics.errors import InternalError, UnsilentError
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint import CHECKSUMS, Checkpoint
from unsilent.checkpoints.comparing import compare
from unsilent.checkpoints.difference_report import difference_report
from unsilent.checkpoints.drawing import DrawOptions, corruptible, draw_faults
from unsilent.checkpoints.editing import apply_edit, undo_edit, undo_record_of
from unsilent.checkpoints.hashes import hash_files
from unsilent.checkpoints.inspection import inspection_report, summarise
from unsilent.checkpoints.manifest import make_manifest, verify
from unsilent.faults.models import fault_model

SECONDS = 10.0
PATIENCE = 6
"""A busy machine, or a child process of ours, may take the time."""
MEMORY = 2**30
LONGEST_MESSAGE = 1000
MODELS = ("bitflip", "bitflip:count=3", "zero", "bitflip:bits=exponent")


class Finding(AssertionError):
    """What a checkpoint must not make us do."""


class TooSlow(BaseException):
    """A case takes longer than it may; no handler for errors catches it."""


_watched: list[Path] = []
"""While a case runs, the folder in which files may be written."""
_seen: list[str] = []
"""What was done that must not be done."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes code that a file could have made us run, and files that are opened for writing outside of the case's folder."""
    if not _watched:
        return
    if event in ("os.system", "pickle.find_class", "os.exec", "os.posix_spawn", "ctypes.dlopen"):
        _seen.append(f"{event} {arguments!r}"[:200])
    elif event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and isinstance(path, (str, bytes))
        if (
            writes and not _is_inside(os.fsdecode(path)) and not os.path.isdir(path)
        ):  # the latter: a file without a name
            _seen.append(f"opened for writing: {path!r}"[:200])


def _is_inside(path: str) -> bool:
    return path == os.devnull or Path(path).absolute().is_relative_to(_watched[0])


def install_audit() -> None:
    """Install the audit of this process, once; Python has no way to take it out again."""
    if _audit not in _installed:
        _installed.append(_audit)
        sys.addaudithook(_audit)


_installed: list[Any] = []


def limit_memory() -> None:
    """Let this process use `MEMORY` more than it has now. Only the soft limit, as children have limits of their own."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextlib.contextmanager
def deadline(seconds: float = SECONDS) -> Iterator[None]:
    """Raises `TooSlow` inside after some seconds of this process, or `PATIENCE` times as many where it did not get to run."""
    used, late = time.process_time(), time.monotonic() + PATIENCE * seconds

    def stop(*_: Any) -> None:
        if time.process_time() - used > 0.9 * seconds or time.monotonic() > late:
            raise TooSlow(f"more than {seconds:g} seconds")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Fuzzer:
    """Makes and runs cases.

    Args:
        seeds: Sound checkpoints by format.
        folder: Where damaged ones are written; nothing else may be in it.
        seed: Of all cases.
        formats: Only these; by default all that have seeds.
        shares: Draw formats as often as `MAKERS` says, not equally often.
    """

    def __init__(
        self, seeds: dict[str, list[Path]], folder: Path, seed: int, formats: Sequence[str] = (), shares: bool = True
    ) -> None:
        self.seeds, self.folder, self.seed = seeds, folder, seed
        self.formats = [name for name in seeds if not formats or name in formats]
        self.weights = [MAKERS[name].share if shares else 1.0 for name in self.formats]
        self.files = [file for paths in seeds.values() for path in paths for file in _files(path)]
        self._originals: dict[Path, Checkpoint] = {}
        self._contents: dict[Path, bytes] = {}

    def run(self, number: int) -> tuple[str, str]:
        """Run a case and remove its files.

        Returns:
            Its format, and its outcome: ``refused`` where it cannot be opened, ``partly`` where it can but some operation on
            it ends in an error, else ``read``.

        Raises:
            Finding: something happened that must not; the message says how the case was made.
        """
        format_name, what, path = self.make(number)
        original = self._original(self._made_from)
        try:
            return format_name, exercise(path, original, random.Random(f"{self.seed}/{number}/use"))
        except Finding as finding:
            raise Finding(f"case {self.seed}/{number} ({format_name}, {path.name}, {what}): {finding}") from finding
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run_seeds(self) -> dict[str, str]:
        """Outcome of every seed as it is; everything that cases import is imported then."""
        outcomes = {}
        for format_name in self.formats:
            for seed in self.seeds[format_name]:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
                path = self.folder / seed.name
                shutil.copytree(seed, path) if seed.is_dir() else shutil.copyfile(seed, path)
                outcomes[f"{format_name}/{seed.name}"] = exercise(path, self._original(seed), random.Random(0))
        return outcomes

    def make(self, number: int) -> tuple[str, str, Path]:
        """Write a case: its format, what was done to it, and where it is."""
        draw = random.Random(f"{self.seed}/{number}")
        format_name = draw.choices(self.formats, self.weights)[0]
        self._made_from = seed = draw.choice(self.seeds[format_name])
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        path = self.folder / seed.name
        if seed.is_file():
            what, content = self._mutated(seed, draw)
            path.write_bytes(content)
            return format_name, what, path
        shutil.copytree(seed, path)
        victim = draw.choice(_files(path))
        if draw.random() < 0.04:
            victim.unlink()
            return format_name, f"{victim.name} removed", path
        what, content = self._mutated(seed / victim.relative_to(path), draw)
        victim.write_bytes(content)
        return format_name, f"{victim.name} {what}", path

    def _mutated(self, file: Path, draw: random.Random) -> tuple[str, bytes]:
        content, other = self._content(file), self._content(draw.choice(self.files))
        done = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            what, content = mutated(content, other, draw) if content else ("nothing", content)
            done.append(what)
        return " ".join(done), content

    def _content(self, file: Path) -> bytes:
        if file not in self._contents:
            self._contents[file] = file.read_bytes()
        return self._contents[file]

    def _original(self, path: Path) -> Checkpoint | None:
        """The seed, opened once; None where a seed is damaged by itself."""
        if path not in self._originals:
            with contextlib.suppress(UnsilentError):
                self._originals[path] = Checkpoint(path)
        return self._originals.get(path)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def exercise(path: Path, original: Checkpoint | None, draw: random.Random) -> str:
    """Everything that can be done with a checkpoint that is alone in its folder; see `Fuzzer.run`."""
    folder = path.parent
    before = snapshot(folder)
    work = Path.cwd()
    _seen.clear()
    _watched.append(folder)
    errors: list[str] = []
    outcome = "refused"
    try:
        with deadline(), _allowed(errors), Checkpoint(path) as checkpoint:
            outcome = "partly"
            _use(checkpoint, original, draw, errors, before)
            outcome = "partly" if errors else "read"
    except (TooSlow, MemoryError) as error:
        raise Finding(f"{type(error).__name__} {error}") from error
    finally:
        _watched.clear()
    if _seen:
        raise Finding("; ".join(_seen))
    if snapshot(folder) != before:
        raise Finding("files were changed")
    if (work / "bomb_went_off").exists():
        raise Finding("code in the file was run")
    return outcome


def _is_printable(text: str) -> bool:
    return escape_unprintable(text) == text


@contextlib.contextmanager
def _allowed(errors: list[str]) -> Iterator[None]:
    """Notes errors that are allowed; any other becomes a `Finding`."""
    try:
        yield
    except InternalError as error:
        raise Finding(f"internal error: {error}") from error
    except UnsilentError as error:
        text = str(error)
        if not text or not _is_printable(text) or len(text) >= LONGEST_MESSAGE:
            raise Finding(
                f"a message of {len(text)} characters that is not one short printable line: {text!r:.500}"
            ) from error
        errors.append(text)
    except (Finding, MemoryError):
        raise
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error!s:.300}") from error


def _use(
    checkpoint: Checkpoint,
    original: Checkpoint | None,
    draw: random.Random,
    errors: list[str],
    before: dict[str, bytes],
) -> None:
    """Read, hash, compare and edit."""
    tensors = list(checkpoint.tensors.values())
    for tensor in tensors:
        if not all(map(_is_printable, (tensor.name, tensor.dtype, tensor.obstacle))):
            raise Finding(f"not printable: {tensor.name!r:.200} {tensor.dtype!r} {tensor.obstacle!r:.200}")
    with _allowed(errors):
        checkpoint.select()
    values = {}
    for tensor in tensors:
        with _allowed(errors):
            size = sum(len(part) for part in checkpoint.content(tensor)) if tensor.is_readable else -1
            if size not in (-1, tensor.nbytes):
                raise Finding(f"{tensor.name} has {size} bytes")
            values[tensor.name] = summarise(checkpoint, tensor, lambda _: None)
        with _allowed(errors):
            if tensor.numel and not tensor.reason_not_editable:
                checkpoint.read(tensor, _elements(tensor.numel, draw))
    with _allowed(errors):
        inspection_report(checkpoint, [*checkpoint.tensors.values()], values)
    with _allowed(errors):
        manifest = make_manifest(checkpoint, hash_files(checkpoint.files))
        if problems := verify(checkpoint.path, manifest):
            raise Finding(f"its own manifest does not fit: {problems[:3]}")
    if original is not None:
        with _allowed(errors):
            difference_report(original.path, checkpoint.path, list(compare(original, checkpoint)))
    for checksums in CHECKSUMS:
        with _allowed(errors):
            _edit(checkpoint, checksums, draw, before)


def _elements(numel: int, draw: random.Random) -> Any:
    import numpy as np

    return np.array([0, numel - 1, draw.randrange(numel)], np.int64)


def _edit(checkpoint: Checkpoint, checksums: str, draw: random.Random, before: dict[str, bytes]) -> None:
    """Draw a fault, write it, undo it."""
    path = checkpoint.path
    options = DrawOptions(seed=draw.randrange(2**32), law=draw.choice(("per-element", "per-tensor")))
    regions = corruptible(checkpoint, draw.choice((("*",), ("*",), ())))
    faults = draw_faults(checkpoint, regions, fault_model(draw.choice(MODELS)), options)
    patches, receipt = checkpoint.plan(faults, checksums)
    if apply_edit(path, patches, receipt.to_json()) is None:
        return
    now = snapshot(path.parent)
    record = undo_record_of(path)
    if set(now) != {*before, record.name}:
        raise Finding(f"files after an edit: {sorted(now)}")
    changed = sum(a != b for name in before for a, b in zip(before[name], now[name], strict=True))
    wanted = sum(a != b for patch in patches for a, b in zip(patch.before, patch.after, strict=True))
    if changed != wanted:
        raise Finding(f"{changed} bytes were changed; {wanted} were planned")
    undo_edit(path)
    if snapshot(path.parent) != before:
        raise Finding("undo did not restore every byte")


def run_cases(fuzzer: Fuzzer, numbers: Sequence[int]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Run cases one after the other: how often each format had each outcome, and what was found."""
    counts: Counter[tuple[str, str]] = Counter()
    findings = []
    for number in numbers:
        try:
            counts[fuzzer.run(number)] += 1
        except Finding as finding:
            findings.append(str(finding))
            counts["any", "finding"] += 1
    return counts, findings


def digest(text: str) -> str:
    """A short name for a finding."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]

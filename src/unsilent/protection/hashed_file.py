"""Files of arrays and JSON in safetensors format with a hash of their content, for profiles and canaries.

The hash is in the header, so that a file with a flipped bit is refused. Nothing in a file is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import map_tensors
from unsilent.basics.plainfiles import open_plain, parse_json
from unsilent.sites.memory import content_of

Arrays = dict[str, Tensor]
_HASH = "xxh3-128"
"""Key of `_content_hash` in the header."""
_TENSOR = "tensor of the file"


@dataclass(frozen=True)
class FileKind:
    """A kind of file with a hash of its content, such as a profile.

    Attributes:
        name: Key in the header, and noun in error messages.
        formats, version: Together the format in the header, like ``unsilent/activation-profile/4``.
        what: Noun for a file, with its article.
        made_by: The command that writes it.
    """

    name: str
    formats: str
    version: int
    what: str
    made_by: str

    @property
    def format(self) -> str:
        """The format that is written and read, with its version."""
        return f"{self.formats}{self.version}"

    def write(self, path: str | Path, text: Mapping[str, Any], arrays: Arrays) -> None:
        """Write a file.

        Raises ``UsageError`` if it cannot be written, ``TypeError`` for a value that is not JSON.
        """
        content = {**text, "format": self.format}
        content[_HASH] = _content_hash(content, arrays)
        try:
            save_file(arrays, str(path), metadata={self.name: json.dumps(content)})
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot write the {self.name} {path} ({error}); give another file") from None

    @contextmanager
    def reading(self, path: str | Path) -> Iterator[tuple[dict[str, Any], Arrays]]:
        """Context with the text and the arrays of a file.

        An error about their content inside becomes a one-line ``UsageError`` with the name of the file.
        """
        open_plain(path).close()
        try:
            with safe_open(str(path), framework="pt") as file:
                text = parse_json((file.metadata() or {}).get(self.name, "{}").encode())
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            if not (version := str(text.get("format", ""))).startswith(self.formats):
                raise ValueError(f"its header has no {self.name}")
            if version != self.format:
                raise UsageError(
                    f"the {self.name} has format {version}, expected {self.format}; make the {self.name} again"
                )
            if text.pop(_HASH, None) != _content_hash(text, arrays):
                raise UsageError(
                    f"the content of the {self.name} differs from what was written; make the {self.name} again"
                )
            yield text, arrays
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        except (
            OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError,
        ) as error:  # fmt: skip
            raise UsageError(
                f"{path} is not {self.what} ({kind_and_line(error)}); expected a file of {self.made_by}"
            ) from None


def stored(value: Any, prefix: str, arrays: Arrays) -> Any:
    """A nested value as JSON, without its tensors.

    The tensors are added to ``arrays``, under names with this prefix.
    """

    def keep(path: tuple[str, ...], tensor: Tensor) -> dict[str, str]:
        name = f"{prefix}{len(arrays)}"
        arrays[name] = tensor.detach().cpu().contiguous().clone()
        return {_TENSOR: name}

    return map_tensors(value, keep)


def restored(value: Any, arrays: Arrays, device: torch.device | str = "cpu") -> Any:
    """The value from the JSON that `stored` returned, with its tensors on a device."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return arrays[value[_TENSOR]].to(device)
        return {key: restored(item, arrays, device) for key, item in value.items()}
    return [restored(item, arrays, device) for item in value] if isinstance(value, list) else value


def _content_hash(text: Mapping[str, Any], arrays: Arrays) -> str:
    """xxh3-128 hash of the content of a file: its text, and the names, dtypes, shapes and bits of its arrays."""
    digest = xxhash.xxh3_128(json.dumps(text).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name};{array.dtype};{list(array.shape)};".encode())
        digest.update(content_of(array))
    return digest.hexdigest()

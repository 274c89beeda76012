"""safetensors files, written and read by hand where the library cannot bound what it trusts.

The file is: eight bytes of header length, a JSON header ``{name: {dtype, shape, data_offsets},
"__metadata__": {str: str}}``, then the data. The reader checks every number against the size of
the file before it allocates anything, reads one array at a time, and never maps the file (a file
cut short under a map kills the process). The writer streams, so that an anchor needs no second
copy in memory. Files are ordinary: ``safetensors.safe_open`` opens them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from deltawire.codec.bits import BitArray, bits_type
from deltawire.protocol.errors import LayoutMismatch, MalformedObject

MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library itself."""
_METADATA = "__metadata__"
_MAX_RANK = 32
"""Dimensions of one array; more would only be there to make us multiply."""
_MAX_REASON = 1000
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of a file. ``begin`` and ``end`` are byte offsets into its data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One array to be written: its dtype word, its shape, and its bytes in pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[npt.NDArray[Any] | bytes]

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) * bits_type(self.dtype).itemsize


def header_bytes(sections: Sequence[Section], metadata: Mapping[str, str]) -> bytes:
    """The length word and the JSON header, padded so that the data begins at a multiple of 8."""
    header: dict[str, object] = {_METADATA: dict(metadata)}
    begin = 0
    for section in sections:
        end = begin + section.nbytes
        header[section.name] = {
            "dtype": section.dtype,
            "shape": list(section.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    body = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _LENGTH_BYTES)
    if len(body) > MAX_HEADER_BYTES:
        raise LayoutMismatch(
            f"a header of {len(body)} bytes passes safetensors' cap of {MAX_HEADER_BYTES}; "
            "write the object in shards"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def aligned(sections: Sequence[Section]) -> list[Section]:
    """Sections in the order the library writes: widest elements first, then by name."""
    return sorted(sections, key=lambda s: (-bits_type(s.dtype).itemsize, s.name))


def write_container(path: Path, sections: Sequence[Section], metadata: Mapping[str, str]) -> int:
    """Write a file and return its size in bytes. The caller makes the name visible (rename)."""
    with path.open("wb") as file:
        size = file.write(header_bytes(sections, metadata))
        for section in sections:
            wrote = sum(_write_piece(file, piece) for piece in section.pieces)
            if wrote != section.nbytes:
                raise LayoutMismatch(
                    f"{section.name}: {section.dtype} {section.shape} takes {section.nbytes} "
                    f"bytes, {wrote} were given"
                )
            size += wrote
    return size


def _write_piece(file: BinaryIO, piece: npt.NDArray[Any] | bytes) -> int:
    data = piece if isinstance(piece, bytes) else piece.reshape(-1).view(np.uint8).data
    file.write(data)
    return len(data)


class Container:
    """A safetensors file that was checked and may be read array by array.

    Raises MalformedObject, naming the file and what is wrong, at opening and at each read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = self._header(file)
        self.metadata = self._metadata(header.pop(_METADATA, {}))
        self.entries = {name: self._entry(name, row) for name, row in header.items()}
        self._check_cover()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def read(self, name: str) -> BitArray:
        """One array, flat, as bit patterns."""
        entry = self._get(name)
        return self.read_range(
            name, 0, (entry.end - entry.begin) // bits_type(entry.dtype).itemsize
        )

    def read_range(self, name: str, first: int, end: int) -> BitArray:
        """Elements [first, end) of one array, as bit patterns in an own, writable array."""
        entry = self._get(name)
        dtype = bits_type(entry.dtype)
        begin = entry.begin + first * dtype.itemsize
        if first < 0 or end < first or entry.begin + end * dtype.itemsize > entry.end:
            raise self.wrong(f"{name}: elements {first} to {end} lie outside the array")
        bits = np.fromfile(
            self.path, dtype=dtype, count=end - first, offset=self._data_begin + begin
        )
        if bits.size != end - first:
            raise self.wrong(f"{name}: cut short while it was read")
        return bits

    def wrong(self, reason: str) -> MalformedObject:
        """The error that names this file. What the file says is escaped: it may hold anything."""
        text = f"{self.name}: {reason}"
        return MalformedObject(text.encode("ascii", "backslashreplace").decode()[:_MAX_REASON])

    def _get(self, name: str) -> Entry:
        if name not in self.entries:
            raise self.wrong(f"no array {name!r} in it")
        return self.entries[name]

    def _header(self, file: BinaryIO) -> dict[str, object]:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if self.file_bytes < _LENGTH_BYTES or length > self.file_bytes - _LENGTH_BYTES:
            raise self.wrong(f"a header of {length} bytes in a file of {self.file_bytes}")
        if length > MAX_HEADER_BYTES:
            raise self.wrong(f"a header of {length} bytes, more than {MAX_HEADER_BYTES}")
        self._data_begin = _LENGTH_BYTES + length
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self.wrong("the header is not a JSON object")
        return header

    def _metadata(self, found: object) -> dict[str, str]:
        if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()):
            return found
        raise self.wrong("__metadata__ is not a map of strings")

    def _entry(self, name: str, row: object) -> Entry:
        if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
            raise self.wrong(f"{name}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
        if not (isinstance(dtype, str) and _sizes(shape) and _sizes(offsets)):
            raise self.wrong(f"{name}: dtype, shape or data_offsets of the wrong type")
        if len(shape) > _MAX_RANK or len(offsets) != 2:
            raise self.wrong(f"{name}: {len(shape)} dimensions and {len(offsets)} offsets")
        entry = Entry(dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])
        try:
            size = math.prod(entry.shape) * bits_type(dtype).itemsize
        except LayoutMismatch as error:
            raise self.wrong(f"{name}: {error}") from error
        if entry.end - entry.begin != size:
            raise self.wrong(f"{name}: {dtype} {entry.shape} does not take bytes {offsets}")
        return entry

    def _check_cover(self) -> None:
        """The arrays must cover the data part exactly: no hole, no overlap, nothing after."""
        at = 0
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].begin, item[1].end)
        ):
            if entry.begin != at:
                raise self.wrong(f"{name}: begins at {entry.begin}, expected {at}")
            at = entry.end
        if self._data_begin + at != self.file_bytes:
            raise self.wrong(
                f"{self.file_bytes} bytes, but the header describes {self._data_begin + at}"
            )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**62 for v in value)

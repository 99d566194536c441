"""Snapshot files: read from whatever form they come in, with what is known about each; written so that PyTorch's tools open them.

A file is somebody else's until proven harmless: nothing in it is executed, and what it announces is held against what it has.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gpumem_magic.snapshot.events import EventReader
from gpumem_magic.snapshot.model import Snapshot
from gpumem_magic.snapshot.origin import Beginning, beginning_of, version_of
from gpumem_magic.snapshot.plain import snapshot_from_data, snapshot_to_data
from gpumem_magic.snapshot.unpickle import MAX_BYTES, SnapshotFileError, check_depth, loads, one_line
from gpumem_magic.snapshot.values import PlainDataError
from gpumem_magic.snapshot.whole_file import replace_file
from gpumem_magic.units import MIB, human

__all__ = ["LoadedSnapshot", "SnapshotFileError", "read", "write"]

OWN_KEY = "gpumem_magic"
# The data, the snapshot that they are, and the keys of its events.
_Read = tuple[Any, Snapshot, set[Any]]
_NOT_ONE = "Pass a file of torch.cuda.memory._dump_snapshot."
_AGAIN = "Copy or record it again."
# Snapshots compress 10 to 50 times; a file that is one long run of the same byte, a thousand times.
_MOST_COMPRESSION = 200
_ALWAYS_UNPACKED = 16 * MIB
_CHUNK = MIB
# PyTorch's page keeps its pickle as a list of {"name": ..., "base64": ...}.
_EMBEDDED = re.compile(rb"""["']base64["']\s*:\s*["']([A-Za-z0-9+/=]+)["']""")
_FORMS_OF_OTHERS = (
    (b"PK\x03\x04", "it is a zip archive, as torch.save writes them"),
    (b"version https://git-lfs", "it is a pointer of Git LFS, not the file itself"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstandard"),
    (b"\xfd7zXZ", "it is compressed with xz"),
    (b"BZh", "it is compressed with bzip2"),
)


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot and what is known about its file.

    path: as it was given. form: "pickle", "JSON" or "HTML", with "gzip " before it where it was compressed. torch: the
    version that wrote it, as far as the keys tell ("2.5-2.7"). devices: one `Beginning` for each device that has segments or
    events. extra: what gpumem_magic kept beside the snapshot, or None.
    """

    path: str
    snapshot: Snapshot
    form: str
    torch: str
    devices: tuple[Beginning, ...]
    extra: Mapping[str, Any] | None = None


def read(path: str | os.PathLike[str]) -> LoadedSnapshot:
    """The snapshot in a file: a pickle, a JSON text, or a page of PyTorch's memory_viz with one in it, gzipped or not.

    Raises SnapshotFileError, in one line, for what is not one, and OSError where the file can't be opened.
    """
    name = os.fspath(path)
    content = _content(name)
    zipped = content.startswith(b"\x1f\x8b")
    if zipped:
        content = _unzipped(content, name)
    form = _form_of(content, name)
    if form == "HTML":
        content = _in_page(content, name)
    data, snapshot, keys = _from_json(content, name) if form == "JSON" else _from_pickle(content, name)
    del content
    extra = data.get(OWN_KEY) if isinstance(data, dict) else None
    extra = extra if isinstance(extra, dict) else None
    told = extra.get("torch") if extra is not None else None
    torch = told if isinstance(told, str) else version_of(data, keys)
    return LoadedSnapshot(
        path=name,
        snapshot=snapshot,
        form=f"gzip {form}" if zipped else form,
        torch=torch,
        devices=_devices(snapshot),
        extra=extra,
    )


def write(snapshot: Snapshot, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
    """Writes a pickle (protocol 4) that PyTorch's `_memory_viz.py` opens; `path` then holds all of it, or what it held before.

    extra: plain data (JSON's types) that is kept beside the snapshot under the key `gpumem_magic`; others ignore it. Raises
    TypeError for extra data of another type, OSError where the file can't be written.
    """
    data = snapshot_to_data(snapshot)
    if extra is not None:
        # By way of JSON: only its types come through, as lists where there were tuples.
        data[OWN_KEY] = json.loads(json.dumps(extra))
    replace_file(path, lambda file: pickle.dump(data, file, protocol=4))


def _content(name: str) -> bytes:
    if os.path.isdir(name):
        _refuse(name, "it is a folder", "Name a file in that folder.")
    if os.path.exists(name) and not os.path.isfile(name):
        _refuse(name, "it is not a regular file", "Copy it to a regular file.")
    try:
        size = os.path.getsize(name)
        if size > MAX_BYTES:
            _refuse(name, f"it has {human(size)}, but at most {human(MAX_BYTES)} can be read", "Record fewer events.")
        with open(name, "rb") as file:
            content = file.read(size)
    except OSError as error:
        raise type(error)(f"cannot read {one_line(name)}: {error.strerror or error}") from None
    if not content:
        _refuse(name, "it is empty", _AGAIN)
    return content


def _unzipped(content: bytes, name: str) -> bytes:
    """What a gzip file holds, all members of it, up to a limit that depends on the file's size."""
    limit = min(MAX_BYTES, max(_ALWAYS_UNPACKED, _MOST_COMPRESSION * len(content)))
    parts: list[bytes] = []
    total = 0
    rest = content
    try:
        # Zeros may follow the last member.
        while rest.rstrip(b"\0"):
            unpacker = zlib.decompressobj(wbits=31)
            while not unpacker.eof:
                part = unpacker.decompress(rest, _CHUNK)
                rest = unpacker.unconsumed_tail
                total += len(part)
                if total > limit:
                    _refuse(name, f"unpacked, it is larger than {human(limit)}", "Unpack it yourself if you trust it.")
                if not part and not rest and not unpacker.eof:
                    _refuse(name, "its gzip data are cut off", _AGAIN)
                parts.append(part)
            rest = unpacker.unused_data
    except zlib.error as error:
        _refuse(name, f"its gzip data are damaged ({one_line(error)})", _AGAIN)
    return b"".join(parts)


def _form_of(content: bytes, name: str) -> str:
    if content.startswith(b"\x80"):
        return "pickle"
    for magic, what in _FORMS_OF_OTHERS:
        if content.startswith(magic):
            _refuse(name, what, _NOT_ONE)
    head = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head[:1] in (b"{", b"["):
        return "JSON"
    if head[:1] != b"<":
        _refuse(name, "it is neither a pickle of protocol 2 to 5, nor JSON, nor a page of memory_viz", _NOT_ONE)
    return "HTML"


def _from_pickle(content: bytes, name: str) -> _Read:
    """Events are made as they are read. Where that does not work out, all is read first, to say what is wrong and where."""
    reader = EventReader()
    try:
        data = loads(content, name, reader.taking_list)
        return data, snapshot_from_data(data, reader), reader.keys
    except PlainDataError:
        return _checked(loads(content, name), name)


def _from_json(content: bytes, name: str) -> _Read:
    try:
        data = json.loads(content, object_hook=_Frames().shared)
    except RecursionError:
        _refuse(name, "its JSON is nested too deep", "A snapshot is not: do not trust this file.")
    except ValueError as error:
        _refuse(name, f"its JSON is damaged ({one_line(error)})", _AGAIN)
    check_depth(data, name)
    return _checked(data, name)


class _Frames:
    """Equal frames of a JSON text as one object, as they are in a pickle: a trace names few, very often."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], dict[str, Any]] = {}

    def shared(self, data: dict[str, Any]) -> dict[str, Any]:
        if len(data) == 3 and "filename" in data:
            file, function, line = data["filename"], data.get("name"), data.get("line")
            # By type: 1, 1.0 and True are equal.
            if type(file) is str and type(function) is str and type(line) is int:
                return self._known.setdefault((file, function, line), data)
        return data


def _checked(data: Any, name: str) -> _Read:
    reader = EventReader()
    try:
        return data, snapshot_from_data(data, reader), reader.keys
    except PlainDataError as error:
        _refuse(name, f"it is not a memory snapshot: {one_line(error)}", _NOT_ONE)


def _in_page(content: bytes, name: str) -> bytes:
    """The pickle in a page; of several, the first."""
    found = _EMBEDDED.findall(content)
    if not found:
        _refuse(name, "it is a web page without a snapshot in it", "Save the page with its data, or pass the pickle.")
    try:
        return base64.b64decode(found[0], validate=True)
    except (binascii.Error, ValueError) as error:
        _refuse(name, f"the snapshot in the page is damaged ({one_line(error)})", _AGAIN)


def _devices(snapshot: Snapshot) -> tuple[Beginning, ...]:
    with_segments = {segment.device for segment in snapshot.segments}
    with_events = {number for number, trace in enumerate(snapshot.device_traces) if trace}
    return tuple(
        beginning_of(
            device,
            [segment for segment in snapshot.segments if segment.device == device],
            snapshot.device_traces[device] if device < len(snapshot.device_traces) else (),
        )
        for device in sorted(with_segments | with_events)
    )


def _refuse(name: str, what: str, advice: str) -> NoReturn:
    raise SnapshotFileError(f"{one_line(name)}: {what}. {advice}") from None

"""Reports as JSON text and files. A file is replaced as a whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpumem_magic.report.model import SCHEMA, ReportData
from gpumem_magic.report.schema import report_from_dict, report_to_dict
from gpumem_magic.snapshot.whole_file import replace_file
from gpumem_magic.units import MIB, human

# A report of 100,000 rows has about 60 MiB. What is larger is something else, and is not read into memory.
MAX_FILE_BYTES = 256 * MIB


def to_json(report: ReportData, indent: int | None = None) -> str:
    return _text(report_to_dict(report), indent)


def save_all(
    paths: Sequence[str], reports: Mapping[str, ReportData], refused: Mapping[str, str], path: str | os.PathLike[str]
) -> None:
    """The reports of several files in one, and of those that could not be read, why."""
    files = [
        {"file": name, "report": report_to_dict(reports[name])}
        if name in reports
        else {"file": name, "error": refused[name]}
        for name in paths
    ]
    content = _text({"schema": SCHEMA, "files": files}).encode()
    replace_file(path, lambda file: file.write(content))


def _text(data: Any, indent: int | None = None) -> str:
    text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, in a statement's text: only an escape can carry it
        text = json.dumps(data, indent=indent, allow_nan=False)
    return text


def save(report: ReportData, path: str | os.PathLike[str]) -> None:
    content = to_json(report).encode()
    replace_file(path, lambda file: file.write(content))


def load(path: str | os.PathLike[str]) -> ReportData:
    name = os.fspath(path)
    try:
        with open(Path(path).expanduser(), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise type(error)(f"cannot read {name}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than any report ({human(MAX_FILE_BYTES)}): it was not read")
    if content[:1] == b"\x80" or content[:2] in (b"\x1f\x8b", b"PK"):
        raise ValueError(f"{name} is not JSON: memory snapshots are read by gpumem_magic.load")
    try:
        data: Any = json.loads(content.decode("utf-8-sig"), parse_constant=_not_a_number)
        return report_from_dict(data)
    except RecursionError:
        raise ValueError(f"{name}: not a report: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name}: not a whole JSON text (line {error.lineno}: {error.msg}): save the report again"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a JSON text in UTF-8: memory snapshots are read by gpumem_magic.load") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _not_a_number(constant: str) -> NoReturn:
    raise ValueError(f"not a report: a figure is {constant}; save the report again")

"""A report as plain data (the ledger's schema 1) and back. Reading checks every key; a report is read completely or not at all.

Keys, their order and their types are those of the dataclasses. Five entries of a field's metadata say more. `unwritten`: the
field is not a part of the data. `keys`: the names that a mapping has, no more and no fewer; `later`: what stands for those of
them that older data lacks. `one_of`: the words that are allowed. `only_with`: the field is written where that field of the same
object holds something; where it is missing or null, it is read as its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from gpumem_magic.report.inside import DEEPEST
from gpumem_magic.report.model import SCHEMA, Cause, ReportData

_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
# Inside a report and its breakdown of activations; nothing else goes as deep.
_MOST_LEVELS = DEEPEST + 3


def report_to_dict(report: ReportData) -> dict[str, Any]:
    """Dictionaries, lists, strings and numbers, as JSON has them."""
    data: dict[str, Any] = {"schema": SCHEMA}
    for one, _ in members(ReportData):
        if one.name == "inside":
            data["causes"] = _plain(report.causes)
        data.update({"notes": list(report.notes)} if one.name == "remarks" else _entry(report, one))
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, ReportData):
        return report_to_dict(value)
    if is_dataclass(value):
        data: dict[str, Any] = {}
        for one, _ in members(cast(type, type(value))):
            data.update(_entry(value, one))
        return data
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    # PyTorch's version is a string with methods of its own.
    return str(value) if isinstance(value, str) else value


def _entry(owner: Any, one: Field[Any]) -> dict[str, Any]:
    """A field with its name; nothing where it is left out."""
    value, needed, keys = getattr(owner, one.name), one.metadata.get("only_with"), one.metadata.get("keys")
    if needed is not None and not getattr(owner, needed):
        return {}
    return {one.name: _plain(value) if keys is None else {key: value.get(key) for key in keys}}


@cache
def members(kind: type) -> list[tuple[Field[Any], Any]]:
    """A dataclass's fields that are written, each with its type."""
    types = get_type_hints(kind)
    return [(one, types[one.name]) for one in fields(kind) if "unwritten" not in one.metadata]


def report_from_dict(data: Any, where: str = "", level: int = 0) -> ReportData:
    """Raises ValueError, in one line that names the key, for anything that is not a report of this schema."""
    path = f"{where}.schema" if where else "schema"
    if not isinstance(data, Mapping):
        raise _wrong(where, "a dictionary", data)
    if "schema" not in data:
        raise ValueError(
            f"not a gpumem_magic report: the key '{path}' is missing (memory snapshots: gpumem_magic.load)"
        )
    schema = data["schema"]
    if isinstance(schema, bool) or schema != SCHEMA:
        raise ValueError(
            f"the key '{path}' is {schema!r:.40} and this version reads {SCHEMA}: "
            "read it with a newer gpumem_magic, or save the report again with this one"
        )
    values = _values(ReportData, data, where, level)
    causes = list(_read(tuple[Cause, ...], *_get(data, "causes", where), level))
    remarks: list[str | Cause] = []
    for note in _read(tuple[str, ...], *_get(data, "notes", where), level):
        cause = next((one for one in causes if one.sentence == note), None)
        if cause is not None:
            causes.remove(cause)
        remarks.append(note if cause is None else cause)
    return ReportData(**values, remarks=(*remarks, *causes))


def _values(kind: type, data: Mapping[Any, Any], where: str, level: int) -> dict[str, Any]:
    if level > _MOST_LEVELS:
        raise ValueError(f"not a report: '{where[:80]}…' is nested too deeply")
    values = {}
    for one, expected in members(kind):
        if one.name == "remarks" or ("only_with" in one.metadata and data.get(one.name) is None):
            continue
        value, path = _get(data, one.name, where)
        if (keys := one.metadata.get("keys")) is not None:
            if not isinstance(value, Mapping):
                raise _wrong(path, "a dictionary", value)
            later = one.metadata.get("later", {})
            value = {key: _get({**later, **value}, key, path)[0] for key in keys}
        found = values[one.name] = _read(expected, value, path, level + 1)
        allowed = one.metadata.get("one_of")
        if allowed is not None and found not in allowed:
            raise ValueError(
                f"not a report: the key '{path}' is {found!r:.40}, and should be one of {', '.join(allowed)}"
            )
    return values


def _get(data: Mapping[Any, Any], key: str, where: str) -> tuple[Any, str]:
    """The value, and the path of its key."""
    path = f"{where}.{key}" if where else key
    if key not in data:
        raise ValueError(f"not a complete report: the key '{path}' is missing; save the report again")
    return data[key], path


def _read(kind: Any, value: Any, where: str, level: int) -> Any:
    """A value of a field's type. Loops in place of comprehensions, so that a deep tree takes few frames."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(inner[0], value, where, level)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(where, "a list", value)
        items = []
        for number, item in enumerate(value):
            items.append(_read(inner[0], item, f"{where}[{number}]", level))
        return tuple(items)
    if kind is ReportData:
        return report_from_dict(value, where, level)
    if is_dataclass(kind) or origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(where, "a dictionary", value)
        if is_dataclass(kind):
            return kind(**_values(cast(type, kind), value, where, level))  # type: ignore[operator]
        return {
            _read(str, name, f"{where}.?", level): _read(inner[1], item, f"{where}.{name}", level)
            for name, item in value.items()
        }
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is float and not math.isfinite(value)):
        raise _wrong(where, _WORDS[kind], value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> ValueError:
    name = f"the key '{where}'" if where else "it"
    return ValueError(f"not a report: {name} should be {wanted}, not {type(value).__name__}; save the report again")

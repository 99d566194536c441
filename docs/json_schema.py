"""The JSON schema of a report: what `report.save` and `gpumem show --json` write, made from the dataclasses themselves.

`conf.py` writes it beside the pages: `report.schema.json`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from gpumem_magic.report.model import SCHEMA, Cause, ReportData
from gpumem_magic.report.schema import members

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def json_schema() -> dict[str, Any]:
    """For one report, and for several files side by side."""
    definitions: dict[str, Any] = {}
    report = _of_type(ReportData, definitions)
    file = {"type": "string"}
    alone = {"type": "object", "required": ["file", "error"], "properties": {"file": file, "error": file}}
    read = {"type": "object", "required": ["file", "report"], "properties": {"file": file, "report": report}}
    several = {
        "type": "object",
        "description": "Several files; of one that could not be read, why.",
        "required": ["schema", "files"],
        "properties": {"schema": {"const": SCHEMA}, "files": {"type": "array", "items": {"anyOf": [read, alone]}}},
    }
    return {
        "$schema": _DIALECT,
        "title": "A report of gpumem_magic. All sizes are bytes.",
        "anyOf": [report, several],
        "$defs": dict(sorted(definitions.items())),
    }


def _of_type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": [_of_type(inner[0], definitions), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _of_type(inner[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of_type(inner[1], definitions)}
    if is_dataclass(kind):
        name = cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _of_dataclass(cast(type, kind), definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {"type": _TYPES[kind]}


def _of_dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required = []
    if kind is ReportData:
        properties["schema"] = {"const": SCHEMA}
        properties["causes"] = {"type": "array", "items": _of_type(Cause, definitions)}
        properties["notes"] = {"type": "array", "items": {"type": "string"}}
        required = list(properties)
    for one, expected in members(kind):
        if one.name == "remarks":
            continue
        keys, words = one.metadata.get("keys"), one.metadata.get("one_of")
        found = _of_type(expected, definitions)
        if keys is not None:
            value = found["additionalProperties"]
            found = {"type": "object", "required": list(keys), "properties": dict.fromkeys(keys, value)}
        properties[one.name] = {"enum": list(words)} if words is not None else found
        if "only_with" not in one.metadata:
            required.append(one.name)
    text = " ".join((inspect.getdoc(kind) or "").split())
    return {"type": "object", "description": text, "required": required, "properties": properties}

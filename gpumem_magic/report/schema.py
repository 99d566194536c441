"""A report as plain data (the ledger's schema 1) and back. Reading checks every key; there is no partly read report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from gpumem_magic.allocator.verdict import AllocationInWords, FailedRequest, Trial
from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.inside import DEEPEST, ActivationBreakdown, LayerRow, OperatorRow
from gpumem_magic.report.model import CATEGORIES, SCHEMA, Folded, Owner, Peak, ReportCause, ReportData, ReportError, Row

KINDS = ("before", "statement", "part", "error", "after")
_T = TypeVar("_T")


def report_to_dict(report: ReportData) -> dict[str, Any]:
    device, error = report.device, report.error
    return {
        "schema": SCHEMA,
        "torch": str(report.torch),
        "device": {
            "name": device.name,
            "kind": device.kind,
            "index": device.index,
            "uuid": device.uuid,
            "total_bytes": device.total_bytes,
            "smi_total_bytes": device.smi_total_bytes,
        },
        "checkpoints": [_row_to_dict(row) for row in report.checkpoints],
        "peak": {"where": report.peak.where, **_figures_to_dict(report.peak)},
        "error": None
        if error is None
        else {
            "type": error.type,
            "message": error.message,
            "line": error.line,
            "requested": error.requested,
            "rounded": error.rounded,
            "segment": error.segment,
            "largest_free": error.largest_free,
            # Only out-of-memory errors have one.
            **({} if error.verdict is None else {"verdict": asdict(error.verdict)}),
            # Only errors inside a forward.
            **({"module": error.module, "operator": error.operator} if error.module else {}),
        },
        "evidence": dict(report.evidence),
        "retries": report.retries,
        "stand_ins": [
            {
                "line": stand_in.line,
                "count": stand_in.count,
                **({"supplied": stand_in.supplied} if stand_in.supplied else {}),
            }
            for stand_in in report.stand_ins
        ],
        "folded": [{"line": fold.line, "total": fold.total, "kept": fold.kept} for fold in report.folded],
        "notes": list(report.notes),
        "overhead_seconds": report.overhead_seconds,
        "devices": [report_to_dict(other) for other in report.devices],
        "owners": [dict(vars(owner)) for owner in report.owners],
        "causes": [dict(vars(cause)) for cause in report.causes],
        # Only where a module ran on the device.
        **({} if report.inside is None else {"inside": asdict(report.inside)}),
    }


def _figures_to_dict(state: Row | Peak) -> dict[str, Any]:
    return {
        "allocated": state.allocated,
        "reserved": state.reserved,
        "device_used": state.device_used,
        "peak_allocated": state.peak_allocated,
        "peak_reserved": state.peak_reserved,
        "categories": {category: state.categories.get(category) for category in CATEGORIES},
    }


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "label": row.label,
        "statement": row.statement,
        "line": row.line,
        "iteration": list(row.iteration),
        "parts": [_row_to_dict(part) for part in row.parts],
        **_figures_to_dict(row),
    }


class _Fields:
    """A dictionary being read, which knows where it is, so that an error can name the key."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise _wrong(where, "a dictionary", data)
        self._data = data
        self._where = where

    def path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def get(self, key: str) -> Any:
        if key not in self._data:
            raise ValueError(f"not a complete report: the key '{self.path(key)}' is missing; save the report again")
        return self._data[key]

    def has(self, key: str) -> bool:
        return self._data.get(key) is not None

    def yes_or_no(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise _wrong(self.path(key), "true or false", value)
        return value

    def text(self, key: str) -> str:
        return _typed(self.get(key), str, self.path(key), "text")

    def text_or_none(self, key: str) -> str | None:
        return None if self.get(key) is None else self.text(key)

    def number(self, key: str) -> int:
        return _typed(self.get(key), int, self.path(key), "a whole number")

    def number_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.number(key)

    def real(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise _wrong(self.path(key), "a finite number", value)
        return float(value)

    def fields(self, key: str) -> _Fields:
        return _Fields(self.get(key), self.path(key))

    def each(self, key: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
        items = self.get(key)
        if not isinstance(items, (list, tuple)):
            raise _wrong(self.path(key), "a list", items)
        return tuple(read(item, f"{self.path(key)}[{number}]") for number, item in enumerate(items))

    def bytes_by_name(self, key: str) -> dict[str, int]:
        fields = self.fields(key)
        return {_typed(name, str, fields.path("?"), "text"): fields.number(name) for name in fields._data}


def _wrong(where: str, wanted: str, value: Any) -> ValueError:
    name = f"the key '{where}'" if where else "it"
    return ValueError(f"not a report: {name} should be {wanted}, not {type(value).__name__}; save the report again")


def _typed(value: Any, kind: type[_T], where: str, wanted: str) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _wrong(where, wanted, value)
    return value


def report_from_dict(data: Any, where: str = "") -> ReportData:
    """Raises ValueError, in one line that names the key, for anything that is not a report of this schema."""
    fields = _Fields(data, where)
    if "schema" not in fields._data:
        raise ValueError(
            f"not a gpumem_magic report: the key '{fields.path('schema')}' is missing (memory snapshots: gpumem_magic.load)"
        )
    schema = fields.get("schema")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise ValueError(
            f"the key '{fields.path('schema')}' is {schema!r:.40} and this version reads {SCHEMA}: "
            "read it with a newer gpumem_magic, or save the report again with this one"
        )
    device = fields.fields("device")
    return ReportData(
        torch=fields.text("torch"),
        device=DeviceFacts(
            name=device.text("name"),
            kind=device.text("kind"),
            index=device.number("index"),
            uuid=device.text_or_none("uuid"),
            total_bytes=device.number_or_none("total_bytes"),
            smi_total_bytes=device.number_or_none("smi_total_bytes"),
        ),
        checkpoints=fields.each("checkpoints", _row_from_dict),
        peak=_peak_from_fields(fields.fields("peak")),
        error=None if fields.get("error") is None else _error_from_fields(fields.fields("error")),
        evidence=fields.bytes_by_name("evidence"),
        retries=fields.number("retries"),
        stand_ins=fields.each("stand_ins", _stand_in_from_dict),
        folded=fields.each("folded", _folded_from_dict),
        notes=fields.each("notes", lambda item, path: _typed(item, str, path, "text")),
        overhead_seconds=fields.real("overhead_seconds"),
        devices=fields.each("devices", report_from_dict),
        owners=fields.each("owners", _owner_from_dict),
        causes=fields.each("causes", _cause_from_dict),
        inside=_inside_from_fields(fields.fields("inside")) if fields.has("inside") else None,
    )


def _categories(fields: _Fields) -> dict[str, int | None]:
    categories = fields.fields("categories")
    return {category: categories.number_or_none(category) for category in CATEGORIES}


def _row_from_dict(data: Any, where: str) -> Row:
    fields = _Fields(data, where)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise ValueError(
            f"not a report: the key '{fields.path('kind')}' is {kind!r:.40}, and should be one of {', '.join(KINDS)}"
        )
    return Row(
        kind=kind,
        label=fields.text("label"),
        statement=fields.text("statement"),
        line=fields.number("line"),
        iteration=fields.each("iteration", lambda item, path: _typed(item, int, path, "a whole number")),
        parts=fields.each("parts", _row_from_dict),
        allocated=fields.number("allocated"),
        reserved=fields.number("reserved"),
        device_used=fields.number_or_none("device_used"),
        peak_allocated=fields.number("peak_allocated"),
        peak_reserved=fields.number("peak_reserved"),
        categories=_categories(fields),
    )


def _peak_from_fields(fields: _Fields) -> Peak:
    return Peak(
        where=fields.text("where"),
        allocated=fields.number("allocated"),
        reserved=fields.number("reserved"),
        device_used=fields.number_or_none("device_used"),
        peak_allocated=fields.number("peak_allocated"),
        peak_reserved=fields.number("peak_reserved"),
        categories=_categories(fields),
    )


def _error_from_fields(fields: _Fields) -> ReportError:
    return ReportError(
        type=fields.text("type"),
        message=fields.text("message"),
        line=fields.number_or_none("line"),
        requested=fields.number_or_none("requested"),
        rounded=fields.number_or_none("rounded"),
        segment=fields.number_or_none("segment"),
        largest_free=fields.number_or_none("largest_free"),
        verdict=_verdict_from_fields(fields.fields("verdict")) if fields.has("verdict") else None,
        module=fields.text("module") if fields.has("module") else "",
        operator=fields.text("operator") if fields.has("operator") else "",
    )


def _verdict_from_fields(fields: _Fields) -> FailedRequest:
    return FailedRequest(
        cause=fields.text("cause"),
        free=fields.number("free"),
        cached=fields.number("cached"),
        spare=fields.number("spare"),
        limit=fields.number_or_none("limit"),
        place=fields.number_or_none("place"),
        left_by=fields.text("left_by"),
        pieces=fields.each("pieces", _piece_from_dict),
        more_pieces=fields.number("more_pieces"),
        trials=fields.each("trials", _trial_from_dict),
        rounds=fields.number("rounds"),
        requests=fields.number("requests"),
        tried=fields.yes_or_no("tried"),
        kept=fields.number("kept"),
    )


def _piece_from_dict(data: Any, where: str) -> AllocationInWords:
    fields = _Fields(data, where)
    return AllocationInWords(what=fields.text("what"), bytes=fields.number("bytes"))


def _trial_from_dict(data: Any, where: str) -> Trial:
    fields = _Fields(data, where)
    return Trial(
        conf=fields.text("conf"),
        passes=fields.yes_or_no("passes"),
        rounds=fields.number("rounds"),
        peak_reserved=fields.number("peak_reserved"),
    )


def _stand_in_from_dict(data: Any, where: str) -> StandIn:
    fields = _Fields(data, where)
    supplied = fields.number("supplied") if fields.has("supplied") else 0
    return StandIn(line=fields.text("line"), count=fields.number("count"), supplied=supplied)


def _owner_from_dict(data: Any, where: str) -> Owner:
    fields = _Fields(data, where)
    return Owner(
        name=fields.text("name"),
        kind=fields.text("kind"),
        type=fields.text("type"),
        bytes=fields.number("bytes"),
        frees=fields.number("frees"),
        statement=fields.text_or_none("statement"),
        together=fields.text("together"),
        together_frees=fields.number("together_frees"),
    )


def _cause_from_dict(data: Any, where: str) -> ReportCause:
    fields = _Fields(data, where)
    return ReportCause(fields.text("name"), fields.text("text"), fields.text("remedy"), fields.number("bytes"))


def _inside_from_fields(fields: _Fields) -> ActivationBreakdown:
    return ActivationBreakdown(
        moment=fields.text("moment"),
        layers=_layer_from_dict(fields.get("layers"), fields.path("layers")),
        operators=fields.each("operators", _operator_from_dict),
    )


def _layer_from_dict(data: Any, where: str, depth: int = 0) -> LayerRow:
    fields = _Fields(data, where)
    if depth > DEEPEST:
        raise ValueError(f"not a report: '{where[:80]}…' is nested deeper than modules are")
    return LayerRow(
        name=fields.text("name"),
        type=fields.text("type"),
        activations=fields.number("activations"),
        parameters=fields.number("parameters"),
        gradients=fields.number("gradients"),
        children=fields.each("children", lambda item, path: _layer_from_dict(item, path, depth + 1)),
    )


def _operator_from_dict(data: Any, where: str) -> OperatorRow:
    fields = _Fields(data, where)
    return OperatorRow(
        name=fields.text("name"),
        bytes=fields.number("bytes"),
        shared=fields.number("shared"),
        operations=fields.bytes_by_name("operations"),
    )


def _folded_from_dict(data: Any, where: str) -> Folded:
    fields = _Fields(data, where)
    return Folded(line=fields.number("line"), total=fields.number("total"), kept=fields.number("kept"))

"""Values of strangers' data, each checked as it is taken: an error says where in the data it is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# 64-bit figures; a bigger one is damage.
LIMIT = 1 << 64


class PlainDataError(ValueError):
    """The data are not a snapshot; the text says where they differ from one."""


def pool_id_of(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or any(type(part) is not int for part in value):
        wrong(f"{where}: the pool id", "two whole numbers", value)
    return value[0], value[1]


def int_of(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if type(value) is not int or not 0 <= value < LIMIT:
        wrong(f"{where}.{key}", "there" if value is None else "a whole number of up to 64 bits", value)
    return value


def list_of(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        wrong(where, "a list", value)
    return value


def dict_of(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        wrong(where, "a dictionary", value)
    return value


def wrong(where: str, expected: str, value: Any = None) -> NoReturn:
    found = "" if value is None else f", but {_short(value)}"
    raise PlainDataError(f"{where} is not {expected}{found}") from None


def _short(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    return repr(value)[:60]

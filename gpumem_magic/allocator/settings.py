"""`PYTORCH_CUDA_ALLOC_CONF`: the text of the environment variable to `AllocatorSettings`.

Options that change placement and are not emulated are not honoured in silence: they come back as notes for the reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, INTERVALS, UNLIMITED, AllocatorSettings
from gpumem_magic.units import MIB

# PyTorch looks at the first that is set.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# `pinned_max_register_threads` in ``CUDAAllocatorConfig.h``.
_MOST_THREADS = 128


def parse(text: str) -> AllocatorSettings:
    """The settings of a text such as ``max_split_size_mb:128,garbage_collection_threshold:0.8``; empty is the default.

    Raises ValueError, naming the option, where PyTorch would refuse the text.
    """
    return parse_with_notes(text)[0]


def parse_with_notes(text: str, base: AllocatorSettings = DEFAULT_SETTINGS) -> tuple[AllocatorSettings, list[str]]:
    """The settings, and one sentence for each option that was understood but is not emulated. Raises as `parse` does.

    base: what holds where the text names nothing.
    """
    settings = base
    notes: list[str] = []
    for name, value in _options(text):
        if name in _READERS:
            field, read = _READERS[name]
            settings = replace(settings, **{field: read(name, value)})
        elif name == "backend":
            if value not in ("native", "cudaMallocAsync"):
                raise ValueError(f"backend must be native or cudaMallocAsync, not {value!r}")
            if value == "cudaMallocAsync":
                notes.append("backend:cudaMallocAsync is not emulated: the native allocator's rules are used.")
        elif name == "throw_on_cudamalloc_oom":
            if _boolean(name, value):
                notes.append("throw_on_cudamalloc_oom:True is not emulated: cached memory is released before failing.")
        elif name in _WITHOUT_EFFECT:
            _WITHOUT_EFFECT[name](name, value)
        else:
            raise ValueError(f"unknown option {name!r} in PYTORCH_CUDA_ALLOC_CONF")
    return settings, notes


def changed(settings: AllocatorSettings, text: str) -> tuple[AllocatorSettings, list[str]]:
    """The settings after `_set_allocator_settings(text)` in a running program, and notes. Raises as `parse` does.

    Three options are reset where the text doesn't name them (``parseArgs`` of ``AllocatorConfig.cpp``). The share of memory was
    taken when the allocator was made.
    """
    reset = ("max_split_size", "roundup_power2_divisions", "garbage_collection_threshold")
    base = replace(settings, **{name: getattr(DEFAULT_SETTINGS, name) for name in reset})
    after, notes = parse_with_notes(text, base)
    return replace(after, memory_fraction=settings.memory_fraction), notes


@dataclass(frozen=True)
class EnvironmentSettings:
    """text: as the variable has it, for snapshots; notes: sentences about what was understood but is not emulated."""

    settings: AllocatorSettings
    text: str
    notes: tuple[str, ...]


def settings_from_environment(environ: Mapping[str, str] = os.environ) -> EnvironmentSettings:
    """The settings that PyTorch would take from the environment: PYTORCH_CUDA_ALLOC_CONF, else PYTORCH_ALLOC_CONF.

    Raises ValueError, naming the variable and the option, where PyTorch would refuse the text.
    """
    notes: list[str] = []
    given = [(name, environ[name]) for name in VARIABLES if environ.get(name)]
    settings, text = DEFAULT_SETTINGS, ""
    if given:
        name, text = given[0]
        try:
            settings, notes = parse_with_notes(text)
        except ValueError as error:
            raise ValueError(f"{name}={text}: {error}") from None
        if len(given) > 1 and given[1][1] != text:
            notes.append(f"{given[1][0]} is set too, and differs: {name} is the one that counts.")
    if environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        notes.append("PYTORCH_NO_CUDA_MEMORY_CACHING is not emulated: memory is cached.")
    return EnvironmentSettings(settings, text, tuple(notes))


def _options(text: str) -> list[tuple[str, str]]:
    """Splits at the commas that are not within a list's brackets."""
    compact = re.sub(r"\s+", "", text)
    options = []
    for part in re.split(r",(?![^\[]*\])", compact):
        if not part:
            continue
        name, colon, value = part.partition(":")
        if not (name and colon and value):
            raise ValueError(f"expected name:value in PYTORCH_CUDA_ALLOC_CONF, not {part!r}")
        options.append((name, value))
    return options


def _integer(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {value!r}") from None


def _boolean(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value == "True"


def _size_mb(least: int) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        size = _integer(name, value)
        if size < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
        return size * MIB

    return read


def _threshold(name: str, value: str) -> float:
    threshold = _number(name, value)
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"{name} must be between 0 and 1, both excluded, not {value}")
    return threshold


def _fraction(name: str, value: str) -> float:
    fraction = _number(name, value)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {value}")
    return fraction


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _threads(name: str, value: str) -> int:
    threads = _integer(name, value)
    if not _power_of_two(threads) or threads > _MOST_THREADS:
        raise ValueError(f"{name} must be a power of two up to {_MOST_THREADS}, not {value}")
    return threads


def _anything(name: str, value: str) -> str:
    return value


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """``8`` for all intervals, or ``[256:1,512:2,>:8]``: keys are MiB; the first also fills what lies below it, and ``>``
    what lies above the last."""
    if not value.startswith("["):
        number = _integer(name, value)
        if not _power_of_two(number):
            raise ValueError(f"{name} must be a power of two, not {value}")
        return (number,) * INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{name} has an opening bracket without a closing one: {value!r}")
    divisions = [0] * INTERVALS
    last: int | None = None
    for entry in filter(None, value[1:-1].split(",")):
        key, colon, text = entry.partition(":")
        if not colon:
            raise ValueError(f"{name} expects size:divisions in its list, not {entry!r}")
        number = _integer(name, text)
        if number and not _power_of_two(number):
            raise ValueError(f"{name} must be 0 or a power of two, not {text}")
        if key == ">":
            start = 0 if last is None else last + 1
            divisions[start:] = [number] * (INTERVALS - start)
            continue
        size = _integer(name, key)
        if not _power_of_two(size):
            raise ValueError(f"{name} expects sizes that are powers of two, not {key}")
        index = min(size.bit_length() - 1, INTERVALS - 1)
        if last is None:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_split_size_mb": ("max_split_size", _size_mb(20)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _size_mb(20)),
    # Requests below 10 MiB share this segment, so a smaller one could not hold them.
    "large_segment_size_mb": ("large_segment_size", _size_mb(10)),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _boolean),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
}
"""An option's name -> the field of the settings, and what reads its value."""

_WITHOUT_EFFECT: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(
        ("graph_capture_record_stream_reuse", "pinned_use_background_threads", "pinned_use_cuda_host_register",
         "release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
        _boolean,
    ),
    "pinned_num_register_threads": _threads,
    **dict.fromkeys(
        ("pinned_free_catch_all", "pinned_max_cached_size", "pinned_max_round_threshold", "pinned_reserve_segment_size_mb"),
        _anything,
    ),
}  # fmt: skip
"""What reads the values of options that change speed or pinned host memory, never where a block on the device lies."""


def settings_to_dict(settings: AllocatorSettings, text: str = "") -> dict[str, Any]:
    """The `allocator_settings` of a PyTorch snapshot (2.10's keys); an unlimited split size is -1 there."""
    unlimited = settings.max_split_size == UNLIMITED
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "max_split_size": -1 if unlimited else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(1 << index): number for index, number in enumerate(settings.roundup_power2_divisions)
        },
    }


def settings_from_dict(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """The settings under which a snapshot was recorded, from its `allocator_settings`; {} is the default.

    What that does not list comes from the recorded environment variable. Raises ValueError where the text is not one.
    """
    settings = parse(str(recorded.get("PYTORCH_CUDA_ALLOC_CONF", "")))
    readers: dict[str, Callable[[Any], Any]] = {
        "max_split_size": lambda size: UNLIMITED if int(size) < 0 else int(size),
        "garbage_collection_threshold": float,
        "expandable_segments": bool,
        "roundup_power2_divisions": lambda found: tuple(
            int(found.get(str(1 << index), 0)) for index in range(INTERVALS)
        ),
    }
    given = {name: read(recorded[name]) for name, read in readers.items() if name in recorded}
    return replace(settings, **given)


def settings_of_another_backend(recorded: Mapping[str, Any]) -> bool:
    """Whether a snapshot's `allocator_settings` say that it was recorded under an allocator which is not emulated."""
    text = re.sub(r"\s+", "", str(recorded.get("PYTORCH_CUDA_ALLOC_CONF", "")))
    return "backend:cudaMallocAsync" in text.split(",")

"""The options of PYTORCH_CUDA_ALLOC_CONF: understood, refused with a clear word, or said not to be emulated."""

from __future__ import annotations

import pytest

from gpumem_magic.allocator.settings import (
    EnvironmentSettings,
    parse,
    parse_with_notes,
    settings_from_dict,
    settings_from_environment,
    settings_to_dict,
)
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.units import MIB


@pytest.mark.parametrize(
    "text", ["", " ", "backend:native", "expandable_segments:False, pinned_num_register_threads:8"]
)
def test_settings_that_change_nothing(text: str) -> None:
    assert parse_with_notes(text) == (AllocatorSettings(), [])


def test_settings_are_read() -> None:
    text = (
        "max_split_size_mb:128, garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:8],"
        "max_non_split_rounding_mb:64,large_segment_size_mb:12,expandable_segments:True,per_process_memory_fraction:0.5"
    )
    settings = parse(text)
    assert settings == AllocatorSettings(
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(*(1,) * 9, 2, *(8,) * 6),
        max_non_split_rounding=64 * MIB,
        large_segment_size=12 * MIB,
        expandable_segments=True,
        memory_fraction=0.5,
    )
    assert settings_from_dict(settings_to_dict(settings, text)) == settings
    assert parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


@pytest.mark.parametrize(
    ("text", "word"),
    [("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom"), ("backend:cudaMallocAsync", "cudaMallocAsync")],
)
def test_what_is_not_emulated_is_said(text: str, word: str) -> None:
    settings, notes = parse_with_notes(text + ",max_split_size_mb:64")
    assert settings.max_split_size == 64 * MIB
    assert len(notes) == 1
    assert word in notes[0]
    assert "not emulated" in notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:many", "must be a whole number"),
        ("max_split_size_mb", "expected name:value"),
        ("max_split_size_mb:", "expected name:value"),
        ("large_segment_size_mb:2", "at least 10"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:half", "must be a number"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "powers of two"),
        ("roundup_power2_divisions:[4:3]", "0 or a power of two"),
        ("roundup_power2_divisions:[4]", "size:divisions"),
        ("roundup_power2_divisions:[4:2", "closing"),
        ("expandable_segments:yes", "True or False"),
        ("release_lock_on_cudamalloc:none", "True or False"),
        ("pinned_use_cuda_host_register:1", "True or False"),
        ("pinned_num_register_threads:many", "whole number"),
        ("pinned_num_register_threads:12", "power of two up to 128"),
        ("pinned_num_register_threads:1024", "power of two up to 128"),
        ("backend:other", "native or cudaMallocAsync"),
        ("per_process_memory_fraction:2", "between 0 and 1"),
        ("max_split:128", "unknown option 'max_split'"),
    ],
)
def test_bad_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_the_environment_is_read_as_pytorch_does() -> None:
    assert settings_from_environment({}) == EnvironmentSettings(AllocatorSettings(), "", ())
    long, short = "max_split_size_mb:64", "expandable_segments:True"
    found = settings_from_environment({"PYTORCH_ALLOC_CONF": short})
    assert (found.settings.expandable_segments, found.text, found.notes) == (True, short, ())
    both = settings_from_environment({"PYTORCH_ALLOC_CONF": short, "PYTORCH_CUDA_ALLOC_CONF": long})
    assert (both.settings, both.text) == (parse(long), long)
    (note,) = both.notes
    assert "PYTORCH_CUDA_ALLOC_CONF is the one that counts" in note
    (note,) = settings_from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).notes
    assert "memory is cached" in note
    with pytest.raises(ValueError, match="PYTORCH_ALLOC_CONF=nonsense: expected name:value"):
        settings_from_environment({"PYTORCH_ALLOC_CONF": "nonsense"})

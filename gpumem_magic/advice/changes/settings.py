"""Settings of PyTorch's allocator: they change no line of the program, and help where memory is there in the wrong pieces."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import SAME, Proposal

# Of what is allocated at the peak: less that is cached then is no fragmentation worth a word.
_LEAST = 0.02
_SETTINGS = ("expandable_segments:True", "max_split_size_mb:128", "garbage_collection_threshold:0.8")


def allocator_settings(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if seen.cached > _LEAST * seen.allocated:
        for setting in _SETTINGS:
            yield Proposal(setting, SAME, conf=setting)

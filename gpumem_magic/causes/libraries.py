"""What libraries keep, and how each lets go of it in its own words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import tee

from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.model import Station

# The class of what `functools.lru_cache` makes.
CACHED = f"functools.{type(lru_cache(len)).__name__}"
# A class, or one that is made of it -> what to do; {} is the place of the object.
_ADVICE = {
    "torchmetrics.metric.Metric": (
        "`{0}.reset()` after each epoch lets go of them; `compute_on_cpu=True` keeps them on the host, and `thresholds=` "
        "(of curves) keeps counts instead"
    ),
    "itertools.cycle": (
        "`itertools.cycle` keeps all that it has given, to give it again: `del {0}` lets go of it, and a generator with "
        "`while True: yield from loader` keeps none"
    ),
    f"itertools.{type(tee(())[0]).__name__}": (
        "`itertools.tee` keeps what one of its iterators has given until the others have given it, too: `del {0}` lets go of it"
    ),
    "weakref.WeakKeyDictionary": (
        "a `WeakKeyDictionary` keeps a value as long as its key is there, and a value that leads to its key keeps that: let it "
        "have a `weakref.ref` of it; `{0}.clear()` lets go of them now"
    ),
    CACHED: "`{0}.cache_clear()` lets go of it",
}
# The same by how the place begins that has no name in the program.
_OF_PLACES = {
    "weakref.finalize.": (
        "`weakref.finalize` keeps its function and arguments as long as the object is there, and a method of the object keeps "
        "the object: give it a function outside of the class (or a `staticmethod`), and no argument that leads there"
    ),
}


def of_library(place: str) -> str:
    """What a library calls what has a place that no program writes, ``weakref.finalize``; "" for all other places."""
    return next((start.rstrip(".") for start in _OF_PLACES if place.startswith(start)), "")


_LIGHTNING = re.compile(r"^(?:pytorch_lightning|lightning\.pytorch)\..*\bLightningModule$")
_STAGES = {"val": "validation", "test": "test", "pred": "predict", "train": "train"}


def clearing_hook(place: str, bases: Iterable[str]) -> str:
    """Where a library's own code would empty what grows there: ``clear it in `on_validation_epoch_end` ``; "" for no library."""
    if not any(_LIGHTNING.match(kind) for kind in bases):
        return ""
    stage = next((name for word, name in _STAGES.items() if word in place.rpartition(".")[2]), "validation")
    return f"clear it in `on_{stage}_epoch_end`, where Lightning keeps no outputs for you"


def gathering(place: CodePlace) -> tuple[str, str] | None:
    """What a library's loop joins on the device, and what to do about it, by where it does so; None where that is not known."""
    file = place.file.replace("\\", "/")
    if "/transformers/" in file and file.endswith(("trainer_pt_utils.py", "trainer.py")):
        return (
            "keeps the predictions of all evaluation batches (logits, and whatever else the model returns) on the device",
            "`eval_accumulation_steps=` in `TrainingArguments` moves them to the host every so many batches; "
            "`preprocess_logits_for_metrics=` of the `Trainer` (an argmax, say) keeps less of them.",
        )
    return None


def widening(place: CodePlace | None) -> str:
    """How a library that copies to float32 is kept from it, by where it does so; "" where that is not known."""
    file = place.file.replace("\\", "/") if place is not None else ""
    if "/peft/tuners/" in file:
        # (`cast_adapter_dtype` of peft/tuners/tuners_utils.py, since 0.12.)
        return (
            "The adapters are in float32, and what goes into them is copied to that: `get_peft_model(..., "
            "autocast_adapter_dtype=False)` leaves them in the model's type."
        )
    return ""


def advised(trail: Sequence[Station]) -> str:
    """The place of the object of a library's that has such words; "" where none is on this trail."""
    return next((one.place for one in reversed(trail) if any(kind in _ADVICE for kind in one.bases)), "")


def advice(trail: Sequence[Station]) -> str | None:
    """What to do about memory on this trail, in the words of the library that keeps it; None where no library is known."""
    for station in reversed(trail):
        for kind in station.bases:
            if kind in _ADVICE:
                return _ADVICE[kind].format(station.place)
    first = trail[0].place if trail else ""
    return next((words for start, words in _OF_PLACES.items() if first.startswith(start)), None)

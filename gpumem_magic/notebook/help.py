"""``%gpumem_help``: what somebody wants to know, and the line to type for it."""

from __future__ import annotations

from gpumem_magic.views.sheet import Sheet

CARD = (
    ("I ran out of memory", "%%gpumem", "above the cell: what filled it, and what would help"),
    ("It grows with every step", "%%gpumem --max-iterations 20", "above the loop: what is kept, and by whom"),
    ("It grows when I run cells again", "%gpumem_auto on", "and later %gpumem_history: what each run added"),
    (
        "Will it fit? How large a batch?",
        "%%gpumem --fit batch_size=1..512",
        "tries copies of the cell on a virtual card",
    ),
    (
        "What did my change save?",
        "%%gpumem -o first",
        "above the cell, -o second above the changed one: first.diff(second)",
    ),
    ("Who holds the memory?", "%gpumem_who", "your names, and what deleting each would free"),
    ("It stays full after an error", "%gpumem_free", "gives back what no variable of yours holds"),
    ("I want to see it while it runs", "%gpumem_watch", "a live chart; %gpumem_watch stop leaves a picture"),
    ("I have a snapshot file", "%gpumem_load snapshot.pickle", "its report, and a timeline of all allocations"),
    ("I have no GPU", "%gpumem_device T4", "a virtual one from now on; alone, it lists the cards"),
)


def card() -> Sheet:
    """A row for each question."""
    return Sheet(
        "What do you want to know?",
        [("", "type", ""), *CARD],
        figures=(),
        code=(1,),
        after="`%gpumem --help`, `%gpumem_watch --help` and so on list what else each of them takes.",
    )

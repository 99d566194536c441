"""Cases at many shapes and types, drawn from sweeps.txt: a rule can be fitted to one draw and looked at on another.

A letter in braces is put for one of its values; so many of all combinations are drawn, the same ones for the same seed.
"""

from __future__ import annotations

import math
import random
import re

from building import HERE


def drawn(seed: int) -> list[tuple[str, str, str]]:
    """Name, setup and expression of each case; those of one kind lie far apart, so that a run that is cut has some of each."""
    lines = (HERE / "sweeps.txt").read_text(encoding="utf-8").splitlines()
    kinds = [of_kind(line, seed) for line in lines if line.strip() and not line.startswith("#")]
    places = [(number / len(kind), case) for kind in kinds for number, case in enumerate(kind)]
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def of_kind(line: str, seed: int) -> list[tuple[str, str, str]]:
    head, _, code = line.partition(" | ")
    called, _, letters = head.partition(": ")
    name, _, wanted = called.partition("*")
    values = {letter: of.split() for letter, _, of in (one.strip().partition("=") for one in letters.split(";"))}
    setup, _, expression = code.rpartition(" || ")
    every = math.prod(map(len, values.values()))
    chosen = random.Random(f"{name} {seed}").sample(range(every), min(every, int(wanted.rstrip("g"))))
    cases = []
    for number in chosen:
        given = {}
        rest = number
        for letter, of in values.items():
            rest, place = divmod(rest, len(of))
            given[letter] = of[place]
        before, asked = filled(setup, given), filled(expression, given)
        cases.append((f"{name}_{seed}_{number}", before, asked))
        if wanted.endswith("g"):
            cases.append((f"{name}_{seed}_{number}_g", f"{before};y=({asked});g=torch.ones_like(y)", "y.backward(g)"))
    return cases


def filled(text: str, given: dict[str, str]) -> str:
    """With each letter's value, which may have letters itself."""
    while (with_values := re.sub(r"\{([a-z])\}", lambda found: given[found[1]], text)) != text:
        text = with_values
    return text

"""Gradients that are there longer than anybody needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft, call_of, called
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import SAME, Proposal


def dropped(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """``zero_grad(set_to_none=False)`` keeps them, filled with zeros."""

    def edit(draft: CellDraft) -> None:
        for call in _filling(draft):
            draft.argument(call, "set_to_none", "True")

    if _filling(draft):
        yield Proposal(
            "zero_grad(set_to_none=True)", SAME, edit, but="while each parameter gets a gradient in every backward"
        )


def earlier(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """Before the next forward instead of after it."""

    def edit(draft: CellDraft) -> None:
        for step, zero in _late(draft):
            owner = draft.text(step.func.value) if isinstance(step.func, ast.Attribute) else ""
            draft.after(zero, f"{owner}.zero_grad()")

    if seen.share("gradients") and _late(draft):
        yield Proposal("zero_grad() right after step()", SAME, edit)


def _filling(draft: CellDraft) -> list[ast.Call]:
    return [
        call
        for call in draft.calls(["zero_grad"])
        for word in call.keywords
        if word.arg == "set_to_none" and isinstance(word.value, ast.Constant) and word.value.value is False
    ]


def _late(draft: CellDraft) -> list[tuple[ast.Call, ast.stmt]]:
    """Steps behind which gradients stay, in suites that let go of them before the next one; with the statements of the steps."""
    found = []
    for suite in draft.suites():
        calls = [call_of(statement) for statement in suite]
        zeros = [place for place, call in enumerate(calls) if call is not None and called(call) == "zero_grad"]
        for place, call in enumerate(calls):
            if call is None or called(call) != "step" or not isinstance(call.func, ast.Attribute):
                continue
            owner = ast.dump(call.func.value)
            own = [
                zero
                for zero in zeros
                if isinstance(calls[zero].func, ast.Attribute)  # type: ignore[union-attr]
                and ast.dump(calls[zero].func.value) == owner  # type: ignore[union-attr]
            ]
            rest = suite[place + 1 :]
            reads = any(
                isinstance(node, ast.Attribute) and node.attr == "grad" for one in rest for node in ast.walk(one)
            )
            if own and max(own) < place and not reads:
                found.append((call, suite[place]))
    return found

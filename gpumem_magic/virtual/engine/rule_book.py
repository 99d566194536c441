"""Rules by operator: what follows from an operator's arguments, asked before or after it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpumem_magic.private import aten as _aten

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


class RuleBook(Generic[_Rule]):
    """rules: by operator. beginning: those with which something begins; others need to be asked only where there is something."""

    def __init__(self) -> None:
        self.rules: dict[Any, _Rule] = {}
        self.beginning: set[Any] = set()

    def of(self, names: str, begins: bool = False) -> Callable[[_Rule], _Rule]:
        """Registers a rule for all overloads of operators, whose names are apart by spaces."""

        def register(rule: _Rule) -> _Rule:
            for name in names.split():
                packet = getattr(_aten, name)
                for overload in packet.overloads():
                    operator = getattr(packet, overload)
                    self.rules[operator] = rule
                    if begins:
                        self.beginning.add(operator)
            return rule

        return register

    def ask(self, rule: _Rule | None, *arguments: Any) -> Any:
        """What a rule says; None where it says nothing, or where the call is wrong: the operator says so itself."""
        if rule is None:
            return None
        try:
            return rule(*arguments)
        except (IndexError, RuntimeError, TypeError):
            return None

"""Where memory runs out in a loop: whether a backward behind it was to go through what the loop had made, as the text says."""

from __future__ import annotations

import pytest

from gpumem_magic.causes.ahead import backward_behind
from gpumem_magic.causes.written import Text, Written

LAYERS = "h = x\nfor layer in layers:\n    h = layer(h)  # here\nloss = head(h)\nloss.backward()"
LOSSES = "losses = []\nfor x in batches:\n    losses.append(model(x))  # here\ntorch.stack(losses).sum().backward()"
SCALED = "total = 0\nfor x in batches:\n    total += model(x)  # here\nscaler.scale(total).backward()"
ACCELERATED = "for x in batches:\n    self.total = self.total + model(x)  # here\naccelerator.backward(self.total)"
NESTED = "for epoch in epochs:\n    for t in times:\n        h = cell(xs[t], h)  # here\n    h.sum().backward()"
EPISODE = (
    "def episode(n):\n    saved = []\n    for t in range(n):\n        saved.append(policy(t))  # here\n    return saved, t\n"
    "for one in episodes:\n    saved, _ = episode(9)  # called\n    loss = -torch.stack(saved).sum()\n    loss.backward()"
)
HANDED_ON = (
    "def inner(h):\n    for t in ts:\n        h = cell(h)  # here\n    return h\n"
    "def outer(x):\n    return head(inner(x))  # called\n"
    "out = outer(x)  # called first\nloss = out.mean()\ntorch.autograd.grad(loss, ws)"
)
GIVEN_TO = (
    "class Agent:\n    def update(self, lr, saved):\n        loss = torch.stack(saved).sum()\n        loss.backward()\n"
    "saved = []\nfor t in range(9):\n    saved.append(policy(t))  # here\nagent.update(0.1, saved=saved)"
)
EVERY_FOURTH = (
    "total = 0\nfor i, x in enumerate(batches):\n    total = total + model(x)  # here\n"
    "    if (i + 1) % 4 == 0:\n        total.backward()\n        total = 0"
)
YES = [LAYERS, LOSSES, SCALED, ACCELERATED, NESTED, EPISODE, HANDED_ON, GIVEN_TO, EVERY_FOURTH]
NO = [
    # in all turns or in none
    "total = 0\nfor x in batches:\n    total = total + model(x)  # here\n    if training:\n        total.backward()",
    # each turn has a backward of its own
    "for x in batches:\n    loss = model(x)  # here\n    loss.backward()\nloss.backward()",
    # none follows
    "for x in batches:\n    kept.append(model(x))  # here\nprint(len(kept))",
    # the one that follows is of another training, which uses the same names for other things
    "for x in held_out:\n    out = model(x)  # here\n    scores.append(out)\nprint(scores)\n"
    "for x in batches:\n    out = model(x)\n    loss = out.mean()\n    loss.backward()",
    # an evaluation's results are given back, and no loss is made of them
    "def evaluate():\n    outs = []\n    for x in held_out:\n        outs.append(model(x))  # here\n    return torch.cat(outs)\n"
    "score = evaluate()  # called\nloss = model(x).mean()\nloss.backward()",
    # nothing is given back
    "def evaluate():\n    for x in held_out:\n        out = model(x)  # here\n"
    "score = evaluate()  # called\nloss = score.mean()\nloss.backward()",
    # a function that goes back, too, is given something else
    "def train(model):\n    loss = model(x)\n    loss.backward()\n"
    "for x in held_out:\n    outs.append(model(x))  # here\nshow(outs)\ntrain(model)",
    # no loop
    "h = model(x)  # here\nh.backward()",
    "no Python (",
]


def way_of(source: str) -> list[Written]:
    lines = source.splitlines()
    marks = ("# called first", "# called", "# here")
    found = [next((n for n, line in enumerate(lines, 1) if line.endswith(mark)), None) for mark in marks]
    return [Written("", number + 1, "") for number in found if number is not None]


@pytest.mark.parametrize("source", YES)
def test_what_a_loop_made_goes_into_the_backward_that_was_to_come(source: str) -> None:
    found = backward_behind([Text("", source, ahead=1)], way_of(source))
    assert found is not None
    lines = source.splitlines()
    here = next(number for number, line in enumerate(lines) if line.endswith("# here"))
    head = max(number for number, line in enumerate(lines[:here]) if line.lstrip().startswith("for "))
    last = max(number for number, line in enumerate(lines) if "backward" in line or "autograd.grad" in line)
    assert [one.line - 2 for one in found] == [head, last]


@pytest.mark.parametrize("source", NO)
def test_another_backward_is_not_waited_for(source: str) -> None:
    assert backward_behind([Text("", source, ahead=1)], way_of(source)) is None
    assert backward_behind([], way_of(source)) is None

"""Forward, backward and steps are seen wherever they are called from, change nothing, and leave nothing behind."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import pytest
import torch
from recording_fakes import FakeDevice, FakeMachine
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer
from torch.utils.checkpoint import checkpoint

from gpumem_magic.recording import torch_seams
from gpumem_magic.recording.guard import Guard
from gpumem_magic.recording.identity import Witness
from gpumem_magic.recording.model import Moment
from gpumem_magic.recording.phases import Phases

WATCHED = {
    torch.autograd: ("_engine_run_backward",),
    torch.autograd.graph: ("_engine_run_backward",),
    record_function: ("__enter__", "__exit__"),
    torch.utils.checkpoint._recomputation_hook: ("__enter__", "__exit__"),
    torch.utils.checkpoint.CheckpointFunction: ("backward",),
}
HOOKS = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_forward_hooks_always_called,
    nn_module._global_forward_hooks_with_kwargs,
    nn_optimizer._global_optimizer_pre_hooks,
    nn_optimizer._global_optimizer_post_hooks,
)


def state_of_torch() -> list[object]:
    return [vars(owner).get(name) for owner, names in WATCHED.items() for name in names] + [
        dict(hooks) for hooks in HOOKS
    ]


class Seen:
    """Phases with a moment that only counts."""

    def __init__(self, names: dict[str, object] | None = None) -> None:
        ticks = count(1)
        self.machine = FakeMachine(FakeDevice())
        self.guard = Guard()
        self.steps = 0
        self.witness = Witness(self.machine, lambda device: 0, names or {}, names)
        self.phases = Phases(lambda: Moment({0: 0}, {}, next(ticks)), self.witness, self.guard, self._step)

    def _step(self) -> None:
        self.steps += 1

    @property
    def kinds(self) -> list[str]:
        return [span.kind for span in self.ordered]

    @property
    def ordered(self) -> list:
        return sorted(self.phases.spans, key=lambda span: span.start.tick)

    def failed(self, kind: str) -> list[bool]:
        return [span.failed for span in self.ordered if span.kind == kind]


@contextmanager
def watching(names: dict[str, object] | None = None) -> Iterator[Seen]:
    before = state_of_torch()
    seen = Seen(names)
    seen.phases.start()
    try:
        yield seen
    finally:
        seen.phases.stop()
        assert state_of_torch() == before
        assert seen.guard.notes == []


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Boom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def test_a_training_step() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    with watching({"net": net, "opt": optimizer}) as seen:
        loss = net(torch.ones(3, 4)).sum()
        loss.backward()
        optimizer.step()
    assert [(span.kind, span.label) for span in seen.ordered] == [
        ("forward", "net"),
        ("backward", "backward"),
        ("optimizer", "opt"),
    ]
    assert not any(span.failed for span in seen.phases.spans)
    assert seen.steps == 1


def test_nothing_that_the_program_computes_changes() -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train()
    with watching() as seen:
        assert train() == plain
    assert seen.kinds == ["forward", "backward", "optimizer"] * 3


def test_names_without_variables() -> None:
    first, second = model(), model()
    with watching() as seen:
        first(torch.ones(1, 4))
        second(torch.ones(1, 4))
        first(torch.ones(1, 4))
    assert [span.label for span in seen.ordered] == ["Sequential", "Sequential (2)", "Sequential"]


def test_grad_is_a_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    with watching() as seen:
        torch.autograd.grad(x.square().sum(), x)
    assert seen.kinds == ["backward"]


def test_each_phase_that_fails_is_marked_and_the_error_is_the_users() -> None:
    class BadBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("bad backward")

    class BadStep(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("bad step")

    net = nn.Sequential(nn.Linear(4, 4), Boom())
    with watching() as seen:
        with pytest.raises(ValueError, match="boom"):
            net(torch.ones(1, 4))
        with pytest.raises(ValueError, match="bad backward"):
            BadBackward.apply(torch.ones(3, requires_grad=True)).sum().backward()
        with pytest.raises(ValueError, match="bad step"):
            BadStep(net.parameters(), lr=1.0).step()
        # And afterwards all is as if nothing had been.
        model()(torch.ones(1, 4)).sum().backward()
    assert seen.kinds == ["forward", "backward", "optimizer", "forward", "backward"]
    assert [span.failed for span in seen.ordered] == [True, True, True, False, False]


def test_an_interrupt_that_no_hook_sees_ends_with_the_statement() -> None:
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    with watching() as seen:
        with suppress(KeyboardInterrupt):
            nn.Sequential(Interrupted())(torch.ones(1))
        seen.phases.statement_ended()
        model()(torch.ones(1, 4))
    assert seen.kinds == ["forward", "forward"]
    assert seen.failed("forward") == [True, False]


def test_an_inner_error_that_the_model_catches_is_not_the_models() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Boom()

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                return x

    with watching() as seen:
        Careful()(torch.ones(1))
        Careful()(torch.ones(1))
    assert seen.failed("forward") == [False, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_neither_forward_nor_backward(reentrant: bool) -> None:
    inner = nn.Linear(4, 4)

    class Checkpointed(nn.Module):
        def forward(self, x):
            # A plain function, and not only a module, is computed again.
            return checkpoint(lambda y: torch.relu(inner(y)).exp(), x, use_reentrant=reentrant)

    with watching() as seen:
        Checkpointed()(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen.kinds == ["forward", "backward", "recomputation"]
    forward, backward, again = seen.ordered
    assert backward.start.tick < again.start.tick < again.end.tick < backward.end.tick
    assert forward.end.tick < backward.start.tick


def test_a_closure_runs_phases_inside_the_step() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    with watching() as seen:
        optimizer.step(closure)
    assert seen.kinds[:3] == ["optimizer", "forward", "backward"]
    assert seen.ordered[0].end.tick > seen.ordered[-1].end.tick or len(seen.ordered) == 1


def test_only_the_first_optimizer_ends_iterations() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = torch.optim.SGD(one.parameters()), torch.optim.SGD(two.parameters())
    with watching() as seen:
        for _ in range(3):
            first.step()
            second.step()
    assert seen.steps == 3
    assert [span.label for span in seen.ordered] == ["SGD", "SGD (2)"] * 3


def test_ranges_and_marks() -> None:
    with watching() as seen:
        with record_function("outer"), record_function("inner"):
            seen.phases.mark("here")
        with suppress(ValueError), record_function("bad"):
            raise ValueError
    assert [(span.kind, span.label, span.failed) for span in seen.ordered] == [
        ("range", "outer", False),
        ("range", "inner", False),
        ("mark", "here", False),
        ("range", "bad", True),
    ]


def test_pytorchs_own_ranges_are_not_the_users() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    with watching() as seen:
        optimizer.zero_grad()
        optimizer.step()
    assert seen.kinds == ["optimizer"]


def test_a_range_that_was_open_before_us_ends_quietly() -> None:
    early = record_function("early")
    early.__enter__()
    with watching() as seen:
        early.__exit__(None, None, None)
    assert seen.phases.spans == []


def test_a_range_that_is_open_at_the_end_is_ended() -> None:
    with record_function("outlives us"):
        before = state_of_torch()
        seen = Seen()
        seen.phases.start()
        late = record_function("late").__enter__()
        seen.phases.stop()
        assert state_of_torch() == before
    assert [(span.label, span.failed) for span in seen.phases.spans] == [("late", False)]
    late.__exit__(None, None, None)
    assert len(seen.phases.spans) == 1


def test_threads_have_their_own_depth() -> None:
    net = model()
    inside = threading.Event()
    done = threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(300)
            return x

    with watching() as seen:
        other = threading.Thread(target=lambda: Waits()(torch.ones(1)))
        other.start()
        assert inside.wait(300)
        # A replica's forward in another thread is part of the forward that is under way.
        net(torch.ones(1, 4))
        done.set()
        other.join()
        net(torch.ones(1, 4))
    assert seen.kinds == ["forward", "forward"]
    assert [span.label for span in seen.ordered] == ["Waits", "Sequential"]


def test_a_missing_seam_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils.checkpoint, "_recomputation_hook")
    seen = Seen()
    seen.phases.start()
    model()(torch.ones(1, 4)).sum().backward()
    seen.phases.stop()
    assert seen.kinds == ["forward", "backward"]
    assert len(seen.guard.notes) == 1
    assert "_recomputation_hook" in seen.guard.notes[0]


def test_a_seam_that_is_missing_raises_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumem_magic.patching import Patches

    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    with pytest.raises(RuntimeError, match="_engine_run_backward"):
        torch_seams.watch_backward(Patches(), lambda: lambda failed: None)


def test_our_own_failure_is_a_note_and_not_the_users() -> None:
    before = state_of_torch()
    seen = Seen()
    seen.witness.forward_begins = lambda *args: 1 / 0  # type: ignore[method-assign]
    seen.phases.start()
    output = model()(torch.ones(1, 4))
    seen.phases.stop()
    assert output.shape == (1, 2)
    assert state_of_torch() == before
    assert len(seen.guard.notes) == 1
    assert "ZeroDivisionError" in seen.guard.notes[0]


# ---- what the phases let the witness see


def looks(seen: Seen) -> set[tuple[str, str | None]]:
    return {(look.role, look.name) for look in seen.witness.sightings}


def test_a_training_step_shows_who_holds_what() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.ones(3, 4)
    with watching() as seen:
        for tensor in (x, *net.parameters(), *net.buffers()):
            seen.machine.put(tensor)
        output = net(input=x)
        output.sum().backward()
        for parameter in net.parameters():
            seen.machine.put(parameter.grad)
        optimizer.step()
        before = len(seen.witness.sightings)
        for state in optimizer.state.values():
            for tensor in state.values():
                seen.machine.put(tensor)
        optimizer.step()
    names = {name for name, _ in net.named_parameters()}
    assert before > 0
    assert {name for role, name in looks(seen) if role == "parameter"} == names
    assert {name for role, name in looks(seen) if role == "gradient"} == names
    assert {name for role, name in looks(seen) if role == "buffer"} == {name for name, _ in net.named_buffers()}
    assert ("optimizer_state", "Adam.exp_avg[0.weight]") in looks(seen)
    assert ("input", "input") in looks(seen)


def test_an_output_of_another_module_is_no_input() -> None:
    net = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    with watching() as seen:
        seen.machine.put(x)
        hidden = net(x)
        seen.machine.put(hidden)
        net(hidden)
    assert [look.role for look in seen.witness.sightings].count("input") == 1


def test_the_variables_of_the_cell() -> None:
    x, y = torch.ones(2), torch.ones(3, requires_grad=True)
    z = y * 2
    batch = {"ids": torch.ones(4), "more": [torch.ones(5)], "length": 7}
    names = {"x": x, "z": z, "batch": batch, "number": 3}
    seen = Seen(names)
    for tensor in (x, z, batch["ids"], batch["more"][0]):
        seen.machine.put(tensor)
    seen.witness.statement_ended()
    assert looks(seen) == {
        ("named", "x"),
        ("output", "z"),
        ("named", "batch['ids']"),
        ("named", "batch['more'][0]"),
    }
    count_before = len(seen.witness.sightings)
    seen.witness.statement_ended()
    assert len(seen.witness.sightings) == count_before  # nothing moved, so nothing new is to be said


def test_what_state_dict_gave_is_weights() -> None:
    model = nn.BatchNorm1d(2)
    best = copy.deepcopy(model.state_dict())
    batch = OrderedDict(weight=torch.ones(4))
    seen = Seen({"model": model, "best": best, "kept": {"epoch": best}, "batch": batch})
    for tensor in (*best.values(), batch["weight"]):
        seen.machine.put(tensor)
    seen.witness.statement_ended()
    found = {(role, name) for role, name in looks(seen) if role != "named"}
    of_weights = {("parameter", "weight"), ("parameter", "bias"), ("buffer", "running_mean"), ("buffer", "running_var")}
    of_weights.add(("buffer", "num_batches_tracked"))
    assert found == {(role, f"{place}['{key}']") for role, key in of_weights for place in ("best", "kept['epoch']")}
    count_before = len(seen.witness.sightings)
    seen.witness.statement_ended()
    assert len(seen.witness.sightings) == count_before


def test_all_of_a_large_state_dict_is_weights_and_has_a_name() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(50)])
    best = copy.deepcopy(model.state_dict())
    seen = Seen({"model": model, "best": best})
    for tensor in best.values():
        seen.machine.put(tensor)
    seen.witness.statement_ended()
    every = {f"best['{key}']" for key in best}
    assert {look.name for look in seen.witness.sightings if look.role == "parameter"} == every
    assert {look.name for look in seen.witness.sightings if look.role == "named"} == every


def test_a_long_history_costs_no_more_than_the_limit() -> None:
    history = [torch.ones(1) for _ in range(500)]
    seen = Seen({"history": history})
    for tensor in history:
        seen.machine.put(tensor)
    seen.witness.statement_ended()
    assert 0 < len(seen.witness.sightings) < 100
    seen.witness.cell_ended({"history": history})
    assert {look.name for look in seen.witness.sightings} == {f"history[{number}]" for number in range(500)}


def test_modules_that_were_never_called_are_found_at_the_end() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.state[net.weight]["momentum_buffer"] = momentum = torch.ones(2, 2)
    net.weight.grad = torch.ones(2, 2)
    seen = Seen()
    for tensor in (net.weight, net.bias, net.weight.grad, momentum):
        seen.machine.put(tensor)
    seen.witness.cell_ended({"net": net, "optimizer": optimizer, "other": object()})
    assert looks(seen) == {
        ("parameter", "weight"),
        ("parameter", "bias"),
        ("gradient", "weight"),
        ("optimizer_state", "SGD.momentum_buffer[weight]"),
    }


def test_a_gradient_has_the_name_that_its_parameter_has_now() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = Seen({"net": net})
    for parameter in net.parameters():
        seen.machine.put(parameter)
        parameter.grad = torch.ones_like(parameter)
        seen.machine.put(parameter.grad)
    seen.witness.forward_begins(net, ())
    seen.witness.backward_ended()
    net.first = net[0]
    del net._modules["0"]
    seen.witness.sightings.clear()
    seen.witness.backward_ended()
    found = {look.name for look in seen.witness.sightings if look.role == "gradient"}
    assert found == {"1.weight", "1.bias", "first.weight", "first.bias"}


def test_a_module_that_moved_is_looked_at_again() -> None:
    net = nn.Linear(2, 2)
    seen = Seen({"net": net})
    seen.machine.put(net.weight)
    seen.witness.statement_ended()
    seen.witness.statement_ended()
    looks = [(look.role, look.name) for look in seen.witness.sightings]
    assert looks == [("parameter", "weight"), ("named", "net.weight")]
    seen.machine.put(net.weight)
    seen.witness.statement_ended()
    assert len({look.address for look in seen.witness.sightings}) == 2


def test_nothing_of_the_users_is_kept() -> None:
    import gc
    import weakref

    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.ones(3, 4)
    with watching({"net": net, "optimizer": optimizer, "x": x}) as seen:
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        seen.witness.statement_ended()
        seen.witness.cell_ended({"net": net})
    seen.witness.forget()
    gone = [weakref.ref(net), weakref.ref(optimizer), weakref.ref(x)]
    del net, optimizer, x, loss
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3

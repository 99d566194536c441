"""One run of a program on a virtual card, in the process that it has for itself, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from gpumem_magic.allocator.program import ALLOC, FAILED, FREE, Program
from gpumem_magic.allocator.settings import parse
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording import under_way
from gpumem_magic.recording.failure import is_out_of_memory
from gpumem_magic.recording.model import Failed
from gpumem_magic.recording.progress import CellProgress, StopRun
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import report_of
from gpumem_magic.report.failure import failed_row
from gpumem_magic.report.kept import kept_of
from gpumem_magic.report.model import ReportData
from gpumem_magic.session.device import put_on
from gpumem_magic.trials.costs import Costs
from gpumem_magic.trials.counting import goes_by_its_count, with_functions
from gpumem_magic.trials.further_turns import FurtherTurns
from gpumem_magic.trials.loops import LoopEnds, TrialLimit
from gpumem_magic.trials.process import Pause, in_a_fork, last_words, shared_start
from gpumem_magic.trials.programs import Running, Subject, Variable
from gpumem_magic.trials.saved_files import keep_apart
from gpumem_magic.trials.tried import ERROR, FITS, MEMORY, Course, Share, Tried
from gpumem_magic.virtual.engine.device import VirtualDevice


def tried(program: Subject, device: str | None, values: Mapping[str, int]) -> Tried:
    """Runs the program with these values on a card (None: the one that is on) in a process of its own."""
    found: Tried = in_a_fork(lambda: run_here(lambda: program.prepared(values), device)[0])
    return found


@contextmanager
def trials(
    program: Variable, device: str, names: Sequence[str]
) -> Iterator[Callable[[Sequence[Mapping[str, int]]], list[Tried]]]:
    """`tried` for several values of these names, at the same time. What the program does before they matter it does once."""

    def begun(ask: Pause) -> Tried:
        def prepared() -> Running:
            ask.begin()
            return program.begun(names, ask)

        return run_here(prepared, device)[0]

    with shared_start(begun) as start:

        def run(values: Sequence[Mapping[str, int]]) -> list[Tried]:
            if start.has_copies:
                return start.of(values)
            if start.answer is not None and start.answer.ending == MEMORY:
                # It never came to the values.
                return [replace(start.answer, values=dict(one)) for one in values]
            return [tried(program, device, one) for one in values]

        yield run


def run_here(
    prepared: Callable[[], Running],
    device: str | None,
    *,
    conf: str = "",
    with_costs: bool = False,
    most: int | None = None,
    last: int | None = None,
) -> tuple[Tried, DeviceView, Running]:
    """A prepared program's run in this process, which has to be the trial's own. conf: settings of the allocator, besides those
    that it has. most, last: of `TrialLimit`; None for no limit."""
    under_way.abandon()
    machine = put_on(device)
    keep_apart()
    for one in machine.devices if conf else ():
        text = ",".join(part for part in (one.allocator.settings_text, conf) if part)
        one.allocator.settings, one.allocator.settings_text = parse(text), text
    running = prepared()
    index = machine.current_device()
    recorder = Recorder(machine, primary=index, names=running.names, own_file=running.filename)
    sources = with_functions(running.source, running.names, running.namespace())
    counts = bool(running.source) and any(map(goes_by_its_count, sources))
    further = FurtherTurns(recorder, machine.devices, counts)
    limit = TrialLimit(most, further, machine.devices, lambda: machine.process, last)
    recorder.start(running.namespace())
    limit.install()
    running.observe(CellProgress(recorder, limit, running.source), recorder, further, LoopEnds(limit))
    costs = Costs(machine.engine, lambda: len(recorder.iterations)) if with_costs else None
    error: BaseException | None = None
    place: Failed | None = None
    try:
        _to_its_end(running)
    except BaseException as raised:
        error, place = raised, running.failed(raised.__traceback__)
    iterations = len(recorder.iterations)
    repeats = further.are_known()
    with no_automatic_collection():
        recording = recorder.finish(error, place, running.namespace())
        used = [number for number, log in sorted(recording.logs.items()) if log.events or log.start]
        primary = index if index in used or not used else used[0]
        if recording.error is not None and recording.error.device is not None:
            primary = recording.error.device
        view = DeviceView(recording, primary)
        report = report_of(view, most_steps=0)
    ending = FITS if error is None else MEMORY if is_out_of_memory(error) else ERROR
    told = _told(machine.spec.text, running.values, ending, report, view, machine.devices[primary], iterations, repeats)
    flops, moved = (0, 0) if costs is None else costs.of_one()
    cut = limit.left_a_call
    told = replace(told, flops=flops, moved=moved, assumes=counts and repeats, cut=cut)
    return replace(told, grown=limit.grown, growing=limit.growing, left_after=limit.left_after), view, running


def _to_its_end(running: Running) -> None:
    """Raises what the program raises; leaving by ``sys.exit()`` is no error, and a status is one."""
    with suppress(StopRun):
        try:
            running.run()
        except SystemExit as left:
            if left.code not in (None, 0):
                words = left.code if isinstance(left.code, str) else last_words()
                raise RuntimeError(words or f"it exits with {left.code!r}") from left


def _told(
    name: str,
    values: Mapping[str, int],
    ending: str,
    report: ReportData,
    view: DeviceView,
    device: VirtualDevice,
    iterations: int,
    repeats: bool,
) -> Tried:
    failing = failed_row(report)
    at = report.peak if failing is None or ending != MEMORY else failing
    error = report.error
    shares, owners = _shares(view, report.peak.position)
    model = device.model
    outside = model.idle_bytes + model.context_bytes
    kept = kept_of(view)
    return Tried(
        device=name,
        values=dict(values),
        ending=ending,
        capacity=model.total_bytes,
        used=report.peak.peak_reserved + outside,
        allocated=at.allocated,
        reserved=at.reserved,
        categories={category: size for category, size in at.categories.items() if size},
        shares=shares,
        where=report.peak.where,
        iterations=iterations,
        repeats=repeats,
        retries=report.retries,
        line=0 if error is None or error.line is None else error.line,
        statement="" if failing is None else failing.statement.strip().partition("\n")[0],
        iteration=() if failing is None else failing.iteration,
        wanted=0 if error is None else error.requested or 0,
        error="" if error is None else f"{error.type}: {error.message}".splitlines()[0],
        course=_course(view, device, owners, ending == FITS),
        notes=report.notes,
        kept={} if kept is None else kept.activations,
        before=report.checkpoints[0].allocated,
    )


def _shares(view: DeviceView, position: int) -> tuple[tuple[Share, ...], dict[int, int]]:
    """Who holds what at a position, and by the event of each allocation that lives then, the place of its share."""
    places: dict[tuple[str, int, str], int] = {}
    sizes: list[int] = []
    owners: dict[int, int] = {}
    for one in view.timeline.live_at(position):
        facts = view.tensors.facts(one)
        text = facts.statement.strip().partition("\n")[0] or facts.inner
        place = places.setdefault((facts.category, facts.line, text), len(places))
        if place == len(sizes):
            sizes.append(0)
        sizes[place] += one.size
        owners[one.born] = place
    return tuple(Share(*key, sizes[place]) for key, place in places.items()), owners


def _course(view: DeviceView, device: VirtualDevice, owners: Mapping[int, int], whole: bool) -> Course:
    log = view.log
    numbers: dict[int, int] = {}
    steps = []
    sizes: list[int] = []
    for step in Program(log.start, log.events, log.final or ()).steps:
        pool = step.pool_id
        if step.action in (ALLOC, FAILED):
            numbers[step.block] = len(sizes)
            steps.append((True, len(sizes), step.stream, pool))
            sizes.append(step.size)
        elif step.action == FREE:
            steps.append((False, numbers.get(step.block, step.block), step.stream, None))
    model = device.model
    available = model.total_bytes - model.idle_bytes - model.context_bytes
    live = tuple((numbers[event], place) for event, place in owners.items() if event in numbers)
    return Course(tuple(steps), tuple(sizes), live, tuple(log.start), whole, available, model.total_bytes, log.settings)

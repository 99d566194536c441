"""What the bytes of a snapshot file mean: evidence of stacks, frees and sizes, against live cells and what programs hold."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from meaning_programs import PROGRAMS
from torch_versions import BIAS_WORKSPACE

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.ledger import TENANT_CATEGORIES
from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.size_sets import equal_sets
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.loaded import views_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.snapshot.files import read
from gpumem_magic.snapshot.model import Frame

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"
RECORDINGS = sorted(SHARED.glob("*.pickle.gz")) if SHARED.is_dir() else []
MODULE = Frame("/env/site-packages/torch/nn/modules/module.py", "_call_impl", 1700)
OWN = Frame("/home/me/train.py", "<module>", 9)
ENGINE = Frame("??", "torch::autograd::Engine::evaluate_function(...)", 0)


def native(name: str) -> Frame:
    return Frame("??", name, 0)


def as_on_a_gpu(path: Path) -> Path:
    """The backward of a GPU runs on a thread of C++, whose events have no Python frames; a virtual GPU's has the program's."""
    data = pickle.loads(path.read_bytes())
    for trace in data["device_traces"]:
        for event in trace:
            names = [frame["name"] for frame in event.get("frames", ())]
            if "_engine_run_backward" in names:
                event["frames"] = event["frames"][: names.index("_engine_run_backward")]
                if not {"_call_impl", "apply", "unpack_hook"} & {frame["name"] for frame in event["frames"]}:
                    del event["frames"]
    path.write_bytes(pickle.dumps(data))
    return path


# The program, and how many of its four steps come before the recording.
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"own optimizer and modules"}))
def test_a_file_means_what_the_live_cell_meant(name: str, before: int, tmp_path: Path) -> None:
    live, view = recorded(name, before, tmp_path)
    assert_same(live, view)


def test_what_a_programs_own_optimizer_puts_in_the_place_of_a_parameter(tmp_path: Path) -> None:
    live, view = recorded("own optimizer and modules", 0, tmp_path)
    assert_same(live, view)


def assert_same(live: dict[str, int], view: DeviceView) -> None:
    """Each category has the same bytes, but for those that the live cell could not tell: the file may know them by its stacks."""
    file = view.sizes(view.peak[1])
    # (What cuBLASLt keeps has the size of many a tensor, and nothing in a file tells it from one.)
    of_bias = {"workspace": 2 * BIAS_WORKSPACE}
    lost = {what: size - file[what] - of_bias.get(what, 0) for what, size in live.items() if what != "unknown"}
    assert {what: size for what, size in lost.items() if size > 4096} == {}
    gained = sum(max(file[what] - size, 0) for what, size in live.items())
    assert gained <= live["unknown"] + 4096 + 2 * BIAS_WORKSPACE


def recorded(name: str, before: int, folder: Path) -> tuple[dict[str, int], DeviceView]:
    """The live categories at the peak of four steps; and the file's only device."""
    import torch

    import gpumem_magic

    path = folder / "run.pickle"
    with gpumem_magic.measure(device="A100-40GB") as m:
        step = None
        for number in range(4):
            if number == before:
                torch.cuda.memory._record_memory_history(stacks="python")
            step = step or PROGRAMS[name]()
            step()
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
    (view,) = views_of(read(as_on_a_gpu(path)))
    return {what: m.report.peak.categories[what] or 0 for what in TENANT_CATEGORIES}, view


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((), sites.NO_STACK),
        ((OWN,), sites.SCRIPT),
        ((MODULE, OWN), FORWARD),
        ((native("at::empty(long)"),), sites.NATIVE),
        ((native("torch::autograd::generated::BmmBackward0::apply(...)"),), BACKWARD),
        ((native("torch::autograd::AccumulateGrad::apply(...)"),), BACKWARD),
        ((native("at::autocast::cached_cast(...)"), MODULE, OWN), sites.CAST),
        ((native("at::cuda::getCUDABlasLtWorkspace"), MODULE, OWN), sites.WORKSPACE),
        # A compiled backward, and a program's own: Python on the thread of backward.
        (
            (
                Frame("/tmp/torchinductor_me/ab/cabc.py", "call", 80),
                Frame("/env/site-packages/torch/_functorch/_aot_autograd/runtime_wrappers.py", "_backward_impl", 2000),
                Frame("/env/site-packages/torch/autograd/function.py", "apply", 307),
            ),
            BACKWARD,
        ),
        ((Frame("/home/me/ops.py", "f", 3), ENGINE, OWN), BACKWARD),
        # A forward is computed again within it.
        (
            (
                MODULE,
                Frame("/home/me/model.py", "forward", 8),
                Frame("/env/site-packages/torch/utils/checkpoint.py", "unpack_hook", 1120),
            ),
            sites.RECOMPUTED,
        ),
        ((Frame("/env/site-packages/torch/optim/adam.py", "_init_group", 150), OWN), OPTIMIZER),
        ((Frame("/home/me/my_optimizer.py", "step", 20), OWN), OPTIMIZER),
        ((Frame("/env/site-packages/torch/nn/modules/linear.py", "__init__", 100), OWN), sites.PARAMETERS),
        ((Frame("/env/vllm/model_executor/layers/linear.py", "create_weights", 9), OWN), sites.PARAMETERS),
        ((Frame("/env/flexgen/flex_opt.py", "init_weight", 9), OWN), sites.PARAMETERS),
        ((Frame("/env/vllm/worker/cache_engine.py", "_allocate_kv_cache", 9), OWN), sites.CACHE),
        ((Frame("/env/site-packages/transformers/cache_utils.py", "update", 9), MODULE, OWN), sites.CACHE),
        ((Frame("/home/me/model.py", "__init__", 9), OWN), sites.CONSTRUCTOR),
        # A module that is called by its method.
        ((Frame("/home/me/model.py", "forward", 9), OWN), FORWARD),
    ],
)
def test_what_asked_for_memory(frames: tuple[Frame, ...], kind: str) -> None:
    assert sites.site_of(frames) == kind


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((native("c10::free"), native("torch::autograd::SavedVariable::reset_data()"), OWN), sites.SAVED),
        ((native("torch::autograd::generated::MulBackward0::release_variables()"), ENGINE), sites.SAVED),
        ((Frame("/env/site-packages/torch/optim/optimizer.py", "zero_grad", 900), OWN), sites.ZEROED),
        ((Frame("/env/site-packages/torch/amp/autocast_mode.py", "__exit__", 300), OWN), sites.CAST),
        ((native("torch::autograd::Node::operator()"),), BACKWARD),
        ((Frame("/home/me/model.py", "forward", 3), OWN), FORWARD),
        ((OWN,), sites.SCRIPT),
    ],
)
def test_what_let_go_of_it(frames: tuple[Frame, ...], kind: str) -> None:
    assert sites.letting_go(frames) == kind


def test_where_memory_was_let_go_of() -> None:
    held = native("torch::autograd::SavedVariable::reset_data()")
    assert sites.let_go_at((native("THPVariable_clear"), held)) == "torch::autograd::SavedVariable::reset_data"
    assert sites.let_go_at((held, OWN)) == "/home/me/train.py:9 <module>, by torch::autograd::SavedVariable::reset_data"
    assert sites.let_go_at((MODULE, OWN)) == "/home/me/train.py:9 <module>"
    assert sites.let_go_at(()) == ""


def test_sets_of_equal_sizes() -> None:
    model = [40_000_000, *[16_000_000] * 24, *[4_000_000] * 48, 8_000, 8_000]
    for sets in (1, 3, 4):
        assert equal_sets(model * sets) == sets
    assert equal_sets([1 << 20] * 4) == 1, "layers that are alike are no sets"
    assert equal_sets([]) == 1


def test_a_librarys_frame_that_tells_is_shown() -> None:
    stack = (
        Frame("/env/site-packages/torch/nn/modules/linear.py", "forward", 125),
        MODULE,
        Frame("/env/site-packages/transformers/models/llama/modeling_llama.py", "forward", 320),
        MODULE,
        OWN,
    )
    assert sites.folded(stack) == [
        "(2 library frames)",
        "/env/site-packages/transformers/models/llama/modeling_llama.py:320 forward",
        "(1 library frame)",
        "/home/me/train.py:9 <module>",
    ]


def test_a_library_around_compiled_code_tells_nothing() -> None:
    stack = (
        Frame("/tmp/torchinductor_me/ab/cab.py", "call", 80),
        Frame("/env/site-packages/torch/_inductor/output_code.py", "__call__", 650),
        Frame("/env/site-packages/transformers/utils/generic.py", "wrapper", 937),
        OWN,
    )
    assert sites.folded(stack)[-1] == "/home/me/train.py:9 <module>"
    assert not [line for line in sites.folded(stack) if "generic.py" in line]


def one_view(path: Path) -> DeviceView:
    return views_of(read(path))[0]


@pytest.mark.skipif(not RECORDINGS, reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize("path", RECORDINGS, ids=[one.name.partition(".")[0] for one in RECORDINGS])
def test_real_recordings_are_known(path: Path) -> None:
    view = one_view(path)
    position = view.peak[1]
    balance = view.ledger.at([position])[position]
    file = view.recording.file
    assert file is not None
    if any(device.has_frames for device in file.devices):
        assert balance.requested["unknown"] <= 0.05 * sum(balance.requested.values())
    for one in view.timeline.live_at(position):
        why, stack = view.why(one), folded(view.frames_of(one))
        assert why, "each category is explained"
        assert not (stack and "no stack" in why)
        assert not (any("module.py" in line for line in stack) and "outside modules" in why)
    # What a backward let go of as saved was an activation, or what the program put in.
    for allocation, label in zip(view.timeline.allocations, view.labels, strict=True):
        ended = () if allocation.freed is None else view.log.events[allocation.freed].frames
        if allocation.born >= 0 and any("SavedVariable::reset_data" in frame.name for frame in ended):
            kinds = ("activations", "activation_gradients", "inputs", "parameters", "buffers", "gradients", "workspace")
            assert label.category in (*kinds, "kv_cache", "autocast_copies")


@pytest.mark.skipif(not RECORDINGS, reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize(
    "name", ["transformer-2.7b-train-bf16", "transformer-full-step", "transformer-medium-512-training"]
)
def test_adams_states_are_twice_the_parameters(name: str) -> None:
    view = one_view(SHARED / f"{name}.pickle.gz")
    sizes = view.sizes(view.peak[1])
    assert sizes["optimizer_state"] == pytest.approx(2 * sizes["parameters"], rel=0.001)
    if sizes["gradients"] > sizes["parameters"] // 2:
        assert sizes["gradients"] == pytest.approx(sizes["parameters"], rel=0.001)


@pytest.mark.skipif(not RECORDINGS, reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize(
    "name",
    [
        "transformer-forward-b150",
        "transformer-full-step",
        "transformer-medium-512-training",
        "transformer-2.7b-train-bf16",
    ],
)
def test_activations_are_those_that_mosaic_counts(name: str) -> None:
    """Its rule: the first name with "forward" in it, from the inside. It does not tell those from temporaries, nor a workspace;
    and it does not see what the program computes between a forward and a backward."""
    view = one_view(SHARED / f"{name}.pickle.gz")
    theirs = ours = 0
    for one in view.timeline.live_at(view.peak[1]):
        frames = view.frames_of(one)
        label = view.labels[one.index].category
        named = next((frame for frame in frames if "forward" in frame.name or "param" in frame.name), None)
        in_forward = named is not None and "forward" in named.name and sites.site_of(frames) != OPTIMIZER
        if in_forward and label != "workspace":
            theirs += one.requested
        if label in ("activations", "autocast_copies", "temporaries") and sites.site_of(frames) in (
            FORWARD,
            sites.CAST,
        ):
            ours += one.requested
    assert theirs > 0
    assert ours == pytest.approx(theirs, rel=0.01)


def test_grounds_are_of_the_file_only(tmp_path: Path) -> None:
    """What was saved with its labels says nothing of stacks."""
    _, view = recorded("inference", 0, tmp_path)
    assert set(view.attribution.grounds) | set(view.attribution.reasons) == set(range(len(view.labels)))
    words: Any = json.dumps(sorted(set(view.attribution.grounds.values())))
    assert "None" not in words

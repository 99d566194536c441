"""Names of virtual devices: what is understood, what is refused and how."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.units import GIB, MIB
from gpumem_magic.virtual.card.catalog import (
    CATALOG,
    MAX_BYTES,
    DeviceSpec,
    GpuModel,
    RealDevice,
    UnknownDevice,
    bus_id,
    describe,
    device_uuid,
    parse,
    parse_size,
)

NAMES = [
    "T4",
    "V100-16GB",
    "V100-32GB",
    "P100",
    "L4",
    "L40S",
    "A100-40GB",
    "A100-80GB",
    "H100",
    "H200",
    "B200",
    "RTX2080Ti",
    "RTX3060",
    "RTX3070",
    "RTX3080",
    "RTX3090",
    "RTX4060",
    "RTX4070",
    "RTX4080",
    "RTX4090",
    "RTX5090",
    "RTX-PRO-6000",
    "RTX-PRO-5000",
    "A6000",
    "A10G",
    "TITAN-RTX",
    "colab-2021",
]


def one(text: str) -> GpuModel:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    (model,) = spec.models
    return model


def test_all_names_are_known() -> None:
    assert set(NAMES) == set(CATALOG)
    for name in NAMES:
        assert one(name).key == name


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_consistent(name: str) -> None:
    model = CATALOG[name]
    assert model.total_bytes <= model.smi_total_bytes
    assert model.idle_bytes + model.context_bytes < model.total_bytes / 8
    assert model.driver_reserved_bytes == model.smi_total_bytes - model.total_bytes
    assert (
        model.shared_memory_per_block <= model.shared_memory_per_block_optin <= model.shared_memory_per_multiprocessor
    )
    assert model.max_threads_per_multiprocessor % model.warp_size == 0
    assert ("estimate" in model.note) == model.context_is_estimate
    if model.capability[0] >= 9:
        assert model.cublas_workspace_bytes == 32 * MIB
    elif name != "colab-2021":
        assert model.cublas_workspace_bytes == 8_519_680


def test_colab_2021_is_the_device_of_the_investigation() -> None:
    model = one("colab-2021")
    assert model.smi_total_bytes // MIB == 16160
    assert f"{model.total_bytes / GIB:.2f}" == "15.78"
    assert model.idle_bytes == 2 * MIB
    assert model.context_bytes == 1372 * MIB
    assert model.cublas_workspace_bytes == 0
    assert model.oom_text_version == "1.8"
    assert model.name == "Tesla V100-SXM2-16GB"
    assert "P100" in model.note
    assert all(CATALOG[name].oom_text_version is None for name in NAMES if name != "colab-2021")


@pytest.mark.parametrize("text", ["t4", " T4 ", "rtx 3090", "RTX-4090", "a100_40gb", "COLAB2021", "2 x t4", "2XT4"])
def test_spelling_is_free(text: str) -> None:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    assert len(spec.models) == (2 if text[0] == "2" else 1)


@pytest.mark.parametrize(
    ("text", "key", "note"),
    [
        ("V100", "V100-16GB", "V100 is taken as V100-16GB; there is V100-32GB, too."),
        ("3060", "RTX3060", "3060 is taken as RTX3060."),
        ("2080 Ti", "RTX2080Ti", "2080 Ti is taken as RTX2080Ti."),
        ("2xa100,context=1MiB", "A100-40GB", "a100 is taken as A100-40GB; there is A100-80GB, too."),
        ("H100", "H100", ""),
        ("RTX 4090", "RTX4090", ""),
        ("virtual:24GiB", "virtual:24GiB", ""),
    ],
)
def test_a_name_without_its_memory_takes_the_usual_card_and_says_so(text: str, key: str, note: str) -> None:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    assert {model.key for model in spec.models} == {key}
    assert spec.note == note


def test_options_apply_to_every_device() -> None:
    spec = parse("2xT4, context=350MiB ,total=14GiB,idle=3MiB,name=Mine")
    assert isinstance(spec, DeviceSpec)
    assert spec.text == "2xT4, context=350MiB ,total=14GiB,idle=3MiB,name=Mine"
    assert len(spec.models) == 2
    for model in spec.models:
        assert model.context_bytes == 350 * MIB
        assert not model.context_is_estimate
        assert model.total_bytes == 14 * GIB
        assert model.driver_reserved_bytes == CATALOG["T4"].driver_reserved_bytes
        assert model.idle_bytes == 3 * MIB
        assert model.name == "Mine"
        assert model.capability == (7, 5)


def test_a_device_of_any_size() -> None:
    model = one("virtual:24GiB")
    assert model.total_bytes == model.smi_total_bytes == 24 * GIB
    assert model.capability == (8, 0)
    assert "24 GiB" in model.name
    assert "no such GPU" in model.note
    assert one("virtual:1.5GiB").key == "virtual:1.5GiB"
    assert one(model.key) == model
    spec = parse("3xvirtual:512MiB")
    assert isinstance(spec, DeviceSpec)
    assert [m.total_bytes for m in spec.models] == [512 * MIB] * 3


@pytest.mark.parametrize(("text", "index"), [("cuda", None), ("cuda:0", 0), ("CUDA:12", 12), (" cuda:1 ", 1)])
def test_real_devices_are_recognised(text: str, index: int | None) -> None:
    assert parse(text) == RealDevice(text.strip(), index)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Known: T4"),
        ("K80", "Known: T4"),
        ("A1", "A100-40GB or A100-80GB"),
        ("V10", "did you mean V100-16GB or V100-32GB"),
        ("colab", "did you mean colab-2021"),
        ("100", "did you mean P100 or H100"),
        ("8 GB", "for a card of 8 GB write virtual:8GiB"),
        ("cola-2021", "did you mean colab-2021"),
        ("cuda:1,context=1MiB", "virtual devices only"),
        ("cuda:x", "Known"),
        ("0xT4", "1 to 64"),
        ("65xT4", "1 to 64"),
        ("99999999999999999999xT4", "1 to 64"),
        ("2x", "Known"),
        ("virtual", "virtual:24GiB"),
        ("virtual:", "is not a size"),
        ("virtual:24", "write a number and B"),
        ("virtual:24GB", "write GiB"),
        ("virtual:-3GiB", "is not a size"),
        ("virtual:0GiB", "too small"),
        ("virtual:9TiB", "the most that is emulated"),
        ("virtual:1e3GiB", "is not a size"),
        ("T4,", "unknown option"),
        ("T4,context", "write context="),
        ("T4,context=", "write context="),
        ("T4,contxt=4MiB", "write context="),
        ("T4,context=400", "write a number and B"),
        ("T4,context=400MB", "write MiB"),
        ("T4,context=1MiB,context=2MiB", "twice"),
        ("T4,context=20GiB", "leave nothing"),
        ("T4,total=1MiB", "too small"),
        ("T4,name=caf\u00e9", "ASCII"),
        ("T4,name=" + "x" * 96, "at most 95"),
    ],
)
def test_bad_input_is_refused_in_one_helpful_line(text: str, says: str) -> None:
    with pytest.raises(UnknownDevice) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_every_known_name_is_in_the_refusal_and_in_the_list() -> None:
    with pytest.raises(UnknownDevice) as caught:
        parse("nothing like it")
    for name in NAMES:
        assert name in str(caught.value)
        assert name in describe()
    assert "P100" in describe().split("colab-2021:")[1]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512B", 512), ("1KiB", 1024), ("1.5 mib", 3 * MIB // 2), (".5GiB", GIB // 2), ("1TiB", 1024 * GIB)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, MAX_BYTES))
def test_every_size_in_bytes_is_read_back(size: int) -> None:
    assert parse_size(f"{size}B") == size


PIECES = [
    "T4",
    "virtual:",
    "24GiB",
    "cuda",
    ":",
    "2x",
    ",",
    "context=",
    "total=",
    "name=",
    "0",
    "64MiB",
    "GB",
    " ",
    "-",
    "\n",
    "x",
]


@given(st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
def test_any_text_is_either_understood_or_refused(text: str) -> None:
    try:
        parsed = parse(text)
    except UnknownDevice:
        return
    if isinstance(parsed, DeviceSpec):
        assert parsed.models
        assert all(0 <= model.context_bytes < model.total_bytes <= model.smi_total_bytes for model in parsed.models)


def test_uuid_and_bus_id() -> None:
    assert device_uuid("Tesla T4", 0) == device_uuid("Tesla T4", 0)
    many = [device_uuid(name, index) for name in ("Tesla T4", "NVIDIA L4") for index in range(4)]
    assert len(set(many)) == 8
    assert all(uuid.startswith("GPU-") and len(uuid) == 40 for uuid in many)
    assert bus_id(0) == "00000000:00:04.0"
    assert len({bus_id(index) for index in range(64)}) == 64
    assert all(int(bus_id(index).split(":")[2][:2], 16) < 32 for index in range(64))


def test_these_modules_import_neither_torch_nor_pynvml() -> None:
    code = (
        "import sys, gpumem_magic.virtual.card.catalog, gpumem_magic.virtual.card.smi, gpumem_magic.virtual.card.nvml\n"
        "print([name for name in ('torch', 'pynvml', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_another_version_brings_its_context_and_its_workspaces() -> None:
    old = one("V100-16GB,torch=1.10")
    assert (old.context_bytes, old.cublas_workspace_bytes, old.torch_version) == (1341 * MIB, 0, "1.10")
    assert not old.context_is_estimate
    assert one("H100,torch=2.6").cublas_workspace_bytes == 32 * MIB
    assert one("A100-80GB,loading=eager").context_bytes == 942 * MIB
    assert one("A100-80GB,torch=2.1,loading=lazy").context_bytes == 481 * MIB


def test_a_context_that_is_written_wins_over_that_of_the_version() -> None:
    for text in ("T4,context=123MiB,torch=1.10", "T4,torch=1.10,context=123MiB"):
        assert one(text).context_bytes == 123 * MIB


@pytest.mark.parametrize(
    "text", ["T4,torch=new", "T4,torch=2", "T4,loading=fast", "T4,torch=1.10,loading=lazy", "T4,torch=2.6,torch=2.7"]
)
def test_versions_and_loading_that_mean_nothing_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UnknownDevice) as failure:
        parse(text)
    assert "\n" not in str(failure.value)

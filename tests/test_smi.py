"""`nvidia-smi` for virtual GPUs, run as people run it: by a shell, through pipes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_magic.units import MIB
from gpumem_magic.virtual.card import smi as smi_module
from gpumem_magic.virtual.card import smi_script
from gpumem_magic.virtual.card.catalog import DeviceSpec, GpuModel, device_uuid, parse
from gpumem_magic.virtual.card.generations import wheels
from gpumem_magic.virtual.card.smi import VirtualSmi

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the program is tried in a POSIX shell")


class FakeDevice:
    def __init__(self, model: GpuModel, index: int) -> None:
        self.model, self.index, self.uuid = model, index, device_uuid(model.name, index)
        self.used = model.idle_bytes

    def used_bytes(self) -> int:
        return self.used

    def process_bytes(self) -> int:
        return self.used - self.model.idle_bytes


def devices(text: str) -> list[FakeDevice]:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    return [FakeDevice(model, index) for index, model in enumerate(spec.models)]


def shell(command: str) -> tuple[str, int]:
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout, done.returncode


@pytest.fixture
def colab() -> Iterator[VirtualSmi]:
    with VirtualSmi(devices("colab-2021")) as smi:
        yield smi


@pytest.fixture
def two() -> Iterator[VirtualSmi]:
    with VirtualSmi(devices("2xT4")) as smi:
        yield smi


# --- the investigation's pipe ---


def test_the_investigation_pipe(colab: VirtualSmi) -> None:
    pipe = "nvidia-smi | grep MiB | awk '{print $9, $10, $11}'"
    assert shell(pipe) == ("2MiB / 16160MiB\n", 0)
    colab.update(0, 3769 * MIB + 123)
    assert shell(pipe) == ("3769MiB / 16160MiB\n", 0)
    assert "3769MiB / 16160MiB" in shell("nvidia-smi | grep MiB")[0]
    assert shell("nvidia-smi | grep MiB | awk '{print $9$10$11}'") == ("3769MiB/16160MiB\n", 0)


def test_sizes_are_cut_off_as_nvidia_smi_does() -> None:
    # A P100 has 16280.9 MiB, and nvidia-smi shows 16280.
    with VirtualSmi(devices("P100")) as smi:
        smi.update(0, 3770 * MIB - 1)
        assert "3769MiB / 16280MiB" in shell("nvidia-smi")[0]


# --- the table ---


@pytest.mark.parametrize("text", ["T4", "2xA100-80GB", "H200", "64xvirtual:8TiB", f"T4,name={'long name ' * 9}x"])
@pytest.mark.parametrize("used", [0, 3769 * MIB, (8 << 40) - 1])
def test_every_line_of_the_table_has_the_same_width(text: str, used: int) -> None:
    with VirtualSmi(devices(text)) as smi:
        smi.update(0, used)
        out, status = shell("nvidia-smi")
    assert status == 0
    head, *rows = out.splitlines()
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4} {7}", head)
    # One blank line stands between the two tables, without borders.
    assert [row for row in rows if len(row) != 91] == [""]
    assert out.count("MiB") == 2 * len(devices(text))


def test_the_table_says_that_it_is_virtual_and_keeps_its_layout(colab: VirtualSmi) -> None:
    rows = shell("nvidia-smi")[0].splitlines()
    assert "virtual (gpumem_magic)" in rows[2]
    assert re.search(r"Driver Version: [\d.]+ +CUDA Version: [\d.]+ +\|$", rows[2])
    # The columns' borders stand under one another.
    borders = [index for index, sign in enumerate(rows[3]) if sign in "|+"]
    for row in rows[3:12]:
        assert [index for index, sign in enumerate(row) if sign in "|+"] == borders
    assert "Tesla V100-SXM2-16GB" in rows[8]
    # Nothing runs on it.
    assert rows[9].split("|")[3] == "      0%      Default "
    assert "No running processes found" in rows[-2]
    # As driver 580's printed it on an H100.
    assert rows[3] == f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    assert rows[-5:-3] == [
        "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
        "|        ID   ID                                                               Usage      |",
    ]


def test_a_query_is_a_table_of_commas_unless_it_is_said_otherwise(two: VirtualSmi) -> None:
    assert shell("nvidia-smi --query-gpu=index,name") == shell("nvidia-smi --query-gpu=index,name --format=csv")
    assert shell("nvidia-smi -q -d MEMORY")[0].splitlines()[3].startswith(f"Timestamp{' ' * 46}: ")


# --- lists and queries ---


def test_list(two: VirtualSmi) -> None:
    first, second = (device_uuid("Tesla T4", index) for index in (0, 1))
    assert shell("nvidia-smi -L") == (f"GPU 0: Tesla T4 (UUID: {first})\nGPU 1: Tesla T4 (UUID: {second})\n", 0)


def test_csv_forms(two: VirtualSmi) -> None:
    two.update(1, 1000 * MIB)
    query = "nvidia-smi --query-gpu=index,name,memory.total,memory.used,memory.free,utilization.gpu --format"
    assert shell(f"{query}=csv")[0].splitlines() == [
        "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%]",
        "0, Tesla T4, 15360 MiB, 0 MiB, 15095 MiB, 0 %",
        "1, Tesla T4, 15360 MiB, 1000 MiB, 14095 MiB, 0 %",
    ]
    assert shell(f"{query}=csv,noheader")[0].splitlines()[0] == "0, Tesla T4, 15360 MiB, 0 MiB, 15095 MiB, 0 %"
    assert shell(f"{query} csv,nounits,noheader -i 1") == ("1, Tesla T4, 15360, 1000, 14095, 0\n", 0)
    assert shell("nvidia-smi --format=csv,noheader,nounits --query-gpu memory.used") == ("0\n1000\n", 0)


def test_other_fields(two: VirtualSmi) -> None:
    out, status = shell(
        "nvidia-smi --query-gpu=gpu_name,gpu_uuid,gpu_bus_id,pci.domain,pci.bus,pci.device,count,compute_cap,"
        "driver_version,timestamp,pstate,power.draw,temperature.gpu --format=csv -i 1"
    )
    head, row = out.splitlines()
    assert status == 0
    assert head.startswith(
        "name, uuid, pci.bus_id, pci.domain, pci.bus, pci.device, count, compute_cap, driver_version, "
    )
    assert head.endswith("timestamp, pstate, power.draw [W], temperature.gpu")
    uuid = device_uuid("Tesla T4", 1)
    assert row.startswith(
        f"Tesla T4, {uuid}, 00000000:00:05.0, 0x0000, 0x00, 0x05, 2, 7.5, {smi_script.DRIVER_VERSION}, "
    )
    assert re.search(r", \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}, \[N/A\], \[N/A\], \[N/A\]$", row)


def test_every_field_that_is_listed_can_be_asked_for(colab: VirtualSmi) -> None:
    fields = shell("nvidia-smi --help-query-gpu")[0].split()
    out, status = shell(f"nvidia-smi --query-gpu={','.join(fields)} --format=csv,noheader")
    assert status == 0
    assert len(out.split(", ")) == len(fields) > 40


def test_no_process_is_listed_as_in_a_container(colab: VirtualSmi) -> None:
    colab.update(0, 4000 * MIB)
    query = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
    assert shell(query) == ("pid, process_name, used_gpu_memory [MiB]\n", 0)
    assert shell(f"{query},noheader") == ("", 0)


def test_memory_section(two: VirtualSmi) -> None:
    two.update(1, 5 * MIB)
    out, status = shell("nvidia-smi -q -d MEMORY -i 1")
    assert status == 0
    found = dict(re.findall(r"^ {8}(\w+) +: (\d+) MiB$", out, re.MULTILINE))
    assert found == {"Total": "15360", "Reserved": "264", "Used": "5", "Free": "15090"}
    assert "virtual" in out
    assert device_uuid("Tesla T4", 0) in shell("nvidia-smi -q")[0]


def test_devices_are_chosen_by_index_uuid_and_bus(two: VirtualSmi) -> None:
    want = shell("nvidia-smi -L -i 1")[0]
    assert want.startswith("GPU 1:")
    for name in (device_uuid("Tesla T4", 1), "00000000:00:05.0", "0000:00:05.0"):
        assert shell(f"nvidia-smi -L --id={name}") == (want, 0)
    assert shell("nvidia-smi -L -i 1,0")[0] == shell("nvidia-smi -L")[0]


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("--query-gpu=memory.usd --format=csv", 2, 'Field "memory.usd" is not a valid field to query.\n'),
        ("--query-compute-apps=cpu --format=csv", 2, 'Field "cpu" is not a valid field to query.\n'),
        ("--query-gpu=memory.used --format=json", 2, "Invalid format: json"),
        ("--frobnicate", 255, "Option --frobnicate is not recognized"),
        ("--help=yes", 255, "is not recognized"),
        ("-i", 2, "needs a value"),
        ("-i 2", 6, "No devices were found"),
        ("-l 0", 2, "Invalid loop interval"),
        ("-lms soon", 2, "Invalid loop interval"),
        ("-d MEMORY", 2, "Invalid combination"),
        ("-q -d NONSENSE", 2, "NONSENSE"),
        ("dmon", 3, "not available on a virtual GPU"),
        ("-q -x", 3, "not available on a virtual GPU"),
        ("-pl 200", 3, "not available on a virtual GPU"),
    ],
)
def test_errors(two: VirtualSmi, arguments: str, status: int, says: str) -> None:
    out, got = shell(f"nvidia-smi {arguments}")
    assert got == status
    assert says in out
    assert "Traceback" not in out


def test_help_and_version(colab: VirtualSmi) -> None:
    for flag in ("-h", "--help"):
        out, status = shell(f"nvidia-smi {flag}")
        assert (status, "virtual" in out, "--query-gpu=" in out) == (0, True, True)
    assert smi_script.DRIVER_VERSION in shell("nvidia-smi --version")[0]


def test_a_reader_that_leaves_early_sees_no_complaint(colab: VirtualSmi) -> None:
    # `shell` checks that nothing is written to stderr.
    out, status = shell("nvidia-smi --query-gpu=memory.used --format=csv -lms 5 | head -3")
    assert out == "memory.used [MiB]\n2 MiB\n2 MiB\n"
    assert status == 0


def test_a_loop_follows_the_figures_and_ends_with_the_device() -> None:
    smi = VirtualSmi(devices("colab-2021"))
    smi.install()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2\n"
        smi.update(0, 7 * MIB)
        assert any(row == "7\n" for row in process.stdout)
        smi.remove()
        assert "is off" in process.stdout.read()
        assert process.wait() == 9


def test_ctrl_c_ends_a_loop(colab: VirtualSmi) -> None:
    with subprocess.Popen(
        ["nvidia-smi", "-L", "-l", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs hand on that they ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert process.returncode == 130
        assert error == ""


# --- installing and removing ---


def test_the_path_is_restored_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}::/nowhere:")
    before = os.environ["PATH"]
    smi = VirtualSmi(devices("T4"))
    smi.install()
    directory = smi.directory
    assert directory is not None
    assert os.environ["PATH"] == f"{directory}:{before}"
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    smi.install()
    assert smi.directory == directory
    smi.remove()
    smi.remove()
    assert os.environ["PATH"] == before
    assert not os.path.exists(directory)
    smi.update(0, 5)


def test_a_missing_path_is_missing_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    with VirtualSmi(devices("T4")):
        assert shell("nvidia-smi | grep -c MiB") == ("1\n", 0)
    assert "PATH" not in os.environ


def test_what_the_user_added_to_the_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with VirtualSmi(devices("T4")):
        os.environ["PATH"] = f"/opt/mine:{os.environ['PATH']}:/opt/other"
    assert os.environ["PATH"] == "/opt/mine:/usr/bin:/bin:/opt/other"


def test_two_at_once_come_apart_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    first, second = VirtualSmi(devices("T4")), VirtualSmi(devices("L4"))
    first.install()
    second.install()
    assert "NVIDIA L4" in shell("nvidia-smi -L")[0]
    first.remove()
    assert "NVIDIA L4" in shell("nvidia-smi -L")[0]
    second.remove()
    assert os.environ["PATH"] == "/usr/bin:/bin"


def test_an_install_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def used_bytes(self) -> int:
            raise RuntimeError("no figure")

    monkeypatch.setattr(smi_module.tempfile, "gettempdir", lambda: str(tmp_path))
    before = os.environ["PATH"]
    smi = VirtualSmi([Broken(devices("T4")[0].model, 0)])
    with pytest.raises(RuntimeError, match="no figure"):
        smi.install()
    assert os.environ["PATH"] == before
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_run_programs_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noexec, colon, good = tmp_path / "noexec", tmp_path / "a:b", tmp_path / "good"
    for place in (noexec, colon, good):
        place.mkdir()
    monkeypatch.setattr(smi_module.tempfile, "gettempdir", lambda: str(noexec))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(colon))
    monkeypatch.setenv("HOME", str(good))
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "noexec" not in str(path) and allowed(path, mode))
    with VirtualSmi(devices("T4")) as smi:
        assert smi.directory is not None
        assert Path(smi.directory).parent == good
    assert list(noexec.iterdir()) == []
    monkeypatch.setenv("HOME", str(noexec))
    with pytest.raises(OSError, match="no place for a program"):
        VirtualSmi(devices("T4")).install()


@pytest.mark.parametrize("folder", ["with space", "x" * 130])
def test_an_interpreter_with_an_awkward_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    (place / "python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    with VirtualSmi(devices("2xT4")) as smi:
        assert smi.directory is not None
        assert Path(smi.directory, "nvidia-smi").read_text().startswith("#!/bin/sh\n")
        assert shell("nvidia-smi --query-gpu='index, memory.used' --format=csv,noheader") == ("0, 0 MiB\n1, 0 MiB\n", 0)


def test_the_users_environment_and_folder_do_not_reach_the_program(
    colab: VirtualSmi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("time.py", "smi_script.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert shell("nvidia-smi | grep -c MiB") == ("1\n", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_files_of_the_program_have_the_numbers_that_they_have_without_it(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    os.close(second)
    with VirtualSmi(devices("T4")) as smi:
        again = os.open(tmp_path, os.O_RDONLY)
        assert again == second
        assert fcntl.fcntl(smi._file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for file in (first, again):
        os.close(file)


def test_a_forked_child_neither_writes_nor_cleans_up() -> None:
    program = f"""
import os, sys
sys.path.insert(0, {os.fspath(Path(__file__).parents[1])!r})
from gpumem_magic.virtual import gpu
smi = gpu.turn_on("colab-2021").smi
child = os.fork()
if child == 0:
    smi.update(0, 99 << 20)
    smi.remove()
    sys.exit(0)  # runs the exit handlers that it has inherited
assert os.waitpid(child, 0)[1] == 0
os.system("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits")
print(smi.directory)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    used, directory = done.stdout.split()
    assert used == "2"
    # ... and the parent cleaned up when it ended.
    assert not os.path.exists(directory)


# --- the state file ---


def test_a_torn_record_is_read_again(tmp_path: Path) -> None:
    model = devices("T4")[0].model
    whole = smi_script.pack(5 * MIB, model.smi_total_bytes, 0, model.capability, "GPU-x", "00000000:00:04.0", "T")
    state = tmp_path / "state"
    state.write_bytes(smi_script.pack_used(6 * MIB)[:8] + whole[8:])
    with pytest.raises(OSError, match="unreadable"):
        smi_script.read_gpus(str(state))
    state.write_bytes(whole)
    (gpu,) = smi_script.read_gpus(str(state))
    assert (gpu.used, gpu.total, gpu.capability, gpu.uuid, gpu.name) == (5, 15360, "7.5", "GPU-x", "T")


def test_readers_see_whole_figures_while_a_thread_writes(two: VirtualSmi) -> None:
    assert two.directory is not None
    state = os.path.join(two.directory, "state")
    values = (0x0102030405 * MIB, 0x00FF00FF00 * MIB)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for value in values:
                two.update(1, value)

    thread = threading.Thread(target=write)
    two.update(1, values[0])
    thread.start()
    try:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            gpus = smi_script.read_gpus(state)
            assert gpus[1].used * MIB in values
            assert gpus[0].used == 0
    finally:
        stop.set()
        thread.join()


def test_the_driver_runs_what_every_wheel_was_built_for() -> None:
    built = [wheels((2, minor)) for minor in range(1, 14)]
    assert all(one is not None for one in built)
    newest = max(tuple(map(int, one.cuda.split("."))) for one in built if one is not None)
    assert newest <= tuple(map(int, smi_script.CUDA_VERSION.split(".")))

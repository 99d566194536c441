"""`benchmarks/recordings`: a program out of a repository, run once and compared with each of its recordings."""

from __future__ import annotations

import hashlib
import json
import runpy
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import warm

from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, Block, Segment

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"
PROGRAM = """
import torch
torch.cuda.memory._record_memory_history()
x = torch.zeros(1000, device="cuda")
torch.cuda.memory._dump_snapshot("first.pickle")
y = torch.zeros(SIZE, device="cuda")
torch.cuda.memory._dump_snapshot("second.pickle")
"""


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return runpy.run_path(str(FOLDER / "__main__.py"), run_name="recordings")


def commit(repository: Path, **files: bytes) -> str:
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    if not repository.exists():
        repository.mkdir(parents=True)
        subprocess.run([*git, "init", "-q"], check=True)
    for name, content in files.items():
        (repository / f"{name.replace('_', '.')}").write_bytes(content)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_one_run_is_compared_with_all_of_its_recordings(tool: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "someone" / "nets"
    case: dict[str, Any] = {
        "repository": "someone/nets", "script": "program.py", "arguments": [], "device": "T4",
        "change": [["SIZE", "2000"]], "recorded_at": "HEAD", "commit": commit(place, program_py=PROGRAM.encode()),
    }  # fmt: skip
    written, _ = tool["snapshots"]([case], tmp_path, tmp_path / "scratch")
    real = [path.read_bytes() for path in written]
    commit(place, first_pickle=real[0], second_pickle=real[1])
    recordings = [
        {"recording": name, "file": f"{name}.pickle", "sha256": hashlib.sha256(content).hexdigest(), "dump": number}
        for number, (name, content) in enumerate(zip(("first", "second"), real, strict=True), 1)
    ]
    other = {**recordings[1], "recording": "changed since", "sha256": "0"}
    cases = [{**case, **one} for one in (*recordings, other)]
    found = [result for _, result in tool["run"](cases, tmp_path, tmp_path)]
    assert [len(result.pairing.a) for result in found[:2]] == [1, 2]
    assert [result.pairing.matched for result in found[:2]] == [1.0, 1.0]
    assert "checksum" in str(found[2])
    rows = [list(tool["row_of"](result).values())[:3] for result in found[:2]]
    assert rows == [["someone: first", "T4", "1"], ["someone: second", "T4", "2"]]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"change": [["no such line", ""]]}, "no such line"),
        ({"packages": {"torch": "0.1"}}, "it needs torch 0.1"),
        (
            {"change": [["import torch", "import os; os.write(2, b'a warning'); os.kill(os.getpid(), 9)"]]},
            "ended by signal 9",
        ),
    ],
)
def test_what_cannot_be_run_is_left_out_with_the_reason(
    tool: dict[str, Any], tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    text = PROGRAM.replace("SIZE", "1").encode()
    case = {
        "repository": "someone/nets", "script": "program.py", "arguments": [], "device": "T4", "recording": "none",
        "commit": commit(tmp_path / "someone" / "nets", program_py=text), **more,
    }  # fmt: skip
    [(_, found)] = tool["run"]([case], tmp_path, tmp_path)
    assert isinstance(found, tool["Skip"])
    assert why in str(found)


PROFILED = """
import torch
x = torch.zeros(1000, device="cuda")
with torch.profiler.profile(profile_memory=True) as profiler:
    y = torch.zeros(2000, device="cuda")
    del x
profiler.export_chrome_trace("trace.json")
print(profiler.key_averages().table())
"""


def test_what_the_profiler_traces_is_compared_with_a_trace(tool: dict[str, Any], tmp_path: Path) -> None:
    """4,000 bytes are there before, 8,000 are made: blocks of 4,096 and 8,192."""
    events = [{"Addr": 2, "Bytes": 8192}, {"Addr": 1, "Bytes": -4096}]
    made = [{"name": "[memory]", "args": {"Device Type": 1, "Device Id": 0, **one}} for one in events]
    trace = json.dumps({"traceEvents": made}).encode()
    repository = tmp_path / "somebody" / "program"
    head = commit(repository, **{"program.py": PROFILED.encode(), "trace.json": trace})
    case = {
        "recording": "trace", "sha256": hashlib.sha256(trace).hexdigest(), "repository": "somebody/program", "commit": head,
        "file": "trace.json", "script": "program.py", "arguments": [], "trace": True, "device": "T4",
    }  # fmt: skip
    ((_, result),) = tool["run"]([case], tmp_path, tmp_path)
    assert (result.pairing.matched, result.pairing.freed_alike) == (1.0, 1)
    assert (result.real.growth.end, result.virtual.growth.end) == (4096, 4096)


def test_snapshots_without_a_history_are_compared_block_by_block(tool: dict[str, Any]) -> None:
    """Two of three blocks have a partner of the bytes that were asked for, and one of two segments lies in both."""
    state, result = tool["states"].State, tool["StateResult"]

    def segment(address: int, *blocks: tuple[int, int]) -> Segment:
        """(size, requested) of its blocks; nothing was requested for a free one."""
        places = [address + sum(size for size, _ in blocks[:number]) for number in range(len(blocks))]
        made = (
            Block(place, size, asked, ACTIVE if asked else INACTIVE)
            for place, (size, asked) in zip(places, blocks, strict=True)
        )
        return Segment(0, address, sum(size for size, _ in blocks), 0, "small", tuple(made))

    both = segment(0, (512, 500), (1024, 1000), (2**21 - 1536, 0))
    real = state((both, segment(1 << 30, (2**21, 2**21))))
    virtual = state(
        (segment(1 << 31, *((block.size, block.requested_size) for block in both.blocks)), segment(0, (2**20, 2**20)))
    )
    case = {"repository": "someone/nets", "recording": "moment", "device": "T4,torch=2.2"}
    *row, day = tool["row_of"](result(case, real, virtual, 1.0)).values()
    assert row == ["someone: moment", "T4, 2.2", "3", "66.67 %", "-49.964 %", "-25.000 %", "50.0 %"]
    assert day == date.today().isoformat()
    assert list(tool["told"](result(case, real, virtual, 1.0), 1))[-2:] == [
        "only in A      1 x      2,097,152 bytes",
        "only in B      1 x      1,048,576 bytes",
    ]

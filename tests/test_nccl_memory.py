"""What NCCL takes beside PyTorch's allocator: sizes worked out by hand from its source, and programs on virtual GPUs."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

from gpumem_magic import cli
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card.models import CATALOG
from gpumem_magic.virtual.card.nccl import Card, Communicator, Seat, Settings

MIB = 1 << 20
T4, L4, V100, A100, H100, B200 = Card(75, 0), Card(89, 0), Card(70, 6), Card(80, 12), Card(90, 18), Card(100, 18)
LATE = Settings.of({})
ALL_AT_ONCE = Settings.of({"NCCL_CUMEM_ENABLE": "0"})

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)


@pytest.mark.parametrize(
    ("card", "place", "count"),
    [
        # Six rings of 40 GB/s use 12 links of 20; they are cut in two, and doubled.
        (A100, Seat(8, 0, 1), 24),
        (A100, Seat(2, 0, 1), 24),
        # Six of 60 use most of 18 links of 20.6.
        (H100, Seat(8, 0, 1), 24),
        # Eight of 90.
        (B200, Seat(8, 0, 1), 32),
        # Three of 40, cut in two.
        (V100, Seat(8, 0, 1), 12),
        # One ring of 12 GB/s on PCI Express 3.0, two on 4.0.
        (T4, Seat(2, 0, 1), 2),
        (L4, Seat(2, 0, 1), 4),
        # Between computers eight adapters have a ring of 45 each, one adapter has one of 48, cut in two.
        (H100, Seat(8, 3, 16), 16),
        (H100, Seat(1, 0, 8), 4),
        (A100, Seat(8, 3, 16), 16),
        # Alone nothing limits them.
        (T4, Seat(1, 0, 1), 64),
    ],
)
def test_how_many_channels_there_are(card: Card, place: Seat, count: int) -> None:
    assert Communicator(card, place, LATE).channels == count


def test_settings_change_the_number_of_channels() -> None:
    fewer = Settings.of({"NCCL_MAX_NCHANNELS": "2"})
    more = Settings.of({"NCCL_MIN_NCHANNELS": "32"})
    assert Communicator(A100, Seat(8, 0, 1), fewer).channels == 2
    assert Communicator(T4, Seat(2, 0, 1), more).channels == 32
    # The adding switch of Hopper has 16 of its own.
    assert Communicator(H100, Seat(8, 0, 1), fewer).channels == 16
    off = Settings.of({"NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0"})
    assert Communicator(H100, Seat(8, 0, 1), off).channels == 2


def test_published_groups_of_a100() -> None:
    """NVIDIA/nccl's issue 964: 544 MiB with two of four cards, 688 with three or four; all at once, without pages of 2 MiB."""
    # 2 for small blocks; 32 channels of 16 chunks of 512 KiB; 24 with 6 to send and 6 to receive.
    assert Communicator(A100, Seat(2, 0, 1), ALL_AT_ONCE).collective(is_sum=True) == (2 + 256 + 24 * 12) * MIB
    # The first of a chain has one neighbour, from which it receives as well.
    for here in (3, 4):
        one = Communicator(A100, Seat(here, 0, 1), ALL_AT_ONCE)
        assert one.collective(is_sum=True) == (2 + 256 + 24 * 12 + 24 * 6) * MIB
        assert one.least == one.most == one.taken
        assert one.collective() == one.between_two([], sends=True, receives=True) == 0


def test_a_ring_a_tree_and_the_switch_come_with_what_is_sent_first() -> None:
    one = Communicator(H100, Seat(8, 3, 1), LATE)
    # Three blocks for each of 32 channels and two more; one for each of 24 and one more for the switch.
    begun = (3 * 32 + 2 + 24 + 1) * 2 * MIB
    # LL 512 KiB, LL128 4,915,200, Simple 4 MiB: 10 MiB in pages, and a page to send.
    ring = 24 * (10 + 2) * MIB
    assert one.collective() == begun + ring
    assert one.collective() == 0
    # To the neighbour before, and from the one after; the others are the ring's.
    assert one.collective(is_sum=True, nbytes=4) == ring
    # 16 channels, there and back, 8 steps of 128 KiB for each of 8 cards.
    assert one.collective(is_sum=True, nbytes=64 * MIB) == 16 * 2 * 8 * 8 * MIB // 8
    assert (one.least, one.most) == (begun + ring, one.taken)
    # On the last of the chain only the sending side is missing.
    last = Communicator(H100, Seat(8, 7, 1), LATE)
    last.collective()
    assert last.collective(is_sum=True, nbytes=4) == 24 * 2 * MIB


def test_all_to_all_connects_each_pair_in_32_channels() -> None:
    one = Communicator(H100, Seat(8, 0, 1), LATE)
    begun = (3 * 32 + 2 + 24 + 1) * 2 * MIB
    others = [(peer, True) for peer in range(1, 8)]
    assert one.between_two(others, sends=True, receives=True) == begun + 7 * 32 * (10 + 2) * MIB
    # What it sends to another already has its place.
    assert one.between_two([(3, True)], sends=True, receives=False) == 0
    # Between computers there is one buffer for all of them, of 16 chunks of 128 KiB in 16 channels.
    far = Communicator(H100, Seat(8, 0, 2), LATE)
    far.collective()
    assert far.between_two([(8, False), (9, False)], sends=True, receives=False) == 16 * 16 * 128 * 1024


def test_sizes_of_buffers_are_the_environments() -> None:
    smaller = Settings.of({"NCCL_BUFFSIZE": str(MIB)})
    one, other = (Communicator(H100, Seat(2, 0, 1), settings) for settings in (LATE, smaller))
    # 512 KiB + 4,915,200 + 1 MiB and a head of 4 KiB are 8 MiB in pages.
    assert one.collective() - other.collective() == 24 * 2 * MIB


def test_a_single_card() -> None:
    """NVIDIA/nccl's pull request 2366: 512 MiB more where all is connected at once, also for a single card."""
    begun = (3 * 64 + 2) * 2 * MIB
    assert Communicator(T4, Seat(1, 0, 1), LATE).collective() == begun
    at_once = Settings.of({"NCCL_RUNTIME_CONNECT": "0"})
    assert Communicator(T4, Seat(1, 0, 1), at_once).collective(is_sum=True) == begun + 512 * MIB


# ---- in programs

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
dist: Any = torch.distributed

PROGRAM = """
import os, pickle, sys, warnings
import torch, torch.distributed as dist

warnings.simplefilter("ignore")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(sys.argv[2])
rank = dist.get_rank()
x = torch.ones(1 << 20, device="cuda")
read = []

def note():
    free, total = torch.cuda.mem_get_info()
    read.append(total - free - torch.cuda.memory_reserved())

note()
dist.broadcast(x, 0); note()
dist.all_reduce(x[:4]); note()
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x, 0)
note()
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x + 1, 1 - rank)]):
    work.wait()
note()
from torch.distributed._functional_collectives import all_reduce
pair = dist.new_group([0, 1])
(all_reduce(x, "sum", pair) + 0).sum(); note()
dist.destroy_process_group(); note()
with open(f"{sys.argv[1]}-{rank}", "wb") as file:
    pickle.dump(read, file)
"""


def _both_ways(folder: Path, backend: str) -> Iterator[tuple[list[int], list[int]]]:
    """What a process has beside the allocator after each statement: in two processes, and in ranks that run alone."""
    program = folder / "program.py"
    program.write_text(PROGRAM, "utf-8")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", "2xH100", str(program), "--"]
    started = [
        subprocess.Popen(
            [*command, str(folder / "real"), backend],
            env={**os.environ, **around, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.DEVNULL,
        )
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    options = ["run", "--device", "H100", "--ranks", "2", "--as", "0,1", "--json", str(folder / "report.json")]
    assert cli.main([*options, str(program), "--", str(folder / "alone"), backend]) == 0
    for rank in (0, 1):
        yield tuple(pickle.loads((folder / f"{way}-{rank}").read_bytes()) for way in ("real", "alone"))  # type: ignore[misc]


def test_ranks_alone_and_in_processes_take_the_same(tmp_path: Path) -> None:
    context = CATALOG["H100"].context_bytes
    # No switch adds for two cards; there are 24 channels, and 32 for what two send each other.
    begun, ring = (3 * 32 + 2) * 2, 24 * 12
    send, receive = 32 * 2, 32 * 10
    first, second = _both_ways(tmp_path, "nccl")
    for (real, alone), one_way in ((first, send), (second, receive)):
        assert real == alone
        steps = [(now - before) // MIB for before, now in itertools.pairwise(real)]
        # With two cards a tree's neighbours are the ring's. Then a communicator of two, the group's own, and another group's.
        assert steps == [
            begun + ring,
            0,
            begun + one_way,
            send + receive,
            begun + ring,
            context // MIB - real[-2] // MIB,
        ]
        assert real[0] == real[-1] == context
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    said = [note for note in report["notes"] if note.startswith("NCCL's own memory is an estimate")]
    assert said, report["notes"]


def test_gloo_takes_nothing(tmp_path: Path) -> None:
    for real, alone in _both_ways(tmp_path, "gloo"):
        assert real == alone
        assert set(real) == {CATALOG["H100"].context_bytes}


def test_where_there_is_no_room_nccl_fails() -> None:
    gpu.turn_on("T4")
    try:
        with pytest.warns(UserWarning, match="gloo is used instead"):
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        torch.ones(1, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        filled = torch.empty(free - 100 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(dist.DistBackendError, match="Failed to CUDA calloc"):
            dist.all_reduce(filled[:4])
        del filled
    finally:
        dist.destroy_process_group()
        gpu.turn_off()


def test_copies_between_a_process_own_devices() -> None:
    """`torch.nn.DataParallel`'s, on two T4: two channels, 10 MiB to receive and 2 to send, and blocks for both."""
    machine = gpu.turn_on("2xT4")
    try:
        x = torch.ones(1 << 20, device="cuda")
        torch.nn.parallel.comm.broadcast(x, [0, 1])
        (note,) = machine.engine.memory.communication.notes()
        assert " on each of cuda:0-1 beside " in note
        taken = (2 + 3 * 2) * 2 * MIB + 2 * 12 * MIB
        for index in (0, 1):
            free, total = torch.cuda.mem_get_info(index)
            beside = total - free - torch.cuda.memory_reserved(index) - CATALOG["T4"].context_bytes
            assert beside == taken, index
    finally:
        gpu.turn_off()


def test_copies_to_a_device_that_is_not_there() -> None:
    gpu.turn_on("2xT4")
    try:
        x = torch.ones(8, device="cuda")
        for devices in ([0, 2], [0, 1, -1]):
            with pytest.raises(RuntimeError, match=r"invalid device ordinal \(the virtual machine has 2 devices"):
                torch.nn.parallel.comm.broadcast(x, devices)
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                torch._C._broadcast_coalesced([x], devices, 1 << 20)
        assert torch.cuda.memory_allocated(1) == 0
    finally:
        gpu.turn_off()

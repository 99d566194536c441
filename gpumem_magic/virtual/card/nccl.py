"""What NCCL takes from the driver for a communicator: an estimate, made from its source.

NCCL's buffers are not PyTorch's: no allocator knows them, and `nvidia-smi` shows them. They are those of NCCL 2.27
(``init.cc``, ``channel.cc``, ``graph/search.cc``, ``graph/connect.cc``, ``graph/paths.cc``, ``transport/p2p.cc``, ``net.cc`` and
``nvls.cc``; the same from 2.22 to 2.30 but for details): each channel has three small blocks, each connection of a channel the
buffers of three protocols, and what is small takes a page of 2 MiB. What the source does not say is the computer:

* Cards with NVLink are taken to be joined by a switch, others by PCI Express, with access to each other's memory.
* Between computers every card is taken to have a network adapter of its own, which writes into its memory.
* Which algorithm a collective takes is NCCL's choice, by size and measured times: a small sum over ranks takes trees here, a
  large one the switch's own adding (NVLS, from Hopper on) where there is one, else rings; all others take rings.

Published: two of four A100 take 544 MiB and three or four 688 MiB (NVIDIA/nccl's issue 964, before 2.19; 546 and 690 here); the
first all-to-all of 8 H100 adds 3.28 GB (issue 1685; 3.08 here); a single RTX 3090's takes 484 MiB, and 996 where all is connected
at once (pull request 2366, with what CUDA loads meanwhile; 388 and 900 here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpumem_magic.units import KIB, MIB

# A block from the driver is a whole number of these.
_PAGE = 2 * MIB
# What lies before the buffers of a connection (`ncclSendMem`, `ncclRecvMem`).
_HEAD = 4 * KIB
# LL: 8 lines of 16 bytes for each of 512 threads in 8 steps; LL128: 120 elements of 8 bytes for each of 640; Simple.
_BUFFERS = {"NCCL_LL_BUFFSIZE": 512 * KIB, "NCCL_LL128_BUFFSIZE": 4_915_200, "NCCL_BUFFSIZE": 4 * MIB}
_MOST_CHANNELS = 64
# GB/s of a ring that the search tries (`speedArrayIntra`, `speedArrayInter`), and of one NVLink, by compute capability.
_AT_HOME = {
    100: (90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
    90: (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    0: (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
}
_ABROAD = {
    90: (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0),
    0: (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
}
_LINK = {100: 40.1, 90: 20.6, 70: 20.0, 0: 18.0}
# Of one adapter: those of the systems that were sold with such cards (400, 200 and 100 Gbit/s).
_ADAPTER = {90: 50.0, 80: 25.0, 0: 12.5}
# PCI Express 3.0 and later generations, 16 lanes.
_BUS = {120: 48.0, 80: 24.0, 0: 12.0}
# NVLS: from Hopper on, with more than two cards on a switch; chunks of 128 KiB in 8 steps, there and back.
_ADDING_SWITCH = 90
_SWITCH_CHANNELS = {100: 24, 90: 16}
_SWITCH_CHUNK = 128 * KIB
_STEPS = 8
# From here on a sum over ranks is large.
_LARGE = MIB

RING, TREE, SWITCH = "ring", "tree", "switch"


def _newest(table: Mapping[int, float], capability: int) -> float:
    return table[max(since for since in table if since <= capability)]


def _speeds(table: Mapping[int, tuple[float, ...]], capability: int) -> tuple[float, ...]:
    return table[max(since for since in table if since <= capability)]


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Settings(NamedTuple):
    """NCCL's variables of the environment that decide how much it takes."""

    buffers: tuple[int, int, int]
    fewest: int
    most: int
    fewest_between_two: int
    most_between_two: int
    pages: bool
    switch: bool
    late: bool

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Settings:
        def number(name: str, otherwise: int) -> int:
            try:
                return int(variables[name])
            except (KeyError, ValueError):
                return otherwise

        low, middle, plain = (number(name, size) for name, size in _BUFFERS.items())
        pages = bool(number("NCCL_CUMEM_ENABLE", 1))
        return cls(
            (low, middle, plain),
            max(0, min(number("NCCL_MIN_NCHANNELS", number("NCCL_MIN_NRINGS", 0)), _MOST_CHANNELS)),
            max(1, min(number("NCCL_MAX_NCHANNELS", number("NCCL_MAX_NRINGS", _MOST_CHANNELS)), _MOST_CHANNELS)),
            number("NCCL_MIN_P2P_NCHANNELS", 1),
            number("NCCL_MAX_P2P_NCHANNELS", _MOST_CHANNELS),
            pages,
            pages and bool(number("NCCL_NVLS_ENABLE", 2)),
            pages and bool(number("NCCL_RUNTIME_CONNECT", 1)),
        )


class Card(NamedTuple):
    """capability: ten times the compute capability. links: how many NVLinks it has."""

    capability: int
    links: int


class Seat(NamedTuple):
    """A rank in its group. here: how many of the group's cards are in this computer, number: which of these it is, from 0;
    computers: over how many the group is spread."""

    here: int
    number: int
    computers: int


def channels(card: Card, seat: Seat, settings: Settings) -> int:
    """How many rings there are: of the first speed with which most of the links' bandwidth is used."""
    capability, links = card
    bandwidth = links * _newest(_LINK, capability) if links else _newest(_BUS, capability)
    if seat.here == 1 and seat.computers == 1:
        count = _MOST_CHANNELS // 2
        speed = 0.0
    elif seat.computers == 1:
        speed, count = _fastest(_speeds(_AT_HOME, capability), lambda one: int(bandwidth // one))
    else:
        adapter = _newest(_ADAPTER, capability)
        at_home = bandwidth if seat.here > 1 else adapter
        speed, count = _fastest(
            _speeds(_ABROAD, capability), lambda one: min(seat.here * int(adapter // one), int(at_home // one))
        )
    if speed >= 25.0 and not (capability > 80 and speed < 50.0 and count > 4):
        count = min(2 * count, _MOST_CHANNELS // 2)
    count = min(2 * count, _MOST_CHANNELS)
    count = max(min(count, settings.most), settings.fewest)
    return max(count, _switch_channels(card, seat, settings))


def _fastest(speeds: tuple[float, ...], rings: Callable[[float], int]) -> tuple[float, int]:
    """The search goes down to half the speed of the best that it has found."""
    best = 0.0, 0
    for speed in speeds:
        if speed <= 0.49 * best[0]:
            break
        if speed * rings(speed) > best[0] * best[1]:
            best = speed, rings(speed)
    return best


def _switch_channels(card: Card, seat: Seat, settings: Settings) -> int:
    able = card.links and card.capability >= _ADDING_SWITCH and seat.here > 2 and settings.switch
    return int(_newest(_SWITCH_CHANNELS, card.capability)) if able else 0


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class Communicator:
    """What one rank's part of a communicator has taken: with its start, and then with what is used first.

    least, most: what it may be, as NCCL chooses its algorithms; the same where nothing depends on that.
    """

    def __init__(self, card: Card, seat: Seat, settings: Settings) -> None:
        self.ranks = seat.here * seat.computers
        self.taken = self.least = self.most = 0
        self._card, self._seat, self._settings = card, seat, settings
        self.channels = channels(card, seat, settings)
        two = max(min(self.channels, settings.most_between_two), settings.fewest_between_two)
        self._between_two = _power_of_two(two)
        low, middle, plain = settings.buffers
        # An A100 reads what others have in their memory; other cards write into theirs.
        reads = bool(card.links) and card.capability == 80
        self._sizes = {
            "receive": _pages(_HEAD + low + middle + (0 if reads else plain)),
            "send": _pages(_HEAD + (plain if reads else 0)),
        }
        self._abroad = _pages(middle + plain)
        self._connected: set[object] = set()
        self._met = False

    def collective(self, *, is_sum: bool = False, nbytes: int = 0) -> int:
        """Bytes that are taken now for one of a group's collectives."""
        taken = self._begin()
        if self.ranks > 1:
            ways = {RING: self._ring(), TREE: self._tree(), SWITCH: self._switch()}
            large = SWITCH if is_sum and ways[SWITCH] else RING
            way = TREE if is_sum and nbytes < _LARGE else large
            if not self._met:
                self._met = True
                self.least += min(sum(ways[RING].values()), sum(ways[way].values()))
                self.most += sum((ways[RING] | ways[TREE] | ways[SWITCH]).values())
            taken += self._connect(ways[way])
        self.taken += taken
        return taken

    def between_two(self, peers: Sequence[tuple[int, bool]], *, sends: bool, receives: bool) -> int:
        """Bytes that are taken now to send to others or receive from them. peers: each one's rank, and whether it is here."""
        taken = self._begin()
        wanted: dict[object, int] = {}
        for direction in ["send"] * sends + ["receive"] * receives:
            for peer, is_here in peers:
                if is_here:
                    wanted[peer, direction] = self._with_one_here() * self._sizes[direction]
                else:
                    # To and from all other computers through one buffer each.
                    wanted["all", direction] = _pages(self._pool())
        added = self._connect(wanted)
        self.least, self.most = self.least + added, self.most + added
        self.taken += taken + added
        return taken + added

    def _begin(self) -> int:
        if self._connected:
            return 0
        self._connected.add("begun")
        count = max(self.channels, self._between_two)
        blocks = 2 + 3 * count + (self.channels + 1 if self._switch() else 0)
        # Without the driver's pages small blocks share one.
        size = (blocks if self._settings.pages else 1) * _PAGE
        if not self._settings.late:
            # Then everything is connected at once, and a buffer for other computers is there if there are none, too.
            size += _pages(self._pool())
            if self.ranks > 1:
                size += self._connect(self._ring() | self._tree() | self._switch())
                self._met = True
        self.least, self.most = self.least + size, self.most + size
        return size

    def _connect(self, wanted: Mapping[object, int]) -> int:
        added = sum(size for key, size in wanted.items() if key not in self._connected)
        self._connected.update(wanted)
        return added

    def _from_abroad(self) -> int:
        """In how many channels this card's neighbour is in another computer: each has its turn."""
        here, _, computers = self._seat
        return 0 if computers == 1 else -(-self.channels // here)

    def _ring(self) -> dict[object, int]:
        here, number, _ = self._seat
        abroad, found = self._from_abroad(), dict[object, int]()
        for direction, neighbour in (("send", number + 1), ("receive", number - 1)):
            if here > 1:
                found[RING, neighbour % here, direction] = (self.channels - abroad) * self._sizes[direction]
            if abroad:
                found[RING, "abroad", direction] = abroad * self._abroad
        return found

    def _tree(self) -> dict[object, int]:
        """Within a computer it is a chain along the ring; between them a card has two neighbours on the average."""
        here, number, _ = self._seat
        abroad, found = self._from_abroad(), dict[object, int]()
        for direction, size in self._sizes.items():
            for neighbour in (number - 1, number + 1):
                if 0 <= neighbour < here:
                    found[RING, neighbour, direction] = (self.channels - abroad) * size
            if abroad:
                found[TREE, "abroad", direction] = 2 * abroad * self._abroad
        return found

    def _switch(self) -> dict[object, int]:
        count = _switch_channels(self._card, self._seat, self._settings)
        return {SWITCH: _pages(2 * count * _STEPS * _SWITCH_CHUNK * self._seat.here)} if count else {}

    def _pool(self) -> int:
        near = self._seat.computers == 1 and (self._card.links or self._seat.here == 1)
        chunk = 512 * KIB if near else 128 * KIB
        return self._between_two * 16 * chunk

    def _with_one_here(self) -> int:
        """Channels between two cards: two for each link between them, fewer where the group is spread over computers."""
        if self._seat.computers > 1:
            count = 2 if 2 * self.ranks <= 4 * self._between_two else 1
        else:
            switched = self._card.links and self._card.capability >= 80
            count = 2 * self._card.links if switched else 2
        return _power_of_two(min(count, self._between_two))

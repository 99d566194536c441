"""Two categories that were activations before: the cache of keys and values, and the copies of weights that autocast keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from causes_cells import Notebook, notebook

from gpumem_magic.attribution.categories import attribute
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.report.model import CATEGORIES, LATER_CATEGORIES
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.units import MIB
from gpumem_magic.user_report import Report

LIBRARY = """
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
sizes = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(sizes).cuda().eval()
x = torch.zeros(16, 512, dtype=torch.long, device="cuda")
"""
# Keys and values of 16 sequences of 512 positions, 256 numbers each, in two layers.
WHOLE = 2 * 2 * 16 * 512 * 256 * 4
OWN = """
import torch.nn.functional as F
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        EXTRA
    def forward(self, x, state=None):
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        JOIN
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), [k, v]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
    def forward(self, x, state):
        left = []
        for number, layer in enumerate(self.layers):
            x, one = layer(x, state[number] if state else None)
            left.append(one)
        return x, left
model = Net().cuda()
def write(tokens):
    x, state = torch.zeros(16, 512, 256, device="cuda"), None
    with torch.no_grad():
        for _ in range(tokens):
            x, state = model(x, state)
            x = x[:, -1:]
"""
JOINED = "if state: k, v = torch.cat([state[0], k], dim=2), torch.cat([state[1], v], dim=2)"
HELD = "self.cache_k = torch.zeros(16, 4, 512, 64, device='cuda'); self.cache_v = torch.zeros_like(self.cache_k)"
BUFFER = "self.register_buffer('kv_cache', torch.zeros(2, 16, 4, 512, 64))"
PAIRS = """
a = b = torch.zeros(8, 4, 64, device="cuda")
for _ in range(4):
    a, b = torch.cat([a, a[:, :1]], 1), torch.cat([b, b[:, :1]], 1)
"""
DENSE = """
class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(64 + 16 * n, 16, 3, padding=1) for n in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x
model = Dense().cuda()
def train():
    for _ in range(4):
        model(torch.zeros(16, 64, 32, 32, device="cuda")).mean().backward()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


@pytest.fixture
def book(shared: Notebook) -> Iterator[Notebook]:
    with shared.forgetting() as found:
        yield found


def own(extra: str = "", join: str = "pass") -> str:
    return OWN.replace("EXTRA", extra).replace("JOIN", join)


def sizes_of(report: Report, category: str, *, as_on_a_gpu: bool = False) -> Sequence[int]:
    """At each position, the bytes of a category. A GPU does not tell how memory came to be wanted."""
    recording = report.recording
    log = recording.logs[recording.primary]
    if as_on_a_gpu:
        log = replace(log, facts=replace(log.facts, kind="cuda"), origins={}, births={})
    timeline = DeviceView(recording, recording.primary).timeline
    labels = attribute(log, timeline, recording.spans, recording.sightings, recording.checkpoints)
    return [
        sum(one.requested for one in timeline.live_at(position) if labels[one.index].category == category)
        for position in range(len(timeline) + 1)
    ]


@pytest.mark.parametrize(
    ("before", "cell", "bytes_"),
    [
        # A cache of something else; pairs that grow outside of a module; layers that join within one forward.
        ("", "cache = {'images': torch.zeros(8, 4, 64, device='cuda')}", 0),
        ("", PAIRS, 0),
        ("", "cache = [(mib(1).view(4, 256, 256), mib(1).view(4, 256, 256)) for _ in range(3)]", 0),
        ("", "cache = {'a': (mib(1).view(4, 16, 64, 64), mib(1).view(4, 16, 64, 64))}", 0),
        ("", "past = [(mib(1).view(64, 64, 64), mib(1).view(64, 64, 64)) for _ in range(3)]", 6 << 20),
        ("", "cache = [(mib(1).view(4, 16, 64, 64), mib(1).view(4, 16, 64, 64)) for _ in range(3)]", 6 << 20),
        (DENSE, "train()", 0),
        ("", "cache = [{'k': torch.zeros(8, 4, 64, device='cuda'), 'v': torch.zeros(8, 4, 64, device='cuda')}]", 16384),
        (LIBRARY, "with torch.no_grad():\n    past = model(x, use_cache=True).past_key_values", WHOLE),
        (LIBRARY, "y = model.generate(x, max_new_tokens=3, do_sample=False)", WHOLE),
        (LIBRARY, "with torch.no_grad():\n    y = model(x, past_key_values=StaticCache(sizes, 512))", WHOLE),
        (own(join=JOINED), "write(4)", WHOLE),
        (own(extra=HELD), "write(2)", WHOLE),
        (own(extra=BUFFER), "write(2)", WHOLE),
    ],
)
def test_a_cache_of_keys_and_values_is_a_category(book: Notebook, before: str, cell: str, bytes_: int) -> None:
    book.cell(before)
    report = book.measured(cell)
    assert report.error is None
    # While a cache grows by joining, the old keys and values are there beside the new ones.
    assert bytes_ <= max(sizes_of(report, "kv_cache")) <= 2.1 * bytes_
    for row in (report.peak, *report.checkpoints):
        assert sum(row.categories[name] or 0 for name in CATEGORIES[: CATEGORIES.index("cached")]) == row.allocated


WEIGHTS = (
    "net_ = net(1024, 6)\nopt = torch.optim.SGD(net_.parameters(), lr=0.1)\nx = torch.zeros(64, 1024, device='cuda')"
)
TRAINING = """
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net_(x).float().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
"""
BODIES = {
    "inference": "with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n    y = net_(x)",
    "training": TRAINING,
}


@pytest.mark.parametrize("body", BODIES)
def test_autocasts_copies_are_a_category_also_where_no_device_tells(book: Notebook, body: str) -> None:
    book.cell(WEIGHTS)
    report = book.measured(BODIES[body])
    told = sizes_of(report, "autocast_copies")
    assert max(told) == 6 * (1024 * 1024 + 1024) * 2
    assert told[-1] == 0
    assert sizes_of(report, "autocast_copies", as_on_a_gpu=True) == told


def test_weights_of_16_bits_have_no_copies(book: Notebook) -> None:
    book.cell(WEIGHTS + "\nnet_ = net_.half()")
    report = book.measured(BODIES["inference"])
    assert max(sizes_of(report, "autocast_copies", as_on_a_gpu=True)) == 0


def test_a_report_of_before_is_read(book: Notebook) -> None:
    data = book.measured("y = mib(1)").to_dict()
    for row in (data["peak"], *data["checkpoints"]):
        for name in LATER_CATEGORIES:
            del row["categories"][name]
    assert report_from_dict(data).peak.categories["kv_cache"] == 0
    assert report_from_dict(data).peak.allocated >= MIB

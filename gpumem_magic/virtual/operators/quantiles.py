"""`quantile` and `nanquantile`, whose parts are others since 2.14 (`quantile_compute` in ``Sorting.cpp``).

Where a quantile lies is worked out in double precision there, and before anything is sorted; so the input may have more numbers
than float32 can count, which older ones refuse. (As the builds of 2.12 and 2.14 ask for it.)
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch.torch_version import TorchVersion

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import version_of
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_PLACES_FIRST_FROM = (2, 14)
_RUNS_PLACES_FIRST = TorchVersion(torch.__version__) >= ".".join(map(str, _PLACES_FIRST_FROM))
# float32 counts no further (``Sorting.cpp``).
_MOST_BEFORE = 2**24
_ROUNDED = {"lower": methodcaller("floor_"), "higher": methodcaller("ceil_"), "nearest": methodcaller("round_")}
_BETWEEN = ("linear", "midpoint")


def _way(usual: Any, without_nan: bool) -> Callable[..., torch.Tensor]:
    def quantile(
        self: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> torch.Tensor:
        if not _is_plain(self, q, dim, interpolation):
            # C++'s way, which also refuses what is refused.
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            return usual._op_dk(key, self, q, dim, keepdim, interpolation=interpolation)  # type: ignore[no-any-return]
        share = q if isinstance(q, torch.Tensor) else torch.scalar_tensor(q, dtype=self.dtype, device=self.device)
        return _found(self, share, dim, keepdim, interpolation, without_nan)

    return quantile


def _is_plain(self: Any, q: Any, dim: int | None, interpolation: str) -> bool:
    """Whether C++ of the other side of 2.14 would run, and refuses nothing."""
    if not isinstance(self, VirtualTensor) or not self.numel() or self.dtype not in (torch.float32, torch.float64):
        return False
    newer = version_of(self) >= _PLACES_FIRST_FROM
    if newer == _RUNS_PLACES_FIRST or interpolation not in (*_ROUNDED, *_BETWEEN):
        return False
    if dim is not None and not -max(self.dim(), 1) <= dim < max(self.dim(), 1):
        return False
    if not newer and (self.numel() if dim is None else self.shape[dim] if self.dim() else 1) > _MOST_BEFORE:
        return False
    if not isinstance(q, torch.Tensor):
        return bool(0 <= q <= 1)
    return isinstance(q, VirtualTensor) and bool(q.dtype == self.dtype and q.device == self.device and q.dim() <= 1)


def _found(
    self: VirtualTensor, share: torch.Tensor, dim: int | None, keepdim: bool, interpolation: str, without_nan: bool
) -> torch.Tensor:
    if dim is None:
        rows, left = self.flatten(), [1] * self.dim() if keepdim else []
    else:
        at = dim % max(self.dim(), 1)
        rows = self if self.dim() and at == self.dim() - 1 else self.unsqueeze(-1).transpose(at, -1)
        left = [*self.shape[:at], *([1] if keepdim else []), *self.shape[at + 1 :]] if self.dim() else [1] * keepdim
    shape = [*left, rows.shape[-1]]
    if version_of(self) >= _PLACES_FIRST_FROM:
        places = _placed(rows, share.reshape(-1), left, without_nan, wide=True)
        below = _below(places, interpolation)
        weights = _weights(places, below, interpolation, self.dtype)
        above = None if weights is None else places.ceil_().long()
        ordered = rows.sort(-1)[0].view(shape)
        values = ordered.gather(-1, below)
        others = None if above is None else ordered.gather(-1, above)
        del ordered
    else:
        ordered = rows.sort(-1)[0].view(shape)
        del rows
        places = _placed(ordered, share.reshape(-1), left, without_nan, wide=False)
        below = _below(places, interpolation)
        values = ordered.gather(-1, below)
        weights = _weights(places, below, interpolation, self.dtype)
        above = None if weights is None else places.ceil_().long()
        others = None if above is None else ordered.gather(-1, above)
    if others is not None:
        values.lerp_(others, weights)
    del others, above, weights, below, places
    return values.squeeze_(-1) if share.dim() == 0 else values.unsqueeze_(0).transpose_(0, -1).squeeze_(-1)


def _placed(
    numbers: torch.Tensor, share: torch.Tensor, left: list[int], without_nan: bool, *, wide: bool
) -> torch.Tensor:
    """Where each quantile lies among a row's numbers, as a fraction of steps."""
    last = numbers.shape[-1] - 1
    if without_nan:
        unknown = numbers.isnan()
        count = unknown.logical_not_().sum(-1, True)
        steps = count - 1
        exact = share.double() if wide else share
        places = exact * steps.view(*left, 1)
        del exact, steps, count, unknown
        places.masked_fill_(places < 0, 0)
        return places
    exact = share.double() if wide else share
    product = exact * last
    unknown = numbers.isnan()
    rows = unknown.any(-1, True).view(*left, 1)
    del unknown, exact
    places = product.expand(*left, len(share)).masked_fill(rows.expand(*left, len(share)), last)
    del product
    return places


def _below(places: torch.Tensor, interpolation: str) -> torch.Tensor:
    if interpolation in _ROUNDED:
        _ROUNDED[interpolation](places)
    return places.long()


def _weights(places: torch.Tensor, below: torch.Tensor, interpolation: str, dtype: torch.dtype) -> Any:
    """How near the number above is."""
    if interpolation not in _BETWEEN:
        return None
    if interpolation == "midpoint":
        return torch.full_like(below, 0.5, dtype=dtype)
    distance = places - below
    return distance.to(dtype)


WAYS: dict[Any, Callable[..., torch.Tensor]] = {
    usual: _way(usual, without_nan)
    for without_nan, packet in ((False, _aten.quantile), (True, _aten.nanquantile))
    for usual in (packet.default, packet.scalar)
}

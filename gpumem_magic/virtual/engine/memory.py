"""What the engine asks of the devices: memory for tensors, and what libraries take beside an operator's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpumem_magic.devices.base import Birth, Padded


@dataclass(frozen=True)
class Convolution:
    """One call of cuDNN's. Shapes as PyTorch's, batch and channels first, weights as for the way forward.

    way: "forward", "input" (the input's gradient) or "weight" (the weight's gradient). fine: the shape of the side with the
    kernel's input, coarse: of the side with its results; for both gradients they are the same two. last: channels last.
    """

    way: str
    fine: tuple[int, ...]
    weight: tuple[int, ...]
    coarse: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    last: bool

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]


class Communication(Protocol):
    """What NCCL takes from the driver, beside the allocator. together: whether calls are sent together just now."""

    together: bool

    def communicate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int) -> None:
        """For a collective of `torch.distributed`'s, before it."""

    def keep(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        """For a collective that nobody has waited for, after it; number: its handle's."""

    def waited(self, number: int) -> None:
        """After somebody waited for the collective with that handle."""

    def in_one_process(self, devices: Sequence[int]) -> None:
        """For what this process sends between its own devices."""

    def end(self, group: Any = None) -> None:
        """After a group is no more; without one, after all are."""


class Memory(Protocol):
    """What the engine asks of the devices."""

    @property
    def communication(self) -> Communication: ...

    def malloc(self, device: int, nbytes: int) -> int: ...

    def free(self, device: int, address: int) -> None: ...

    def pass_through(self, device: int, sizes: Sequence[int]) -> None:
        """Takes blocks and gives them back, the last one first."""

    def is_recorded(self, device: int) -> bool:
        """Whether a log of the device runs."""

    def is_large(self, device: int, nbytes: int) -> bool:
        """Whether a log of the device runs, to which so much is worth a word."""

    def born(self, device: int, birth: Birth) -> None:
        """How the last allocation of the device, or its last failed request, came to be."""

    def copied(self, device: int, address: int, source: int) -> None:
        """One of the newest allocations of the device is a copy of what lies at another address."""

    def padded(self, device: int, address: int, known: Padded) -> None:
        """One of the newest allocations of the device has rows with padding."""

    def take_beside(self, device: int, nbytes: int) -> None:
        """Memory that a library takes from the driver, beside the allocator; less than nothing is given back. Raises out of
        memory as the driver would."""

    def record_stream(self, device: int, address: int, stream: int) -> None: ...

    def takes_after(self, func: Any) -> bool:
        """Whether a library takes memory after such an operator."""

    def after_operator(self, func: Any, args: Sequence[Any], device: int) -> None:
        """Memory that a library takes beside an operator's results, which are there now."""

    def uses_cudnn(self, device: int) -> None:
        """To be called before cuDNN runs anything but a convolution: the library begins with memory from the driver."""

    def drops_out_in_cudnn(self, device: int) -> None:
        """To be called before a recurrent layer that drops out: the states of its random numbers are made once."""

    def convolve(self, device: int, call: Convolution) -> None:
        """Memory that cuDNN takes for a call and gives back; nothing where there is no room."""

    def torch_version(self, device: int) -> tuple[int, int]:
        """The version of PyTorch whose ways of using memory are the device's."""

    def processors(self, device: int) -> tuple[int, int]:
        """The card's multiprocessors, and the most threads that one runs."""

    def capability(self, device: int) -> tuple[int, int]:
        """The card's compute capability."""

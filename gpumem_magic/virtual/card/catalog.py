"""How a person names a virtual GPU: `T4`, `2xT4`, `virtual:24GiB`, `T4,context=400MiB`. The GPUs are in ``cards.json``.

Imports neither torch nor anything of NVIDIA's.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Protocol

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.units import GIB, KIB, MIB, human
from gpumem_magic.virtual.card import calibration, generations
from gpumem_magic.virtual.card.models import CATALOG as CATALOG
from gpumem_magic.virtual.card.models import NO_FIRST_USES, generic
from gpumem_magic.virtual.card.models import GpuModel as GpuModel

MAX_DEVICES = 64
# What nvidia-smi's table has room for.
MAX_BYTES = 8 << 40


class UnknownDevice(DeviceError, ValueError):
    """A device name or option that is not understood. The text is one line and says what to write instead."""


@dataclass(frozen=True)
class DeviceSpec:
    """The virtual devices that a text asks for, options applied; device i is ``models[i]``.

    note: what was taken for a name that may be several cards', in a sentence; else empty.
    values: which values of tensors there are: "real" ones, computed on the host; "auto", small ones that follow from known ones;
    "stand-in", next to none.
    """

    text: str
    models: tuple[GpuModel, ...]
    values: str = "stand-in"
    note: str = ""

    @property
    def computes(self) -> bool:
        """Whether all tensors have real values."""
        return self.values == "real"


@dataclass(frozen=True)
class RealDevice:
    """A GPU of this computer; index None means the current one (`cuda` without a number)."""

    text: str
    index: int | None


class DeviceState(Protocol):
    """What a virtual device tells the drivers' faces (nvidia-smi, NVML)."""

    @property
    def model(self) -> GpuModel: ...

    @property
    def index(self) -> int: ...

    @property
    def uuid(self) -> str:
        """As nvidia-smi writes it: ``GPU-`` and a UUID (see `device_uuid`)."""

    def used_bytes(self) -> int:
        """All memory in use now: idle, context and reserved."""

    def process_bytes(self) -> int:
        """This process's part (context and reserved); 0 before it uses the device."""


def _bare(name: str) -> str:
    """A name without what people write differently: case, spaces, hyphens, underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


_BY_BARE_NAME = {_bare(key): model for key, model in CATALOG.items()}
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_SIZED = re.compile(r"(.+)-\d+GB")
_SIZE_ALONE = re.compile(r"(\d+)gi?b")
_COUNT = re.compile(r"(\d+)\s*[xX]\s*(.*)", re.DOTALL)
# Only chooses between the contexts of older and newer releases.
_A_RECENT_VERSION = "2.9"
_REAL = re.compile(r"cuda(?::(\d{1,3}))?", re.IGNORECASE)
_OPTIONS = ("context", "total", "idle", "name", "torch", "loading", "cudnn", "addresses", "values")


def parse_size(text: str) -> int:
    """Bytes of ``400MiB``, ``14.7 GiB``, ``0``. Raises UnknownDevice for anything else, decimal units included."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].casefold() if match else ""
    if unit in ("kb", "mb", "gb", "tb", "k", "m", "g", "t"):
        binary = f"{unit[0].upper()}iB"
        raise UnknownDevice(f"{text.strip()!r}: sizes are binary here, so write {binary} (1 GiB = 2^30 bytes)")
    if match is None or unit not in _UNITS or (not unit and float(match[1]) != 0):
        raise UnknownDevice(f"{text.strip()!r} is not a size: write a number and B, KiB, MiB, GiB or TiB, as in 400MiB")
    size = round(float(match[1]) * _UNITS[unit])
    if size > MAX_BYTES:
        raise UnknownDevice(
            f"{text.strip()!r} is more than {MAX_BYTES // _UNITS['tib']} TiB, the most that is emulated"
        )
    return size


def parse(text: str) -> DeviceSpec | RealDevice:
    """What `text` asks for: virtual devices with their options applied, or a GPU of this computer.

    Raises UnknownDevice, with a one-line text that says what can be written.
    """
    head, *options = (part.strip() for part in text.strip().split(","))
    real = _REAL.fullmatch(head)
    if real:
        if options:
            raise UnknownDevice(f"{text!r}: options apply to virtual devices only")
        return RealDevice(text.strip(), None if real[1] is None else int(real[1]))
    counted = _COUNT.fullmatch(head)
    count, name = (int(counted[1][:9]), counted[2]) if counted else (1, head)
    if not 1 <= count <= MAX_DEVICES:
        raise UnknownDevice(f"{text!r}: 1 to {MAX_DEVICES} devices can be emulated")
    given = _given(options)
    values = _values(given.pop("values", "stand-in"))
    model, note = _model(name)
    return DeviceSpec(text.strip(), (_with_options(model, given),) * count, values, note)


def says_how_many(text: str) -> bool:
    """Whether a name of virtual devices has their number: ``2xT4``, and not ``T4``."""
    return _COUNT.fullmatch(text.strip().partition(",")[0].strip()) is not None


def _model(name: str) -> tuple[GpuModel, str]:
    """The model, and a sentence where the name is that of several."""
    kind, colon, size = name.partition(":")
    if colon and _bare(kind) == "virtual":
        return generic(_checked_total(parse_size(size))), ""
    wanted = _bare(name)
    model = _BY_BARE_NAME.get(wanted)
    if model is not None:
        return model, ""
    # What differs only in its memory; the usual one stands first in the catalogue.
    usual, *others = [key for key in CATALOG if (sized := _SIZED.fullmatch(key)) and _bare(sized[1]) == wanted] or [""]
    if usual:
        besides = f"; there is {' and '.join(others)}, too" if others else ""
        return CATALOG[usual], f"{name} is taken as {usual}{besides}."
    # `3060` is as clear as `RTX3060`.
    ending = [key for key in CATALOG if len(wanted) > 2 and _bare(key).endswith(wanted)]
    if len(ending) == 1:
        return CATALOG[ending[0]], f"{name} is taken as {ending[0]}."
    if size_alone := _SIZE_ALONE.fullmatch(wanted):
        raise UnknownDevice(f"for a card of {name} write virtual:{size_alone[1]}GiB")
    near = ending or [key for key in CATALOG if wanted and _bare(key).startswith(wanted)]
    near = near or [_BY_BARE_NAME[bare].key for bare in get_close_matches(wanted, _BY_BARE_NAME, n=2, cutoff=0.7)]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else "."
    raise UnknownDevice(
        f"unknown device {name!r}{hint} Known: {', '.join(CATALOG)}, virtual:24GiB, several as 2xT4, options as "
        "T4,context=400MiB; cuda or cuda:1 for a real GPU"
    )


def _checked_total(size: int) -> int:
    if size < 64 * MIB:
        raise UnknownDevice(f"a device of {human(size)} is too small to emulate: give it at least 64 MiB")
    return size


def _given(options: list[str]) -> dict[str, str]:
    """The options by their names, in the order in which they were written."""
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        name = name.casefold()
        if name not in _OPTIONS or not equals or not value:
            raise UnknownDevice(
                f"unknown option {option!r}: write context=, total=, idle= (sizes), name=, torch= (a version), loading= "
                "(eager or lazy), cudnn= (estimate, none or a size), addresses= (rising or falling) or values= (real, auto or "
                "stand-in)"
            )
        if name in given:
            raise UnknownDevice(f"option {name}= is given twice")
        given[name] = value
    return given


def _values(value: str) -> str:
    word = value.casefold()
    if word not in ("real", "auto", "stand-in"):
        raise UnknownDevice(
            f"values={value}: write values=real (computed on the host), values=auto (small ones that follow from known ones) "
            "or values=stand-in (next to none)"
        )
    return word


def _with_options(model: GpuModel, given: dict[str, str]) -> GpuModel:
    if "torch" in given or "loading" in given:
        model = _of_generation(model, given.get("torch"), given.get("loading"))
    if "torch" not in given:
        model = calibration.applied(model, given.get("loading"))
    for name, value in given.items():
        if name == "name":
            model = replace(model, name=_checked_name(value))
        elif name == "context":
            size = parse_size(value)
            model = replace(
                model, context_bytes=size, context_is_estimate=False, calibrated="", first_uses=NO_FIRST_USES
            )
        elif name == "cudnn":
            asks = value.casefold() != "estimate"
            model = replace(model, convolution_bytes=_convolution_bytes(value), asks_cudnn=asks)
        elif name == "addresses":
            if value.casefold() not in ("rising", "falling"):
                raise UnknownDevice(f"addresses={value}: write addresses=rising or addresses=falling")
            model = replace(model, addresses_fall=value.casefold() == "falling")
        elif name == "idle":
            model = replace(model, idle_bytes=parse_size(value))
        elif name == "total":
            # The total is torch's; nvidia-smi's stays above it by what the driver keeps.
            total = _checked_total(parse_size(value))
            model = replace(model, total_bytes=total, smi_total_bytes=total + model.driver_reserved_bytes)
    if model.context_bytes + model.idle_bytes >= model.total_bytes:
        raise UnknownDevice(
            f"context ({human(model.context_bytes)}) and idle memory ({human(model.idle_bytes)}) leave nothing of "
            f"{human(model.total_bytes)}: give a larger total= or a smaller context="
        )
    return model


def _of_generation(model: GpuModel, version_text: str | None, loading: str | None) -> GpuModel:
    """The model with the context and the library workspaces of another PyTorch version, or another way of loading kernels."""
    try:
        version = generations.parse_version(version_text or _A_RECENT_VERSION)
    except ValueError as error:
        raise UnknownDevice(f"torch=: {error}") from None
    lazy = generations.loads_lazily(version)
    if loading is not None:
        if loading.casefold() not in ("eager", "lazy"):
            raise UnknownDevice(f"loading={loading}: write loading=eager or loading=lazy")
        if loading.casefold() == "lazy" and not lazy:
            raise UnknownDevice(
                f"loading=lazy: torch {version_text} loads all kernels at once; 1.13 was the first to load lazily"
            )
        lazy = loading.casefold() == "lazy"
    found = generations.context(model.key, model.capability, version, lazy)
    measured_apart = lazy and (version_text is None or version >= generations.FIRST_USES_FROM)
    first_uses = model.first_uses if measured_apart else NO_FIRST_USES
    model = replace(model, context_bytes=found.nbytes, context_is_estimate=found.is_estimate, first_uses=first_uses)
    if version_text is None:
        return model
    workspace = generations.cublas_workspace_bytes(version, model.capability, generations.is_rocm(version_text))
    falls = version < generations.ADDRESSES_MAY_RISE_FROM
    return replace(model, torch_version=version_text, cublas_workspace_bytes=workspace, addresses_fall=falls)


def _convolution_bytes(value: str) -> int | None:
    """What cuDNN takes for each convolution; None for the estimate."""
    word = value.casefold()
    if word in ("estimate", "none"):
        return None if word == "estimate" else 0
    try:
        return parse_size(value)
    except UnknownDevice as error:
        raise UnknownDevice(f"cudnn={value}: write estimate, none, or what each convolution takes ({error})") from None


def _checked_name(value: str) -> str:
    # NVML's buffer for names holds 95 characters.
    if len(value) > 95 or not value.isascii() or not value.isprintable():
        raise UnknownDevice("name= takes at most 95 printable ASCII characters")
    return value


def device_uuid(name: str, index: int) -> str:
    """The same for the same name and index, in every process: ``GPU-`` and a UUID."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{name}.gpumem-magic.invalid')}"


def bus_id(index: int) -> str:
    """The PCI address of virtual device `index` as nvidia-smi writes it: ``00000000:00:04.0`` for 0."""
    bus, slot = divmod(index, 28)
    return f"00000000:{bus:02X}:{4 + slot:02X}.0"


def describe() -> str:
    """The names that can be written, one a line: name, GPU, memory, context."""
    measured = calibration.known()
    models = [calibration.applied(model, calibrations=measured) for model in CATALOG.values()]
    wide = max(len(model.name) for model in models)
    lines = [f"{'name':<14}{'GPU':<{wide}}{'torch':>12}{'nvidia-smi':>12}{'context':>12}"]
    for model in models:
        context = f"{'about ' if model.context_is_estimate else ''}{model.context_bytes // MIB} MiB"
        total, smi = f"{model.total_bytes / GIB:.2f} GiB", f"{model.smi_total_bytes // MIB} MiB"
        lines.append(f"{model.key:<14}{model.name:<{wide}}{total:>12}{smi:>12}{context:>15}")
    lines += [
        f"{'virtual:24GiB':<14}any size; otherwise like an A100",
        "",
        "colab-2021: the author of the question said P100, but its totals are those of a V100-SXM2-16GB.",
        "Several: 2xT4. Options: T4,context=400MiB,total=14.7GiB,idle=2MiB. A real GPU: cuda, cuda:1.",
        "torch=1.10 takes the context and the library workspaces of another PyTorch version; loading=eager those of kernels that",
        "are loaded all at once (CUDA_MODULE_LOADING=EAGER).",
        "cudnn=none leaves out what cuDNN takes while it runs a convolution; cudnn=256MiB sets it. Else cuDNN is asked where it",
        "is installed, and it is an estimate elsewhere, or with cudnn=estimate.",
        "addresses=falling gives out addresses as drivers do whose addresses are 0x7...: it can change what is reserved.",
        "values=real computes all values on the host, with memory as before: T4,values=real. values=auto computes small ones",
        "that follow from known ones. Without either, a program that reads a value is given a stand-in.",
        '"about": nobody published the context of that GPU with lazily loaded kernels; measure yours and set context=.',
    ]
    lines += [
        f"{model.key}: measured here {model.calibrated} (`gpumem calibrate --forget` goes back to the catalogue's "
        "figures)."
        for model in models
        if model.calibrated
    ]
    return "\n".join(lines)

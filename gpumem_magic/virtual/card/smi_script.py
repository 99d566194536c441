"""The `nvidia-smi` of virtual GPUs: what `!nvidia-smi` runs while one is on.

It starts after every line of a training loop, so it imports nothing but `sys` and `time`, neither torch nor the rest of
this package; `smi.py` copies it and its words (`smi_script.txt`) beside the state file that it reads. Layout and words are
those of driver 580's nvidia-smi; the head of the table says that the GPU is virtual. What an emulated GPU does not have
(temperature, power, clocks) is N/A, and its load is 0 %, as nothing runs on it. The table of processes stays empty, as in a
Colab container, so that `nvidia-smi | grep MiB` prints one line a GPU.

Sizes are whole MiB, cut off and not rounded, as nvidia-smi does (a P100's 17,071,734,784 bytes are 16280.9 MiB; it shows
16280MiB). Exit statuses: 0; 2 bad value or field; 3 not available on a virtual GPU; 6 no such GPU; 9 the virtual GPU is off;
255 no such option.
"""

from __future__ import annotations

import sys
import time

# The first driver with CUDA 13.0: it runs what the wheels of PyTorch 2.11 to 2.13 were built for, and all that is older.
DRIVER_VERSION = "580.65.06"
CUDA_VERSION = "13.0"
MIB = 1 << 20

# The help, and words by what they are for.
WORDS: dict[str, list[str]] = {}
with open(f"{__file__.rpartition('.')[0]}.txt", encoding="ascii") as _text:
    HELP, _, _tables = _text.read().partition("\n---")
for _line in _tables.splitlines()[1:]:
    WORDS.setdefault(_line.partition(": ")[0], []).extend(_line.partition(": ")[2].split())

# One record a device, little-endian: used bytes at 0, the same with all bits turned at 8 (a reader that finds the two
# apart came between two halves of a write and reads again), then what does not change.
RECORD_BYTES = 256
USED_BYTES = 16
_ALL_BITS = (1 << 64) - 1
_TOTAL, _RESERVED, _CAPABILITY, _UUID, _BUS, _NAME = 16, 24, 32, 40, 88, 120


def pack_used(used: int) -> bytes:
    """The changing head of a record."""
    return used.to_bytes(8, "little") + (used ^ _ALL_BITS).to_bytes(8, "little")


def pack(used: int, total: int, reserved: int, capability: tuple[int, int], uuid: str, bus_id: str, name: str) -> bytes:
    """A whole record."""
    record = bytearray(RECORD_BYTES)
    for offset, field in (
        (0, pack_used(used)),
        (_TOTAL, total.to_bytes(8, "little")),
        (_RESERVED, reserved.to_bytes(8, "little")),
        (_CAPABILITY, bytes(capability)),
        (_UUID, uuid.encode()),
        (_BUS, bus_id.encode()),
        (_NAME, name.encode()),
    ):
        record[offset : offset + len(field)] = field
    return bytes(record[:RECORD_BYTES])


class Gpu:
    """One record, read; sizes in MiB. The driver's own part is neither used nor free."""

    __slots__ = ("bus_id", "capability", "free", "index", "name", "reserved", "total", "used", "uuid")

    def __init__(self, index: int, record: bytes) -> None:
        def number(offset: int) -> int:
            return int.from_bytes(record[offset : offset + 8], "little")

        def text(start: int, end: int) -> str:
            return record[start:end].rstrip(b"\0").decode()

        self.index = index
        used, total, reserved = number(0), number(_TOTAL), number(_RESERVED)
        self.used, self.total, self.reserved = used // MIB, total // MIB, reserved // MIB
        self.free = max(0, total - reserved - used) // MIB
        self.capability = f"{record[_CAPABILITY]}.{record[_CAPABILITY + 1]}"
        self.uuid, self.bus_id, self.name = text(_UUID, _BUS), text(_BUS, _NAME), text(_NAME, RECORD_BYTES)


def read_gpus(path: str) -> list[Gpu]:
    """Raises OSError when the file is gone (the virtual GPU was turned off) or stays torn."""
    for _ in range(100):
        with open(path, "rb") as file:
            data = file.read()
        records = [data[i : i + RECORD_BYTES] for i in range(0, len(data), RECORD_BYTES)]
        if records and all(
            record[:USED_BYTES] == pack_used(int.from_bytes(record[:8], "little")) for record in records
        ):
            return [Gpu(index, record) for index, record in enumerate(records)]
    raise OSError("unreadable state")


# --- the table ------------------------------------------------------------------------------------------------------


def table(gpus: list[Gpu]) -> str:
    whole, left, middle, right = 89, 41, 24, 22
    line = f"+{'-' * whole}+"
    parts = f"+{'-' * left}+{'-' * middle}+{'-' * right}+"

    def row(a: str, b: str, c: str) -> str:
        return f"|{a:<{left}}|{b:>{middle}}|{c:>{right}}|"

    rows = [
        f"{time.ctime()}       ",
        line,
        # The version's place says whose program this is; the rest of the line is as programs expect it.
        f"| NVIDIA-SMI {'virtual (gpumem_magic)':<23}Driver Version: {DRIVER_VERSION:<15}CUDA Version: {CUDA_VERSION:<9}|",
        parts,
        row(" GPU  Name                 Persistence-M ", " Bus-Id          Disp.A ", " Volatile Uncorr. ECC "),
        row(" Fan  Temp   Perf          Pwr:Usage/Cap ", "           Memory-Usage ", " GPU-Util  Compute M. "),
        row("", "", "              MIG M. "),
        f"|{parts[1:-1].replace('-', '=')}|",
    ]
    for gpu in gpus:
        memory = f"{gpu.used}MiB / {gpu.total}MiB"
        rows += [
            row(f" {gpu.index:>3}  {gpu.name[:29]:<30} Off ", f"{gpu.bus_id} Off ", "N/A "),
            row(f" N/A   N/A   N/A {'N/A /  N/A':>23} ", f"{memory} ", "      0%      Default "),
            row("", "", "N/A "),
            parts,
        ]
    rows += [
        "",
        line,
        f"|{' Processes:':<{whole}}|",
        f"|{'  GPU   GI   CI              PID   Type   Process name':<78}{'GPU Memory':<11}|",
        f"|{'        ID   ID':<78}{'Usage':<11}|",
        f"|{'=' * whole}|",
        f"|{'  No running processes found':<{whole}}|",
        line,
    ]
    return "\n".join(rows) + "\n"


# --- -L, -q ---------------------------------------------------------------------------------------------------------


def listing(gpus: list[Gpu]) -> str:
    return "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" for gpu in gpus)


def details(gpus: list[Gpu], sections: list[str]) -> str:
    """`-q`: everything, or the sections asked for with `-d`."""

    def entry(depth: int, label: str, value: object) -> str:
        return f"{' ' * (4 * depth) + label:<55}: {value}"

    rows = [
        "",
        "==============NVSMI LOG==============",
        "",
        entry(0, "Timestamp", time.ctime()),
        entry(0, "Driver Version", DRIVER_VERSION),
        entry(0, "CUDA Version", CUDA_VERSION),
        "",
        entry(0, "Attached GPUs", f"{len(gpus)} (virtual, emulated by gpumem_magic)"),
    ]
    for gpu in gpus:
        rows.append(f"GPU {gpu.bus_id}")
        if not sections:
            rows += [
                entry(1, "Product Name", gpu.name),
                entry(1, "GPU UUID", gpu.uuid),
                entry(1, "Minor Number", gpu.index),
            ]
        for section in sections or ["MEMORY", "UTILIZATION", "TEMPERATURE", "POWER"]:
            if section == "MEMORY":
                rows.append("    FB Memory Usage")
                for label in ("Total", "Reserved", "Used", "Free"):
                    rows.append(entry(2, label, f"{getattr(gpu, label.lower())} MiB"))
            elif section == "UTILIZATION":
                rows.append("    Utilization")
                rows += [entry(2, label, "0 %") for label in ("GPU", "Memory")]
            else:
                rows.append(entry(1, section.replace("_", " ").capitalize(), "N/A"))
        rows.append("")
    return "\n".join(rows) + "\n"


# --- --query-gpu, --query-compute-apps ------------------------------------------------------------------------------

ALIASES, APP_ALIASES = (
    {alias: field for alias, _, field in (pair.partition("=") for pair in WORDS[name])}
    for name in ("aliases", "process aliases")
)
# What a virtual GPU does not have: field -> unit of its column.
NOT_AVAILABLE = {field: unit for unit in ("", " [%]", " [W]", " [MHz]") for field in WORDS[f"not available{unit}"]}
IDLE_FIELDS = WORDS["idle"]
MEMORY_FIELDS = ("memory.total", "memory.reserved", "memory.used", "memory.free")
UNITS = {**NOT_AVAILABLE, **dict.fromkeys(MEMORY_FIELDS, " [MiB]"), **dict.fromkeys(IDLE_FIELDS, " [%]")}
KNOWN_FIELDS = (*WORDS["fields"], *MEMORY_FIELDS, *IDLE_FIELDS, *NOT_AVAILABLE)


def gpu_value(gpu: Gpu, field: str, count: int, units: bool) -> str:
    """One cell of `--query-gpu`; the field is known."""
    if field in NOT_AVAILABLE:
        return "[N/A]"
    if field in IDLE_FIELDS:
        return "0 %" if units else "0"
    if field in MEMORY_FIELDS:
        size: int = getattr(gpu, field.partition(".")[2])
        return f"{size} MiB" if units else str(size)
    domain, bus, slot = gpu.bus_id.split(":")
    now = time.time()
    return {
        "timestamp": f"{time.strftime('%Y/%m/%d %H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03}",
        "driver_version": DRIVER_VERSION,
        "count": str(count),
        "name": gpu.name,
        "uuid": gpu.uuid,
        "index": str(gpu.index),
        "pci.bus_id": gpu.bus_id,
        "pci.domain": f"0x{domain[-4:]}",
        "pci.bus": f"0x{bus}",
        "pci.device": f"0x{slot.partition('.')[0]}",
        "compute_cap": gpu.capability,
        "compute_mode": "Default",
        "persistence_mode": "Disabled",
    }[field]


class Stop(Exception):
    """Ends the program with a text and an exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def query_fields(text: str, aliases: dict[str, str], known: list[str] | tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    fields = [aliases.get(name, name) for name in names]
    for name, field in zip(names, fields, strict=True):
        if field not in known:
            raise Stop(f'Field "{name}" is not a valid field to query.\n', 2)
    return fields


# --- the command line -----------------------------------------------------------------------------------------------


def known_options() -> dict[str, tuple[str, bool]]:
    """Option -> (its long name, whether it takes a value): as the help has them, and those that go with others."""
    options = {"-d": ("display", True), "--display": ("display", True), "--format": ("format", True)}
    for line in HELP.splitlines():
        # What an option is for begins at column 33.
        names = [word.rstrip(",") for word in line[:33].split() if word.startswith("-")]
        for name in names:
            options[name.rstrip("=")] = (names[-1].strip("-="), names[-1].endswith("="))
    return options


OPTIONS = known_options()


def parse(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name in WORDS["elsewhere"]:
            raise Stop(f"'{name}' is not available on a virtual GPU.\n", 3)
        if name not in OPTIONS or (equals and not OPTIONS[name][1]):
            raise Stop(f"ERROR: Option {argument} is not recognized. Please run 'nvidia-smi -h'.\n", 255)
        key, takes_value = OPTIONS[name]
        if takes_value and not equals:
            if left and not left[0].startswith("-"):
                value = left.pop(0)
            elif key == "loop":
                value = "5"
            else:
                raise Stop(f"ERROR: Option {name} needs a value. Please run 'nvidia-smi -h' for help.\n", 2)
        options[key] = value
    return options


def interval(options: dict[str, str]) -> float | None:
    """Seconds between two outputs, None for one output."""
    for key, scale in (("loop-ms", 0.001), ("loop", 1.0)):
        if key in options:
            if not options[key].isdecimal() or int(options[key]) == 0:
                raise Stop(f"Invalid loop interval: {options[key]}\n", 2)
            return int(options[key]) * scale
    return None


def chosen(gpus: list[Gpu], ids: str | None) -> list[Gpu]:
    if ids is None:
        return gpus
    wanted = [name.strip().casefold() for name in ids.split(",")]
    found = []
    for name in wanted:
        match = [
            gpu
            for gpu in gpus
            if name in (str(gpu.index), gpu.uuid.casefold(), gpu.bus_id.casefold(), gpu.bus_id[4:].casefold())
        ]
        if not match:
            raise Stop("No devices were found\n", 6)
        found += [gpu for gpu in match if gpu not in found]
    return sorted(found, key=lambda gpu: gpu.index)


def csv(gpus: list[Gpu], options: dict[str, str], count: int, first: bool) -> str:
    given = options.get("format", "csv")
    form = {part.strip() for part in given.split(",")}
    if "csv" not in form or form - {"csv", "noheader", "nounits"}:
        raise Stop(f"Invalid format: {given}; write csv, csv,noheader or csv,noheader,nounits\n", 2)
    header = first and "noheader" not in form
    if "query-compute-apps" in options:
        fields = query_fields(options["query-compute-apps"], APP_ALIASES, WORDS["process fields"])
        heads = [f"{field} [MiB]" if field == "used_gpu_memory" else field for field in fields]
        return ", ".join(heads) + "\n" if header else ""
    fields = query_fields(options["query-gpu"], ALIASES, KNOWN_FIELDS)
    units = [UNITS.get(field, "") for field in fields]
    rows = [", ".join(map("".join, zip(fields, units, strict=True)))] if header else []
    rows += [", ".join(gpu_value(gpu, field, count, "nounits" not in form) for field in fields) for gpu in gpus]
    return "\n".join(rows) + "\n"


def answer(gpus: list[Gpu], options: dict[str, str], first: bool) -> str:
    """One output."""
    some = chosen(gpus, options.get("id"))
    if "query-gpu" in options or "query-compute-apps" in options:
        return csv(some, options, len(gpus), first)
    if "list-gpus" in options:
        return listing(some)
    if "query" in options:
        sections = [part.strip().upper() for part in options.get("display", "").split(",") if part.strip()]
        for section in sections:
            if section not in WORDS["sections"]:
                raise Stop(f"ERROR: Section {section} is not known. Known: {', '.join(WORDS['sections'])}\n", 2)
        return details(some, sections)
    if "display" in options or "format" in options:
        raise Stop("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n", 2)
    return table(some)


def run(path: str, arguments: list[str]) -> int:
    """Writes what `nvidia-smi ARGUMENTS` would write for the devices in the state file; returns the exit status."""
    write = sys.stdout.write
    try:
        options = parse(arguments)
        if "help" in options:
            write(HELP)
            return 0
        if "help-query-gpu" in options:
            write("\n".join(sorted(KNOWN_FIELDS)) + "\n")
            return 0
        if "version" in options:
            write(f"NVIDIA-SMI version  : virtual (gpumem_magic)\nDRIVER version      : {DRIVER_VERSION}\n")
            write(f"CUDA Version        : {CUDA_VERSION}\n")
            return 0
        pause = interval(options)
        write(answer(read_gpus(path), options, True))
        while pause is not None:
            sys.stdout.flush()
            time.sleep(pause)
            write(answer(read_gpus(path), options, False))
        sys.stdout.flush()
    except Stop as stop:
        write(f"{stop}\n" if stop.status == 2 else str(stop))
        return stop.status
    except BrokenPipeError:
        raise
    except OSError:
        write("The virtual GPU of gpumem_magic is off.\n")
        return 9
    except KeyboardInterrupt:
        return 130
    return 0


def main(path: str) -> None:
    """The program: never returns."""
    try:
        status = run(path, sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left (`nvidia-smi | head -1`): end as a signal would, without Python's complaint about it.
        import os

        os._exit(141)
    sys.exit(status)

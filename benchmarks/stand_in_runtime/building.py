"""Builds `runtime.c`, and a success for every other function that the wheel asks for, into two libraries of a scratch folder."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
EMULATED = r"(?:cudart|cublas|cublasLt|cufft|cusparse|cusolver)"
_LOOK = """
import glob, importlib.util, json, os, sys
found = importlib.util.find_spec("torch")
said = {}
if found is not None:
    exec(open(os.path.join(os.path.dirname(found.origin), "version.py")).read(), said)
search = lambda *ways: sorted(path for start in dict.fromkeys(sys.path) for way in ways for path in glob.glob(f"{start}/{way}"))
print(json.dumps({
    "torch": os.path.dirname(found.origin) if found else None, "version": said.get("__version__"), "cuda": said.get("cuda"),
    "libraries": search("nvidia/*/lib", "cusparselt/lib"),
    "headers": search("nvidia/*/include", "triton/backends/nvidia/include"),
}))
"""

# The driver's one answer that counts: before a backward pass older PyTorch asks it whether the device is in use.
_IN_USE = (
    "int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }\n"
)


class Unfit(Exception):
    """It cannot be built or run here. The text says why, in one line."""


@dataclass(frozen=True)
class Wheel:
    """PyTorch in another environment: its folder and version, and the folders of the nvidia packages beside it."""

    torch: Path
    version: str
    libraries: tuple[Path, ...]
    headers: tuple[Path, ...]


def wheel(python: str) -> Wheel:
    """What is installed there, found without importing it."""
    found = json.loads(_run([python, "-c", _LOOK], "the other Python cannot be run"))
    if not found["torch"]:
        raise Unfit(f"{python} has no PyTorch")
    if not found["cuda"]:
        raise Unfit(f"{python} has PyTorch {found['version']}, which is no CUDA build")
    paths = {key: tuple(Path(one) for one in found[key]) for key in ("libraries", "headers")}
    return Wheel(Path(found["torch"]), found["version"], **paths)


def build(wheel: Wheel, folder: Path) -> dict[str, str]:
    """Makes runtime.so and libcuda.so.1 in `folder`; the environment variables with which the wheel finds them."""
    # The header of crt/ is a package of its own, but Triton's wheel has it, too.
    missing = [name for name in ("cuda_runtime_api.h", "crt/host_defines.h", "cuda.h") if not _header(wheel, name)]
    if missing:
        raise Unfit(f"no {missing[0]} beside that PyTorch: its nvidia-cuda-runtime and triton packages have it")
    compiler = ["cc", "-w", "-O1", "-fPIC"]
    include = [f"-I{path}" for path in wheel.headers]
    runtime, stubs = folder / "runtime.o", folder / "stubs.c"
    _run([*compiler, *include, "-c", "-o", str(runtime), str(HERE / "runtime.c")], "runtime.c does not compile")
    own = set(re.findall(r" T (\w+)", _run(["nm", "--defined-only", str(runtime)], "no symbols can be read")))
    libraries = [str(path) for path in sorted((wheel.torch / "lib").glob("*.so"))]
    listing = _run(["nm", "-D", "--undefined-only", *libraries], "the wheel's symbols cannot be read")
    solver = _header(wheel, "cusolverDn.h")
    declarations = solver.read_text(encoding="utf-8", errors="replace") if solver else ""
    stubs.write_text("#include <stddef.h>\n" + successes(emulated(listing) - own, declarations), encoding="utf-8")
    _run([*compiler, "-shared", "-o", str(folder / "runtime.so"), str(runtime), str(stubs)], "stubs do not link")
    words = (_header(wheel, "cuda.h") or HERE).read_text(encoding="utf-8", errors="replace")
    asked = set(re.findall(r"\bcu[A-Z]\w*\b", words)) - {"cuDevicePrimaryCtxGetState"}
    stubs.write_text(_IN_USE + successes(asked), encoding="utf-8")
    _run([*compiler, "-shared", "-o", str(folder / "libcuda.so.1"), str(stubs)], "the driver's stubs do not link")
    paths = [str(folder), *map(str, wheel.libraries)]
    return {"LD_LIBRARY_PATH": ":".join(paths), "LD_PRELOAD": str(folder / "runtime.so")}


def emulated(listing: str) -> set[str]:
    """What a listing of `nm -D --undefined-only` asks for of CUDA's runtime and of the libraries that are not run."""
    return set(re.findall(rf" U (\w+)@+lib{EMULATED}\.so", listing))


def successes(names: set[str], declarations: str = "") -> str:
    """C functions that return 0, and write 0 where the declarations have them say how much a solver's workspace takes."""
    written = []
    for name in sorted(names):
        sizes = _sizes_asked_for(name, declarations) if name.endswith("ufferSize") else []
        arguments = ", ".join(f"void *a{place}" for place in range(max((place for place, _ in sizes), default=-1) + 1))
        zeros = "".join(f"*({kind} *)a{place} = 0; " for place, kind in sizes)
        written.append(f"int {name}({arguments}) {{ {zeros}return 0; }}\n")
    return "".join(written)


def _sizes_asked_for(name: str, declarations: str) -> list[tuple[int, str]]:
    """Where in a function's arguments it writes how large a workspace has to be, and as which type."""
    found = re.search(rf"\b{name}\s*\(([^)]*)\)", declarations)
    # (Numbers that are no integers are passed apart from the others.)
    whole = (
        [one for one in found[1].split(",") if "*" in one or not re.search(r"\b(float|double)\b", one)] if found else []
    )
    asked = [
        (place, re.search(r"\b(int|size_t)\s*\*\s*(?:[lL]work|workspace|buf)", one)) for place, one in enumerate(whole)
    ]
    return [(place, kind[1]) for place, kind in asked if kind]


def _header(wheel: Wheel, name: str) -> Path | None:
    return next((folder / name for folder in wheel.headers if (folder / name).exists()), None)


def _run(command: list[str], complaint: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unfit(f"{complaint}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Unfit(f"{complaint}: {(done.stderr.strip().splitlines() or ['no word why'])[0]}")
    return done.stdout

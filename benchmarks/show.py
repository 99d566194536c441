"""A snapshot file as a report, a timeline page and a picture, beside the page that PyTorch makes of the same file.

    python benchmarks/show.py FILE.pickle [--turns 5]

Each is a new process, in turns, so that both meet the same machine; median and fastest are printed. Much of PyTorch's time
is the import of torch, which reading a file does without here; its page works out the drawing later, in the browser.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PICTURE = (
    "import sys, gpumem_magic\n"
    "report = gpumem_magic.load(sys.argv[1])\n"
    "timeline = report.timeline()\n"
    "timeline.to_png()\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "run.pickle", str(Path(folder) / "page.html")
        content = options.file.read_bytes()
        path.write_bytes(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
        commands = {
            "PyTorch's trace_plot": ["-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", page],
            "gpumem show --html": ["-m", "gpumem_magic.cli", "show", str(path), "--html", page],
            "load, ledger and picture": ["-c", _PICTURE, str(path)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.turns):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                seconds[name].append(time.perf_counter() - began)
    for name, found in seconds.items():
        print(f"{name:26} {statistics.median(found):6.2f} s  (fastest {min(found):.2f} s)")


if __name__ == "__main__":
    main()

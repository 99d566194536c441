"""Ten thousand damaged and hostile snapshot files on the whole road, from the file to a report and a page.

    python benchmarks/hostile.py [--files 10000] [--seed 1]

Exit status 1 where anything was executed, raised what it should not, took more than a second, or more than 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import traceback
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile_snapshots import hand_made, mutations, walk

GIB = 1 << 30
SECOND = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcomes = {"loaded": 0, "refused": 0, "mistakes": 0}
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory() as folder:
        canary, path = Path(folder) / "canary", Path(folder) / "case.pickle"
        made = ((str(number), content) for number, content in enumerate(mutations(options.seed, options.files)))
        for name, content in chain(hand_made(canary).items(), made):
            path.write_bytes(content)
            began = time.process_time()
            try:
                outcomes["refused" if walk(path) else "loaded"] += 1
            except Exception:
                outcomes["mistakes"] += 1
                print(f"--- {name}\n{traceback.format_exc()}")
            slowest = max(slowest, (time.process_time() - began, name))
        executed = canary.exists()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{sum(outcomes.values()):,} files: " + ", ".join(f"{count:,} {what}" for what, count in outcomes.items()))
    print(
        f"slowest: {slowest[0]:.3f} s ({slowest[1]}); most memory: {memory / (1 << 20):,.0f} MiB; executed: {executed}"
    )
    return int(executed or outcomes["mistakes"] > 0 or slowest[0] > SECOND or memory > GIB)


if __name__ == "__main__":
    sys.exit(main())

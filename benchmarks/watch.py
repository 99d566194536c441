"""What ``%gpumem_watch`` costs the program that is watched: a training loop on the CPU, with the watch and without.

    python benchmarks/watch.py [--pairs 30] [--seconds 1.0] [--rates 2 5 10]

Everything runs in a real kernel, with the live chart's own messages going out, and this program reading them as a page would.
A virtual T4 is on and holds a model; the loop takes and frees a little of it in every step, so that each sample has something
new to read. A pair is the same number of steps twice, side by side, in random order: with and without the watch. For the
control both are without. Pairs of all kinds are shuffled, so that the machine's moods fall on all of them. The figure is the
median of the pairs' ratios of time, with a bootstrap interval of 95 %; "beyond control" divides it by the control's.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 256
RESAMPLES = 5000
_DELIMITER = b"<IDS|MSG>"


# ---- in the kernel


def loop() -> Callable[[int], float]:
    """A function that trains for so many steps and returns the seconds that took."""
    import torch

    torch.set_num_threads(1)
    resident = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    )
    optimizer = torch.optim.Adam(model.parameters())
    batch, wanted = torch.randn(64, WIDTH), torch.randint(10, (64,))

    def run(steps: int) -> float:
        moving = [next(resident.parameters())]
        begin = time.perf_counter()
        for step in range(steps):
            moving[:] = [torch.empty(1024 * (1 + step % 7), device="cuda")]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), wanted).backward()
            optimizer.step()
        return time.perf_counter() - begin

    return run


def pairs_in_kernel(shell: Any, rates: Sequence[float], pairs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Runs all pairs. rate 0 is the control. Returns the ratios and the sampler's CPU seconds and samples for each rate."""
    import gpumem_magic

    run = loop()
    run(20)
    steps = max(int(20 * seconds / run(20)), 10)
    found: dict[str, Any] = {str(rate): {"ratios": [], "cpu_seconds": 0.0, "samples": 0} for rate in (0, *rates)}

    def side(rate: float) -> float:
        if rate:
            shell.run_line_magic("gpumem_watch", f"--hz {rate:g}")
        time.sleep(0.1)
        taken = run(steps)
        if rate:
            shell.run_line_magic("gpumem_watch", "stop")
            last = gpumem_magic.last_watch()
            assert last is not None
            found[str(rate)]["cpu_seconds"] += last.cpu_seconds
            found[str(rate)]["samples"] += last.devices[0].taken
        return taken

    side(max(rates))
    found[str(max(rates))].update(cpu_seconds=0.0, samples=0)
    order = random.Random(seed)
    plan = [rate for rate in (0, *rates) for _ in range(pairs)]
    order.shuffle(plan)
    for rate in plan:
        if order.random() < 0.5:
            watched = side(rate)
            alone = side(0)
        else:
            alone = side(0)
            watched = side(rate)
        found[str(rate)]["ratios"].append(watched / alone)
    return found


# ---- beside it


class Wire(threading.Thread):
    """Reads all that the kernel publishes, as a page does, and adds up the samples' messages in bytes as they are on the wire."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._ending = threading.Event()
        self.samples = 0
        self.bytes = 0

    def run(self) -> None:
        while not self._ending.is_set():
            if self._socket.poll(100):
                frames = self._socket.recv_multipart()
                body = frames[frames.index(_DELIMITER) + 1 :]
                if b'"comm_msg"' in body[1] and json.loads(body[4])["data"].get("content", {}).get("k") == "rows":
                    self.samples += 1
                    self.bytes += sum(map(len, frames))

    def stop(self) -> None:
        self._ending.set()
        self.join()
        self._socket.close(0)


def in_kernel(module: str, expression: str) -> tuple[dict[str, Any], Wire]:
    """What an expression of a module beside this one gives in a new kernel with a virtual T4; and what was on the wire."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    wire = Wire(f"tcp://{manager.ip}:{manager.iopub_port}")
    wire.start()
    here = Path(__file__).resolve()
    code = (
        f"import sys, json\nsys.path[:0] = [{str(here.parents[1])!r}, {str(here.parent)!r}]\n"
        f"%load_ext gpumem_magic\n%gpumem_device T4\nimport {module} as bench\n"
        f"print('FOUND ' + json.dumps(bench.{expression}))"
    )
    texts: list[str] = []
    try:
        request = client.execute(code)
        while True:
            try:
                message = client.get_iopub_msg(timeout=5.0)
            except queue.Empty:
                if not manager.is_alive():
                    raise SystemExit("the kernel has gone") from None
                continue
            content, kind = message["content"], message["msg_type"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream":
                (texts.append if content["name"] == "stdout" else sys.stderr.write)(content["text"])
            elif kind == "error":
                raise SystemExit("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
    finally:
        wire.stop()
        client.stop_channels()
        manager.shutdown_kernel()
    found: dict[str, Any] = json.loads("".join(texts).rpartition("FOUND ")[2])
    return found, wire


def interval(draw: Callable[[random.Random], float]) -> tuple[float, float]:
    """95 % of what `draw` gives when it draws again and again."""
    chance = random.Random(0)
    found = sorted(draw(chance) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def again(ratios: list[float], chance: random.Random) -> float:
    return statistics.median(chance.choices(ratios, k=len(ratios)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="pairs for each rate")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one side of a pair")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 5.0, 10.0], help="samples a second")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    numbers = f"{options.rates}, {options.pairs}, {options.seconds}, {options.seed}"
    found, wire = in_kernel(Path(__file__).stem, f"pairs_in_kernel(get_ipython(), {numbers})")
    print(
        f"Python {platform.python_version()}, {options.pairs} pairs of {options.seconds:g} s for each, seed {options.seed}"
    )
    control = found["0"]["ratios"]
    low, high = interval(lambda chance: again(control, chance))
    print(f"off against off  {statistics.median(control):.3f}  [{low:.3f}, {high:.3f}]")
    for rate in options.rates:
        ratios = found[str(rate)]["ratios"]
        low, high = interval(lambda chance, ratios=ratios: again(ratios, chance))  # type: ignore[misc]
        beyond = interval(lambda chance, ratios=ratios: again(ratios, chance) / again(control, chance))  # type: ignore[misc]
        cpu = 1000 * found[str(rate)]["cpu_seconds"] / found[str(rate)]["samples"]
        print(
            f"{rate:>4g} Hz          {statistics.median(ratios):.3f}  [{low:.3f}, {high:.3f}]   beyond control "
            f"{statistics.median(ratios) / statistics.median(control):.3f}  [{beyond[0]:.3f}, {beyond[1]:.3f}]   "
            f"sampler {cpu:.2f} ms CPU a sample"
        )
    print(
        f"{wire.bytes / wire.samples:.0f} bytes a sample of one device, all frames of its message ({wire.samples} messages)"
    )


if __name__ == "__main__":
    main()

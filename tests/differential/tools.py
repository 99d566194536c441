"""Other tools at work in the same kernel: what they see of a cell, and what they do to it, is the same plain and measured.

A tool that is not installed has no cases; `missing` names it.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator

from run import Case

_MODULE = """\
open("mine.py", "w").write('''
def squares(limit):
    found = []
    for n in range(limit):
        if n % 2:
            found.append(n * n)
    return found

def fails(x):
    return 1 / x
''')
import sys, os
sys.path.insert(0, os.getcwd())
import mine
"""
_WORK = "total = 0\nfor n in range(4):\n    total += sum(mine.squares(n))\ntry:\n    mine.fails(0)\nexcept ZeroDivisionError as error:\n    print(error)\ntotal"
_LINES = "sorted((name.rpartition('/')[2], sorted(data.lines(name))) for name in data.measured_files() if name.endswith('mine.py'))"
_TRACER = """\
seen = []
def tracer(frame, event, argument):
    if frame.f_code.co_filename.endswith("mine.py"):
        seen.append((frame.f_code.co_name, frame.f_lineno, event))
    return tracer
"""
_MONITOR = """\
seen = []
monitoring = sys.monitoring
monitoring.use_tool_id(4, "mine")
def line(code, number):
    if code.co_filename.endswith("mine.py"):
        seen.append((code.co_name, number))
monitoring.register_callback(4, monitoring.events.LINE, line)
monitoring.set_events(4, monitoring.events.LINE)
"""

# (the module that it needs, cells before, cells that are measured)
TOOLS: dict[str, tuple[str, list[str], list[str]]] = {
    "sys.settrace": ("sys", [_MODULE, _TRACER], ["sys.settrace(tracer)\n" + _WORK + "\nsys.settrace(None)", "seen"]),
    "sys.setprofile": ("sys", [_MODULE, _TRACER, "sys.setprofile(tracer)"], [_WORK, "sys.setprofile(None)\nseen"]),
    "threading.settrace": (
        "sys",
        [_MODULE, _TRACER, "import threading"],
        ["threading.settrace(tracer)\nt = threading.Thread(target=mine.squares, args=[3], name='t')\nt.start(); t.join()\nthreading.settrace(None)\nseen"],
    ),
    "sys.monitoring": ("monitoring", [_MODULE, _MONITOR], [_WORK, "monitoring.set_events(4, 0)\nmonitoring.free_tool_id(4)\nseen"]),
    "coverage": (
        "coverage",
        [_MODULE, "import coverage\ncov = coverage.Coverage(data_file=None, config_file=False)\ncov.start()"],
        [_WORK, "cov.stop()\ndata = cov.get_data()\n" + _LINES],
    ),
    "coverage through the cell": (
        "coverage",
        [_MODULE, "import coverage\ncov = coverage.Coverage(data_file=None, config_file=False, branch=True)"],
        [f"with cov.collect():\n    mine.squares(4)\ndata = cov.get_data()\n{_LINES}"],
    ),
    "coverage by monitoring": (
        "coverage+monitoring",
        [_MODULE, "os.environ['COVERAGE_CORE'] = 'sysmon'\nimport coverage\ncov = coverage.Coverage(data_file=None, config_file=False)\ncov.start()"],
        [_WORK, "cov.stop()\ndata = cov.get_data()\n" + _LINES],
    ),
    "line_profiler": (
        "line_profiler",
        [_MODULE, "from line_profiler import LineProfiler\nprofiler = LineProfiler(mine.squares)\nprofiler.enable_by_count()"],
        [_WORK, "profiler.disable_by_count()\n[[row[:2] for row in rows] for rows in profiler.get_stats().timings.values()]"],
    ),
    "%lprun": (
        "line_profiler",
        [_MODULE, "%load_ext line_profiler"],
        ["stats = %lprun -r -f mine.squares mine.squares(5)\n[[row[:2] for row in rows] for rows in stats.get_stats().timings.values()]"],
    ),
    "memory_profiler": (
        "memory_profiler",
        [_MODULE, "%load_ext memory_profiler"],
        ["r = %memit -o -r 1 mine.squares(5)\ntype(r).__name__", "from memory_profiler import memory_usage\n_, value = memory_usage((mine.squares, [5]), retval=True)\nvalue"],
    ),
    "pyinstrument": (
        "pyinstrument",
        [_MODULE, "from pyinstrument import Profiler\nprofiler = Profiler(async_mode='disabled')\nprofiler.start()"],
        [_WORK, "session = profiler.stop()\nprofiler.is_running, sys.getprofile()"],
    ),
    "%pyinstrument": ("pyinstrument", [_MODULE, "%load_ext pyinstrument"], ["from pyinstrument import Profiler\nwith Profiler() as p:\n    x = mine.squares(4)\nx"]),
    "scalene": ("scalene", [_MODULE, "from scalene import scalene_profiler"], [_WORK]),
    "autoreload": (
        "IPython",
        [_MODULE, "%load_ext autoreload\n%autoreload 2\nimport time, pathlib"],
        [
            "mine.squares(4)",
            "pathlib.Path('mine.py').write_text('def squares(limit):\\n    return \"new\"\\n')\nos.utime('mine.py', (9e8, 9e8))",
            "mine.squares(4)",
            "pathlib.Path('mine.py').write_text('def squares(:')\nos.utime('mine.py', (8e8, 8e8))",
            "mine.squares(4)",
        ],
    ),
    "jaxtyping": (
        "jaxtyping+beartype",
        ["import torch\nfrom jaxtyping import Float\n%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype"],
        ["def f(x: Float[torch.Tensor, 'a b']) -> Float[torch.Tensor, 'b a']:\n    return x.T\nf(torch.ones(2, 3)).shape", "f(torch.ones(3))"],
    ),
    "jaxtyping's import hook": (
        "jaxtyping+beartype",
        [_MODULE, "open('typed.py', 'w').write('import torch\\nfrom jaxtyping import Float\\ndef f(x: Float[torch.Tensor, \"a a\"]): return x\\n')"],
        ["from jaxtyping import install_import_hook\nwith install_import_hook('typed', 'beartype.beartype'):\n    import typed\nimport torch\ntyped.f(torch.ones(2, 2)).shape", "typed.f(torch.ones(2, 3))"],
    ),
    "beartype's import hook": (
        "beartype",
        [_MODULE, "open('claimed.py', 'w').write('def f(x: int) -> str: return str(x)\\n')"],
        ["from beartype.claw import beartype_package\nbeartype_package('claimed')\nimport claimed\nclaimed.f(3)", "claimed.f('three')"],
    ),
    "beartype on cells": ("beartype", [_MODULE, "from beartype import beartype"], ["@beartype\ndef f(x: int) -> int:\n    return x\nf(2)", "f('two')"]),
    "cProfile": (
        "cProfile",
        [_MODULE, "import cProfile, pstats, io\nprofiler = cProfile.Profile()\nprofiler.enable()"],
        [_WORK, "profiler.disable()\nsorted((k[2], v[0]) for k, v in pstats.Stats(profiler).stats.items() if k[0].endswith('mine.py'))"],
    ),
    "%prun": ("cProfile", [_MODULE], ["p = %prun -q -r mine.squares(5)\nsorted((k[2], v[0]) for k, v in p.stats.items() if k[0].endswith('mine.py'))"]),
    "tracemalloc": ("tracemalloc", [_MODULE, "import tracemalloc\ntracemalloc.start()"], [_WORK + "\ntracemalloc.is_tracing(), tracemalloc.get_traceback_limit()"]),
    "faulthandler": ("faulthandler", [_MODULE, "import faulthandler\nfaulthandler.enable()"], [_WORK + "\nfaulthandler.is_enabled()"]),
    "an alarm": (
        "signal",
        [_MODULE, "import signal\nclass TimeOut(Exception): pass\ndef ring(number, frame):\n    raise TimeOut('too long')\nsignal.signal(signal.SIGALRM, ring)"],
        ["signal.setitimer(signal.ITIMER_REAL, 0.15)\nwhile True:\n    squares = mine.squares(3)"],
    ),
    "torch's profiler": ("torch", ["import torch"], ["with torch.profiler.profile() as p:\n    torch.ones(3) + 1\nsorted({e.key for e in p.key_averages() if e.key.startswith('aten')})"]),
    "torch's modes": (
        "torch",
        ["import torch\nfrom torch.utils._python_dispatch import TorchDispatchMode\nseen = []\nclass Seen(TorchDispatchMode):\n    def __torch_dispatch__(self, f, types, args=(), kwargs=None):\n        seen.append(str(f))\n        return f(*args, **(kwargs or {}))"],
        ["with Seen():\n    x = torch.ones(3)\n    y = x + 1\n    z = 5\nseen"],
    ),
    "weak references": ("weakref", ["import weakref, gc\nclass Node: pass"], ["n = Node()\nr = weakref.ref(n, lambda _: print('gone'))\ndel n\nprint(r())\ngc.disable()  # By itself Python collects at a moment of its own.\nm = Node(); m.self = m; q = weakref.ref(m)\ndel m\nprint(q() is None)\ngc.enable()"]),
    "logging": ("logging", ["import logging\nlogging.basicConfig(level=logging.DEBUG, format='%(message)s %(funcName)s %(lineno)d', stream=__import__('sys').stdout, force=True)"], ["logging.info('in a cell')\nlogging.debug('again')"]),
    "asyncio tasks": ("asyncio", ["import asyncio\nseen = []\nasync def tick():\n    for n in range(3):\n        seen.append(n)\n        await asyncio.sleep(0)"], ["t = asyncio.create_task(tick())\nawait asyncio.sleep(0.01)\nseen", "seen"]),
}  # fmt: skip


def _is_there(needs: str) -> bool:
    names = needs.split("+")
    monitoring = "monitoring" not in names or hasattr(sys, "monitoring")
    return monitoring and all(importlib.util.find_spec(name) for name in names if name not in ("monitoring", "sys"))


def missing() -> list[str]:
    """The tools that are not there."""
    return [name for name, (needs, _, _) in TOOLS.items() if not _is_there(needs)]


def cases(source: random.Random) -> Iterator[Case]:
    names = [name for name, (needs, _, _) in TOOLS.items() if _is_there(needs)]
    source.shuffle(names)
    for name in names:
        _, setup, cells = TOOLS[name]
        yield Case(f"tools: {name}", cells, setup, seconds=20.0)

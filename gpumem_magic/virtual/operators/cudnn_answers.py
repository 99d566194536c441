"""A process of its own that asks a cuDNN library what its plans for convolutions take. `cudnn_library` starts it.

    python cudnn_answers.py LIBRARY ...

LIBRARY are names or files, of which the first that is there is asked. The first line of the output is its version, 92000 for
9.20.0. Then each line of the input is a JSON list: a card and a call as `cudnn_library` writes them, and whether all plans are
wanted or the first only. Each is answered by one line: a JSON list of bytes, in the order in which PyTorch tries the plans, empty
where cuDNN refuses. It needs nothing but Python.

A process of its own, since cuDNN ends the one that it is in where it misses a library of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

_FIRST = 90800
"""9.8 was the first that can be asked."""
# Numbers of cudnn_graph.h, by its names without what they begin with.
_KINDS = {
    "CONVOLUTION": 1, "ENGINE": 2, "ENGINECFG": 3, "ENGINEHEUR": 4, "EXECUTION_PLAN": 5, "FORWARD": 10, "BACKWARD_FILTER": 11,
    "BACKWARD_DATA": 12, "OPERATIONGRAPH": 15, "TENSOR": 17, "DEVICEPROP": 38,
}  # fmt: skip
_TYPES: dict[str, tuple[int, Any]] = {
    "DATA_TYPE": (1, ctypes.c_int), "INT64": (3, ctypes.c_int64), "FLOAT": (4, ctypes.c_float),
    "CONVOLUTION_MODE": (7, ctypes.c_int), "HEUR_MODE": (8, ctypes.c_int), "NUMERICAL_NOTE": (11, ctypes.c_int),
    "BACKEND_DESCRIPTOR": (15, ctypes.c_void_p), "CHAR": (24, ctypes.c_char),
}  # fmt: skip
_CONVOLUTION = {
    "COMP_TYPE": 100, "CONV_MODE": 101, "DILATIONS": 102, "FILTER_STRIDES": 103, "POST_PADDINGS": 104, "PRE_PADDINGS": 105,
    "SPATIAL_DIMS": 106,
}  # fmt: skip
_HEURISTICS_MODE, _HEURISTICS_GRAPH, _HEURISTICS_RESULTS, _HEURISTICS_CARD = 200, 201, 202, 204
_CONFIGURATION_ENGINE = 300
_PLAN_CONFIGURATION, _PLAN_WORKSPACE, _PLAN_CARD = 401, 402, 407
_GRAPH_OPERATIONS = 801
_TENSOR = {"BYTE_ALIGNMENT": 900, "DATA_TYPE": 901, "DIMENSIONS": 902, "STRIDES": 903, "UNIQUE_ID": 906}
_ENGINE_NOTES = 1303
_CARD_JSON = 2702
# The operation of each way, and its attributes: alpha, beta, the convolution, then its tensors (fine, weight, coarse).
_WAYS = {
    "forward": ("FORWARD", 700, 701, 702, (704, 703, 705)),
    "input": ("BACKWARD_DATA", 706, 707, 708, (710, 709, 711)),
    "weight": ("BACKWARD_FILTER", 712, 713, 714, (716, 715, 717)),
}
_DATA = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_CROSS_CORRELATION = 1
_INSTANT, _FALLBACK = 0, 2
_TENSOR_CORE, _LESS_PRECISE, _NOT_DETERMINISTIC = 0, 1, 4
_MOST_NOTES = 16
# Blocks of PyTorch's allocator begin at multiples of 512 bytes; `getAlignment` looks no further than 32.
_ALIGNMENT = 32


class _Refusal(Exception):
    """cuDNN answered with a status other than success."""


class _Descriptor:
    """A descriptor of cuDNN's. It keeps those that it was made of: cuDNN holds their addresses."""

    def __init__(self, library: _Plans, kind: str) -> None:
        self._functions = library.functions
        self._parts: list[_Descriptor] = []
        self.address = ctypes.c_void_p()
        _check(self._functions.cudnnBackendCreateDescriptor(_KINDS[kind], ctypes.byref(self.address)))

    def __del__(self) -> None:
        if self.address:
            self._functions.cudnnBackendDestroyDescriptor(self.address)

    def put(self, attribute: int, type_name: str, *values: Any) -> _Descriptor:
        number, c_type = _TYPES[type_name]
        self._parts += [value for value in values if isinstance(value, _Descriptor)]
        plain = [value.address.value if isinstance(value, _Descriptor) else value for value in values]
        array = (c_type * len(plain))(*plain)
        size = ctypes.c_int64(len(plain))
        _check(self._functions.cudnnBackendSetAttribute(self.address, attribute, number, size, array))
        return self

    def done(self) -> _Descriptor:
        _check(self._functions.cudnnBackendFinalize(self.address))
        return self

    def get(self, attribute: int, type_name: str, most: int = 1, into: Sequence[_Descriptor] = ()) -> list[Any]:
        number, c_type = _TYPES[type_name]
        array = (c_type * most)(*(part.address.value for part in into))
        count = ctypes.c_int64()
        size = ctypes.c_int64(most)
        _check(
            self._functions.cudnnBackendGetAttribute(self.address, attribute, number, size, ctypes.byref(count), array)
        )
        return list(array[: count.value])

    def how_many(self, attribute: int, type_name: str) -> int:
        count = ctypes.c_int64()
        number = _TYPES[type_name][0]
        nothing = ctypes.c_int64(0)
        _check(
            self._functions.cudnnBackendGetAttribute(
                self.address, attribute, number, nothing, ctypes.byref(count), None
            )
        )
        return count.value

    def kept_by(self, *parts: _Descriptor) -> _Descriptor:
        self._parts += parts
        return self


def _check(status: int) -> None:
    if status:
        raise _Refusal(status)


class _Plans:
    """cuDNN of a name or file. version: 92000 for 9.20.0."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions = functions
        functions.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(functions.cudnnGetVersion())
        self._cards: dict[str, _Descriptor | None] = {}

    def workspaces(self, described: dict[str, Any], call: dict[str, Any]) -> Iterator[int]:
        """Bytes of each plan, in the order in which PyTorch tries them. None at all where cuDNN has no answer for the card."""
        card = self._card(json.dumps(described))
        if card is None or call["dtype"] not in _DATA:
            return
        with contextlib.suppress(_Refusal):
            graph = self._graph(call)
            for mode in (_INSTANT, _FALLBACK):
                for configuration in self._configurations(graph, card, mode):
                    notes = self._notes(configuration)
                    if _LESS_PRECISE in notes or (call["deterministic"] and _NOT_DETERMINISTIC in notes):
                        continue
                    if call["dtype"] == "float32" and not call["tf32"] and _TENSOR_CORE in notes:
                        continue
                    # A configuration that makes no plan is passed over, as there.
                    with contextlib.suppress(_Refusal):
                        plan = self._new("EXECUTION_PLAN").put(_PLAN_CONFIGURATION, "BACKEND_DESCRIPTOR", configuration)
                        plan.put(_PLAN_CARD, "BACKEND_DESCRIPTOR", card).done()
                        yield int(plan.get(_PLAN_WORKSPACE, "INT64")[0])

    def _new(self, kind: str) -> _Descriptor:
        return _Descriptor(self, kind)

    def _card(self, text: str) -> _Descriptor | None:
        if text not in self._cards:
            self._cards[text] = None
            with contextlib.suppress(_Refusal):
                letters = [bytes([letter]) for letter in text.encode()]
                self._cards[text] = self._new("DEVICEPROP").put(_CARD_JSON, "CHAR", *letters).done()
        return self._cards[text]

    def _graph(self, call: dict[str, Any]) -> _Descriptor:
        dtype = _DATA[call["dtype"]]
        sums = _DATA["float64" if call["dtype"] == "float64" else "float32"]
        convolution = self._new("CONVOLUTION").put(_CONVOLUTION["COMP_TYPE"], "DATA_TYPE", sums)
        convolution.put(_CONVOLUTION["CONV_MODE"], "CONVOLUTION_MODE", _CROSS_CORRELATION)
        convolution.put(_CONVOLUTION["SPATIAL_DIMS"], "INT64", len(call["stride"]))
        convolution.put(_CONVOLUTION["PRE_PADDINGS"], "INT64", *call["padding"])
        convolution.put(_CONVOLUTION["POST_PADDINGS"], "INT64", *call["padding"])
        convolution.put(_CONVOLUTION["DILATIONS"], "INT64", *call["dilation"])
        convolution.put(_CONVOLUTION["FILTER_STRIDES"], "INT64", *call["stride"]).done()
        kind, alpha, beta, of_convolution, of_tensors = _WAYS[call["way"]]
        operation = self._new(kind).put(of_convolution, "BACKEND_DESCRIPTOR", convolution)
        for name, attribute, shape in zip(
            "xwy", of_tensors, (call["fine"], call["weight"], call["coarse"]), strict=True
        ):
            tensor = self._new("TENSOR").put(_TENSOR["DATA_TYPE"], "DATA_TYPE", dtype)
            tensor.put(_TENSOR["DIMENSIONS"], "INT64", *shape)
            tensor.put(_TENSOR["STRIDES"], "INT64", *strides(shape, call["last"]))
            tensor.put(_TENSOR["UNIQUE_ID"], "INT64", ord(name)).put(_TENSOR["BYTE_ALIGNMENT"], "INT64", _ALIGNMENT)
            operation.put(attribute, "BACKEND_DESCRIPTOR", tensor.done())
        operation.put(alpha, "FLOAT", 1.0).put(beta, "FLOAT", 0.0).done()
        return self._new("OPERATIONGRAPH").put(_GRAPH_OPERATIONS, "BACKEND_DESCRIPTOR", operation).done()

    def _configurations(self, graph: _Descriptor, card: _Descriptor, mode: int) -> list[_Descriptor]:
        heuristics = self._new("ENGINEHEUR").put(_HEURISTICS_GRAPH, "BACKEND_DESCRIPTOR", graph)
        heuristics.put(_HEURISTICS_MODE, "HEUR_MODE", mode).put(_HEURISTICS_CARD, "BACKEND_DESCRIPTOR", card)
        try:
            heuristics.done()
        except _Refusal:
            return []
        count = heuristics.how_many(_HEURISTICS_RESULTS, "BACKEND_DESCRIPTOR")
        if not count:
            return []
        found = [self._new("ENGINECFG").kept_by(heuristics, graph) for _ in range(count)]
        got = heuristics.get(_HEURISTICS_RESULTS, "BACKEND_DESCRIPTOR", count, found)
        return found[: len(got)]

    def _notes(self, configuration: _Descriptor) -> list[int]:
        engine = self._new("ENGINE")
        configuration.get(_CONFIGURATION_ENGINE, "BACKEND_DESCRIPTOR", 1, [engine])
        return engine.get(_ENGINE_NOTES, "NUMERICAL_NOTE", _MOST_NOTES)


def strides(shape: Sequence[int], last: bool) -> list[int]:
    """Of a tensor without gaps: plain, or with the channels last."""
    order = [*([1] if last else []), *range(len(shape) - 1, 1, -1), *([] if last else [1]), 0]
    found, step = [0] * len(shape), 1
    for dimension in order:
        found[dimension] = step
        step *= shape[dimension]
    return found


def opened(name: str) -> _Plans | None:
    """The library of that name or file; None where it is not there, or is too old to be asked."""
    try:
        library = _Plans(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL))
    except (OSError, AttributeError):
        return None
    return library if library.version >= _FIRST else None


def main(names: Sequence[str]) -> None:
    library = next((found for found in map(opened, names) if found is not None), None)
    if library is None:
        return
    print(library.version, flush=True)
    for line in sys.stdin:
        card, call, every = json.loads(line)
        print(json.dumps(list(islice(library.workspaces(card, call), None if every else 1))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

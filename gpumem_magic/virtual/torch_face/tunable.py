"""`torch.cuda.tunable` while a virtual GPU is on: its settings are kept, and nothing is tuned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from gpumem_magic.units import MIB

_NOT_COUNTED = "a virtual GPU tunes no products: what TunableOp takes on a card while it tries them is not counted"


class Tunable:
    """TunableOp's settings. Defaults and variables are those of ``aten/src/ATen/cuda/tunable`` (PyTorch 2.13)."""

    def __init__(self, l2_cache_bytes: Callable[[], int], environment: Mapping[str, str] = os.environ) -> None:
        self._l2_cache_bytes = l2_cache_bytes
        self._enabled = environment.get("PYTORCH_TUNABLEOP_ENABLED") == "1"
        self._tunes = environment.get("PYTORCH_TUNABLEOP_TUNING") != "0"
        self._records = environment.get("PYTORCH_TUNABLEOP_RECORD_UNTUNED") == "1"
        self._duration = _number(environment, "PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS", 30)
        self._iterations = _number(environment, "PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS", 100)
        self._rotating = _number(environment, "PYTORCH_TUNABLEOP_ROTATING_BUFFER_SIZE", -1)
        self._filename = environment.get("PYTORCH_TUNABLEOP_FILENAME", "tunableop_results.csv")

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By the names in `torch._C` that `torch.cuda.tunable` calls."""
        return {
            "_cuda_tunableop_enable": self._enable,
            "_cuda_tunableop_is_enabled": lambda: self._enabled,
            "_cuda_tunableop_tuning_enable": lambda value: self._set("_tunes", bool(value)),
            "_cuda_tunableop_tuning_is_enabled": lambda: self._tunes,
            "_cuda_record_untuned_enable": lambda value: self._set("_records", bool(value)),
            "_cuda_record_untuned_is_enabled": lambda: self._records,
            "_cuda_tunableop_set_max_tuning_duration": lambda value: self._set("_duration", max(0, int(value))),
            "_cuda_tunableop_get_max_tuning_duration": lambda: self._duration,
            "_cuda_tunableop_set_max_tuning_iterations": lambda value: self._set("_iterations", max(0, int(value))),
            "_cuda_tunableop_get_max_tuning_iterations": lambda: self._iterations,
            "_cuda_tunableop_set_filename": lambda name, with_number=False: self._set("_filename", str(name)),
            "_cuda_tunableop_get_filename": lambda: self._filename,
            "_cuda_tunableop_get_results": lambda: (),
            "_cuda_tunableop_get_validators": lambda: (),
            "_cuda_tunableop_read_file": lambda name=None: os.path.isfile(name or self._filename),
            "_cuda_tunableop_set_rotating_buffer_size": lambda value: self._set("_rotating", int(value)),
            "_cuda_tunableop_get_rotating_buffer_size": self._rotating_buffer,
            "_cuda_tunableop_set_numerical_check_tolerances": lambda enable, atol=1e-5, rtol=1e-5: None,
        }

    def _set(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def _enable(self, value: bool) -> None:
        if value and self._tunes and not self._enabled:
            warnings.warn(_NOT_COUNTED, stacklevel=3)
        self._enabled = bool(value)

    def _rotating_buffer(self) -> int:
        """Bytes; by default as many as the second cache has."""
        return self._l2_cache_bytes() if self._rotating < 0 else self._rotating * MIB


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default

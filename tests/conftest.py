"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The machines of CI are slow and shared: how long an example takes says nothing.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

# What `gpumem calibrate` measured on a developer's computer changes no test; tests of it name a file of their own.
os.environ["GPUMEM_CALIBRATION"] = ""

"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machines of CI are slow and shared: how long an example takes says nothing.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

"""What all tests share: hypothesis measures no times, so that a busy machine fails none of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("nblaunch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nblaunch")

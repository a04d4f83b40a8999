"""What all tests share: property tests do not fail because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("tpspec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tpspec")

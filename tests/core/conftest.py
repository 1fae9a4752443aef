"""Properties are about values, not about how busy the machine is: no per-example deadline, no example database."""

from hypothesis import settings

settings.register_profile("core", deadline=None, database=None)
settings.load_profile("core")

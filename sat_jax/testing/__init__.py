"""For whoever extends the project, and for its own tests: what a part of one's own must pass, and stand-ins to try it
with."""

from sat_jax.testing.engines import check_engine
from sat_jax.testing.fake_engine import FakeEngine

__all__ = ["FakeEngine", "check_engine"]

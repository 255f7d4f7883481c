"""The suites that sat_jax's own parts are held to, for those of others; and stand-ins to try them with."""

from sat_jax.testing.engines import check_engine
from sat_jax.testing.fake_engine import FakeEngine
from sat_jax.testing.rules import check_loss, check_rule

__all__ = ["FakeEngine", "check_engine", "check_loss", "check_rule"]

"""What any rule must pass: the suites that sat_jax's own parts are held to, for those of others."""

from sat_jax.testing.rules import check_loss, check_rule

__all__ = ["check_loss", "check_rule"]

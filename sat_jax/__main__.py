"""``python -m sat_jax`` is ``sat-jax``."""

from sat_jax.cli.main import entry

entry()

"""The version of sat_jax."""

__version__ = "0.1.0"

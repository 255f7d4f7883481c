"""One stabiliser a file. ``base`` says what a rule is."""

from sat_jax.losses.rules.base import Contraction, Mask, Penalty, Radii, Radius, Rule, Surrogate, Token, Weight

__all__ = ["Contraction", "Mask", "Penalty", "Radii", "Radius", "Rule", "Surrogate", "Token", "Weight"]

"""What a response is worth: verifiers, and the worker processes that run them."""

from sat_jax.rewards.functions import Grade, GradeJob, load_reward
from sat_jax.rewards.grader import Grader

__all__ = ["Grade", "GradeJob", "Grader", "load_reward"]

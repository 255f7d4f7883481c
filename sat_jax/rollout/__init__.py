"""Sampling engines, the queue between engine and learner, and the thread that connects them."""

from sat_jax.rollout.engine import Engine, Request, SamplingParams
from sat_jax.rollout.ledger import Ledger
from sat_jax.rollout.queue import GroupQueue
from sat_jax.rollout.schedule import Schedule
from sat_jax.rollout.worker import RolloutWorker

__all__ = ["Engine", "GroupQueue", "Ledger", "Request", "RolloutWorker", "SamplingParams", "Schedule"]

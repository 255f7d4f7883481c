"""What several rollout tests share: a prompt stream and groups without a model."""

import dataclasses
import itertools

import numpy as np
import pytest

from sat_jax.types import Group, Prompt, Trajectory


@dataclasses.dataclass(frozen=True)
class Place:
    """A ticket of the prompt stream: prompt ``p<position>`` of epoch 0."""

    position: int

    @property
    def prompt(self) -> Prompt:
        return Prompt(f"p{self.position}", f"prompt {self.position}", np.array([1, 2, 3], np.int32), "", "test")

    @property
    def group_id(self) -> str:
        return f"0:p{self.position}"


@pytest.fixture(scope="session")
def place():
    return Place


@pytest.fixture(scope="session")
def stream():
    def make(start=0, stop=None):
        return map(Place, itertools.count(start) if stop is None else range(start, stop))

    return make


@pytest.fixture(scope="session")
def make_group():
    def make(ticket, versions=(0,)) -> Group:
        versions = np.asarray(versions, np.int32)
        trajectory = Trajectory(
            prompt_id=ticket.prompt.prompt_id,
            sample_index=0,
            prompt_ids=ticket.prompt.token_ids,
            response_ids=np.arange(len(versions), dtype=np.int32),
            log_probs=np.zeros(len(versions), np.float32),
            policy_versions=versions,
            routed_experts=None,
            finish_reason="stop",
            reward=1.0,
        )
        return Group(ticket.group_id, ticket.prompt, (trajectory,), np.zeros(1, np.float32))

    return make

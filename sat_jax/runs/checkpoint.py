"""Training state on disk, through Orbax: what a run needs to go on as if it had never stopped.

A checkpoint of step s holds the learner (``TrainState``), the queued rollouts as flat arrays, and a JSON record with
everything countable (data cursor, ledger counters, seeds). The frozen reference policy is written once per run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sat_jax.types import Group, Prompt, TrainState, Trajectory

KEPT = 2
"""Checkpoints of a run that are on disk at the same time."""


class Checkpoints:
    """A run's ``checkpoints/``. ``save`` returns once the arrays are copied; ``close`` waits for the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, host: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Write the checkpoint of ``state.step``; a step that is already there is left as it is."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        record, arrays = pack_groups(groups)
        kinds = {name: (len(array), str(array.dtype)) for name, array in arrays.items()}
        parts = {
            "state": ocp.args.StandardSave(state),
            "queue": ocp.args.StandardSave(arrays),
            "host": ocp.args.JsonSave({"host": dict(host), "groups": record, "arrays": kinds}),
        }
        self._manager.save(step, args=ocp.args.Composite(**parts))

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any], list[Group]]:
        """The checkpoint of ``step``, its arrays laid out (shapes, dtypes, shardings) like ``like``; ``ValueError``
        where they do not fit it (another model or optimizer)."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        self._manager.wait_until_finished()
        try:
            host = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            queue_like = {name: np.zeros(length, dtype) for name, (length, dtype) in host["arrays"].items()}
            likes = {"state": abstract, "queue": queue_like}
            parts = {name: ocp.args.StandardRestore(like) for name, like in likes.items()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**parts))
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise ValueError(
                f"checkpoint {step} in {self._folder} is damaged or does not fit this configuration ({reason:.200}): "
                "resume with the model and optimizer that wrote it, or remove its folder to go on from an older one"
            ) from error
        return restored["state"], host["host"], unpack_groups(host["groups"], restored["queue"])

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def save_params(folder: Path, params: Any) -> None:
    """Write a bare parameter pytree (the reference policy), replacing what is there."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), params, force=True)


def restore_params(folder: Path, like: Any) -> Any:
    """Read what ``save_params`` wrote, laid out like ``like``."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.resolve(), jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Groups as a JSON record and one flat array per field that holds arrays; ``unpack_groups`` is the inverse."""
    # Orbax refuses trees without leaves and leaves without elements: one element stands in front of each.
    flat: dict[str, list[np.ndarray]] = {"empty": [np.zeros(1, np.int32)]}

    def pack(record: Prompt | Trajectory | Group, *left_out: str) -> dict[str, Any]:
        shapes, plain = {}, {}
        for name, value in vars(record).items():
            if name in left_out:
                continue
            if isinstance(value, np.ndarray):
                shapes[name] = value.shape
                flat.setdefault(name, [np.zeros(1, value.dtype)]).append(value.reshape(-1))
            else:
                plain[name] = value
        return {"shapes": shapes, "plain": plain}

    record = [
        {
            "group": pack(group, "prompt", "trajectories"),
            "prompt": pack(group.prompt),
            # The prompt's tokens are kept once a group.
            "members": [pack(member, "prompt_ids") for member in group.trajectories],
        }
        for group in groups
    ]
    return json.loads(json.dumps(record, default=_plain)), {name: np.concatenate(parts) for name, parts in flat.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if isinstance(value, np.generic) else str(value)


def unpack_groups(record: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> list[Group]:
    """Rebuild what ``pack_groups`` took apart."""
    host = {name: np.asarray(array) for name, array in arrays.items()}
    position = dict.fromkeys(host, 1)

    def unpack(packed: Mapping[str, Any]) -> dict[str, Any]:
        fields = dict(packed["plain"])
        for name, shape in packed["shapes"].items():
            start = position[name]
            position[name] = start + int(np.prod(shape))
            fields[name] = host[name][start : position[name]].reshape(shape)
        return fields

    groups = []
    for entry in record:
        group, prompt = unpack(entry["group"]), Prompt(**unpack(entry["prompt"]))
        members = tuple(Trajectory(prompt_ids=prompt.token_ids, **unpack(member)) for member in entry["members"])
        groups.append(Group(prompt=prompt, trajectories=members, **group))
    return groups

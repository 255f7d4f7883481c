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


class Checkpoints:
    """The ``checkpoints/`` folder of a run. ``save`` returns once the arrays are copied; ``close`` waits for the
    disk."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder.resolve()
        self._manager = ocp.CheckpointManager(
            self._folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, host: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Write the checkpoint of ``state.step``; a step that is already there is left as it is."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        record, arrays = pack_groups(groups)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                queue=ocp.args.StandardSave(arrays),
                host=ocp.args.JsonSave(
                    {"host": dict(host), "groups": record, "lengths": {name: len(a) for name, a in arrays.items()}}
                ),
            ),
        )

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any], list[Group]]:
        """The checkpoint of ``step``, its arrays laid out (shapes, dtypes, shardings) like ``like``.

        Raises:
            ValueError: the stored arrays do not fit ``like`` (another model or optimizer).
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        self._manager.wait_until_finished()
        try:
            host = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            queue_like = {name: np.zeros(n, _DTYPES[name]) for name, n in host["lengths"].items()}
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), queue=ocp.args.StandardRestore(queue_like)
                ),
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise ValueError(
                f"checkpoint {step} in {self._folder} is damaged or does not fit this configuration ({reason:.200}): "
                "resume with the model and optimizer that wrote it, or remove its folder to go on from an older one"
            ) from error
        return restored["state"], host["host"], unpack_groups(host["groups"], restored["queue"])

    def close(self) -> None:
        """Wait until everything is on disk."""
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


_TOKEN_FIELDS = {"response_ids": np.int32, "log_probs": np.float32, "policy_versions": np.int32}
_DTYPES = {**_TOKEN_FIELDS, "prompt_ids": np.int32, "routed_experts": np.int32, "support": np.int32}


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Groups as a JSON-able record and a few flat arrays; ``unpack_groups`` is the exact inverse."""
    record: list[dict[str, Any]] = []
    flat: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    for group in groups:
        flat["prompt_ids"].append(np.asarray(group.prompt.token_ids, np.int32))
        members = []
        for t in group.trajectories:
            for name, dtype in _TOKEN_FIELDS.items():
                flat[name].append(np.asarray(getattr(t, name), dtype))
            if t.routed_experts is not None:
                flat["routed_experts"].append(np.asarray(t.routed_experts, np.int32).reshape(-1))
            if t.support is not None:
                flat["support"].append(np.asarray(t.support, np.int32).reshape(-1))
            members.append(
                {
                    "sample_index": t.sample_index,
                    "request_id": t.request_id,
                    "tokens": len(t.response_ids),
                    "routes": None if t.routed_experts is None else list(t.routed_experts.shape),
                    "support": None if t.support is None else t.support.shape[1],
                    "finish_reason": t.finish_reason,
                    "text": t.text,
                    "reward": t.reward,
                    "reward_info": dict(t.reward_info),
                }
            )
        prompt = group.prompt
        record.append(
            {
                "group_id": group.group_id,
                "prompt": {
                    "prompt_id": prompt.prompt_id,
                    "text": prompt.text,
                    "tokens": len(prompt.token_ids),
                    "answer": prompt.answer,
                    "source": prompt.source,
                    "metadata": json.loads(json.dumps(dict(prompt.metadata), default=str)),
                },
                "members": members,
                "advantages": [float(a) for a in group.advantages],
            }
        )
    # One leading element each: Orbax refuses arrays without elements.
    arrays = {name: np.concatenate([np.zeros(1, _DTYPES[name]), *parts]) for name, parts in flat.items()}
    return record, arrays


def unpack_groups(record: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> list[Group]:
    """Rebuild what ``pack_groups`` took apart."""
    host = {name: np.asarray(a) for name, a in arrays.items()}
    position = dict.fromkeys(host, 1)

    def take(name: str, count: int) -> np.ndarray:
        start = position[name]
        position[name] = start + count
        return host[name][start : start + count]

    groups = []
    for entry in record:
        p = entry["prompt"]
        prompt = Prompt(
            p["prompt_id"], p["text"], take("prompt_ids", p["tokens"]), p["answer"], p["source"], p["metadata"]
        )
        members = []
        for m in entry["members"]:
            tokens = {name: take(name, m["tokens"]) for name in _TOKEN_FIELDS}
            shape = m["routes"]
            routes = None if shape is None else take("routed_experts", int(np.prod(shape))).reshape(shape)
            width = m.get("support")  # absent in checkpoints older than the record
            support = None if width is None else take("support", m["tokens"] * width).reshape(m["tokens"], width)
            members.append(
                Trajectory(
                    prompt_id=prompt.prompt_id,
                    sample_index=m["sample_index"],
                    prompt_ids=prompt.token_ids,
                    routed_experts=routes,
                    finish_reason=m["finish_reason"],
                    text=m["text"],
                    reward=m["reward"],
                    reward_info=m["reward_info"],
                    request_id=m["request_id"],
                    support=support,
                    **tokens,
                )
            )
        groups.append(Group(entry["group_id"], prompt, tuple(members), np.asarray(entry["advantages"], np.float32)))
    return groups

"""A configuration cannot exist in an impossible state, however it was made."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from sat_jax import losses
from sat_jax.checked import Checked, Range
from sat_jax.cli.train import parse_options
from sat_jax.config import (
    DataConfig,
    ExperimentConfig,
    LearnerConfig,
    PolicyConfig,
    RolloutConfig,
    Schedule,
    config_functions,
    fixed_delay,
    load_config,
    synchronous,
    with_method,
)
from sat_jax.dataclass_json import from_dict, to_dict
from sat_jax.losses import Decoupled, LossConfig, Ppo, Sat
from tests.helpers.subjects import discovered


def records(cls: type, seen: set[type] | None = None) -> Iterator[type]:
    """Every dataclass that a configuration of ``cls`` may hold."""
    seen = set() if seen is None else seen
    if cls in seen:
        return
    seen.add(cls)
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for option in (hint, *typing.get_args(hint)):
            if isinstance(option, type) and dataclasses.is_dataclass(option) and option is not losses.Rule:
                yield from records(option, seen)


def numbers(cls: type) -> Iterator[tuple[type, str, Range | None]]:
    """The numbers among a record's fields, with their declared ranges."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for option in typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,):
            plain, *extras = typing.get_args(option) if typing.get_origin(option) is Annotated else (option,)
            if plain in (int, float):
                yield cls, name, next((extra for extra in extras if isinstance(extra, Range)), None)


RECORDS = [*records(ExperimentConfig), *discovered().values()]
NUMBERS = [number for cls in RECORDS for number in numbers(cls)]


def outside(cls: type, name: str, allowed: Range) -> Iterator[Any]:
    """Values just outside a range, and those that no number may have."""
    whole = "int" in str(typing.get_type_hints(cls)[name])
    for bound, excluded, way in ((allowed.low, allowed.above, -1), (allowed.high, allowed.below, 1)):
        if bound is not None:
            yield int(bound) + way if whole else bound if excluded else math.nextafter(bound, way * math.inf)
    yield from (math.nan, math.inf, -math.inf, "1", True)
    if whole:
        yield from (2**40, 1.5)


def example(cls: type) -> Any:
    """Some record of a class, to change one field of."""
    policy = load_config("mix6").policy.init
    return policy if isinstance(policy, cls) else cls()


def test_the_walk_reaches_everything() -> None:
    names = {cls.__name__ for cls in RECORDS}
    assert {
        "ExperimentConfig",
        "ModelConfig",
        "PromptOptions",
        "SamplingParams",
        "Schedule",
        "WarmStartConfig",
    } <= names
    assert {"Sat", "DualClip", "EngineConfig", "LossConfig", "MeshConfig", "RewardConfig"} <= names
    assert all(issubclass(cls, Checked) for cls in RECORDS)
    assert len(NUMBERS) > 80


@pytest.mark.parametrize(("cls", "name", "allowed"), NUMBERS, ids=[f"{c.__name__}.{n}" for c, n, _ in NUMBERS])
def test_every_number_has_a_range_and_keeps_to_it(cls: type, name: str, allowed: Range | None) -> None:
    assert allowed is not None, f"{cls.__name__}.{name} declares no range"
    for value in outside(cls, name, allowed):
        with pytest.raises(ValueError) as caught:
            dataclasses.replace(example(cls), **{name: value})
        said = str(caught.value)
        assert "\n" not in said
        assert name in said
        assert repr(value) in said


def test_what_is_written_in_json_is_held_to_the_same() -> None:
    stored = to_dict(ExperimentConfig())
    stored["optimizer"]["b2"] = -1.0
    with pytest.raises(ValueError, match=r"optimizer.b2 = -1.0: must lie in \[0, 1\)"):
        from_dict(ExperimentConfig, json.loads(json.dumps(stored)))
    stored = to_dict(ExperimentConfig())
    stored["rollout"]["schedule"]["delay"] = 40
    with pytest.raises(ValueError, match="max_staleness = 16 drops them"):
        from_dict(ExperimentConfig, stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": RolloutConfig(schedule=fixed_delay(9), max_staleness=4)}, "9 versions old"),
        ({"rollout": RolloutConfig(queue_groups=40)}, "cannot hold a lag of 8"),
        ({"learner": LearnerConfig(updates_per_batch=5)}, "does not divide rollout.prompts_per_step"),
        ({"learner": LearnerConfig(updates_per_batch=2)}, "2 updates per batch.* set max_staleness >= 17"),
        ({"learner": LearnerConfig(micro_batches=7)}, "does not divide the 256 rows"),
        ({"loss": losses.method("decoupled-ppo")}, "the ratio is 1 and cannot clip"),
        ({"loss": LossConfig(rules=(Ppo(),), denominator="proximal")}, "the ratio is 1 and cannot clip"),
    ],
)
def test_fields_that_contradict_each_other(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ExperimentConfig(), **change)


def test_a_proximal_policy_means_something_with_several_updates() -> None:
    config = dataclasses.replace(
        ExperimentConfig(),
        loss=LossConfig(rules=(Ppo(), Decoupled()), denominator="proximal"),
        learner=LearnerConfig(updates_per_batch=2),
        rollout=RolloutConfig(schedule=synchronous()),
    )
    assert (config.groups_per_update, config.rows_per_update) == (16, 128)


def test_nothing_is_ignored_silently() -> None:
    """What once did nothing is gone, or refused."""
    fields = {f"{cls.section}.{f.name}" for cls in RECORDS for f in dataclasses.fields(cls)}
    assert not {"sampling.seed", "policy.init.router_aux_loss_coef"} & fields
    with pytest.raises(ValueError, match="keep one of them"):
        PolicyConfig(path="x", init=load_config("mix6").policy.init)
    with pytest.raises(ValueError, match=r"is up to rollout\.max_staleness"):
        Schedule(delay=2, free_running=True)


def test_the_method_is_the_loss_and_one_choice_about_routes() -> None:
    base = dataclasses.replace(ExperimentConfig(), data=DataConfig(source="p.jsonl"))
    assert base.method == "sat-gspo-r3"
    plain = with_method(base, "grpo-tis", kl_loss_coef=0.1)
    assert (plain.method, plain.learner.routing_replay, plain.loss.kl_loss_coef) == ("grpo-tis", False, 0.1)
    assert with_method(plain, "sat-grpo-r3").loss.kl_loss_coef == 0.1  # no matter of the method: it stays
    assert with_method(plain, "sat-grpo-r3").loss.rules == (Ppo(), Sat())
    own = dataclasses.replace(base, loss=LossConfig(rules=(Ppo(), Sat())))
    assert own.method == "ppo+sat-r3"
    assert {load_config(name).method for name in config_functions() if name.startswith("mix6_")} >= set(
        losses.TABLE_1
    ) - {"sat-gspo-r3"}


def test_the_command_line_and_python_make_the_same() -> None:
    config = parse_options(["mix6_grpo", "--optimizer.lr", "1e-3", "--rollout.schedule.delay", "1"]).config
    base = load_config("mix6_grpo")
    made = dataclasses.replace(
        base,
        optimizer=dataclasses.replace(base.optimizer, lr=1e-3),
        rollout=dataclasses.replace(base.rollout, schedule=fixed_delay(1)),
    )
    assert config == made

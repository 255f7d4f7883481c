"""What is public is written down here a second time: whoever changes it, meets this list, and then the CHANGELOG."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

PUBLIC = {
    "sat_jax": """
        __version__ load_policy
    """,
    "sat_jax.types": """
        Batch Group MIN_TEMPERATURE NATIVE_ROUTE NO_TOKEN Prompt TrainState Trajectory
    """,
    "sat_jax.learner.aot": """
        abstract_batch compile_train_step memory shard_bytes topology_mesh
    """,
    "sat_jax.losses": """
        AdvantageKind Aggregation check_values Cispo Contraction Decoupled DESCRIPTIONS Dppo Drpo DualClip
        group_advantages Icepop Kpop Loss LossConfig LossInputs LossRows LossSummary make_loss Mask method
        METHODS METRIC_REDUCTIONS Opsm Penalty Ppo Radii Radius Rule Sat Seqclip split_method Spo Surrogate
        TABLE_1 Tis TisReinforce Token Unclipped Weight zero_variance
    """,
    "sat_jax.losses.rules": """
        Cispo Contraction Decoupled Dppo Drpo DualClip Icepop Kind Kpop Mask Opsm outward Penalty Ppo Radii
        Radius Rule Sat Scope Seqclip Spo Surrogate Tis TisReinforce Token Unclipped Weight
    """,
    "sat_jax.kernels": """
        KernelLoss make_loss order_statistic
    """,
    "sat_jax.model": """
        abstract_params cache_bytes cache_sharding check_mesh extend ExtendOutput forward ForwardOptions
        ForwardOutput init_cache init_params KVCache LayerRun load_balancing_loss logits MESH_AXES
        ModelConfig param_shardings Parameter parameter_count parameter_table Params Placement router_z_loss
        RouterOutput SAMPLING_RULES split_layers token_log_probs TokenLogProbs
    """,
    "sat_jax.hub": """
        config_from_hf config_to_hf load_params read_config save_hf
    """,
    "sat_jax.learner": """
        abstract adam batch_shardings init_state LearnerSpec learning_rate Metrics Programs score Scores
        state_shardings supervised_spec supervised_step train_step
    """,
    "sat_jax.data": """
        check_routes check_support load_prompts make_batch make_sft_batch PromptOptions PromptReport
        PromptSet PromptStream RouteLayout Routes Support Ticket Tokenizer width_buckets
    """,
    "sat_jax.rewards": """
        Grade GradeJob Grader load_reward
    """,
    "sat_jax.rollout": """
        Engine GroupQueue Ledger Request RolloutWorker SamplingParams Schedule
    """,
    "sat_jax.rollout.local": """
        LocalEngine PREFILL_ROWS
    """,
    "sat_jax.runs": """
        read_run Run
    """,
    "sat_jax.report": """
        render write_report
    """,
    "sat_jax.inspection": """
        configure inspect_batch Inspection load_batch
    """,
    "sat_jax.config": """
        batchwise config_functions DataConfig EngineConfig EvaluationConfig ExperimentConfig fixed_delay
        free_running LearnerConfig load_config MeshConfig ModelConfig OptimizerConfig PolicyConfig
        PromptOptions RewardConfig RolloutConfig SamplingParams Schedule synchronous WarmStartConfig
        with_method
    """,
    "sat_jax.training": """
        Trainer
    """,
    "sat_jax.testing": """
        check_engine check_loss check_rule FakeEngine
    """,
}
"""By room; names are separated by spaces."""


@pytest.mark.parametrize("room", PUBLIC)
def test_public_names(room: str) -> None:
    module = importlib.import_module(room)
    assert set(module.__all__) == set(PUBLIC[room].split())
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_every_room_says_what_is_public() -> None:
    rooms = {
        ".".join(("sat_jax", *path.parent.relative_to(ROOT / "sat_jax").parts))
        for path in (ROOT / "sat_jax").rglob("__init__.py")
    }
    files = {"sat_jax.types", "sat_jax.learner.aot"}  # public beside the rooms
    assert rooms - {"sat_jax.cli"} == set(PUBLIC) - files  # the command line is no library


USERS = [path for folder in ("benchmarks", "examples", "configs") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_users_import_public_names_only(path: Path) -> None:
    """Benchmarks, examples and configurations do as users do."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "sat_jax":
            for name in (alias.name for alias in node.names):
                known = name in PUBLIC.get(node.module, "").split() or f"{node.module}.{name}" in PUBLIC
                assert known, f"{name} is no public name of {node.module}"


def test_the_map_names_every_file_and_no_other() -> None:
    drawn = re.search(r"```\n(sat_jax/\n.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)
    assert drawn is not None
    found, at = set(), [Path()]
    for line in drawn.group(1).splitlines():
        entry = re.match(r"( *)([\w.]+/?)(?: |$)", line)
        depth = len(entry.group(1)) // 2 if entry else 0
        if entry is None or depth >= len(at) or "---" in line:
            continue  # what goes on from the line before
        path = at[depth] / entry.group(2)
        at = [*at[: depth + 1], path]
        found.add(str(path))
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sat_jax").rglob("*")
        if (path.suffix in (".py", ".jinja") or (path.is_dir() and any(path.glob("*.py"))))
        and path.name not in ("__init__.py", "__main__.py", "_configs")
        and path.parent.name != "rules"
    }
    top = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"} - {"runs", "dist"}
    assert found == package | top

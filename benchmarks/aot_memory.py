"""Compiles the learner's train step on Qwen3-30B-A3B for a TPU slice, without a TPU, and prints its memory as JSON.

    pip install '.[tpu]' && python benchmarks/aot_memory.py                      # all 48 layers on v5p:4x4x4
    python benchmarks/aot_memory.py --layers 2 --fsdp 8 --expert 2 --data 1      # other sizes

SAT-GSPO with routing replay, bfloat16 compute on float32 masters, full remat, scan over layers, head in chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

# Before jax is imported: no TPU is looked for, and libtpu asks no metadata server.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax

from sat_jax import kernels, learner, losses, model
from sat_jax.learner import Programs, abstract, aot

HBM = {"v5p": 95 * 10**9, "v5e": 16 * 10**9, "v6e": 32 * 10**9, "v4": 32 * 10**9}


def qwen3_30b_a3b(layers: int) -> model.ModelConfig:
    """The real shape, with fewer layers if asked."""
    return model.ModelConfig(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )


def spec_of(args: argparse.Namespace) -> learner.LearnerSpec:
    sizes = {axis: getattr(args, axis) for axis in model.MESH_AXES}
    placement = model.Placement(aot.topology_mesh(args.topology, sizes))
    schedule = learner.learning_rate(1e-6)
    return learner.LearnerSpec(
        model=qwen3_30b_a3b(args.layers),
        loss=kernels.make_loss(losses.method("sat-gspo"), placement.mesh, placement.mesh_axes("batch")),
        optimizer=learner.adam(schedule, 0.9, 0.98, 1e-8),
        schedule=schedule,
        micro_batches=args.micro_batches,
        forward=model.ForwardOptions(compute_dtype="bfloat16", remat="full", placement=placement),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    spec = spec_of(args)
    began = time.perf_counter()
    program = aot.compile_train_step(spec, args.rows, args.width)
    took = time.perf_counter() - began
    state, batch = Programs(spec).abstract_state(), aot.abstract_batch(spec, args.rows, args.width)
    state_places, batch_places = program.input_shardings[0]  # what was compiled, not what was asked for
    there, rows_there = abstract(state, state_places), abstract(batch, batch_places)
    memory = aot.memory(program)
    return {
        "topology": args.topology,
        "mesh": {axis: getattr(args, axis) for axis in model.MESH_AXES},
        "layers": args.layers,
        "parameters": model.parameter_count(spec.model),
        "batch": [args.rows, args.width],
        "micro_batches": args.micro_batches,
        "compile_seconds": round(took, 1),
        "memory_bytes_per_chip": memory,
        "hbm_fraction": round(memory["total"] / HBM[args.topology.partition(":")[0]], 4),
        "state_bytes_per_chip": aot.shard_bytes(there),
        "state_bytes_asked_for": aot.shard_bytes(state),
        "batch_bytes_per_chip": aot.shard_bytes(rows_there),
        "state_shares": {
            jax.tree_util.keystr(path): round(aot.shard_bytes(leaf) / (leaf.size * leaf.dtype.itemsize), 6)
            for path, leaf in jax.tree_util.tree_leaves_with_path(there)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:4x4x4")
    for axis, size in {"data": 2, "fsdp": 4, "tensor": 2, "expert": 4}.items():
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=2)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()

"""Cost of log-probs, entropy and both gradients under a large vocabulary, beside the same matmuls alone.

    python benchmarks/head.py                    # V = 151,936, width 256, 8 x 256 tokens, float32, chunks of 128 tokens
    python benchmarks/head.py --chunk 1024

Prints one JSON object. ``cpu_s`` and ``wall_s`` are the best repetition; ``peak_mb`` is the largest resident memory
of the process while they ran, inputs and results included (Linux). ``matmuls_cpu_s`` is what the four matmuls that the
method needs (logits twice, the gradient of either factor) cost by themselves in this run, in the same chunks: the
machine's own limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=128, help="tokens whose logits are in memory at once")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    B, T, V, D = 8, 256, args.vocabulary, args.width
    cfg = model.ModelConfig(
        model_type="qwen3",
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=D,
        intermediate_size=D,
        tie_word_embeddings=True,
    )
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(0.02 * rng.normal(size=(V, D)).astype(np.float32))
    hidden = jnp.asarray(rng.normal(size=(B, T, D)).astype(np.float32))
    tokens = jnp.asarray(rng.integers(0, V, (B, T)))

    def loss(matrix: jax.Array, hidden: jax.Array) -> jax.Array:
        found = model.token_log_probs({"embed": matrix}, cfg, hidden, tokens, chunk_size=args.chunk)
        assert found.entropy is not None
        return jnp.mean(found.log_probs) + 0.01 * jnp.mean(found.entropy)

    def matmuls(matrix: jax.Array, hidden: jax.Array) -> jax.Array:
        def chunk(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = x @ matrix.T
            again = (x + logits[:, :1]) @ matrix.T
            return total + x.T @ again, again @ matrix

        zero = jnp.zeros((D, V), jnp.float32)
        return jax.lax.scan(chunk, zero, hidden.reshape(-1, min(args.chunk, B * T), D))

    result: dict[str, Any] = {"jax": jax.__version__, "python": sys.version.split()[0], "chunk": args.chunk}
    Path("/proc/self/clear_refs").write_text("5")
    result |= measure(jax.jit(jax.value_and_grad(loss, (0, 1))), args.repeats, matrix, hidden)
    lines = Path("/proc/self/status").read_text().splitlines()
    result["peak_mb"] = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024
    result["matmuls_cpu_s"] = measure(jax.jit(matmuls), args.repeats, matrix, hidden)["cpu_s"]
    print(json.dumps(result, indent=1))


def measure(function: Callable[..., Any], repeats: int, *args: jax.Array) -> dict[str, float]:
    compiled = function.lower(*args).compile()
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(*args))
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu_s": round(min(r[0] for r in runs), 2), "wall_s": round(min(r[1] for r in runs), 2)}


if __name__ == "__main__":
    main()

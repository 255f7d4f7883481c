"""What the losses cost, as ratios within one run: ``python benchmarks/losses.py [--repeat N] [--shape 64 4096]``.

CPU seconds, not wall time, so that other load on the machine matters less; the median over interleaved repeats. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import kernels, losses


def batch(rows: int, width: int) -> losses.LossInputs:
    rng = np.random.default_rng(0)
    mask = np.arange(width) < rng.integers(width // 8, width + 1, (rows, 1))
    behavior = -rng.gamma(0.5, 1.0, (rows, width))
    log_probs = np.minimum(behavior + 0.05 * rng.normal(size=(rows, width)), 0)
    advantages = np.repeat(rng.normal(size=(rows, 1)), width, axis=1)
    floats = (jnp.asarray(x, jnp.float32) for x in (log_probs, behavior, advantages))
    return losses.LossInputs(*floats, jnp.asarray(mask))


def copy(inputs: losses.LossInputs) -> Any:
    """Every input byte read and written once, which also is what a loss with its gradient has to touch at the least."""
    return -inputs.log_probs, -inputs.behavior_log_probs, -inputs.advantages, ~inputs.loss_mask


def loss_and_gradient(config: losses.LossConfig, diagnostics: bool) -> Callable[[losses.LossInputs], Any]:
    loss_fn = kernels.make_loss(config)

    def run(inputs: losses.LossInputs) -> Any:
        (value, metrics), gradient = jax.value_and_grad(
            lambda log_probs: loss_fn(inputs.replace(log_probs=log_probs)), has_aux=True
        )(inputs.log_probs)
        return (value, gradient, metrics) if diagnostics else (value, gradient)

    return run


def quantile(name: str) -> Callable[[losses.LossInputs], Any]:
    loss_fn = losses.make_loss(losses.method(name))
    return lambda inputs: loss_fn.summarize(inputs).rules["sat"].q


def sort(inputs: losses.LossInputs) -> Any:
    d = jnp.abs(jnp.where(inputs.loss_mask, inputs.log_probs - inputs.behavior_log_probs, jnp.inf))
    return jnp.sort(d.ravel())[jnp.sum(inputs.loss_mask) * 9 // 10]


def measure(programs: dict[str, Callable], inputs: losses.LossInputs, repeat: int) -> dict[str, dict[str, float]]:
    compiled, found = {}, {}
    for name, program in programs.items():
        start = time.process_time(), time.perf_counter()
        compiled[name] = jax.jit(program).lower(inputs).compile()
        memory = compiled[name].memory_analysis()
        jax.block_until_ready(compiled[name](inputs))
        found[name] = {
            "compile_cpu_s": time.process_time() - start[0],
            "compile_s": time.perf_counter() - start[1],
            "temporaries_bt_arrays": memory.temp_size_in_bytes / inputs.log_probs.nbytes,
            "bytes_accessed_bt_arrays": compiled[name].cost_analysis()["bytes accessed"] / inputs.log_probs.nbytes,
        }
    samples: dict[str, list[float]] = {name: [] for name in programs}
    walls: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeat):
        for name, program in compiled.items():
            start = time.process_time(), time.perf_counter()
            jax.block_until_ready(program(inputs))
            samples[name].append(time.process_time() - start[0])
            walls[name].append(time.perf_counter() - start[1])
    for name in programs:
        found[name] |= {
            "cpu_ms": 1e3 * statistics.median(samples[name]),
            "cpu_ms_min": 1e3 * min(samples[name]),
            "wall_ms": 1e3 * statistics.median(walls[name]),
            "wall_ms_min": 1e3 * min(walls[name]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--shape", type=int, nargs=2, default=(64, 4096))
    arguments = parser.parse_args()
    inputs = batch(*arguments.shape)
    programs = {
        "copy": copy,
        "ppo": loss_and_gradient(losses.method("grpo"), diagnostics=False),
        "ppo + diagnostics": loss_and_gradient(losses.method("grpo"), diagnostics=True),
        "gspo": loss_and_gradient(losses.method("gspo"), diagnostics=False),
        "sat-grpo + diagnostics": loss_and_gradient(losses.method("sat-grpo"), diagnostics=True),
        "sat-gspo": loss_and_gradient(losses.method("sat-gspo"), diagnostics=False),
        "sat-gspo + diagnostics": loss_and_gradient(losses.method("sat-gspo"), diagnostics=True),
        "quantile, tokens": quantile("sat-grpo"),
        "quantile, sequences": quantile("sat-gspo"),
    }
    found = measure(programs, inputs, arguments.repeat)
    found |= measure({"quantile by sorting": sort}, inputs, 3)
    small = batch(8, 256)
    few = measure({name: programs[name] for name in ("ppo", "sat-gspo + diagnostics")}, small, arguments.repeat)

    def ratio(a: str, b: str) -> float:
        return found[a]["cpu_ms_min"] / found[b]["cpu_ms_min"]

    print(
        json.dumps(
            {
                "jax": jax.__version__,
                "shape": arguments.shape,
                "ratios": {
                    "ppo / copy (at most 4)": ratio("ppo", "copy"),
                    "sat-gspo with quantile and diagnostics / ppo (at most 6)": ratio("sat-gspo + diagnostics", "ppo"),
                    "sat-grpo with quantile and diagnostics / ppo": ratio("sat-grpo + diagnostics", "ppo"),
                    "token quantile / ppo": ratio("quantile, tokens", "ppo"),
                    "sorting / ppo": ratio("quantile by sorting", "ppo"),
                },
                "sat_adds_on_8x256_ms": few["sat-gspo + diagnostics"]["cpu_ms_min"] - few["ppo"]["cpu_ms_min"],
                "programs": found,
                "programs_8x256": few,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

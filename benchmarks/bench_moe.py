"""Milliseconds of one policy-gradient step (forward, log-probs, loss, backward, Adam), and of a peer where installed.

    python benchmarks/bench_moe.py                                   # a fresh model and batch, this library alone
    python benchmarks/bench_moe.py --peer PATH_TO/python             # also torch + transformers, in that interpreter
    python benchmarks/bench_moe.py --model HF_DIR --batch BATCH.npz  # a given checkpoint and batch

Prints one JSON object. The model is a Qwen3-MoE of 9.2 M parameters (vocabulary 4096, width 256, 4 layers, 16 experts
top-4 of 128), the batch 8 x 256 tokens of which the last 192 are trained on, everything float32. Speed is compared on
checked work: both sides report the loss and the global gradient norm of their first step, which must agree to 1e-4.

Both sides allocate their arrays anew in every step and profit from huge pages: set
``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` in the environment.

``step_ms`` is the best of the repetitions, ``step_cpu_ms`` CPU time of all threads per step, ``peak_mb`` the largest
resident memory while stepping (Linux; without what loading and compiling took before). Measure alone: another process
on the machine changes wall times several-fold and CPU time little. The peer runs with transformers' ``eager`` and
``grouped_mm`` experts (``batched_mm`` copies the weights for every token) and the faster one is reported.

A batch file holds ``input_ids [8, 256]``, ``target_mask [8, 255]`` (1 where the predicted token is trained on),
``advantages [8]``, ``old_logps [8, 255]``.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import hub, learner, losses, model
from sat_jax.types import Batch

CONFIG = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
    rope_theta=1e6,
    initializer_range=0.05,
)
EPS_LOW, EPS_HIGH, LR, BETAS, WEIGHT_DECAY, CLIP = 0.2, 0.28, 1e-5, (0.9, 0.95), 0.01, 1.0

PEER = """
import json, sys, time
import numpy as np, torch
from transformers import AutoModelForCausalLM
folder, batch, repeats, experts = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=experts).train()
ids = torch.tensor(batch["input_ids"]).long()
mask = torch.tensor(batch["target_mask"]).float()
advantages, old = torch.tensor(batch["advantages"]).float()[:, None], torch.tensor(batch["old_logps"])
adam = torch.optim.AdamW(policy.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)
def step():
    logits = policy(input_ids=ids).logits[:, :-1]
    logps = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    r = torch.exp(logps.view_as(old) - old)
    loss = (mask * torch.maximum(-advantages * r, -advantages * r.clip(0.8, 1.28))).sum() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    adam.step()
    adam.zero_grad(set_to_none=True)
    return loss.item(), norm.item()
first = step()
open("/proc/self/clear_refs", "w").write("5")
runs = []
for _ in range(repeats):
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    runs.append((time.perf_counter() - wall, time.process_time() - cpu))
peak = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
print(json.dumps({"experts": experts, "step_ms": round(1e3 * min(runs)[0], 1), "first_loss": first[0],
                  "step_cpu_ms": round(1e3 * min(r[1] for r in runs), 1), "first_grad_norm": first[1],
                  "peak_mb": round(peak)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without one, fresh weights")
    parser.add_argument("--batch", type=Path, help="an .npz as described above; without one, a random batch")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peer", help="a Python interpreter with torch and transformers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, batch = args.model or Path(scratch) / "model", args.batch or Path(scratch) / "batch.npz"
        if args.model is None:
            hub.save_hf(folder, CONFIG, model.init_params(jax.random.key(0), CONFIG))
        if args.batch is None:
            np.savez(batch, **random_batch(hub.read_config(folder)))
        result: dict[str, object] = {"jax": jax.__version__, "python": sys.version.split()[0]}
        result["sat_jax"] = ours = measure(folder, dict(np.load(batch)), args.repeats)
        if args.peer:
            result["torch"] = peer = run_peer(args.peer, folder, batch, args.repeats)
            for name in ("first_loss", "first_grad_norm"):
                if not np.isclose(ours[name], peer[name], rtol=1e-4):
                    raise SystemExit(f"{name} differs: {ours[name]} here, {peer[name]} there: not the same work")
            result["time_ratio"] = round(ours["step_ms"] / peer["step_ms"], 3)
            result["cpu_ratio"] = round(ours["step_cpu_ms"] / peer["step_cpu_ms"], 3)
        print(json.dumps(result, indent=1))


def random_batch(cfg: model.ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "input_ids": rng.integers(0, cfg.vocab_size, (8, 256)),
        "target_mask": np.broadcast_to(np.arange(1, 256) >= 64, (8, 255)).astype(np.float32),
        "advantages": rng.normal(size=8).astype(np.float32),
        "old_logps": (-np.log(cfg.vocab_size) + 0.1 * rng.normal(size=(8, 255))).astype(np.float32),
    }


def measure(folder: Path, arrays: dict[str, np.ndarray], repeats: int) -> dict[str, float]:
    """The learner's own step: what training runs, nothing left out."""
    cfg = hub.read_config(folder)
    loss = dataclasses.replace(
        losses.method("grpo"), eps_low=EPS_LOW, eps_high=EPS_HIGH, loss_agg_mode="token-mean", kl_loss_coef=0.0
    )
    spec = learner.LearnerSpec(
        model=cfg,
        loss=losses.make_loss(loss),
        optimizer=learner.adam(LR, *BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP),
        schedule=learner.learning_rate(LR),
        routing_replay=False,
        forward=model.ForwardOptions(scan_layers=False),  # four layers: a tenth faster, three seconds more to compile
    )
    state = learner.init_state(spec, hub.load_params(folder, cfg))
    batch = to_batch(arrays)
    step = jax.jit(functools.partial(learner.train_step, spec), donate_argnums=0)
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - began
    hand_back_freed_memory()
    state, first = jax.block_until_ready(compiled(state, batch))
    reset_peak()
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        "step_ms": round(1e3 * min(runs)[0], 1),
        "step_cpu_ms": round(1e3 * min(r[1] for r in runs), 1),
        "first_loss": float(first["train/pg_loss"]),
        "first_grad_norm": float(first["train/grad_norm"]),
        "compile_s": round(compile_s, 1),
        "peak_mb": peak_mb(),
        "program_mb": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
    }


def hand_back_freed_memory() -> None:
    """What the compiler used and freed, and glibc still holds, is not the step's."""
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def to_batch(arrays: dict[str, np.ndarray]) -> Batch:
    tokens = jnp.asarray(arrays["input_ids"], jnp.int32)

    def align(x: np.ndarray) -> jax.Array:  # entry t of the file is about token t + 1
        return jnp.pad(jnp.asarray(x, jnp.float32), ((0, 0), (1, 0)))

    return Batch(
        tokens=tokens,
        segment_ids=jnp.ones_like(tokens),
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        loss_mask=align(arrays["target_mask"]) > 0,
        behavior_log_probs=align(arrays["old_logps"]),
        advantages=jnp.broadcast_to(jnp.asarray(arrays["advantages"], jnp.float32)[:, None], tokens.shape),
        policy_versions=jnp.zeros_like(tokens),
    )


def run_peer(python: str, folder: Path, batch: Path, repeats: int) -> dict[str, float]:
    """The same step in torch, once for each expert implementation; the faster."""
    results = []
    for experts in ("eager", "grouped_mm"):
        command = [python, "-c", PEER, str(folder), str(batch), str(repeats), experts]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"the peer failed with experts = {experts}:\n{done.stderr[-2000:]}", file=sys.stderr)
        else:
            results.append(json.loads(done.stdout.splitlines()[-1]))
    if not results:
        raise SystemExit("the peer failed with either expert implementation")
    return dict(min(results, key=lambda r: r["step_ms"]))


if __name__ == "__main__":
    main()

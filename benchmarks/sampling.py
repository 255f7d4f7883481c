"""Response tokens per second of the in-process engine, and of its peers where they are installed.

    python benchmarks/sampling.py                                    # both workloads, this engine alone
    python benchmarks/sampling.py --peer PATH_TO/python              # also transformers' generate, in that interpreter
    python benchmarks/sampling.py --tunix PATH_TO/python             # also Tunix's sampler, likewise

Prints one JSON object. ``tokens_per_s`` is the best of the repetitions, ``cpu_s_per_1000_tokens`` CPU seconds of all
threads: measure alone, for another process on the machine changes wall times several-fold and CPU seconds little.

Workloads:
    toy: 2 layers, width 64, 8 experts top-2; 32 prompts of 10 tokens, 8 responses of 7 tokens to each.
    bench-moe: 4 layers, width 256, 16 experts top-4, vocabulary 4096; 16 prompts of 32 tokens, 128 new tokens each.

The first peer's environment needs ``torch`` and ``transformers``, the second's ``google-tunix``; a peer without an
interpreter is left out. Tunix gets weights of its own in the same shapes: at random weights tokens cost the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from sat_jax import hub, model
from sat_jax.rollout import Request, SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.types import Prompt

PEER = """
import json, resource, sys, time
import numpy as np, torch
from transformers import AutoModelForCausalLM
folder, prompts, new, repeats = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.tensor(prompts, dtype=torch.long)
results = []
for _ in range(repeats):
    began, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                              top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + new
    tokens = ids.shape[0] * new
    results.append((time.perf_counter() - began, 1000 * (time.process_time() - cpu) / tokens, tokens))
best = min(results)
print(json.dumps({"tokens_per_s": round(best[2] / best[0]), "cpu_s_per_1000_tokens": round(best[1], 4)}))
"""


TUNIX = """
import json, sys, time
import numpy as np
from flax import nnx
from tunix.generate import sampler
from tunix.models.qwen3 import model
cfg, prompts, new, repeats = json.loads(sys.argv[1]), np.load(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
class Numbers:  # prompts are written as numbers, and nothing is ever the end
    def encode(self, text, **_): return [int(t) for t in text.split()]
    def decode(self, ids, **_): return " ".join(map(str, ids))
    def bos_id(self): return None
    def eos_id(self): return cfg["vocab_size"]
    def pad_id(self): return 0
policy = model.Qwen3(model.ModelConfig(**cfg), rngs=nnx.Rngs(0))
width = 1 << (prompts.shape[1] - 1).bit_length()
cache = sampler.CacheConfig(width + new, cfg["num_layers"], cfg["num_kv_heads"], cfg["head_dim"])
sample = sampler.Sampler(policy, Numbers(), cache)
texts = [" ".join(map(str, row)) for row in prompts.tolist()]
results = []
for seed in range(repeats + 1):  # the first one compiles
    began, cpu = time.perf_counter(), time.process_time()
    out = sample(texts, max_generation_steps=new, max_prompt_length=width, temperature=1.0, top_p=1.0, seed=seed)
    tokens = sum(len(row) for row in out.tokens)
    assert tokens == prompts.shape[0] * new, tokens
    results.append((time.perf_counter() - began, 1000 * (time.process_time() - cpu) / tokens, tokens))
best = min(results)
print(json.dumps({"tokens_per_s": round(best[2] / best[0]), "cpu_s_per_1000_tokens": round(best[1], 4)}))
"""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A policy, and what is asked of it."""

    cfg: model.ModelConfig
    prompts: int
    group: int
    prompt_len: int
    new: int
    slots: int
    decode_steps: int


TOY = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=24,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
)
BENCH_MOE = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
    initializer_range=0.05,
)
WORKLOADS = {
    "toy": Workload(TOY, prompts=32, group=8, prompt_len=10, new=7, slots=256, decode_steps=8),
    "bench-moe": Workload(BENCH_MOE, prompts=16, group=1, prompt_len=32, new=128, slots=16, decode_steps=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer", help="a Python interpreter with torch and transformers")
    parser.add_argument("--tunix", help="a Python interpreter with google-tunix")
    args = parser.parse_args()
    names = WORKLOADS if args.workload == "all" else [args.workload]
    result = {"jax": jax.__version__, "python": sys.version.split()[0], "backend": jax.default_backend()}
    result |= {name: measure(WORKLOADS[name], args.repeats, args.dtype, args.peer, args.tunix) for name in names}
    print(json.dumps(result, indent=1))


def measure(work: Workload, repeats: int, dtype: str, peer: str | None, tunix: str | None) -> dict[str, object]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, work.cfg.vocab_size, (work.prompts, work.prompt_len), dtype=np.int32)
    params = model.init_params(jax.random.key(0), work.cfg, dtype="float32")
    engine = LocalEngine(
        work.cfg,
        params,
        n_slots=work.slots,
        max_len=work.prompt_len + work.new,
        decode_steps=work.decode_steps,
        dtype=dtype,
    )
    began = time.perf_counter()
    engine.warm_up()
    compile_s = time.perf_counter() - began
    compilations, runs = engine.compilations, []
    for repeat in range(repeats):
        settings = SamplingParams(max_new_tokens=work.new, ignore_eos=True)
        requests = [
            Request(f"{p}/{i}", prompt, i, settings, (repeat * work.prompts + p) * work.group + i)
            for p, prompt in enumerate(Prompt(str(p), "", ids, "", "bench") for p, ids in enumerate(prompts))
            for i in range(work.group)
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(len(t.response_ids) for t in engine.generate(requests))
        runs.append((time.perf_counter() - wall, 1000 * (time.process_time() - cpu) / tokens, tokens))
        assert tokens == len(requests) * work.new
    assert engine.compilations == compilations, "something was compiled after warm-up"
    seconds, cpu_s, tokens = min(runs)
    result: dict[str, object] = {
        "tokens_per_s": round(tokens / seconds),
        "cpu_s_per_1000_tokens": round(cpu_s, 4),
        "compile_s": round(compile_s, 1),
        "cache_bytes": engine.cache_bytes,
    }
    for name, python in (("transformers", peer), ("tunix", tunix)):
        if python is not None:
            found = run_peer(name, work, params, prompts, repeats, python)
            result[name] = found
            result[f"times_{name}"] = round(tokens / seconds / found["tokens_per_s"], 1)
    return result


def run_peer(
    name: str, work: Workload, params: model.Params, prompts: np.ndarray, repeats: int, python: str
) -> dict[str, float]:
    """The same prompts through a peer in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.npy"
        np.save(file, np.repeat(prompts, work.group, axis=0))
        if name == "transformers":
            command = [python, "-c", PEER, str(hub.save_hf(Path(folder) / "model", work.cfg, params))]
        else:
            command = [python, "-c", TUNIX, json.dumps(tunix_config(work.cfg))]
        done = subprocess.run(
            [*command, str(file), str(work.new), str(repeats)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def tunix_config(cfg: model.ModelConfig) -> dict[str, object]:
    return {
        "num_layers": cfg.num_hidden_layers,
        "vocab_size": cfg.vocab_size,
        "embed_dim": cfg.hidden_size,
        "hidden_dim": cfg.moe_intermediate_size,
        "num_heads": cfg.num_attention_heads,
        "head_dim": cfg.head_dim,
        "num_kv_heads": cfg.num_key_value_heads,
        "rope_theta": int(cfg.rope_theta),
        "norm_eps": cfg.rms_norm_eps,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
    }


if __name__ == "__main__":
    main()

"""Every mesh against one device, in a process with 8 CPU devices. Prints a JSON report for ``test_sharding``."""

from __future__ import annotations

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from sat_jax import hub, model
from sat_jax.hub import folder as hub_folder
from tests.helpers.models import CHECKPOINTS, MOE, init

B, T = 8, 7


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    count = int(np.prod(list(sizes.values())))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def problem(cfg: model.ModelConfig) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    lengths = np.array([7, 3, 5, 1, 7, 2, 6, 4])  # uneven rows
    routes = np.argsort(rng.random((B, T, len(cfg.moe_layers), cfg.num_experts)), -1)[..., : cfg.num_experts_per_tok]
    routes[rng.random((B, T)) < 0.5] = -1
    return {
        "tokens": jnp.asarray(rng.integers(0, cfg.vocab_size, (B, T)), jnp.int32),
        "segment_ids": jnp.asarray(np.arange(T) < lengths[:, None], jnp.int32),
        "routed_experts": jnp.asarray(routes, jnp.int32),
    }


def step(cfg: model.ModelConfig, options: model.ForwardOptions):
    """Loss, gradients, one gradient-descent update and what the router did."""

    def loss(params, batch):
        out = model.forward(params, cfg, **batch, options=options)
        found = model.token_log_probs(
            params, cfg, out.hidden, batch["tokens"], chunk_size=16, placement=options.placement
        )
        mask = (batch["segment_ids"] > 0).at[:, 0].set(False)
        value = -jnp.sum(jnp.where(mask, found.log_probs, 0)) / mask.sum()
        return value + 0.01 * model.load_balancing_loss(out.router), (out.router.indices, out.router.agreed.sum())

    def run(params, batch):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return value, aux, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return run


@functools.cache
def alone(cfg: model.ModelConfig):
    return jax.jit(step(cfg, model.ForwardOptions(moe="slots")))(init(cfg), problem(cfg))


def compare(cfg: model.ModelConfig, sizes: dict[str, int], moe: str, remat: str = "none") -> dict[str, object]:
    host, batch, wanted = init(cfg), problem(cfg), alone(cfg)
    mesh = mesh_of(sizes)
    placement = model.Placement(mesh)
    shardings = model.param_shardings(cfg, mesh)
    params = jax.device_put(host, shardings)
    rows = jax.device_put(batch, jax.tree.map(lambda x: placement.sharding(("batch",) + (None,) * (x.ndim - 1)), batch))
    options = model.ForwardOptions(moe=moe, placement=placement, remat=remat)
    run = jax.jit(step(cfg, options), out_shardings=(None, None, shardings, shardings))
    value, (indices, agreement), grads, updated = run(params, rows)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted[2]))
    differences = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), grads, wanted[2])
    after = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), updated, wanted[3])
    shares = {
        ".".join(p.path): x.addressable_shards[0].data.size / x.size
        for p in model.parameter_table(cfg)
        for x in [_leaf(updated, p.path)]
    }
    return {
        "loss": abs(float(value) - float(wanted[0])),
        "gradient": max(jax.tree.leaves(differences)) / scale,
        "updated": max(jax.tree.leaves(after)),
        "routes": bool((np.asarray(indices) == np.asarray(wanted[1][0])).all()),
        "agreement": abs(float(agreement) - float(wanted[1][1])),
        "largest_share": max(shares.values()),
        "experts_share": min(v for k, v in shares.items() if k.endswith("mlp.gate")),
        "shares": shares,
    }


def _leaf(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def loading(sizes: dict[str, int]) -> dict[str, object]:
    """A folder read straight into shards."""
    cfg = hub.read_config(CHECKPOINTS / "moe_top4_norm")
    shardings = model.param_shardings(cfg, mesh_of(sizes))
    plain = hub.load_params(CHECKPOINTS / "moe_top4_norm", cfg)
    sharded = hub.load_params(CHECKPOINTS / "moe_top4_norm", cfg, shardings=shardings)
    staging, hub_folder.STAGING_BYTES = hub_folder.STAGING_BYTES, 20_000  # some experts at once, parts of others
    piecewise = hub.load_params(CHECKPOINTS / "moe_top4_norm", cfg, shardings=shardings)
    hub_folder.STAGING_BYTES = staging
    equal = jax.tree.map(
        lambda a, *others: all(bool((np.asarray(a) == np.asarray(b)).all()) for b in others), plain, sharded, piecewise
    )
    placed = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), sharded, shardings)
    fresh = model.init_params(jax.random.key(0), cfg, shardings=shardings)
    same = jax.tree.map(
        lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), fresh, model.init_params(jax.random.key(0), cfg)
    )
    return {
        "equal": all(jax.tree.leaves(equal)),
        "placed": all(jax.tree.leaves(placed)),
        "init": all(jax.tree.leaves(same)),
    }


def decoding(sizes: dict[str, int]) -> float:
    """``extend`` on a mesh: largest difference of hidden states."""
    params, mesh = init(MOE), mesh_of(sizes)
    placement = model.Placement(mesh)
    tokens = problem(MOE)["tokens"]
    zero, n = jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32)
    plain = model.init_cache(MOE, B, 16, "float32")
    wanted = jax.jit(lambda p, c: model.extend(p, MOE, c, tokens, zero, n))(params, plain)
    cache = model.init_cache(MOE, B, 16, "float32", placement)
    options = model.ForwardOptions(placement=placement, moe="blocked")
    found = jax.jit(lambda p, c: model.extend(p, MOE, c, tokens, zero, n, options=options))(
        jax.device_put(params, model.param_shardings(MOE, mesh)), cache
    )
    return float(np.abs(np.asarray(found.hidden) - np.asarray(wanted.hidden)).max())


CASES = {
    "data": (MOE, {"data": 8}, "blocked"),
    "fsdp": (MOE, {"fsdp": 8}, "blocked"),
    "tensor": (MOE, {"tensor": 2}, "blocked"),
    "expert": (MOE, {"expert": 8}, "blocked"),
    "mixed": (MOE, {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}, "ragged", "full"),
}

if __name__ == "__main__":
    assert jax.device_count() == 8
    report = {name: compare(*case) for name, case in CASES.items()}
    mixed = CASES["mixed"][1]
    json.dump({"meshes": report, "loading": loading(mixed), "decoding": decoding(mixed)}, sys.stdout)

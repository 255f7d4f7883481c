"""The forward pass and its gradients against transformers' own numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from sat_jax.model import parameters
from tests.helpers.models import ATOL, CHECKPOINTS, GOLDEN, load


@functools.cache
def golden(name):
    return dict(np.load(CHECKPOINTS / name / "golden.npz"))


@functools.cache
def program(name):
    """(params, ids, mask, positions, target mask) -> (everything, gradients or None); one compilation a model."""
    cfg, _ = load(name)

    def nll(params, ids, mask, positions, target):
        out = model.forward(params, cfg, ids, mask, positions)
        found = model.token_log_probs(params, cfg, out.hidden, ids, chunk_size=24)
        loss = -jnp.sum(found.log_probs[:, 1:] * target) / target.sum()
        return loss, (loss, model.logits(params, cfg, out.hidden), found, out.router)

    def both(*args):
        (_, aux), grads = jax.value_and_grad(nll, has_aux=True)(*args)
        return aux, grads

    with_gradients = (CHECKPOINTS / name / "grads.npz").exists()
    return jax.jit(both if with_gradients else lambda *args: (nll(*args)[1], None))


@functools.cache
def result(name, side):
    g = golden(name)
    inputs = [jnp.asarray(g[f"{side}_{k}"]) for k in ("input_ids", "attention_mask", "position_ids", "logprob_mask")]
    return program(name)(load(name)[1], *inputs)


CASES = [(name, side) for name in GOLDEN for side in ("right", "left") if f"{side}_logits" in golden(name)]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_logits_log_probs_and_entropy(name, side):
    g, ((_, logits, found, _), _) = golden(name), result(name, side)
    mask, target = g[f"{side}_attention_mask"] > 0, g[f"{side}_logprob_mask"] > 0
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=ATOL[name])
    close(np.asarray(logits)[mask], g[f"{side}_logits"][mask])
    close(np.asarray(found.log_probs)[:, 1:][target], g[f"{side}_logprobs"][target])
    # Here an entropy belongs to the token drawn from the distribution, there to the position that predicts.
    close(np.asarray(found.entropy)[:, 1:][target], g[f"{side}_entropy"][:, :-1][target])
    assert not np.asarray(found.log_probs)[:, 0].any()


@pytest.mark.parametrize(("name", "side"), [case for case in CASES if case[0] != "dense_tied"])
def test_routes_router_logits_and_balancing_loss(name, side):
    g, ((*_, router), _) = golden(name), result(name, side)
    mask = g[f"{side}_attention_mask"] > 0
    assert load(name)[0].moe_layers == tuple(g["moe_layers"])
    np.testing.assert_array_equal(np.asarray(router.indices)[mask], np.moveaxis(g[f"{side}_topk_indices"], 0, 2)[mask])
    wanted = np.moveaxis(g[f"{side}_router_logits"], 0, 2)[mask]
    np.testing.assert_allclose(np.asarray(router.logits)[mask], wanted, rtol=1e-4, atol=ATOL[name])
    np.testing.assert_allclose(model.load_balancing_loss(router), g[f"{side}_aux_loss"], rtol=1e-5)
    assert router.tokens == mask.sum()
    assert router.load.sum() == mask.sum() * router.indices.shape[-1] * router.indices.shape[-2]


@pytest.mark.parametrize("name", ["moe_top4_norm", "dense_tied"])
def test_gradients(name):
    (loss, *_), grads = result(name, "right")
    np.testing.assert_allclose(loss, golden(name)["right_mean_nll"], rtol=1e-5)
    wanted = dict(np.load(CHECKPOINTS / name / "grads.npz"))
    checked = 0
    for p in model.parameter_table(load(name)[0]):
        leaf = np.asarray(parameters.flatten(grads)[p.path])
        for hub_name, index in _hub_entries(p):
            if hub_name in wanted:
                found, target = leaf[index], wanted[hub_name]
                found = (found.reshape(target.shape[::-1]).T if p.matrix else found).reshape(target.shape)
                assert np.abs(found - target).max() <= 1e-3 * np.abs(target).max(), hub_name
                checked += 1
    assert checked == len(wanted)


def _hub_entries(p):
    if p.axes[0] != "layers":
        return [(p.hub, ())]
    layers = range(p.shape[0])
    if "{expert}" not in p.hub:
        return [(p.hub.format(layer=p.first_layer + i), (i,)) for i in layers]
    return [(p.hub.format(layer=p.first_layer + i, expert=e), (i, e)) for i in layers for e in range(p.shape[1])]

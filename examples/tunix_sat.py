"""SAT inside Tunix: register it once, name it in the config, keep Tunix's learner.

    from examples import tunix_sat; tunix_sat.register()      # adds "sat-gspo" and "sat-grpo"
    config = GRPOConfig(policy_loss_fn="sat-gspo", ...)

Tunix calls a policy loss with the model and a ``TrainExample``; the ratio divides by its ``old_per_token_logps``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sat_jax import losses


def sat_loss(
    method: str, log_probs: jax.Array, example: Any, kl_loss_coef: float = 0.0, **settings: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of one ``TrainExample``; ``log_probs`` [B, T] are the policy's, over completions."""
    has_reference = example.ref_per_token_logps is not None
    config = dataclasses.replace(losses.method(method), kl_loss_coef=kl_loss_coef if has_reference else 0.0, **settings)
    old = example.old_per_token_logps
    loss, metrics = losses.make_loss(config)(
        losses.LossInputs(
            log_probs=log_probs,
            behavior_log_probs=jax.lax.stop_gradient(log_probs) if old is None else old,
            advantages=example.advantages,
            loss_mask=jnp.asarray(example.completion_mask, bool),
            segment_ids=example.segment_ids,
            reference_log_probs=example.ref_per_token_logps,
        )
    )
    return loss, metrics


def register() -> None:
    """Add the two methods to Tunix's registry; needs Tunix."""
    from flax import nnx
    from tunix.rl import common, function_registry

    def make(method: str) -> Any:
        def policy_loss(model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **_: Any) -> Any:
            graph, state = nnx.split(model)
            log_probs = common.compute_per_token_logps(
                graph,
                state,
                prompt_tokens=train_example.prompt_ids,
                completion_tokens=train_example.completion_ids,
                pad_id=pad_id,
                eos_id=eos_id,
                stop_gradient=False,
                segment_ids=train_example.segment_ids,
                segment_positions=train_example.segment_positions,
                temperature=algo_config.temperature,
            )
            high = getattr(algo_config, "epsilon_high", None)
            return sat_loss(
                method,
                log_probs,
                train_example,
                kl_loss_coef=algo_config.beta or 0.0,
                eps_low=algo_config.epsilon,
                eps_high=algo_config.epsilon if high is None else high,
            )

        return policy_loss

    for method in ("sat-grpo", "sat-gspo"):
        function_registry.register_policy_loss_fn(method)(make(method))


if __name__ == "__main__":
    register()
    print("registered sat-grpo and sat-gspo with Tunix")

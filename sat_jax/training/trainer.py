"""The shell: owns the threads, the clock, the files and the counters of one run. Everything it calls is a smaller part.

The loop is ``take -> (batch -> step) x updates -> settle -> evaluate -> checkpoint -> publish``. ``settle`` waits until
the engine has generated everything that older weights have to sample: a checkpoint taken then repeats exactly, and on
one machine the two computations do not slow each other down.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from sat_jax import learner
from sat_jax.config import ExperimentConfig
from sat_jax.data.batching import make_sft_batch
from sat_jax.data.pipeline import PromptStream
from sat_jax.dataclass_json import to_dict
from sat_jax.learner import Programs
from sat_jax.report import write_report
from sat_jax.report.terminal import Display
from sat_jax.rewards.functions import load_reward
from sat_jax.rewards.grader import Grader
from sat_jax.rollout.engine import Engine, SamplingParams
from sat_jax.rollout.ledger import Ledger, read_ledger
from sat_jax.rollout.queue import GroupQueue, QueueStopped
from sat_jax.rollout.weights import copy_params
from sat_jax.rollout.worker import RolloutWorker
from sat_jax.runs.checkpoint import Checkpoints, restore_params, save_params
from sat_jax.runs.folder import CONFIG_FILE, LEDGER_FILE, locked, remove, write_config
from sat_jax.runs.reader import read_run
from sat_jax.runs.writer import MetricsWriter
from sat_jax.training import build, grading
from sat_jax.training.assemble import Assembler
from sat_jax.training.evaluation import evaluate
from sat_jax.training.rollout_metrics import rollout_metrics, sample_records
from sat_jax.training.signals import StopRequest, stop_on_signal
from sat_jax.types import Batch, Group, TrainState

INTERRUPTED = 130
"""Exit status of a run that was asked to stop; it can be resumed."""


class Trainer:
    """One run in one folder, which ``run`` creates, or whose newest checkpoint it continues with ``resume``."""

    def __init__(self, config: ExperimentConfig, run_dir: Path, *, resume: bool = False) -> None:
        self.config, self.run_dir, self._resume = config, run_dir, resume

    def run(self) -> int:
        """Trains to ``config.steps``; returns the exit status: 0, or 130 where the run was interrupted.

        Raises:
            ValueError, FileNotFoundError: input that cannot work, found before training starts.
            FloatingPointError: a gradient that is not finite; the last good state has been checkpointed.
        """
        fresh = not self.run_dir.exists()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                # Nothing in the folder is touched before everything that can be wrong has been looked at.
                parts = _Parts.build(self.config, self.run_dir)
                stack.enter_context(locked(self.run_dir))
                checkpoints = Checkpoints(self.run_dir / "checkpoints")
                stack.callback(checkpoints.close)
                restored = self._restore(checkpoints, parts) if self._resume else None
            except (ValueError, OSError):
                if fresh:
                    remove(self.run_dir)
                raise
            label = build.method_label(self.config, parts.policy.config)
            write_config(self.run_dir, self.config.name, label, to_dict(self.config), resumed=self._resume)
            start = 0 if restored is None else int(restored.state.step)
            writer = stack.enter_context(MetricsWriter(self.run_dir, resume_step=start if self._resume else None))
            title = f"{self.config.name}  {label}  {self.run_dir}"
            display = stack.enter_context(Display(self.config.steps, name=title, start_step=start))
            if self._resume and restored is None:
                display.message("no checkpoint yet: starting over")
            if parts.policy.placement is None and jax.device_count() > 1:
                display.message(f"using one of {jax.device_count()} devices: --mesh.data or --mesh.fsdp takes all")
            stop = stack.enter_context(stop_on_signal())
            run = _Run(self.config, self.run_dir, parts, checkpoints, writer, display, stop)
            finished = run.go(restored)
            final, kept = run.version, checkpoints.latest_step() is not None
        if not finished:
            resume = f"sat-jax train --resume --out {self.run_dir}"
            lost = "" if kept else " (nothing is checkpointed before the first step: the warm start will be repeated)"
            print(f"\nstopped at step {final} of {self.config.steps}; continue with\n  {resume}{lost}")
            return INTERRUPTED
        display.summary(read_run(self.run_dir))
        if self.config.report:
            print(f"report: {write_report([self.run_dir], self.run_dir / 'report.html')}")
        return 0

    def _restore(self, checkpoints: Checkpoints, parts: _Parts) -> _Restored | None:
        """The newest checkpoint, checked against this configuration; None where there is none yet."""
        step, updates = checkpoints.latest_step(), self.config.learner.updates_per_batch
        if step is None:
            return None
        if step > self.config.steps:
            raise ValueError(
                f"{self.run_dir} is at step {step} already, steps = {self.config.steps} lies behind it: raise --steps"
            )
        if step % updates:
            raise ValueError(
                f"the checkpoint of step {step} in {self.run_dir} is not at the end of a batch of "
                f"learner.updates_per_batch = {updates} updates: resume with the number that the run had"
            )
        restored = _Restored(*checkpoints.restore(step, parts.programs.abstract_state()))
        try:
            parts.assembler.check(restored.groups)
        except ValueError as error:
            raise ValueError(
                f"groups that wait in the checkpoint of step {step} were sampled under other settings ({error}): "
                f"resume with the sampling.* and learner.* settings of {self.run_dir / CONFIG_FILE}"
            ) from error
        parts.stream.set_state(restored.host["stream"] | {"position": restored.host["queue"]["cursor"]})
        return restored


class _Restored(NamedTuple):
    """What a checkpoint held: the learner, the counters, and the groups that were waiting."""

    state: TrainState
    host: dict[str, Any]
    groups: list[Group]


class _Parts(NamedTuple):
    """What a run is made of, before anything of it starts."""

    policy: build.Policy
    problems: build.Problems
    programs: Programs
    assembler: Assembler
    stream: PromptStream
    context: int

    @staticmethod
    def build(config: ExperimentConfig, run_dir: Path) -> _Parts:
        placement = build.build_placement(config)
        policy = build.build_policy(config, run_dir, placement)
        problems = build.build_problems(config, policy.tokenizer)
        context = build.context_length(config, policy.config, problems.longest_prompt)
        programs = Programs(build.build_learner(config, policy.config, placement))
        load_reward(config.reward.function)  # raises where it cannot be imported or called as one
        if config.warm_start is not None and problems.task is None:
            raise ValueError(
                f"warm_start needs demonstrations and {config.data.source} has none: use a configuration without a "
                "warm start"
            )
        stream = PromptStream(problems.train, config.seed, shuffle=config.data.shuffle)
        return _Parts(policy, problems, programs, Assembler(config, policy, programs, context), stream, context)


@dataclasses.dataclass
class _Run:
    """A run that is under way."""

    config: ExperimentConfig
    run_dir: Path
    parts: _Parts
    checkpoints: Checkpoints
    writer: MetricsWriter
    display: Display
    stop: StopRequest
    version: int = 0

    # ------------------------------------------------------------------ the run

    def go(self, restored: _Restored | None) -> bool:
        """From warm start, or from a checkpoint, to the end; False where it was asked to stop."""
        parts = self.parts
        if restored is None:
            params = self._warm_start(parts.policy.params)
            if params is None:
                return False
            state = parts.programs.init_state(params)
        else:
            state = restored.state
            for leaf in jax.tree.leaves(parts.policy.params):  # the checkpoint's take their place
                leaf.delete()
        self.version = int(state.step)
        if self.config.loss.kl_loss_coef > 0:
            self._set_reference(state.params, fresh=restored is None)
        for truncation in self.writer.truncations:
            self.display.message(f"resumed at step {self.version}: set aside {truncation}")

        with ExitStack() as stack:
            grader = stack.enter_context(build.build_grader(self.config))
            evaluator = build.build_engine(self.config, parts.policy, state.params, self.version, parts.context)
            stack.callback(evaluator.close)
            if restored is None and not self._evaluate(evaluator, grader, state):
                return False
            engine = build.build_engine(
                self.config, parts.policy, state.params, self.version, parts.context, parts.assembler.support
            )
            stack.callback(engine.close)
            queue, worker = self._rollout_side(engine, grader, restored)
            stack.callback(queue.close)
            stack.callback(worker.stop)
            parts.assembler.keep(state.params, self.version)
            worker.start()
            return self._loop(state, queue, worker, evaluator, grader)

    def _loop(
        self, state: TrainState, queue: GroupQueue, worker: RolloutWorker, evaluator: Engine, grader: Grader
    ) -> bool:
        config, clock = self.config, worker.clock()
        while self.version < config.steps and not self.stop.requested:
            began, first = time.perf_counter(), self.version
            self.stop.wake = queue.stop  # only here: elsewhere a stop waits for the end of the batch
            try:
                groups = queue.take(config.rollout.prompts_per_step, first)
            except QueueStopped:
                break
            finally:
                self.stop.wake = lambda: None
            if not groups:
                self.display.message(f"the prompts ran out at step {first}")
                break
            waited = time.perf_counter() - began
            began += waited
            parts = self.parts.assembler.split(groups)
            batches = [self.parts.assembler.make(part, state.params) for part in parts]
            lines: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = []
            for part, batch in zip(parts, batches, strict=True):
                shown = self.parts.assembler.shown_log_probs(part, batch, state.params)
                state, device_metrics = self.parts.programs.train_step(state, batch)
                metrics = {key: float(value) for key, value in jax.device_get(device_metrics).items()}
                took = time.perf_counter() - began
                before, self.version = self.version, self.version + 1
                queue.trained(part, self.version)
                metrics |= rollout_metrics(part, before) | _speed(batch, took)
                lines.append((self.version, metrics, sample_records(part, shown, self.parts.policy.tokenizer)))
                began = time.perf_counter()
            settled = time.perf_counter()
            last = self.version == config.steps or self.stop.requested
            evaluation_due = self._due(config.evaluation.interval, first)
            checkpoint_due = self._due(config.checkpoint_interval, first)
            if last or evaluation_due or checkpoint_due or not config.rollout.overlap:
                worker.settle(self.version)
            waited += time.perf_counter() - settled
            # Only now, for in the middle of a batch how many groups wait is a matter of timing.
            now = worker.clock()
            shared = _queue_metrics(queue, waited / len(lines), {k: (now[k] - clock[k]) / len(lines) for k in now})
            clock = now
            for step, metrics, samples in lines:
                self.writer.log(step, metrics | shared)
                self.writer.log_samples(step, samples)
                self.display.step(step, metrics | shared)
            skipped = [step for step, metrics, _ in lines if not np.isfinite(metrics["train/grad_norm"])]
            if skipped:
                self._checkpoint(state, queue)
                raise FloatingPointError(
                    f"the gradient of step {skipped[0]} is not finite; the update was withheld and the state saved. "
                    "Look at samples.jsonl and metrics.jsonl of that step before resuming"
                )
            if not self.stop.requested and (evaluation_due or self.version == config.steps):
                self._evaluate(evaluator, grader, state)
            if checkpoint_due or last or self.stop.requested:
                self._checkpoint(state, queue)
            if not last and worker.publish(state.params, self.version):
                self.parts.assembler.keep(state.params, self.version)
        if self.stop.requested:
            self._checkpoint(state, queue)
        return self.version >= config.steps

    def _due(self, interval: int, first: int) -> bool:
        """Whether the batch that began at version ``first`` reached or passed a multiple of ``interval`` steps."""
        return bool(interval) and self.version // interval > first // interval

    # ------------------------------------------------------------------ before the loop

    def _warm_start(self, params: Any) -> Any | None:
        """Parameters after supervised learning on demonstrations; None where the run was asked to stop."""
        warm, task = self.config.warm_start, self.parts.problems.task
        if warm is None or task is None:
            return params
        programs = Programs(learner.supervised_spec(self.parts.programs.spec, warm.lr, warm.warmup_steps))
        state = programs.init_state(params)
        for i in range(warm.steps):
            if self.stop.requested:
                return None
            prompts, targets = task.demonstrations(np.random.default_rng([self.config.seed, i]), warm.batch_size)
            widths, multiple = self.parts.assembler.widths, programs.row_ways
            batch = make_sft_batch(list(prompts), list(targets), widths=widths, rows_multiple=multiple)
            state, metrics = programs.supervised_step(state, programs.place(batch))
            if i % 20 == 0 or i == warm.steps - 1:
                self.display.phase(f"warm start, step {i + 1} of {warm.steps}, loss {float(metrics['sft/loss']):.3f}")
        return state.params

    def _set_reference(self, params: Any, fresh: bool) -> None:
        """The frozen reference policy: the weights that RL starts from, kept on disk for a resumed run."""
        folder = self.run_dir / "reference"
        if fresh:
            self.parts.assembler.reference = copy_params(params)
            save_params(folder, self.parts.assembler.reference)
        else:
            self.parts.assembler.reference = restore_params(folder, params)

    def _rollout_side(
        self, engine: Engine, grader: Grader, restored: _Restored | None
    ) -> tuple[GroupQueue, RolloutWorker]:
        config, rollout, updates = self.config, self.config.rollout, self.config.learner.updates_per_batch
        ledger_path = self.run_dir / LEDGER_FILE
        history = read_ledger(ledger_path) if ledger_path.exists() else []
        queue = GroupQueue(
            rollout.prompts_per_step,
            rollout.max_staleness,
            updates_per_batch=updates,
            on_stale=rollout.stale_policy,
            max_groups=rollout.queue_groups or None,
            last_step=config.steps,
            group_timeout=rollout.group_timeout_s,
            ledger=Ledger(ledger_path),
            version=self.version,
        )
        if restored is not None:
            queue.restore(restored.host["queue"], restored.groups, self.parts.stream.at, history)
            if not restored.groups and rollout.schedule.max_lag and self.version < config.steps:
                self.display.message("nothing was waiting in the checkpoint: the lag builds up again from 0")
        worker = RolloutWorker(
            engine,
            queue,
            self.parts.stream,
            grading.graded_with_advantages(config, grader),
            group_size=rollout.n_samples_per_prompt,
            params=config.sampling,
            schedule=rollout.schedule,
            updates_per_batch=updates,
            seed=config.seed,
        )
        return queue, worker

    # ------------------------------------------------------------------ at the end of a batch

    def _evaluate(self, engine: Engine, grader: Grader, state: TrainState) -> bool:
        """One evaluation of the current weights, written and shown; False where the run was asked to stop."""
        if self.stop.requested:
            return False
        config = self.config
        self.display.phase(f"evaluating, step {self.version}")
        if engine.version != self.version:
            engine.update_weights(state.params, self.version)
        params = SamplingParams(
            temperature=config.evaluation.temperature,
            top_p=config.evaluation.top_p,
            max_new_tokens=config.sampling.max_new_tokens,
            stop=config.sampling.stop,
        )
        grade, problems = partial(grading.graded, grader), self.parts.problems.heldout
        result = evaluate(engine, problems, grade, params, config.evaluation.k, seed=config.seed, step=self.version)
        self.writer.log_evaluation(self.version, result.record())
        self.display.evaluation(self.version, result.record())
        return True

    def _checkpoint(self, state: TrainState, queue: GroupQueue) -> None:
        counters, groups = queue.snapshot()
        if self.parts.assembler.keeps_sampler:  # their sampling weights are not kept: they are generated again
            counters["in_flight"] = sorted(counters["in_flight"] + counters["held"])
            counters["held"], groups = [], []
        self.checkpoints.save(state, {"queue": counters, "stream": self.parts.stream.get_state()}, groups)


def _speed(batch: Batch, took: float) -> dict[str, float]:
    tokens = float(np.sum(np.asarray(batch.segment_ids) > 0))
    return {
        "perf/step_time_s": took,
        "perf/tokens_per_s": tokens / took,
        "perf/batch_fill": tokens / batch.segment_ids.size,
    }


def _queue_metrics(queue: GroupQueue, waited: float, clock: dict[str, float]) -> dict[str, float]:
    """What an update's line says of the rollout side: an equal share of what the batch cost."""
    counts = queue.counts()
    # While nothing is sampled (the last batches are waiting already) there is no rate to report.
    sampled = {"rollout/tokens_per_s": clock["tokens"] / clock["engine_s"]} if clock["tokens"] > 0 else {}
    return sampled | {
        "async/queue_groups": counts["ready"],
        "async/dropped_stale": counts["stale"],
        "perf/rollout_wait_s": waited,
        "perf/train_wait_s": clock["wait_s"],
    }

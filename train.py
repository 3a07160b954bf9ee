"""
GRPO: sample groups of completions, reward them, make the better ones of each group likelier. `uv run train.py`

    rollout    sample G completions of each of B prompts, with the log-probability of every token
    reward     score each completion with verifiers and a frozen judge; the weighted sum is its reward
    reference  with a KL term only: log-probabilities under the model without its adapters
    teacher    with --teacher only: what a teacher makes of the completions
    update     advantage = (reward - mean) / std within the group; one step of AdamW on the clipped loss. The old
               log-probabilities are those of its own first forward pass, so no separate pass computes them

`train` below is the whole algorithm; `tune`, supervised fine-tuning, is what remains of it where replies are given. A
run writes its settings, metrics, completions, evaluations and checkpoints to its directory;
`--resume DIR` continues it.

Axes: B prompts a step, G completions a prompt, N = B * G rows, T completion positions, M rows of a micro-batch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import sampler
import update
from config import Config
from disk import run_files
from flags import fail
from launch import trainer
from launch.command import command
from machine import world
from problems import form
from problems.examples import Example, prompt_text
from problems.rewards import call_rewards
from reporting.journal import Step
from run import GrpoRun, SftRun
from settings.sources import parse
from sft import tuning
from step.groups import Choice, Draw, Rewards, by_turn, choose_groups, gather, of_tokens, weigh
from step.policy import Targets
from tasks.curriculum import MOST_DRAWS
from turns.episodes import Episodes, ended


def train(config: Config, run: GrpoRun) -> Iterator[dict[str, Any]]:
    """
    Runs the steps from `run.step` to `config.optimizer.steps`, and yields the figures of each.

    `run` holds everything that outlives a step.
    """
    learner, clock = run.learner, run.clock
    if run.evaluate_if_due():
        run.save()
    run.show()
    while not run.is_done:
        clock.lap()  # evaluating and saving belong to no step
        mx.reset_peak_memory()
        draws, choice = draw_groups(run)

        with clock.phase("batch") as done:
            prompts, rollout = gather(config, draws, choice.groups)
            batches = learner.reader.cut(prompts, rollout, choice.advantages, run.step)
            done(batches)

        ref_logprobs = None
        if config.objective.beta:
            with clock.phase("ref") as done:
                ref_logprobs = update.reference_logprobs(learner, batches, rollout)
                done(ref_logprobs)

        lesson = None
        if run.teacher:
            with clock.phase("teacher") as done:
                lesson = run.teacher.teach(draws, choice.groups, batches, rollout)
                done(lesson.hidden)

        with clock.phase("update") as done:
            lr = update.learning_rate(config, run.step)
            advantages = mx.array(of_tokens(choice.advantages, rollout))
            targets = update.targets_of(learner, batches, rollout, advantages, ref_logprobs, lesson)
            result = update.update(learner, batches, targets, lr)
            done(learner.trainable, learner.optimizer.state)

        run.step, run.num_draws = run.step + 1, run.num_draws + len(draws)
        run.prompts.note(draws)
        # ---- everything below is reporting
        seconds, peak = clock.lap(), mx.get_peak_memory()
        step = Step(run.step, seconds, draws, choice, rollout, result, peak, run.prompts.figures())
        figures = run.journal.write_step(step)
        run.journal.write_scores(run.step, run.judge)
        run.end_step()  # the run is whole again; a Ctrl-C that waited takes effect here
        is_best = run.evaluate_if_due()
        if is_best or run.save_is_due():
            run.save()
        run.show()
        yield figures


def tune(config: Config, run: SftRun) -> Iterator[dict[str, Any]]:
    """Supervised fine-tuning: the same steps, on given replies."""
    learner, clock = run.learner, run.clock
    if run.evaluate_if_due():
        run.save()
    run.show()
    while not run.is_done:
        clock.lap()
        mx.reset_peak_memory()
        with clock.phase("update") as done:
            rows = run.draw()
            batches = tuning.make_batches(rows, run.sizes.train_token_budget)
            targets = Targets(len(rows), sum(len(row.places) for row in rows))
            lr = update.learning_rate(config, run.step)
            result = update.update(learner, batches, targets, lr)
            done(learner.trainable, learner.optimizer.state)
        run.step += 1
        seconds, peak = clock.lap(), mx.get_peak_memory()
        figures = run.write_step(seconds, targets, result, peak)
        run.end_step()
        is_best = run.evaluate_if_due()
        if is_best or run.save_is_due():
            run.save()
        run.show()
        yield figures


def draw_groups(run: GrpoRun) -> tuple[list[Draw], Choice]:
    """
    Samples and rewards one batch of prompts; with --dynamic-sampling more, until B groups have a signal.

    At most MOST_DRAWS batches. Returns them, and the groups of them that are trained with their advantages.
    """
    config, clock = run.config, run.clock
    max_draws = MOST_DRAWS if config.sampling.dynamic_sampling else 1
    draws: list[Draw] = []
    for number in range(run.num_draws, run.num_draws + max_draws):
        examples, prompts = run.prompts.draw(number)
        with clock.phase("rollout") as done:
            talk, context = None, 0
            if run.toolbox:
                talk = run.toolbox.play(examples, config.sampling.groups, f"{config.sampling.seed} {number}")
                examples, prompts, context = talk.asked, talk.prompts, run.toolbox.context
            try:
                rollout = sampler.rollout(
                    run.model,
                    prompts,
                    run.sampling,
                    group_size=config.sampling.groups,
                    key=(config.sampling.seed << 32) + number + 1,  # another for every batch of every seed
                    batch_size=run.batch_size,
                    share_prefix=run.sizes.sharing,
                    talk=talk,
                    context=context,
                )
            except sampler.NotFinite as error:
                said = prompt_text(examples[error.prompt]["prompt"])
                raise ValueError(f"{error}. The prompt: {said!r:.200}") from error
            done(rollout.completion_ids)
        draws.append(Draw(examples, prompts, rollout, reward_completions(run, examples, rollout, talk), talk))
        choice = choose_groups(config, draws, run.own.advantage)
        if choice.is_full:
            break
    return draws, choice


def reward_completions(
    run: GrpoRun, examples: list[Example], rollout: sampler.Rollout, talk: Episodes | None = None
) -> Rewards:
    """Calls each verifier and the judge once, and weighs what they give."""
    config, task, clock = run.config, run.task, run.clock
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.sampling.groups)]
    with clock.phase("reward") as done:
        columns = rollout.columns
        if talk:
            completions, columns = talk.said(completions), columns | talk.columns()
        called, logged = call_rewards(task.rewards, repeated, completions, columns, task.reward_weights)
        done()
    components = {name: np.array(values) for name, values in called.items()}
    judgement = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = run.judge.score([prompt_text(example["prompt"]) for example in repeated], completions)
            components["rubric"] = judgement.rewards
            done()
    if config.data.reward_gate == "form":
        counted = {name: values for name, values in components.items() if task.reward_weights[name]}
        components |= form.gated(counted, repeated, completions, rollout.finish_reasons)
    rewards = weigh(config, task.reward_weights, components, judgement, completions)._replace(logged=logged)
    earned = talk and talk.earned(task.reward_weights)
    return by_turn(rewards, rollout, earned) if earned else rewards


class Trainer(trainer.Trainer):
    """A run from Python; see launch/trainer.py."""

    def make(self, config: Config, path: Path) -> GrpoRun | SftRun:
        return (SftRun if config.objective.loss_type == "sft" else GrpoRun)(config, path)

    def loop(self) -> Iterator[dict[str, Any]]:
        return tune(self.config, self.run) if isinstance(self.run, SftRun) else train(self.config, self.run)


def main(argv: list[str] | None = None) -> None:
    try:
        with world.joined(), run_files.owner():
            command(parse(sys.argv[1:] if argv is None else argv), Trainer)
    except (ValueError, OSError) as error:
        fail(world.signed(error))


if __name__ == "__main__":
    with ended():
        main()

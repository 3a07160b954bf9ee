"""
GRPO: sample groups of completions, reward them, make the better ones of each group likelier. `uv run train.py`

    rollout    sample G completions of each of B prompts, with the log-probability of every token
    reward     score each completion with verifiers and a frozen judge; the weighted sum is its reward, and its
               advantage (reward - mean) / std within its group
    reference  with a KL term only: log-probabilities under the model without its adapters
    teacher    with --teacher only: what a teacher makes of the completions
    update     one optimizer step on the clipped loss, shortened where it moves the policy beyond --target-kl. The old
               log-probabilities are those of its own first forward pass, so at one step a rollout the ratio is 1 and
               nothing is clipped; samples whose advantage is 0 are left out, but for one in eight, which is measured

A step is a list of samples (step/sample.py). They are drawn, rewarded, given their advantages, and cut into padded
batches, which carry everything that the loss needs. Supervised fine-tuning is the same loop on given replies, whose
advantage is 1. A run writes its settings, metrics, completions, evaluations and checkpoints to its directory;
`--resume DIR` continues it.

Axes: B prompts a step, G completions a prompt, N = B * G samples.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import trainer
import update
from disk import run_files
from flags import exit_with_error, line_of
from machine import link
from machine.output import guard_output
from problems import form
from problems.episodes import end_tools
from reporting.journal import StepSamples
from run import GrpoRun, Run, SftRun, make_run
from sampler import RolloutStats
from settings.sources import parse_flags
from step import advantages, generation, sample, scoring
from step.batch import make_batches
from step.loss import UpdateResult
from step.sample import Sample


def train(run: GrpoRun | SftRun) -> Iterator[dict[str, Any]]:
    """Runs the steps after `run.step`, and yields the figures of each; `run` holds everything that outlives a step."""
    clock = run.journal.clock
    if run.evaluate_if_due():
        run.save()
    run.update_page()
    while run.step < run.config.optimizer.steps:
        clock.take_seconds()  # evaluating and saving belong to no step
        mx.reset_peak_memory()
        drawn = collect_samples(run) if isinstance(run, GrpoRun) else StepSamples(run.replies())

        result = run.retry_within_memory(functools.partial(update_policy, run, drawn.samples))
        run.step += 1
        # ---- everything below is reporting
        figures = run.journal.write_step(
            run.step, clock.take_seconds(), drawn, result, mx.get_peak_memory()
        )
        run.journal.write_scores(run.step, run.judge)
        run.end_step()  # the run is whole again; a Ctrl-C that waited takes effect here
        is_best = run.evaluate_if_due()
        if is_best or run.save_is_due():
            run.save()
        run.update_page()
        yield figures


def collect_samples(run: GrpoRun) -> StepSamples:
    """The samples of one batch of prompts, with their rewards and advantages."""
    drawn = score(run, *rollout(run))
    samples = advantages.assign_advantages(
        run.config, drawn.samples, run.task.reward_weights, run.custom.advantage
    )
    return drawn._replace(samples=samples)


def update_policy(run: Run, samples: list[Sample]) -> UpdateResult:
    """One update on these samples, in batches of the run's token budget."""
    config, learner, clock = run.config, run.learner, run.journal.clock
    with clock.phase("batch") as done:
        trained = advantages.select_for_update(
            config, samples, run.step, learner.loss.all_have_gradient
        )
        batches = make_batches(
            trained, run.sizes.train_token_budget, num_mini_batches=config.optimizer.mini_batches
        )
        done(batches)

    if config.objective.beta:
        with clock.phase("ref") as done:
            batches = update.add_reference_logprobs(learner, batches)
            done(batches)

    if run.teacher:
        with clock.phase("teacher") as done:
            batches = run.teacher.add_lessons(trained, batches)
            done(batches)

    with clock.phase("update") as done:
        result = update.run_optimizer_steps(
            learner, batches, update.learning_rate(config, run.step)
        )
        done(learner.trainable, learner.optimizer.state)
    return result


def rollout(run: GrpoRun) -> tuple[list[Sample], RolloutStats]:
    """The samples of the step's prompts, and what they cost."""
    settings = run.config.sampling
    examples, prompts = run.prompts.next_prompts(
        run.step
    )  # where problems have no end, they move on
    asked = sample.new_samples(examples, prompts, settings.groups)
    with run.journal.clock.phase("rollout") as done:
        samples, stats = generation.generate_completions(
            run.model,
            run.tokenizer,
            asked,
            run.sampling,
            key=(settings.seed << 32)
            + run.step
            + 1,  # another for every draw: of every step of every seed
            batch_size=run.batch_size,
            toolbox=run.toolbox,
            seed=f"{settings.seed} {run.step}",
            weights=run.task.reward_weights,
        )
        done()
    return samples, stats


def score(run: GrpoRun, samples: list[Sample], stats: RolloutStats) -> StepSamples:
    """Calls each verifier and the judge once, and weighs what they give."""
    config, task, clock = run.config, run.task, run.journal.clock
    judged = scores = None
    with clock.phase("reward") as done:
        components, logged = scoring.compute_rewards(task.rewards, samples, task.reward_weights)
        done()
    if run.judge is not None:
        with clock.phase("judge") as done:
            judged = scoring.judge_samples(run.judge, samples)
            components["rubric"], scores = judged.rewards, judged.scores
            done()
    if config.data.reward_gate == "form":
        counted = {name: values for name, values in components.items() if task.reward_weights[name]}
        examples, texts = [one.example for one in samples], [one.text for one in samples]
        components |= form.apply_gate(
            counted, examples, texts, [one.finish_reason for one in samples]
        )
    together = config.objective.advantage == "reinforce"  # each is compared with the whole step
    samples = scoring.assign_rewards(
        samples, components, task.reward_weights, scores, logged.extra, together
    )
    return StepSamples(samples, stats, logged, judged)


class Trainer(trainer.Trainer):
    """A run from Python; see trainer.py."""

    make, loop = staticmethod(make_run), staticmethod(train)


@guard_output(is_log=True)
def main(argv: list[str] | None = None) -> None:
    try:
        with link.connect(), run_files.release_at_exit():
            trainer.run_command(parse_flags(sys.argv[1:] if argv is None else argv), Trainer)
    except ValueError as error:
        exit_with_error(link.describe_end(error))
    except OSError as error:
        exit_with_error(link.describe_end(OSError(line_of(error))))


if __name__ == "__main__":
    with end_tools():
        main()

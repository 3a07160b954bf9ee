"""
GRPO: sample groups of completions, score them, and make the better ones in each group likelier.

    uv run train.py

One step of the loop in `train`:

    collect_samples     get the samples for one batch of prompts
        generate            sample G completions of each of B prompts, and record the
                            log-probability of every token
        score               compute reward components with verifiers and a frozen judge; a sample's
                            reward is the weighted sum of its components
        assign_advantages   compute (reward - mean) / std within each group
    update_policy       make one update on these samples
        mark_for_update     select the samples to compute. A sample whose advantage is 0 has no
                            gradient; one in eight of these is still computed, so that means
                            stay unbiased
        make_batches        pad the samples into batches, which hold everything that the loss needs
        reference           with a KL term: compute log-probabilities under the model as it was
                            before training
        teacher             with --teacher: compute the teacher's hidden states of the completions
        optimizer steps     minimize the clipped loss; a step that moves the policy beyond
                            --target-kl is shortened. The old log-probabilities come from the
                            update's own first forward pass. So with one optimizer step per rollout
                            the ratio is 1, and nothing is clipped.

The loop handles samples (step/sample.py): a sample is one response to one prompt. Supervised
fine-tuning is the same loop on given replies, whose advantage is 1.

A run writes its settings, metrics, completions, evaluations and checkpoints to its directory.
`--resume DIR` continues it. This file does not cover what a run holds (run.py) or how it starts,
stops and continues (trainer.py).

Axes: B prompts in a step, G completions of each prompt, N = B * G samples.
"""

import functools
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import gwen
import trainer
import update
from config import Config
from disk import run_files
from flags import exit_with_error, line_of
from judging.rubrics import Judgement
from machine import link
from machine.output import guard_output
from reporting.journal import StepSamples
from rewards import form
from rewards.rewards import Logged
from run import GrpoRun, Run, SftRun
from sampler import RolloutStats
from settings.sources import parse_flags
from step import generation, sample, scoring
from step.advantages import assign_advantages, mark_for_update
from step.batch import make_batches
from step.loss import UpdateResult
from step.sample import Sample
from tools.tool_workers import end_tools


def train(run: GrpoRun | SftRun) -> Iterator[dict[str, Any]]:
    """
    Trains from `run.step` to the last step, and yields the figures of each step.

    `run` holds everything that outlives a step.
    """
    clock = run.journal.clock
    if run.evaluate_if_due():
        run.save()
    run.update_page()

    while run.step < run.config.optimizer.steps:
        clock.take_seconds()  # the time spent on evaluating and saving belongs to no step
        mx.reset_peak_memory()

        if isinstance(run, GrpoRun):
            collected = collect_samples(run)
        else:
            collected = StepSamples(run.replies())
        update_on_samples = functools.partial(update_policy, run, collected.samples)
        result = run.retry_within_memory(update_on_samples)
        run.step += 1

        # ---- everything below is reporting
        seconds = clock.take_seconds()
        peak_memory = mx.get_peak_memory()
        figures = run.journal.write_step(run.step, seconds, collected, result, peak_memory)
        run.journal.write_scores(run.step, run.judge)
        run.end_step()  # from here on the run may be saved; a pending Ctrl-C takes effect here
        is_best = run.evaluate_if_due()
        if is_best or run.save_is_due():
            run.save()
        run.update_page()
        yield figures


# ---- samples


def collect_samples(run: GrpoRun) -> StepSamples:
    """The samples for the step's prompts, with their rewards and advantages."""
    samples, stats = generate(run)
    samples, logged, judgement = score(run, samples)
    samples = assign_advantages(run.config, samples, run.task.reward_weights, run.custom.advantage)
    return StepSamples(samples, stats, logged, judgement)


def generate(run: GrpoRun) -> tuple[list[Sample], RolloutStats]:
    """Samples completions of the step's prompts. Returns the samples and the cost of sampling."""
    settings = run.config.sampling
    # made-up problems never run out: this call advances to the next ones
    examples, prompts = run.prompts.next_prompts(run.step)
    empty_samples = sample.new_samples(examples, prompts, settings.groups)
    with run.journal.clock.phase("rollout") as done:
        samples, stats = generation.generate_completions(
            run.model,
            run.tokenizer,
            empty_samples,
            run.sampling,
            # every step of every seed has its own key
            key=(settings.seed << 32) + run.step + 1,
            batch_size=run.batch_size,
            toolbox=run.toolbox,
            seed=f"{settings.seed} {run.step}",
            weights=run.task.reward_weights,
        )
        done()
    return samples, stats


def score(run: GrpoRun, samples: list[Sample]) -> tuple[list[Sample], Logged, Judgement | None]:
    """
    Calls each reward and the judge once.

    Returns the samples with their rewards, the values that the reward functions logged, and the
    judge's judgement (None if there is no judge).
    """
    config = run.config
    clock = run.journal.clock
    weights = run.task.reward_weights

    with clock.phase("reward") as done:
        components, logged = scoring.compute_rewards(run.task.rewards, samples, weights)
        done()

    judgement = None
    scores = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = scoring.judge_samples(run.judge, samples)
            components["rubric"] = judgement.rewards
            scores = judgement.scores
            done()

    if config.data.reward_gate == "form":
        weighted = {name: values for name, values in components.items() if weights[name]}
        components |= form.apply_gate(
            weighted,
            [sample.example for sample in samples],
            [sample.text for sample in samples],
            [sample.finish_reason for sample in samples],
        )

    samples = scoring.assign_rewards(
        samples,
        components,
        weights,
        scores,
        logged.extra,
        compares_whole_step=config.objective.advantage == "reinforce",
    )
    return samples, logged, judgement


# ---- the update


def update_policy(run: Run, samples: list[Sample]) -> UpdateResult:
    """Makes one update on the samples, in batches of the run's token budget."""
    config = run.config
    learner = run.learner
    clock = run.journal.clock

    with clock.phase("batch") as done:
        selected = mark_for_update(config, samples, run.step, learner.loss.all_have_gradient)
        batches = make_batches(
            selected, run.sizes.train_token_budget, num_mini_batches=config.optimizer.mini_batches
        )
        done(batches)

    if config.objective.beta:
        with clock.phase("ref") as done:
            batches = update.add_reference_logprobs(learner, batches)
            done(batches)

    if run.teacher:
        with clock.phase("teacher") as done:
            batches = run.teacher.add_lessons(selected, batches)
            done(batches)

    with clock.phase("update") as done:
        learning_rate = update.learning_rate(config, run.step)
        result = update.run_optimizer_steps(learner, batches, learning_rate)
        done(learner.trainable, learner.optimizer.state)
    return result


# ---- everything below starts a run: from Python, or as a command


class Trainer:
    """
    A run from Python, as in a notebook. `start` begins one, `resume` continues one.

    Settings are named like their flags:

        trainer = Trainer.start(task="demo", steps=20, reward=my_reward)
        for figures in trainer.steps():
            print(figures["step"], figures["reward/mean"])

    If the loop is left early or interrupted, the run stops after a complete step and is saved.
    Calling `steps` or `fit` again continues from there.
    """

    config: Config
    dir: Path  # the directory of the run's files
    model: gwen.Model  # the model in its current state, with its adapters

    def __init__(self, spec: trainer.RunSpec):
        """Raises a one-line ValueError for a user's mistake; it then leaves no directory behind."""
        self.run = trainer.open_run(spec)
        self.config = self.run.config
        self.dir = self.run.dir
        self.model = self.run.model

    @classmethod
    def start(
        cls, recipe: str | None = None, *, run_dir: str | None = None, **settings: Any
    ) -> "Trainer":
        """
        Begins a new run. recipe: a YAML file of settings that replaces the task's recipe.

        `data` and `eval_data` may be a list of dictionaries, or a table from `datasets` or pandas.
        `reward` may be a function or a list of functions. `loss_type` and `advantage` may be
        functions. Define a function at the top level of a notebook or module: a resumed run must
        be able to find it.
        """
        flags = trainer.settings_from_arguments(settings)
        return cls(trainer.make_run_spec(flags, recipe, run_dir=run_dir))

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, allow_changes: bool = False, **settings: Any
    ) -> "Trainer":
        """Continues a run. allow_changes: even if its data, rewards or files have changed."""
        flags = trainer.settings_from_arguments(settings)
        spec = trainer.make_run_spec(flags, resume=str(run_dir), allow_changes=allow_changes)
        return cls(spec)

    def steps(self, *, stop_if_hopeless: bool = False) -> Generator[dict[str, Any], None, None]:
        """
        Trains, and yields each step's figures as in `metrics.jsonl`. Prints a summary at the end.

        stop_if_hopeless: raise ValueError, which says what to change, if the first steps of a long
        run show no signal. These are ordinary steps of the run, so the check costs nothing.
        """
        yield from trainer.run_steps(self.run, train, stop_if_hopeless=stop_if_hopeless)

    def fit(self) -> "Trainer":
        """Trains to the last step."""
        for _ in self.steps():
            pass
        return self

    train = fit  # the method's name in TRL

    def save(self) -> None:
        """Saves a checkpoint and the adapter."""
        self.run.save()

    def evaluate(self) -> dict[str, Any]:
        """The figures on the held-out problems, as in `eval.jsonl`. Prints nothing."""
        evaluations = self.run.journal.evaluations
        if not evaluations or evaluations[-1]["step"] != self.run.step:
            self.run.evaluate()
        return self.run.journal.evaluations[-1]

    def sample(
        self, prompts: Sequence[Any], n: int = 1, *, temp: float | None = None
    ) -> list[list[str]]:
        """
        `n` completions of each prompt, sampled as in training. temp: 0 decodes greedily.

        prompts: one prompt or a sequence of prompts. A prompt is either a text, which is
        placed after the messages that all training prompts begin with, or a list of chat messages,
        which is used as it is.
        """
        return trainer.sample_completions(self.run, prompts, n, temp)


@guard_output(is_log=True)
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with link.connect(), run_files.release_at_exit():
            trainer.run_command(parse_flags(arguments), train)
    except ValueError as error:
        exit_with_error(link.describe_end(error))
    except OSError as error:
        one_line_error = OSError(line_of(error))
        exit_with_error(link.describe_end(one_line_error))


if __name__ == "__main__":
    with end_tools():
        main()

"""
GRPO samples several completions of each prompt, scores them, and makes the better ones likelier.

    uv run train.py

One step of the loop in `train`:

    collect_samples:    Get the scored samples for one batch of prompts.
        generate:           Sample G completions of each of B prompts, and record the
                            log-probability of every sampled token.
        score:              Compute the reward components with verifiers and a frozen judge. The
                            reward of a sample is the weighted sum of its components.
        assign_advantages:  Compute (reward - mean) / std within each group.
    update_policy:      Make one update with these samples.
        mark_for_update:    Select the samples that pass through the model. A sample whose advantage
                            is 0 has no gradient. One in eight samples without a gradient is
                            computed anyway, to keep the averaged statistics unbiased.
        make_batches:       Pad the samples into batches, which contain everything that the loss
                            needs.
        reference:          If there is a KL term, compute the log-probabilities under the model
                            before training.
        teacher:            With --teacher, compute the teacher's hidden states for the completions.
        optimizer steps:    Minimize the clipped loss. A step that moves the policy beyond
                            --target-kl is shortened. The log-probabilities of the old policy come
                            from the first forward pass of the update itself. With one optimizer
                            step per rollout, the ratio of new to old probabilities is therefore 1,
                            and nothing is clipped. Only samples that `Trainer.on_samples` replays
                            have other ratios, because an earlier policy wrote them.

The loop handles samples (step/sample.py): a sample is one response to one prompt. Supervised
fine-tuning runs the same loop on given replies, each of which has an advantage of 1.

A run writes its settings, metrics, completions, evaluations and checkpoints to the run directory.
`--resume DIR` continues the run in the directory DIR. The state of a run is in run.py; starting,
stopping and resuming a run are in trainer.py.

Axes: B prompts per step, G completions per prompt, N = B * G samples.
"""

import functools
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import grpo
import gwen
import trainer
import update
from config import Config
from disk import run_files
from flags import exit_with_error, message_with_advice
from judging.grader import Judgement
from machine import link
from machine.output import guard_output
from reporting.callbacks import (
    CallbackCaller,
    instantiate_and_check_callbacks,
    train_with_callbacks,
)
from reporting.journal import StepSamples
from rewards import form
from rewards.rewards import LoggedValues
from run import GrpoRun, Run, SamplesHook, SftRun
from sampler import RolloutStats
from settings.sources import parse_flags
from step import generation, sample, scoring
from step.advantages import assign_advantages, mark_for_update
from step.batch import make_batches
from step.loss import UpdateResult
from step.sample import Sample
from tools.tool_workers import end_tool_threads_on_exit


def train(run: GrpoRun | SftRun) -> Iterator[dict[str, Any]]:
    """
    Trains from step `run.step` to the last step, and yields the metrics of each step.

    run: everything that outlives a single step, such as the model and the settings.
    """
    clock = run.journal.clock
    if run.evaluate_if_due_and_tell_if_best():
        run.save()
    run.update_page_if_due()

    while run.step < run.config.optimizer.steps:
        clock.take_seconds_by_phase()  # drops the time for evaluating and saving
        mx.reset_peak_memory()

        if isinstance(run, GrpoRun):
            collected = collect_samples(run)
        else:
            collected = StepSamples(run.samples_for_next_step())
        samples = run.apply_samples_hook(collected.samples)
        update_on_samples = functools.partial(update_policy, run, samples)
        result = run.update_with_memory_retries(update_on_samples)
        run.step += 1

        # ---- the rest of the loop reports, evaluates and saves
        seconds = clock.take_seconds_by_phase()
        peak_memory = mx.get_peak_memory()
        figures = run.journal.record_and_print_step(
            run.step, seconds, collected, result, peak_memory
        )
        run.journal.write_new_judge_scores(run.step, run.judge)
        # from here on, the run can be saved, so a pending Ctrl-C takes effect
        run.mark_step_complete_and_keep_state(figures)
        is_best = run.evaluate_if_due_and_tell_if_best()
        if is_best or run.save_is_due():
            run.save()
        run.update_page_if_due()
        yield figures


# ---- samples


def collect_samples(run: GrpoRun) -> StepSamples:
    """Generates samples for the step's prompts, and adds their rewards and advantages."""
    samples, stats = generate(run)
    samples, logged, judgement = score(run, samples)
    samples = assign_advantages(run.config, samples, run.task.reward_weights, run.custom.advantage)
    return StepSamples(samples, stats, logged, judgement)


def generate(run: GrpoRun) -> tuple[list[Sample], RolloutStats]:
    """Samples completions of the step's prompts. Returns the samples and sampling statistics."""
    settings = run.config.sampling
    examples, prompts = run.draw_prompts()
    empty_samples = sample.new_samples(examples, prompts, settings.groups)
    with run.journal.clock.phase("rollout") as done:
        samples, stats = generation.generate_completions(
            run.model,
            run.tokenizer,
            empty_samples,
            run.training_sampling_params,
            # each combination of seed and step has its own key
            key=(settings.seed << 32) + run.step + 1,
            batch_size=run.batch_size,
            toolbox=run.toolbox,
            player=run.player,
            environment_seed=f"{settings.seed} {run.step}",
            environment_reward_weights=run.task.reward_weights,
        )
        done()
    return samples, stats


def score(
    run: GrpoRun, samples: list[Sample]
) -> tuple[list[Sample], LoggedValues, Judgement | None]:
    """
    Calls each reward function once, and the judge if there is one.

    Returns the samples with their rewards, the values that the reward functions logged, and the
    judgement (None if there is no judge).
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
        components |= form.rewards_capped_at_0_if_form_gate_fails(
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
        compares_whole_step=grpo.compares_whole_step(config.objective.advantage),
    )
    return samples, logged, judgement


# ---- the update


def update_policy(run: Run, samples: list[Sample]) -> UpdateResult:
    """Makes one update with the samples, in batches that fit the run's token budget."""
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
            batches = run.teacher.add_teacher_states_and_head(selected, batches)
            done(batches)

    with clock.phase("update") as done:
        learning_rate = update.scheduled_learning_rate(config, run.step)
        result = update.run_optimizer_steps(learner, batches, learning_rate)
        done(learner.trainable, learner.optimizer.state)
    return result


# ---- starting a run, from Python or as a command


class Trainer:
    """
    A training run that is started from Python, for example in a notebook.

    `Trainer.start` begins a run, and `Trainer.resume` continues one. If the loop over `steps` is
    left early or interrupted, the run stops after a complete step and is saved. Calling `steps` or
    `fit` again continues an interrupted run. Settings have the names of their flags, as in this
    example:

        trainer = Trainer.start(task="demo", steps=20, reward=my_reward)
        for figures in trainer.steps():
            print(figures["step"], figures["reward/mean"])
    """

    config: Config
    dir: Path  # the run directory

    # A function (run, samples) -> samples that changes the samples before each update; see
    # `run.Run.apply_samples_hook`. A subclass may define it as a method instead.
    on_samples: SamplesHook | None = None

    model: gwen.Model  # the model in its current state, including its adapters

    def __init__(self, spec: trainer.RunSpec, callbacks: Iterable[Any] = ()):
        """
        Makes the run that `spec` describes.

        callbacks: see reporting/callbacks.py.

        Raises ValueError with a one-line message if the user made a mistake. In this case, no
        directory is created for a new run.
        """
        callbacks = instantiate_and_check_callbacks(callbacks)
        self.run = trainer.make_or_restore_run_and_open_dir(spec)
        self.callbacks = CallbackCaller(self.run, callbacks)
        self.callbacks.call("on_init_end")
        self.config = self.run.config
        self.dir = self.run.dir
        self.model = self.run.model

    @classmethod
    def start(
        cls,
        recipe: str | None = None,
        *,
        run_dir: str | None = None,
        callbacks: Iterable[Any] = (),
        **settings: Any,
    ) -> "Trainer":
        """
        Begins a new run.

        recipe: a YAML file of settings that replaces the task's recipe.

        `data` and `eval_data` may each be a list of dictionaries, or a table from `datasets` or
        pandas. `reward` may be a function or a list of functions. `loss_type` and `advantage` may
        be functions, and `optimizer` may be a function or class that takes the learning rate and
        returns an `mlx.optimizers.Optimizer`. Define your functions at the top level of a notebook
        or module, so that a resumed run can find them. `callbacks` are objects with methods such as
        `on_step_end` (see reporting/callbacks.py).
        """
        flags = trainer.convert_arguments_and_cache_data(settings)
        return cls(trainer.make_run_spec(flags, recipe, run_dir=run_dir), callbacks)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        *,
        allow_changes: bool = False,
        callbacks: Iterable[Any] = (),
        **settings: Any,
    ) -> "Trainer":
        """
        Continues a run from its last checkpoint.

        A checkpoint does not contain callbacks, so pass them again.

        allow_changes: whether to continue although the run's data, rewards or files have changed.
        """
        flags = trainer.convert_arguments_and_cache_data(settings)
        spec = trainer.make_run_spec(flags, resume=str(run_dir), allow_changes=allow_changes)
        return cls(spec, callbacks)

    def steps(self, *, stop_if_hopeless: bool = False) -> Generator[dict[str, Any], None, None]:
        """
        Trains, and yields the metrics of each step, named as in `metrics.jsonl`.

        Prints a summary at the end.

        stop_if_hopeless: whether to raise ValueError, with advice on what to change, if the first
        steps of a long run give the model nothing to learn from. The check only looks at ordinary
        training steps, so it costs nothing.
        """
        self.run.on_samples = self.on_samples
        steps = trainer.run_steps(self.run, train, stop_if_hopeless=stop_if_hopeless)
        with trainer.exit_on_termination():
            yield from train_with_callbacks(self.callbacks, steps)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, which is an object with methods such as `on_step_end`."""
        self.callbacks.callbacks += instantiate_and_check_callbacks([callback])

    def fit(self) -> "Trainer":
        """Trains to the last step."""
        for _ in self.steps():
            pass
        return self

    train = fit  # TRL calls this method `train`

    def save(self) -> None:
        """Saves a checkpoint and the adapter."""
        self.run.save()

    def save_model(self, directory: str | Path) -> None:
        """
        Writes the current model to a directory that transformers, PEFT and TRL can load.

        With adapters, the directory contains the adapter in PEFT format. With --lora-rank 0, it
        contains the whole model. Files of the same names are replaced. For a merged model or a GGUF
        file, use export.py.
        """
        trainer.write_peft_adapter_or_full_model(self.run, Path(directory))

    def push_to_hub(
        self, repo_id: str, *, private: bool = True, commit_message: str = "End of training"
    ) -> str | None:
        """
        Uploads to the hub the files that `save_model` writes. Returns the repository's address.

        repo_id: OWNER/NAME. The repository is created if it does not exist.
        private: whether a new repository is private.

        With several machines, only the first one uploads, and the others return None.
        """
        return trainer.push_to_hub(
            self.run, repo_id, private=private, commit_message=commit_message
        )

    def evaluate(self) -> dict[str, Any]:
        """
        Evaluates the model on the held-out problems. Returns the metrics recorded in `eval.jsonl`.

        If the model has already been evaluated at this step, the recorded metrics are returned.
        """
        evaluations = self.run.journal.evaluations
        if not evaluations or evaluations[-1]["step"] != self.run.step:
            self.run.evaluate()
        return self.run.journal.evaluations[-1]

    def sample(
        self, prompts: Sequence[Any], n: int = 1, *, temp: float | None = None
    ) -> list[list[str]]:
        """
        Samples `n` completions of each prompt with the run's sampling settings.

        prompts: one prompt or a sequence of prompts. A prompt is either a string or a list of chat
        messages. A string is placed after the messages with which every training prompt begins. A
        list of messages is used unchanged.
        temp: a temperature to use instead of the one in the settings; 0 decodes greedily.
        """
        return trainer.sample_completions(self.run, prompts, n, temp)


@guard_output(is_log=True)
def main(argv: list[str] | None = None) -> None:
    """Runs the command `train.py` with the given arguments."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with link.connect_machines(), run_files.unlock_run_dirs_after_block():
            trainer.run_train_command(parse_flags(arguments), train)
    except ValueError as error:
        exit_with_error(link.end_reason_with_machine_name(error))
    except OSError as error:
        one_line_error = OSError(message_with_advice(error))
        exit_with_error(link.end_reason_with_machine_name(one_line_error))


if __name__ == "__main__":
    with end_tool_threads_on_exit():
        main()

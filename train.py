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

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import sampler
import update
from config import Config, as_yaml, given, parse, resolve
from disk import checkpoint, run_files
from flags import fail
from machine import gpu, power, world
from problems.examples import Example, prompt_text
from problems.rewards import call_rewards
from reporting import page, trackers
from reporting.console import say
from reporting.journal import Step, evaluation_is_due
from run import GrpoRun, SftRun, stoppable
from sft import tuning
from step.groups import Draw, Rewards, choose_groups, gather, weigh
from step.micro_batch import micro_batches
from step.policy import Targets
from tasks.curriculum import MOST_DRAWS


def train(config: Config, run: GrpoRun) -> None:
    """Runs the steps from `run.step` to `config.optimizer.steps`; `run` holds everything that outlives a step."""
    learner, clock = run.learner, run.clock
    if run.evaluate_if_due():
        run.save()
    run.show()
    while not run.is_done:
        clock.lap()  # evaluating and saving belong to no step
        mx.reset_peak_memory()
        draws = draw_groups(run)
        choice = choose_groups(config, draws, run.own.advantage)  # and their advantages

        with clock.phase("batch") as done:
            prompts, rollout = gather(config, draws, choice.groups)
            batches = micro_batches(prompts, rollout, run.sizes.train_token_budget, "auto")
            done(batches)

        ref_logprobs = None
        if config.objective.beta:
            with clock.phase("ref") as done:
                ref_logprobs = update.reference_logprobs(learner, batches, rollout)
                done(ref_logprobs)

        taught = None
        if run.teacher:
            with clock.phase("teacher") as done:
                taught = run.teacher.teach(draws, choice.groups, batches, rollout)
                done()

        with clock.phase("update") as done:
            lr = update.learning_rate(config, run.step)
            advantages = mx.array(choice.advantages.reshape(-1))
            targets = update.targets_of(learner, batches, rollout, advantages, ref_logprobs, taught)
            result = update.update(learner, batches, targets, lr)
            done(learner.trainable, learner.optimizer.state)

        run.step, run.num_draws = run.step + 1, run.num_draws + len(draws)
        run.prompts.note(draws)
        # ---- everything below is reporting
        seconds, peak = clock.lap(), mx.get_peak_memory()
        run.journal.write_step(Step(run.step, seconds, draws, choice, rollout, result, peak, run.prompts.figures()))
        run.journal.write_scores(run.step, run.judge)
        run.end_step()  # the run is whole again; a Ctrl-C that waited takes effect here
        is_best = run.evaluate_if_due()
        if is_best or run.is_done or run.step % config.records.save_every == 0:
            run.save()
        run.show()


def tune(config: Config, run: SftRun) -> None:
    """Supervised fine-tuning: the same steps, on given replies; they end where --early-stopping says so."""
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
        run.write_step(seconds, targets, result, peak)
        run.end_step()
        is_best = run.evaluate_if_due()
        if is_best or run.is_done or run.step % config.records.save_every == 0:
            run.save()
        run.show()
    if run.step < config.optimizer.steps:
        patience = config.evaluation.early_stopping
        said = f"stopped after step {run.step}: {patience} evaluations in a row had no lower eval/loss"
        say(f"{said}; to go on, resume with --early-stopping 0")


def draw_groups(run: GrpoRun) -> list[Draw]:
    """
    Samples and rewards one batch of prompts; with --dynamic-sampling more, until B groups have a signal.

    At most MOST_DRAWS batches.
    """
    config, clock = run.config, run.clock
    max_draws = MOST_DRAWS if config.sampling.dynamic_sampling else 1
    draws: list[Draw] = []
    for number in range(run.num_draws, run.num_draws + max_draws):
        examples, prompts = run.prompts.draw(number)
        with clock.phase("rollout") as done:
            try:
                rollout = sampler.rollout(
                    run.model,
                    prompts,
                    run.sampling,
                    group_size=config.sampling.groups,
                    key=(config.sampling.seed << 32) + number + 1,  # another for every batch of every seed
                    batch_size=run.batch_size,
                    share_prefix=run.sizes.sharing,
                )
            except sampler.NotFinite as error:
                said = prompt_text(examples[error.prompt]["prompt"])
                raise ValueError(f"{error}. The prompt: {said!r:.200}") from error
            done(rollout.completion_ids)
        draws.append(Draw(examples, prompts, rollout, reward_completions(run, examples, rollout)))
        if not config.sampling.dynamic_sampling or choose_groups(config, draws, run.own.advantage).is_full:
            break
    return draws


def reward_completions(run: GrpoRun, examples: list[Example], rollout: sampler.Rollout) -> Rewards:
    """Calls each verifier and the judge once, and weighs what they give."""
    config, task, clock = run.config, run.task, run.clock
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.sampling.groups)]
    with clock.phase("reward") as done:
        called = call_rewards(task.rewards, repeated, completions, sampler.columns(rollout))
        done()
    components = {name: np.array(values) for name, values in called.items()}
    judgement = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = run.judge.score([prompt_text(example["prompt"]) for example in repeated], completions)
            components["rubric"] = judgement.rewards
            done()
    weights = [task.reward_weights[name] for name in components]
    return weigh(config, weights, components, judgement, completions)


# ---- the command


def main(argv: list[str] | None = None) -> None:
    try:
        with world.joined(), run_files.owner():
            command(parse(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as error:
        fail(world.signed(error))


def command(args: argparse.Namespace) -> None:
    """The whole of it. Of several machines the first reads and writes files; the others follow it."""
    flags = given(args)
    if args.allow_changes and not args.resume:
        raise ValueError("--allow-changes is for a run that goes on; name it with --resume")
    if args.resume and args.run_dir:
        raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
    config, state, path = begin(args)
    if args.print_config:
        print(as_yaml(config), end="")
        return
    if not path:
        return
    if args.wired_limit:
        os.environ[gpu.WIRED_LIMIT] = args.wired_limit
    if not args.let_sleep:
        power.keep_awake()
    make, loop = (SftRun, tune) if config.objective.loss_type == "sft" else (GrpoRun, train)
    run: Any = make(config, Path(path))
    if state:
        run.restore(state)
        if "rollout_batch_size" in flags:  # may exceed what the checkpoint had backed off to
            run.batch_size.rows = run.sizes.rollout_batch_size
        state = state._replace(trainable={}, optimizer={})  # the old masters would stay for the whole run
    # only after everything has loaded, so that a user's mistake leaves no directory behind
    run.dir = Path(world.first(lambda: make_dir(run, args, state)))
    run.open()
    print(f"run: {run.dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters", flush=True)
    print(run.memory, flush=True)
    print(run.legend, flush=True)
    with run.shown(), stoppable(run):
        loop(config, run)
    if world.is_first():
        run.journal.print_summary()
        if args.open and (written := run.dir / "report.html").is_file():
            page.show(written)


def begin(args: argparse.Namespace) -> tuple[Config, checkpoint.State | None, str]:
    """The settings, the state to go on from, and the directory of the run; no directory where nothing is to be done."""

    def read() -> list[Any]:
        if args.resume is True:
            args.resume = checkpoint.newest_unfinished()
        config, choice = resolve(given(args), args.config, args.resume, gwen.choose_model)
        trackers.check(config.records.report_to)
        print(choice, file=sys.stderr if args.print_config else sys.stdout, flush=True)
        settings = config.flat()
        if args.print_config:
            return [settings, None, ""]
        if not args.resume:
            return [settings, None, str(run_files.choose_run_dir(config.data.task, args.run_dir))]
        run_dir = Path(args.resume)
        run_files.own(run_dir)
        state = checkpoint.load(run_dir)
        unasked = {name: value for name, value in settings.items() if name not in given(args)}
        changed = [*checkpoint.changes(run_dir, state, unasked), *checkpoint.changed_files(run_dir, state)]
        checkpoint.refuse_changes(run_dir, state, changed, args.allow_changes)
        checkpoint.publish(args.resume, state)  # a killed process may not have got this far
        log = run_files.JsonLines(Path(args.resume) / "eval.jsonl")
        if state.step >= config.optimizer.steps and not evaluation_is_due(config, state.step, log.read()):
            print(f"{args.resume} is finished: {state.step} of {config.optimizer.steps} steps are done")
            return [settings, None, ""]
        return [settings, state, args.resume]

    settings, state, path = world.first(read)
    return Config.of(**settings), checkpoint.State(*state) if state else None, path


def make_dir(run: Any, args: argparse.Namespace, state: checkpoint.State | None) -> str:
    """Makes the run's directory, or that of a resumed run ready to go on; returns its path."""
    if not state:
        return str(run_files.make_run_dir(as_yaml(run.config, run.sizes), run.dir, args.run_dir))
    checkpoint.refuse_changes(run.dir, state, checkpoint.changes(run.dir, state, run.sources), args.allow_changes)
    checkpoint.go_on(run.dir, state, run.config.flat(run.sizes) | run.sources)
    run_files.write(as_yaml(run.config, run.sizes), run.dir)
    return str(run.dir)


if __name__ == "__main__":
    main()

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
import functools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import sampler
import update
from config import Config
from disk import checkpoint, run_files
from flags import fail, flag_of
from machine import gpu, power, world
from problems import chat_template, examples, rewards
from problems.examples import Example, prompt_text
from problems.rewards import call_rewards
from reporting import page, seeds, trackers
from reporting.console import say
from reporting.journal import Step, evaluation_is_due
from run import GrpoRun, SftRun, sampling_of, stoppable
from settings.sources import as_yaml, given, joined, may_change, parse, refuse_unknown, resolve
from sft import tuning
from step.groups import Draw, Rewards, choose_groups, gated, gather, weigh
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
        draws = draw_groups(run)
        choice = choose_groups(config, draws, run.own.advantage)  # and their advantages

        with clock.phase("batch") as done:
            prompts, rollout = gather(config, draws, choice.groups)
            batches = learner.reader.cut(prompts, rollout, choice.advantages, run.step)
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
        step = Step(run.step, seconds, draws, choice, rollout, result, peak, run.prompts.figures())
        figures = run.journal.write_step(step)
        run.journal.write_scores(run.step, run.judge)
        run.end_step()  # the run is whole again; a Ctrl-C that waited takes effect here
        is_best = run.evaluate_if_due()
        if is_best or run.is_done or run.step % config.records.save_every == 0:
            run.save()
        run.show()
        yield figures


def tune(config: Config, run: SftRun) -> Iterator[dict[str, Any]]:
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
        figures = run.write_step(seconds, targets, result, peak)
        run.end_step()
        is_best = run.evaluate_if_due()
        if is_best or run.is_done or run.step % config.records.save_every == 0:
            run.save()
        run.show()
        yield figures
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
        if not config.sampling.dynamic_sampling or choose_groups(config, draws, run.own.advantage).is_full:
            break
    return draws


def reward_completions(
    run: GrpoRun, examples: list[Example], rollout: sampler.Rollout, talk: Episodes | None = None
) -> Rewards:
    """Calls each verifier and the judge once, and weighs what they give."""
    config, task, clock = run.config, run.task, run.clock
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.sampling.groups)]
    with clock.phase("reward") as done:
        columns = sampler.columns(rollout)
        if talk:
            completions, columns = talk.said(completions), columns | talk.columns()
        called = call_rewards(task.rewards, repeated, completions, columns)
        done()
    components = {name: np.array(values) for name, values in called.items()}
    judgement = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = run.judge.score([prompt_text(example["prompt"]) for example in repeated], completions)
            components["rubric"] = judgement.rewards
            done()
    if config.data.reward_gate == "form":
        components = gated(components, repeated, completions, rollout.finish_reasons)
    weights = [task.reward_weights[name] for name in components]
    return weigh(config, weights, components, judgement, completions)


# ---- a run, from Python or from the command


class Trainer:
    """
    A run from Python, as in a notebook. `start` and `resume` make one; settings go by the names of their flags.

        trainer = Trainer.start(task="demo", steps=20, reward=my_reward)
        for figures in trainer.steps():
            print(figures["step"], figures["reward/mean"])

    A break or an interrupt ends the loop after a whole step, which is saved; `steps` or `fit` goes on from there.
    """

    def __init__(self, begun: "Begun"):
        """Raises ValueError in one line for what the user got wrong; no directory is left then."""
        config, state, path = begun.config, begun.state, begun.path
        kind: Any = SftRun if config.objective.loss_type == "sft" else GrpoRun
        run = self.run = kind(config, Path(path))
        if state:
            run.restore(state)
            if "rollout_batch_size" in begun.flags:  # may exceed what the checkpoint had backed off to
                run.batch_size.rows = run.sizes.rollout_batch_size
            state = state._replace(trainable={}, optimizer={})  # the old masters would stay for the whole run
        # only after everything has loaded, so that a user's mistake leaves no directory behind
        run.dir = Path(world.first(lambda: make_dir(run, begun._replace(state=state))))
        self._is_owner = True  # until the loop ends
        run.open()
        print(f"run: {run.dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters")
        print(run.memory)
        print(run.legend, flush=True)

    @classmethod
    def start(cls, recipe: str | None = None, *, run_dir: str | None = None, **settings: Any) -> "Trainer":
        """
        A new run. recipe: YAML of settings, in place of the task's.

        `data` and `eval_data` may be rows as dictionaries, `reward` a function or a list of them, `loss_type` and
        `advantage` a function: one at the top level of a notebook or module, which a resumed run finds there again.
        """
        return cls(begin(as_settings(settings), recipe, run_dir=run_dir))

    @classmethod
    def resume(cls, run_dir: str | Path, *, allow_changes: bool = False, **settings: Any) -> "Trainer":
        """Goes on with a run; allow_changes: though its data, rewards or files changed."""
        return cls(begin(as_settings(settings), resume=str(run_dir), allow_changes=allow_changes))

    @property
    def config(self) -> Config:
        """Its settings."""
        return self.run.config

    @property
    def dir(self) -> Path:
        """Where it is recorded."""
        return self.run.dir

    @property
    def model(self) -> gwen.Model:
        """The model as it is now, with its adapters."""
        return self.run.model

    def steps(self) -> Iterator[dict[str, Any]]:
        """Trains, and yields each step's figures, as in `metrics.jsonl`."""
        if not self._is_owner and world.is_first():
            run_files.own(self.dir)
        try:
            with self.run.shown(), stoppable(self.run):
                yield from (tune if isinstance(self.run, SftRun) else train)(self.config, self.run)
        except GeneratorExit:
            self.save()
            say(f"saved after step {self.run.step}: {self.dir}")
            raise
        finally:
            run_files.let_go(self.dir)
            self._is_owner = False

    def fit(self) -> "Trainer":
        """Trains to the last step."""
        for _ in self.steps():
            pass
        return self

    def save(self) -> None:
        """Saves a checkpoint and the adapter."""
        self.run.save()

    def evaluate(self) -> dict[str, Any]:
        """The figures on what is held out, as in `eval.jsonl`."""
        journal = self.run.journal
        if not journal.evaluations or journal.evaluations[-1]["step"] != self.run.step:
            self.run.evaluate()
        return journal.evaluations[-1]

    def sample(self, prompts: Sequence[Any], n: int = 1, *, temp: float | None = None) -> list[list[str]]:
        """`n` completions of each prompt, a text or chat messages, drawn as in training; temp 0: greedily."""
        run, settings = self.run, self.config.sampling
        prompts = [prompts] if isinstance(prompts, str) else prompts
        ids = [chat_template.chat_ids(run.tokenizer, prompt, thinking=settings.thinking) for prompt in prompts]
        eos_ids = run.model.config.eos_ids
        params = sampling_of(self.config, run.tokenizer, eos_ids, next(iter(eos_ids)))._replace(entropy=False)
        if temp is not None:
            params = params._replace(temperature=temp)
        rollout = sampler.rollout(run.model, ids, params, group_size=n, key=settings.seed)
        texts = sampler.texts(run.tokenizer, rollout, eos_ids)
        return [texts[first : first + n] for first in range(0, len(texts), n)]


def as_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as flags hold them: a function by its name in its module, rows as a file of the cache."""
    for name in ("data", "eval_data"):
        if not isinstance(settings.get(name, ""), (str, Path)):
            settings[name] = examples.keep(settings[name])
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    if (held_out := settings.pop("eval_data", None)) is not None:
        settings["data"] = joined(settings.get("data"), held_out)
    refuse_unknown(settings)
    for name in ("loss_type", "advantage", "env"):
        if callable(settings.get(name)):
            settings[name] = rewards.spec_of(settings[name])
    for name in ("reward", "tools"):
        if (named := settings.get(name)) is not None:
            named = [named] if callable(named) or isinstance(named, str) else named
            settings[name] = [rewards.spec_of(one) if callable(one) else one for one in named]
    return settings


class Begun(NamedTuple):
    """A run that is to be made, or to go on."""

    config: Config
    state: checkpoint.State | None  # to go on from
    path: str  # its directory
    run_dir: str | None  # the directory that was asked for
    allow_changes: bool
    flags: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to be done."""
        if self.state is None or self.state.step < self.config.optimizer.steps:
            return False
        evaluations = run_files.JsonLines(Path(self.path) / "eval.jsonl").read()
        return not evaluation_is_due(self.config, self.state.step, evaluations)


def begin(
    flags: dict[str, Any],
    recipe: str | None = None,
    *,
    resume: str | None = None,
    run_dir: str | None = None,
    allow_changes: bool = False,
) -> Begun:
    """The settings, the state to go on from, and the directory of the run, which is not made yet."""

    def read() -> list[Any]:
        config, choice = resolve(flags, recipe, resume, gwen.choose_model)
        trackers.check(config.records.report_to)
        print(choice, flush=True)
        settings = config.flat()
        if resume is None:
            return [settings, None, str(run_files.choose_run_dir(config.data.task, run_dir))]
        path = Path(resume)
        run_files.own(path)
        state = checkpoint.load(path)
        unasked = {name: value for name, value in settings.items() if name not in flags}
        changed = [*checkpoint.changes(path, state, unasked), *checkpoint.changed_files(path, state)]
        checkpoint.refuse_changes(path, state, changed, allow_changes)
        checkpoint.publish(path, state)  # a killed process may not have got this far
        return [settings, state, resume]

    settings, state, path = world.first(read)
    return Begun(
        Config.of(**settings), checkpoint.State(*state) if state else None, path, run_dir, allow_changes, flags
    )


def make_dir(run: Any, begun: Begun) -> str:
    """Makes the run's directory, or that of a resumed run ready to go on; returns its path."""
    state = begun.state
    if not state:
        return str(run_files.make_run_dir(as_yaml(run.config, run.sizes), run.dir, begun.run_dir))
    checkpoint.refuse_changes(run.dir, state, checkpoint.changes(run.dir, state, run.sources), begun.allow_changes)
    checkpoint.go_on(run.dir, state, run.config.flat(run.sizes) | run.sources)
    run_files.write(as_yaml(run.config, run.sizes), run.dir)
    return str(run.dir)


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
    resume = world.first(checkpoint.newest_unfinished) if args.resume is True else args.resume
    if args.print_config:
        config, choice = resolve(flags, args.config, resume, gwen.choose_model)
        print(choice, file=sys.stderr, flush=True)
        print(as_yaml(config), end="")
        return
    if args.wired_limit:
        os.environ[gpu.WIRED_LIMIT] = args.wired_limit
    if not args.let_sleep:
        power.keep_awake()
    if args.seeds is None:
        begun = begin(flags, args.config, resume=resume, run_dir=args.run_dir, allow_changes=args.allow_changes)
        written = complete(begun) / "report.html"
    else:
        if resume:
            raise ValueError("--seeds with --resume: to go on with seeds, repeat their command with its --run-dir")
        written = train_seeds(args, flags) / "report.html"
    if args.open and world.is_first() and written.is_file():
        page.show(written)


def complete(begun: Begun) -> Path:
    """Trains a run to its end, unless it is there; its directory."""
    if world.first(lambda: begun.is_finished):
        if world.is_first():
            said = f"{begun.state.step} of {begun.config.optimizer.steps} steps are done" if begun.state else ""
            print(f"{begun.path} is finished: {said}", flush=True)
        return Path(begun.path)
    trainer = Trainer(begun)
    try:
        trainer.fit()
    except KeyboardInterrupt:  # which the first machine has told
        if not world.is_first():
            raise
        sys.exit(130)
    if world.is_first():
        trainer.run.journal.print_summary()
    return trainer.dir


def train_seeds(args: argparse.Namespace, flags: dict[str, Any]) -> Path:
    """
    Trains seed after seed, each in its `seed-N` of one directory, which is returned with a page of all of them. Where
    the directory holds some of them, it goes on.
    """
    config, _ = resolve(flags, args.config, None, gwen.choose_model)
    first = config.sampling.seed
    numbers = args.seeds if isinstance(args.seeds, list) else range(first, first + args.seeds)
    home = Path(world.first(lambda: args.run_dir or str(run_files.choose_run_dir(config.data.task, None))))
    if (home / "config.yaml").is_file():
        raise ValueError(f"--run-dir {home} is one run; give --seeds another directory")
    common = {name: value for name, value in config.flat().items() if name != "seed"}
    for held in world.first(lambda: sorted(map(str, home.glob("seed-*")))):
        is_a_run_of(held, common)  # or it says what differs
    for number, seed in enumerate(numbers, 1):
        path = str(home / f"seed-{seed}")
        if world.is_first():
            print(f"seed {seed}, {number} of {len(numbers)}", flush=True)
        if world.first(functools.partial(is_a_run_of, path, config.but(seed=seed).flat())):
            begun = begin({name: value for name, value in flags.items() if may_change(name)}, resume=path)
        else:
            begun = begin(flags | {"seed": seed}, args.config, run_dir=path)
        try:
            complete(begun)
        except SystemExit:
            print(
                f"the seeds that are left: the same command, with --run-dir {shlex.quote(str(home))}", file=sys.stderr
            )
            raise
    if world.is_first():
        print(*seeds.lines(seeds.load([home])), f"page: {page.write(home)}", sep="\n")
    return home


def is_a_run_of(path: str, settings: dict[str, Any]) -> bool:
    """Whether a directory holds a run with these settings, sizes aside. ValueError where it holds one with others."""
    if not (Path(path) / "config.yaml").is_file():
        return False
    held = run_files.settings_of(path)
    for name, value in settings.items():
        if value not in (None, "auto") and held.get(name) != value and not may_change(name):
            raise ValueError(f"{path} has {flag_of(name)} {held.get(name)}, not {value}; give another --run-dir")
    return True


if __name__ == "__main__":
    with ended():
        main()

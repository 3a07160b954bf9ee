"""
GRPO: sample groups of completions, reward them, make the better ones of each group likelier. `uv run train.py`

    rollout    G completions of each of B prompts, with the log-probability of every token
    judge      each completion is scored by a frozen judge and by verifiers; the weighted sum is its reward
    reference  only with a KL term: log-probabilities under the model without its adapters
    update     advantage = reward less the group's mean, over its deviation; one step of AdamW on the clipped loss

`train` below is the whole algorithm. A run writes its settings, metrics, completions, evaluations and checkpoints
to its directory, and goes on from there with `--resume DIR`.

Axes: B prompts a step, G completions a prompt, N = B * G rows, T completion positions, M rows of a micro-batch.
"""

import contextlib
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm import tqdm

import checkpoint
import gpu
import gwen
import page
import procedural
import run_files
import sampler
import tasks
import trackers
import update
from config import Config, as_yaml, fail, given, parse, resolve
from console import CONSOLE_COLUMNS, warn
from examples import Example
from groups import Draw, Rewards, choose_groups, gather, has_signal, weigh
from journal import PhaseClock, Step, evaluation_is_due
from micro_batch import micro_batches
from rewards import call_reward
from run import Run


def train(config: Config, run: Run) -> None:
    """Runs the steps from `run.step` to `config.steps`; everything that lasts is in `run`."""
    learner, clock = run.learner, PhaseClock(run.journal.live.begin)
    if evaluate_if_due(run):
        run.save()
    run.journal.update_page(run.step)
    while run.step < config.steps:
        clock.end_step()  # evaluation and saving belong to no step
        mx.reset_peak_memory()
        draws, chosen, advantages = draw_groups(config, run, clock)

        with clock.phase("update") as done:
            rows, rollout = gather(config, draws, chosen)
            batches = micro_batches(rows, rollout, config.train_token_budget, config.train_share_prefix)
            done(batches)

        ref_logprobs = None
        if config.beta:
            with clock.phase("ref") as done:
                ref_logprobs = update.reference_logprobs(learner, batches, rollout)
                done(ref_logprobs)

        with clock.phase("update") as done:
            lr = update.learning_rate(config, run.step)
            result = update.update(learner, batches, rollout, mx.array(advantages.reshape(-1)), ref_logprobs, lr)
            done(learner.trainable, learner.optimizer.state)

        run.step, run.num_draws = run.step + 1, run.num_draws + len(draws)
        run.prompts.note(draws)
        # ---- everything below is reporting
        seconds, peak = clock.end_step(), mx.get_peak_memory()
        run.journal.write_step(
            Step(run.step, seconds, draws, rollout, chosen, advantages, result, peak, run.prompts.figures())
        )
        run.journal.write_scores(run.step, run.judge)
        run.end_step()
        is_best = evaluate_if_due(run)
        if is_best or run.step % config.save_every == 0 or run.step == config.steps:
            run.save()
        run.journal.update_page(run.step)


def evaluate_if_due(run: Run) -> bool:
    """
    Evaluates before the first step, every `eval_every` steps and after the last, unless it is on record.

    Whether it did, and the held-out figure is the best so far: such a step is saved, whatever `save_every` says.
    """
    if not evaluation_is_due(run.config, run.step, run.dir):
        return False
    run.journal.live.begin("evaluating")
    run.evaluate()
    return run.journal.best_step() == run.step


def draw_groups(config: Config, run: Run, clock: PhaseClock) -> tuple[list[Draw], list[int], np.ndarray]:
    """
    Batches of prompts with their rewarded completions, the groups of them that are trained, and their advantages.

    One batch; with --dynamic-sampling as many as give B groups a signal, up to a cap.
    """
    most_draws = config.dynamic_sampling_cap if config.dynamic_sampling else 1
    draws: list[Draw] = []
    while True:
        number = run.num_draws + len(draws)
        examples, prompts = run.prompts.draw(number)
        with clock.phase("rollout") as done:
            try:
                rollout = sampler.rollout(
                    run.model,
                    prompts,
                    run.sampling,
                    group_size=config.groups,
                    key=(config.seed << 32) + number + 1,
                    batch_size=run.batch_size,
                    share_prefix=config.sharing,
                )
            except sampler.NotFinite as error:
                said = tasks.prompt_text(examples[error.prompt]["prompt"])
                raise ValueError(f"{error}. The prompt: {said!r:.200}") from error
            done(rollout.completion_ids)
        draws.append(Draw(examples, prompts, rollout, reward_completions(run, examples, rollout, clock)))
        chosen, advantages = choose_groups(config, draws)
        if len(draws) == most_draws or has_signal(advantages).all():
            return draws, chosen, advantages


def reward_completions(run: Run, examples: list[Example], rollout: sampler.Rollout, clock: PhaseClock) -> Rewards:
    """The weighted sum of the task's verifiers and the judge, each called once."""
    config, task = run.config, run.task
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.groups)]
    columns: dict[str, Any] = {
        name: [example.get(name) for example in repeated] for name in examples[0] if name != "prompt"
    }
    columns |= sampler.columns(rollout)
    prompts = [example["prompt"] for example in repeated]
    components: dict[str, np.ndarray] = {}
    with clock.phase("reward") as done:
        for name, reward in tqdm(task.rewards.items(), desc="reward", leave=False, disable=None):
            components[name] = np.array(call_reward(name, reward, prompts, completions, columns))
        done()
    judgement = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = run.judge.score([tasks.prompt_text(prompt) for prompt in prompts], completions)
            components["rubric"] = judgement.rewards
            done()
    weights = [task.reward_weights[name] for name in components]
    return weigh(config, weights, components, judgement, completions)


# ---- the command


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        flags = given(args)
        if args.list_tasks:
            for lines in procedural.listing():
                print(lines, flush=True)
            return
        if args.resume and args.run_dir:
            raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
        config, choice = resolve(flags, args.config, args.resume, gwen.choose_model)
        trackers.check(config.report_to)
        print(choice, file=sys.stderr if args.print_config else sys.stdout, flush=True)
        if args.print_config:
            print(as_yaml(config), end="")
            return
        state = checkpoint.load(args.resume) if args.resume else None
        if state:
            checkpoint.publish(args.resume, state)  # the process may have been killed before it did
        if state and state.step >= config.steps and not evaluation_is_due(config, state.step, Path(args.resume)):
            print(f"{args.resume} is finished: {state.step} of {config.steps} steps are done")
            return
        run_dir = Path(args.resume) if args.resume else run_files.choose_run_dir(config, args.run_dir)
        run = Run(config, run_dir)
        if state:
            run.restore(state)
            if "rollout_batch_size" in flags:  # more, too, than memory had left
                run.batch_size.rows = config.rollout_batch_size
            del state  # it would hold the old masters as long as the run lasts
        # only now that everything is loaded: a mistake leaves no directory behind
        if args.resume:
            run_files.record_changes(config, run_dir, run.step)
            run_files.write(config, run_dir)
        else:
            run_dir = run.dir = run_files.make_run_dir(config, run_dir, args.run_dir)
        run.open()
        print(
            f"run: {run_dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters", flush=True
        )
        print(run.memory, flush=True)
        print(CONSOLE_COLUMNS, flush=True)
        with run.journal, _stoppable(run):
            train(config, run)
        run.journal.print_summary()
        print(f"adapter: {run_dir / 'adapter'}")
        if (best := run.journal.best_step()) is not None:
            print(f"best: {run_dir / 'adapter-best'}, {f'after {best} steps' if best else 'before training'}")
        if (written := run_dir / "report.html").is_file():
            print(f"page: {written}")
            if args.open:
                page.show(written)
    except (ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:  # while something is loaded; `_stoppable` answers those of the steps
        print("\nstopped before the first step", file=sys.stderr)
        sys.exit(130)


@contextlib.contextmanager
def _stoppable(run: Run) -> Any:
    """
    Ctrl-C, a reward that fails or memory that runs out saves the run as it was after its last whole step and says how
    to go on.

    No copy of that state is kept, which would take as much memory as the state. While a step makes its changes, Ctrl-C
    waits for its end; a second one does not, and leaves the newest checkpoint.
    """

    def on_ctrl_c(*_: Any) -> None:
        if run.is_whole or run.stopping:
            raise KeyboardInterrupt
        run.stopping = True
        warn("\nthe step is being finished; Ctrl-C again gives it up")

    before = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield
    except (KeyboardInterrupt, ValueError, RuntimeError, MemoryError) as error:
        what = "" if isinstance(error, KeyboardInterrupt) else f"{str(error) or type(error).__name__}; "
        if gpu.is_watchdog(error):
            what = (
                "macOS stopped the GPU because its work held up the display; let the display sleep while it trains "
                "(pmset displaysleepnow), or let less be done at once; "
            )
        if run.is_whole:
            run.save()
            said = f"{what}saved after step {run.step}, " if what else f"stopped after step {run.step}; "
            said += _go_on(run, error)
        else:
            said = f"{what}step {run.step + 1} is lost; {_newest(run, error)}"
        if isinstance(error, ValueError) or gpu.is_out_of_memory(error) or gpu.is_watchdog(error):
            raise ValueError(said) from error
        warn(f"\n{said}")
        if what:  # a mistake of ours or of MLX's, to be seen whole
            raise
        sys.exit(130)
    except OSError as error:  # the disk is full, or gone
        raise OSError(f"{error}; {_newest(run, error, 'make room and ')}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _go_on(run: Run, error: BaseException) -> str:
    """
    The command that goes on, or begins again where nothing was saved.

    Where memory ran out in the update, it takes less: rollouts and judges see to it themselves.
    """
    less = ""
    too_much = gpu.is_out_of_memory(error) or gpu.is_watchdog(error)
    if too_much and not isinstance(error, ValueError):  # those are of the user's rewards
        budget, longest = run.config.train_token_budget // 2, max(map(len, run.prompt_ids)) + run.config.max_tokens
        less = f" --train-token-budget {budget}" if budget >= longest else " --checkpoint-layers on"
    if checkpoint.saved(run.dir):
        return f"go on with: uv run train.py --resume {shlex.quote(str(run.dir))}{less}"
    return f"begin again with: uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))}{less}"


def _newest(run: Run, error: BaseException, first: str = "") -> str:
    """What a run that stopped inside a step has left, and how to go on from there, or to begin again."""
    if saved := checkpoint.saved(run.dir):
        return f"{saved[-1].name} is whole, {first}{_go_on(run, error)}"
    return f"nothing was saved in {run.dir}, {first}{_go_on(run, error)}"


if __name__ == "__main__":
    main()

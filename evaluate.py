"""
The command that evaluates a model on held-out problems.

`uv run evaluate.py --run runs/NAME [--step N]` reproduces the figures of a run digit for digit,
because runs use the same function (evaluation/evaluate.py). `--model M [--adapter DIR] --task T`
evaluates any model. `--url` evaluates a model that runs on a server. This file does not evaluate on
training problems.
"""

import functools
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)

import gwen
import judge
import tasks
from config import JUDGE, SETTINGS, TOOLS, Config, Sizes
from disk import eval_record, model_choice, run_files
from evaluation.evaluate import (
    AnswerFunction,
    EvalParams,
    answer_both,
    evaluate_replies,
    evaluate_task,
)
from evaluation.measures import REFERENCE_TOKENS
from evaluation.policy import load_policy, load_run_config
from flags import (
    Parser,
    add_flags,
    check_least,
    flag_of,
    names_path,
    refuse_unwritable_file,
    report_mistakes,
)
from machine import alive, memory
from machine.output import guard_output
from prompts.chats import render_conversations
from prompts.examples import prompt_key, spread_evenly
from settings.checks import check_settings
from settings.sources import given_settings, load_recipe, load_task_defaults, resolve_settings
from step.loss import StepLoss
from text.printable import escape_invisible
from tools.tool_workers import end_tools
from tools.toolbox import make_toolbox

if TYPE_CHECKING:
    from evaluation.served_policy import ServedPolicy

# settings that `--run` takes from the run unless flags override them
OVERRIDABLE = (
    *("model", "task", "task_config", "columns", "rubric", "eval_rubric"),
    *("verifier", "reward", "reward_weights"),
    *("max_tokens", "stop", "end_tokens", "rollout_batch_size", "thinking", *TOOLS, *JUDGE),
)
URL_REFUSES = ("adapter", "step", "seed", "rollout_batch_size", "end_tokens")


def make_parser() -> Parser:
    parser = Parser("evaluate.py", "Evaluate a model on held-out problems.")
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--url",
        help="get the answers from the OpenAI-compatible server at this address; "
        "it must serve the model that --run or --model names",
    )
    parser.add_argument(
        "--url-model",
        default="default_model",
        metavar="NAME",
        help="the model's name on the server (mlx_lm: default)",
    )
    parser.add_argument(
        "--data", help="held-out problems from a file or hub dataset, instead of the task's"
    )
    parser.add_argument("--limit", type=int, help="evaluate at most N problems, evenly spread")
    parser.add_argument("--samples", type=int, default=1, help="number of completions per problem")
    parser.add_argument(
        "--temp",
        type=float,
        default=1.0,
        help="temperature of the samples (default: 1, as in a run's evaluations)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the samples (default: 0, as in a run's evaluations)"
    )
    add_flags(parser, [SETTINGS[name] for name in OVERRIDABLE])
    parser.add_argument("--out", type=Path, help="write a JSON line for each problem to this file")
    return parser


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with report_mistakes():
        check_least(args, limit=1, samples=1, temp=0, seed=0)
        if args.out:
            refuse_unwritable_file("--out", args.out)
        adapter = run_files.adapter_from_flags(args)
        start = run_files.adapter_path(args.run, 0) if args.run else None
        config, description = choose_settings(args)

        has_replies = config.data.task == "own" and not config.data.path
        if has_replies and args.run and not args.data:
            record = evaluate_sft_run(args, parser, adapter, start)
            line = eval_record.evaluation_line(record)
            print(escape_invisible(f"{description}\n{line}"), file=sys.stderr)
            print(json.dumps(record), flush=True)
        else:
            evaluate_and_print(args, config, description, adapter, start)


# ---- settings and problems


def choose_settings(args: Namespace) -> tuple[Config, str]:
    """The settings of the evaluation, and a line that names the run or model."""
    flags = given_settings(args, OVERRIDABLE)
    if args.run:
        adapter_text = "newest adapter" if args.step is None else f"step {args.step}"
        config = load_run_config(args.run, flags, args.data)
        return config, f"run: {args.run}, {adapter_text}"

    default_model = load_task_defaults(args.task or "", "").get("model")
    model, reason = model_choice.choose_model(args.model, args.adapter, default_model)
    if args.data:
        flags = {"task": "own"} | flags
    config, _ = resolve_settings(flags, None, None, lambda _: (model, reason))
    return config, f"model: {model}, {reason}"


def load_held_out(args: Namespace, config: Config) -> tuple[Config, tasks.Task]:
    """The settings with the evaluation's data, and the task with its held-out problems."""
    if args.data:
        config = config.with_settings(data="", columns=args.columns or "")
    run_held_out = tasks.read_held_out(args.run) if args.run else []
    task = tasks.make_task(config, args.data, run_held_out)
    if args.run and args.data:
        warn_of_trained_prompts(args, task)
    return config, task


def warn_of_trained_prompts(args: Namespace, task: tasks.Task) -> None:
    """Prints a warning if the run was trained on prompts of --data."""
    try:
        run_config = check_settings(load_recipe(run_files.config_file(args.run)))
        train, _ = tasks.load_train_and_held_out(run_config, Path(args.run))
    except ValueError as error:  # the run's data or rewards are gone
        warning = (
            f"WARNING: whether {args.run} was trained on prompts of --data {args.data} is unknown: "
            f"{error}"
        )
        print(escape_invisible(warning), file=sys.stderr)
        return

    trained = {prompt_key(example) for example in train}
    num_trained = sum(prompt_key(example) in trained for example in task.held_out)
    if num_trained:
        warning = (
            f"WARNING: {args.run} was trained on {num_trained} of the {len(task.held_out)} prompts "
            f"of --data {args.data}."
        )
        print(escape_invisible(warning), file=sys.stderr)


# ---- the policy


class Policy(NamedTuple):
    """The model, here or on a server, that answers the problems."""

    answer: AnswerFunction
    tokenizer: Any
    model_config: Any
    base: gwen.Model | None  # a model from which the one before training can be restored
    server: "ServedPolicy | None" = None


def make_policy(
    args: Namespace, config: Config, task: tasks.Task, adapter: str | None, start: str | None
) -> Policy:
    """Loads the policy, or connects to its server."""
    if args.url:
        served = connect_served_policy(args, config, task)
        return Policy(
            served.answer_problems, served.tokenizer, served.facts, base=None, server=served
        )
    model, tokenizer, contains_base = load_policy(
        config.model.name, adapter, start, config.sampling.end_tokens
    )
    answer = functools.partial(answer_both, model, tokenizer)
    return Policy(answer, tokenizer, model.config, base=model if contains_base else None)


def connect_served_policy(args: Namespace, config: Config, task: tasks.Task) -> "ServedPolicy":
    """
    The policy at --url.

    Raises ValueError for a flag that only applies to a model on this machine, and if no flag names
    the model whose tokenizer the server uses.
    """
    from evaluation.served_policy import ServedPolicy

    for name in URL_REFUSES:
        value = getattr(args, name)
        if value is not None:
            raise ValueError(
                f"{flag_of(name)} {value} is for a model on this machine, and --url asks a server; "
                f"leave {flag_of(name)} out"
            )
    if not args.run and not args.model:
        raise ValueError(
            "--url does not tell the tokenizer: name the server's model with --model, or --run"
        )
    if task.tools or task.environments:
        raise ValueError(
            "--url asks for single answers, and this task has tools; leave --url out to use them"
        )
    variables = {} if args.thinking is None else {"enable_thinking": args.thinking}
    folder = Path(args.run or "runs")
    return ServedPolicy(
        args.url, args.url_model, config.model.name, config.sampling.max_tokens, folder, variables
    )


# ---- the evaluation


def evaluate_and_print(
    args: Namespace, config: Config, description: str, adapter: str | None, start: str | None
) -> None:
    """Evaluates the policy on held-out problems and prints the figures."""
    config, task = load_held_out(args, config)
    policy = make_policy(args, config, task, adapter, start)
    if args.url:
        description += f"; as {args.url_model} at {args.url}"

    is_scored_by_judge = task.rubric is not None and task.verifier is None
    base = policy.base
    if base is None and config.judges_itself and (is_scored_by_judge or task.witness is not None):
        base, _ = gwen.load(config.model.name)
    grader, witness = judge.make_graders(
        config, task.rubric if is_scored_by_judge else None, task.witness, base, policy.tokenizer
    )
    any_judge = grader or witness  # both share the stored scores
    if args.run and any_judge:
        scores = run_files.read_log(Path(args.run) / "judge_scores.jsonl")
        any_judge.load_scores(list(scores))

    notes = "\n".join([f"{description}; task: {task.name}", *task.notes])
    print_note(notes)
    params = make_params(args, config, task, policy)
    is_trained = adapter or args.run
    reference = base if is_trained and not args.url else None
    record, answers = evaluate_task(
        policy.answer, task, params, grader=grader, witness=witness, reference=reference
    )

    print_note(eval_record.evaluation_line(record))
    cut_off = eval_record.cut_off_message(record["eval/truncated_frac"], config.to_flags())
    if cut_off:
        print(f"WARNING: {cut_off}.", file=sys.stderr, flush=True)
    try:
        if args.out:
            lines = [json.dumps(answer, default=str) + "\n" for answer in answers]
            with names_path(f"--out {args.out}"):
                args.out.write_text("".join(lines), encoding="utf-8")
    finally:  # the disk may be too full for the file
        print(json.dumps(record), flush=True)
    if policy.server:
        policy.server.log.path.unlink()


def make_params(args: Namespace, config: Config, task: tasks.Task, policy: Policy) -> EvalParams:
    """The parameters of the answers: those of the run, except where flags override them."""
    toolbox = make_toolbox(
        config, task.tools, task.environments, policy.tokenizer, policy.model_config
    )
    batch_size = None  # as many rows as fit into memory
    if args.run or args.rollout_batch_size not in (None, "auto"):
        rows = config.sampling.rollout_batch_size
        if rows:
            batch_size = memory.BatchSize(rows)
    params = EvalParams.from_config(
        config,
        samples=args.samples,
        temperature=args.temp,
        seed=args.seed or 0,
        batch_size=batch_size,
        toolbox=toolbox,
    )
    if args.limit:
        params = params._replace(limit=args.limit)
    return params


def print_note(text: str) -> None:
    """Prints lines for people to stderr, because stdout is for the record."""
    wrapped = alive.wrap_for_terminal(escape_invisible(text), sys.stderr)
    print(wrapped, file=sys.stderr, flush=True)


def evaluate_sft_run(
    args: Namespace, parser: Parser, adapter: str | None, start: str | None
) -> dict[str, Any]:
    """The record of a run of --loss-type sft on its held-out replies, as the run makes it."""
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in ("run", "step", "limit"):
            raise ValueError(
                f"{flag_of(name)} {value} changes nothing in the loss of {args.run}'s replies; "
                "leave it out, or add --data FILE with problems to answer"
            )
    config = check_settings(load_recipe(run_files.config_file(args.run)))
    _, held_out = tasks.load_train_and_held_out(config, Path(args.run))
    model, tokenizer, _ = load_policy(config.model.name, adapter, start, config.sampling.end_tokens)
    conversations = render_conversations(
        spread_evenly(held_out, args.limit or config.evaluation.limit),
        "held-out",
        tokenizer,
        model.config,
        config.sampling.thinking,
    )
    token_budget = config.optimizer.train_token_budget or REFERENCE_TOKENS
    loss = StepLoss(config, Sizes(1, token_budget, 0))
    return evaluate_replies(model, loss, conversations, token_budget)


if __name__ == "__main__":
    with end_tools():
        main()

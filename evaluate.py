"""
The command that evaluates a model on held-out problems.

`uv run evaluate.py --run runs/NAME [--step N]` reproduces a run's evaluation exactly, because
training calls the same function (evaluation/score_task.py). `--model M [--adapter DIR] --task T`
evaluates any model, and `--url` evaluates a model that runs on a server. The training problems of a
task are never used.
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
from config import (
    JUDGE,
    SETTINGS,
    TOOLS,
    Config,
    MemoryDependentSizes,
    evaluations_sample_answers,
)
from disk import eval_record, model_choice, run_files
from evaluation.measures import REFERENCE_TOKENS
from evaluation.policy import load_policy, load_run_config_and_set_template_date
from evaluation.score_task import (
    AnswerFunction,
    EvalParams,
    answer_sampled_and_greedy,
    evaluate_loss_on_replies,
    evaluate_task,
    join_loss_and_answers,
)
from flags import (
    Parser,
    add_flags,
    add_path_to_os_errors,
    check_minimums,
    exit_on_mistakes,
    flag_of,
    refuse_unwritable_file,
)
from machine import memory
from machine.output import guard_output
from prompts.chats import encode_conversations
from prompts.examples import hash_prompt_without_system, pick_evenly_spaced
from settings.checks import check_settings
from settings.sources import load_recipe, load_task_defaults, resolve_settings, settings_from_flags
from step.loss import StepLoss
from tasks.replies import load_conversations_and_task
from text import wrapping
from text.printable import escape_invisible
from tools.tool_workers import end_tool_threads_on_exit
from tools.toolbox import make_toolbox

if TYPE_CHECKING:
    from evaluation.served_policy import ServedPolicy

# settings that `--run` takes from the run, unless a flag gives another value
OVERRIDABLE = (
    *("model", "task", "task_config", "columns", "rubric", "eval_rubric"),
    *("verifier", "reward", "reward_weights"),
    *("max_tokens", "stop", "end_tokens", "rollout_batch_size", "thinking", *TOOLS, *JUDGE),
)
# flags that apply only to a model on this machine, so they cannot be given with --url
URL_REFUSES = ("adapter", "step", "seed", "rollout_batch_size", "end_tokens")


def make_parser() -> Parser:
    parser = Parser("evaluate.py", "Evaluate a model on held-out problems.")
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--url",
        help="the address of an OpenAI-compatible server that generates the answers; the server "
        "must run the model that --run or --model names",
    )
    parser.add_argument(
        "--url-model",
        default="default_model",
        metavar="NAME",
        help="the name under which the server knows the model (default: default_model, which "
        "mlx_lm's server accepts as the name of the model it was started with)",
    )
    parser.add_argument(
        "--data",
        help="a file or hub dataset whose problems replace the task's held-out problems",
    )
    parser.add_argument(
        "--limit",
        type=int,
        help="evaluate at most this many problems, evenly spread over the held-out problems "
        "(default: as in the evaluations during the run; without --run, as in the recipe of the "
        "task; if neither sets a limit, all held-out problems)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help="the number of completions sampled per problem (default: 1)",
    )
    parser.add_argument(
        "--temp",
        type=float,
        default=1.0,
        help="the temperature of the samples (default: 1, as in the evaluations during a run)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="the seed of the samples (default: 0, as in the evaluations during a run)",
    )
    add_flags(parser, [SETTINGS[name] for name in OVERRIDABLE])
    parser.add_argument(
        "--json",
        action="store_true",
        help="print all figures as one line of JSON even in a terminal; without this flag, the "
        "line is printed only to a pipe or a file",
    )
    parser.add_argument("--out", type=Path, help="write one line of JSON per problem to this file")
    return parser


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with exit_on_mistakes():
        check_minimums(args, limit=1, samples=1, temp=0, seed=0)
        if args.out:
            refuse_unwritable_file("--out", args.out)
        adapter = run_files.fill_defaults_and_find_adapter(args)
        start = run_files.adapter_path_at_step(args.run, 0) if args.run else None
        config, description = choose_config_and_description(args)

        # only a run with --loss-type sft has held-out replies; `config` does not name its data file
        has_replies = config.data.task == "own" and not config.data.path
        if has_replies and args.run and not args.data:
            record = evaluate_sft_run(args, parser, adapter, start)
            line = eval_record.format_evaluation_line(record)
            print_to_stderr(f"{description}\n{line}")
            print_json_or_hint(record, as_json=args.json)
        else:
            evaluate_print_and_save(args, config, description, adapter, start)


# ---- settings and problems


def choose_config_and_description(args: Namespace) -> tuple[Config, str]:
    """Returns the settings of the evaluation and a line that names the run or the model."""
    flags = settings_from_flags(args, OVERRIDABLE)
    if args.run:
        config = load_run_config_and_set_template_date(args.run, flags, args.data)
        return config, f"run: {args.run}, {run_files.describe_adapter_at_step(args.step)}"

    default_model = load_task_defaults(args.task or "", "").get("model")
    model, reason = model_choice.choose_model_and_reason(args.model, args.adapter, default_model)
    if args.data:
        flags = {"task": "own"} | flags
    config, _ = resolve_settings(flags, None, None, lambda _: (model, reason))
    return config, f"model: {model}, {reason}"


def load_held_out_task(args: Namespace, config: Config) -> tuple[Config, tasks.Task]:
    """
    Returns the settings of the evaluation and the task with its held-out problems.

    If `--data` is given, the returned settings no longer name the run's own data.
    """
    if args.data:
        config = config.copy_with_settings(data="", columns=args.columns or "")
    run_held_out = tasks.read_held_out_keys(args.run) if args.run else []
    task = tasks.make_task(config, args.data, run_held_out)
    if args.run and args.data:
        warn_if_trained_on_prompts(args, task)
    return config, task


def warn_if_trained_on_prompts(args: Namespace, task: tasks.Task) -> None:
    """Prints a warning if the run was trained on prompts in --data, or if this is unknown."""
    try:
        run_config = check_settings(load_recipe(run_files.find_config_file(args.run)))
        train, _ = tasks.load_train_and_held_out(run_config, Path(args.run))
    except ValueError as error:  # the files with the run's data or rewards are missing
        warning = (
            f"WARNING: cannot tell whether {args.run} was trained on prompts in --data "
            f"{args.data}, because of this error: {error}"
        )
        print_to_stderr(warning)
        return

    trained = {hash_prompt_without_system(example) for example in train}
    num_trained = sum(hash_prompt_without_system(example) in trained for example in task.held_out)
    if num_trained:
        warning = (
            f"WARNING: {args.run} was trained on {num_trained} of the {len(task.held_out)} prompts "
            f"in --data {args.data}."
        )
        print_to_stderr(warning)


# ---- the policy


class Policy(NamedTuple):
    """The model that answers the problems, either on this machine or on a server."""

    answer: AnswerFunction
    tokenizer: Any
    model_config: Any
    # a model that `lora.use_initial_weights` turns into the model before training, if available
    base: gwen.Model | None
    server: "ServedPolicy | None" = None


def load_or_connect_policy(
    args: Namespace, config: Config, task: tasks.Task, adapter: str | None, start: str | None
) -> Policy:
    """Loads the model that answers, or connects to the server that runs it."""
    if args.url:
        served = connect_served_policy(args, config, task)
        return Policy(
            served.answer_problems, served.tokenizer, served.facts, base=None, server=served
        )
    model, tokenizer, contains_base = load_policy(
        config.model.name, adapter, start, config.sampling.end_tokens
    )
    answer = functools.partial(answer_sampled_and_greedy, model, tokenizer)
    return Policy(answer, tokenizer, model.config, base=model if contains_base else None)


def connect_served_policy(args: Namespace, config: Config, task: tasks.Task) -> "ServedPolicy":
    """
    Makes a client for the model on the server at --url.

    Raises ValueError if a given flag applies only to a model on this machine, if no flag names the
    model whose tokenizer the server uses, or if the task has tools.
    """
    from evaluation.served_policy import ServedPolicy

    for name in URL_REFUSES:
        value = getattr(args, name)
        if value is not None:
            raise ValueError(
                f"{flag_of(name)} {value} applies only to a model on this machine, but --url names "
                f"a server; leave out {flag_of(name)}"
            )
    if not args.run and not args.model:
        raise ValueError(
            "--url does not say which tokenizer the server uses; add --model with the server's "
            "model, or --run with the run that trained this model"
        )
    if task.tools or task.has_environments_or_harness:
        raise ValueError(
            "--url does not support tools, but this task has tools; leave out --url to evaluate "
            "the task on this machine"
        )
    variables = {} if args.thinking is None else {"enable_thinking": args.thinking}
    folder = Path(args.run or "runs")
    return ServedPolicy(
        args.url, args.url_model, config.model.name, config.sampling.max_tokens, folder, variables
    )


# ---- the evaluation


def evaluate_print_and_save(
    args: Namespace, config: Config, description: str, adapter: str | None, start: str | None
) -> None:
    """Evaluates a model on held-out problems, prints the record and writes the --out file."""
    config, task = load_held_out_task(args, config)
    policy = load_or_connect_policy(args, config, task, adapter, start)
    if args.url:
        description += f"; called {args.url_model} on the server at {args.url}"

    is_scored_by_judge = task.rubric is not None and task.verifier is None
    base = policy.base
    if (
        base is None
        and config.judges_with_base_model
        and (is_scored_by_judge or task.witness is not None)
    ):
        base, _ = gwen.load(config.model.name)
    grader, witness = judge.make_judge_and_witness(
        config, task.rubric if is_scored_by_judge else None, task.witness, base, policy.tokenizer
    )
    any_judge = grader or witness  # the grader and the witness share the stored scores
    if args.run and any_judge:
        scores = run_files.read_log(Path(args.run) / "judge_scores.jsonl")
        any_judge.replace_cached_scores(list(scores))

    notes = "\n".join([f"{description}; task: {task.name}", *task.notes])
    print_to_stderr(notes)
    params = make_eval_params(args, config, task, policy)
    is_trained = adapter or args.run
    reference = base if is_trained and not args.url else None
    record, answers = evaluate_task(
        policy.answer, task, params, grader=grader, witness=witness, reference=reference
    )

    print_to_stderr(eval_record.format_evaluation_line(record))
    cut_off = eval_record.cut_off_warning(record["eval/truncated_frac"], config.to_flags())
    if cut_off:
        print_to_stderr(f"WARNING: {cut_off}.")
    try:
        if args.out:
            write_answers(args.out, answers)
    finally:  # print the record even if the file could not be written
        print_json_or_hint(record, as_json=args.json)
    if policy.server:
        policy.server.log.path.unlink()


def make_eval_params(
    args: Namespace, config: Config, task: tasks.Task, policy: Policy
) -> EvalParams:
    """Combines the settings and the flags into the parameters for answering problems."""
    toolbox = make_toolbox(
        config, task.tools, task.environments, policy.tokenizer, policy.model_config
    )
    player = None
    if task.harness is not None:
        from step.player import HarnessPlayer

        player = HarnessPlayer(task.harness, config, policy.tokenizer, policy.model_config)
    batch_size = None  # decode as many sequences at once as fit into memory
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
        player=player,
    )
    if args.limit:
        params = params._replace(limit=args.limit)
    return params


def print_json_or_hint(record: dict[str, Any], *, as_json: bool) -> None:
    """
    Prints the record as JSON if `as_json` is set or stdout is not a terminal.

    Otherwise, prints only a hint that mentions --json.
    """
    if as_json or not sys.stdout.isatty():
        print(json.dumps(record), flush=True)
    else:
        print("all figures as JSON: add --json", flush=True)


def print_to_stderr(text: str) -> None:
    """Prints text for the user to stderr, because stdout is reserved for the JSON record."""
    wrapped = wrapping.wrap_for_terminal(escape_invisible(text), sys.stderr)
    print(wrapped, file=sys.stderr, flush=True)


def evaluate_sft_run(
    args: Namespace, parser: Parser, adapter: str | None, start: str | None
) -> dict[str, Any]:
    """
    Evaluates a run with --loss-type sft on its held-out replies, and returns the record.

    The record contains the loss, and equals the record that the run writes. If the run or a flag
    says how to score answers, the model also answers the held-out prompts.

    Raises ValueError if a flag is given that has no effect on this evaluation.
    """
    flags = settings_from_flags(args, OVERRIDABLE)
    settings = load_recipe(run_files.find_config_file(args.run)) | flags
    samples_answers = evaluations_sample_answers(settings)
    allowed = {"run", "step", "limit", "json"}
    if samples_answers:
        allowed |= {"samples", "temp", "seed", "out", *flags}
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in allowed:
            raise ValueError(
                f"{flag_of(name)} {value} has no effect on the loss of {args.run}, which is "
                f"computed from held-out replies; leave out {flag_of(name)}, or add --data FILE "
                "with problems to answer"
            )
    config = check_settings(settings)
    held_out_keys = tasks.read_held_out_keys(args.run)
    _, held_out, task, notes = load_conversations_and_task(config, held_out_keys)
    if samples_answers:
        print_to_stderr("\n".join(notes))
    model, tokenizer, contains_base = load_policy(
        config.model.name, adapter, start, config.sampling.end_tokens
    )
    conversations = encode_conversations(
        pick_evenly_spaced(held_out, args.limit or config.evaluation.limit),
        "held-out",
        tokenizer,
        model.config,
        config.sampling.thinking,
    )
    token_budget = config.optimizer.train_token_budget or REFERENCE_TOKENS
    loss = StepLoss(config, MemoryDependentSizes(1, token_budget, 0))
    record = evaluate_loss_on_replies(model, loss, conversations, token_budget)
    if task is None:
        return record

    answer = functools.partial(answer_sampled_and_greedy, model, tokenizer)
    reference = model if contains_base else None
    policy = Policy(answer, tokenizer, model.config, reference)
    params = make_eval_params(args, config, task, policy)
    answers_record, answers = evaluate_task(answer, task, params, reference=reference)
    if args.out:
        write_answers(args.out, answers)
    return join_loss_and_answers(record, answers_record)


def write_answers(path: Path, answers: list[dict[str, Any]]) -> None:
    """Writes one line of JSON per problem to the file that --out names."""
    lines = [json.dumps(answer, default=str) + "\n" for answer in answers]
    with add_path_to_os_errors(f"--out {path}"):
        path.write_text("".join(lines), encoding="utf-8")
    print_to_stderr(f"wrote the answers to {len(answers)} problems: {path}")


if __name__ == "__main__":
    with end_tool_threads_on_exit():
        main()

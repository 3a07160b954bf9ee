"""
The command that estimates what a run will need: `uv run preflight.py --model M`.

It takes the flags of train.py. It prints the memory and the time of a step, estimated from the
settings and the model's configuration, for completions that are as long as `--max-tokens` allows.
`--try` takes some steps instead, and says whether to start the run. `--audit` shows which answers
the reward functions reward. `--fits` shows which models this machine can train. This file is the
command; the estimates and the trial are in forecast/.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

import gwen
import tasks
from config import SETTINGS, Config
from disk import checkpoint, model_choice
from flags import Parser, check_least, escape_invisible, parse_setting, report_mistakes
from forecast.memory_estimate import (
    CHANGE,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    explain_misfit,
    memory_line,
    rubric_path,
)
from forecast.time_estimate import describe_fitting_models, time_line
from forecast.trial import audit_rewards, try_run
from machine import alive
from machine.output import guard_output
from rewards import audit
from settings.sources import given_settings, parse_flags, resolve_settings
from tools import toolbox


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "preflight.py",
        "Show what memory a run needs, or what its rewards pay for. "
        "It takes the flags of train.py, and these:",
    )
    parser.add_argument(
        "--try",
        action="store_true",
        dest="trial",
        help="take four steps first, and say whether a full run is worth starting",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, help="length of the longest prompts"
    )
    parser.add_argument(
        "--audit", action="store_true", help="only show which answers the reward functions reward"
    )
    parser.add_argument(
        "--fits", action="store_true", help="only show which models this machine can train"
    )
    args, train_flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    with report_mistakes():
        check_least(args, prompt_tokens=1)
        line = ""
        for line in make_report(args, train_flags):
            print(alive.wrap_for_terminal(line), flush=True)
        if line.startswith(CHANGE + TOO_LARGE):
            sys.exit(1)


def make_report(args: argparse.Namespace, train_flags: list[str]) -> Iterator[str]:
    """The lines that the command prints."""
    if args.fits:
        yield from describe_fitting_models()
        return

    config, choice = resolve_train_flags(train_flags)
    if config.objective.loss_type == "sft" and (args.trial or args.audit):
        flag = "--try" if args.trial else "--audit"
        raise ValueError(
            f"{flag} looks at sampled answers and rewards, and --loss-type sft has none; "
            f"leave {flag} out"
        )
    if args.audit:
        yield from show_audit(config)
    elif args.trial:
        yield choice
        for line in try_run(config):
            yield escape_invisible(line)
    else:
        estimates = list(show_estimates(config, args.prompt_tokens))
        yield f"{choice}; {args.prompt_tokens} prompt tokens"
        yield from estimates


def resolve_train_flags(train_flags: list[str]) -> tuple[Config, str]:
    """The settings that train.py would use with these flags, and its reason for the model."""
    args = parse_flags(train_flags)
    if args.resume is True:
        steps = parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        args.resume = checkpoint.newest_unfinished(steps)
    settings = given_settings(args)
    return resolve_settings(settings, args.config, args.resume, model_choice.choose_model)


def show_audit(config: Config) -> list[str]:
    """The lines of the tables that show which answers each reward function rewards."""
    lines: list[str] = []
    for _, reward_audit in audit_rewards(tasks.make_task(config), config.data.reward_gate):
        lines += audit.audit_table(reward_audit)
    if not lines:
        raise ValueError(
            f"--audit: --task {config.data.task} has no reward function, only a judge or an "
            "environment, which --audit does not ask"
        )
    return lines


def show_estimates(config: Config, prompt_tokens: int) -> Iterator[str]:
    """The memory and the time of a run whose longest prompts have `prompt_tokens` tokens."""
    model_choice.refuse_packed(config.model.name)
    model = model_choice.load_config(config.model.name)
    response_length = None
    if config.tools.tools or config.tools.env:  # tool results follow a prompt too
        context = toolbox.conversation_limit(config.tools, model.max_position_embeddings)
        response_length = max(context - prompt_tokens, 1)
    step_demand = RunDemand(
        model,
        gwen.default_dtype(),
        config,
        [prompt_tokens] * config.sampling.batch,
        rubric_path(config),
        response_length=response_length,
    )

    # evaluations use a witness, but steps do not
    run_demand = step_demand
    if step_demand.rubric is None and config.evaluation.rubric and config.evaluation.every:
        run_demand = step_demand._replace(rubric=Path(config.evaluation.rubric))
    sizes = choose_sizes(run_demand)
    yield memory_line(run_demand, sizes)
    yield time_line(step_demand, sizes)
    misfit = explain_misfit(run_demand, sizes)
    if misfit:
        yield CHANGE + misfit


if __name__ == "__main__":
    main()

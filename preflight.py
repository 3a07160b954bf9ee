"""
Estimates the memory and time of a run before the run starts: `uv run preflight.py --model M`.

The command accepts the flags of train.py. The estimates are computed from the settings and from the
configuration of the model, as if every completion were as long as `--max-tokens` allows.
`--try` trains for a few steps and reports whether the run is worth starting. `--audit` makes up
right answers, wrong answers and attempts to cheat, and shows which of them the reward functions
reward. `--fits` lists the models that this machine can train. The estimates and the trial are
computed in forecast/.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

import gwen
import tasks
from config import SETTINGS, Config, is_user_function
from disk import checkpoint, model_choice
from flags import Parser, check_minimums, escape_invisible, exit_on_mistakes, parse_setting
from forecast.memory_estimate import (
    CHANGE,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    explain_memory_misfit,
    find_rubric_path,
    format_memory_line,
)
from forecast.time_estimate import (
    format_phase_times_and_advice,
    format_step_cost_and_time_line,
    list_chip_lines,
    list_fitting_model_lines,
)
from forecast.trial import audit_reward_functions, try_first_steps
from machine.output import guard_output
from prompts.files import refuse_missing_file
from rewards import audit
from rewards.functions import load_function, only_place_that_has_functions
from settings.sources import parse_flags, resolve_settings, settings_from_flags
from step.effects import describe_loss_settings_without_effect
from step.objectives import load_and_try_custom_objective
from text import wrapping
from tools import toolbox


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "preflight.py",
        "Estimate the memory and time of a run, or check its rewards, before the run starts. "
        "All flags of train.py are accepted, and also these flags:",
    )
    parser.add_argument(
        "--try",
        action="store_true",
        dest="trial",
        help="train for four steps, and report whether the full run is worth starting",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=256,
        help="estimate for prompts of this many tokens; set the length of the longest prompts or, "
        "for --loss-type sft, of the longest conversations (default: 256)",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="only show which made-up answers (right, wrong, or attempts to cheat) the reward "
        "functions reward; needs no model",
    )
    parser.add_argument(
        "--fits", action="store_true", help="only list the models that this machine can train"
    )
    parser.add_argument(
        "--all-chips",
        action="store_true",
        help="also list the estimated time of a step on each Apple chip",
    )
    args, train_flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    with exit_on_mistakes():
        check_minimums(args, prompt_tokens=1)
        line = ""
        for line in yield_report_lines(args, train_flags):
            wrapping.print_wrapped(line)
        if line.startswith(CHANGE + TOO_LARGE):
            sys.exit(1)


def yield_report_lines(args: argparse.Namespace, train_flags: list[str]) -> Iterator[str]:
    """Yield the lines that this command prints."""
    if args.fits:
        yield from list_fitting_model_lines()
        return

    config, choice = resolve_config_and_model_line(train_flags)
    if config.objective.loss_type == "sft" and (args.trial or args.audit):
        flag = "--try" if args.trial else "--audit"
        raise ValueError(
            f"{flag} examines sampled answers and their rewards, but --loss-type sft does not "
            f"train on sampled answers; leave {flag} out"
        )
    if args.audit:
        yield from list_reward_audit_lines(config)
    elif args.trial:
        yield choice
        for line in try_first_steps(config):
            yield escape_invisible(line)
    else:
        refuse_missing_file(config.data.path)
        load_functions_of_user(config)
        estimates = list(yield_estimate_lines(config, args.prompt_tokens, all_chips=args.all_chips))
        yield f"{choice}; {args.prompt_tokens} prompt tokens"
        custom = load_and_try_custom_objective(config)
        yield from custom.notes
        yield from describe_loss_settings_without_effect(config, custom.loss)
        yield from estimates


def load_functions_of_user(config: Config) -> None:
    """
    Load the rewards, the verifier, the tools and the environments that the settings name.

    Functions that exist only in the program that started a run are not loaded.

    Raises ValueError, as `train.py` would, if one of them cannot be loaded.
    """
    if only_place_that_has_functions(config.to_flags()):
        return
    for spec in filter(is_user_function, config.data.reward):
        load_function("--reward", spec)
    if is_user_function(config.data.verifier):
        load_function("--verifier", config.data.verifier)
    tasks.load_tools_and_environments(config)


def resolve_config_and_model_line(train_flags: list[str]) -> tuple[Config, str]:
    """
    Return the settings that train.py would use for these flags, and a line about the choice of the
    model and task.
    """
    args = parse_flags(train_flags)
    if args.resume is True:
        steps = parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        args.resume = checkpoint.choose_and_print_run_to_resume(steps)
    settings = settings_from_flags(args)
    return resolve_settings(
        settings, args.config, args.resume, model_choice.choose_model_and_reason
    )


def list_reward_audit_lines(config: Config) -> list[str]:
    """
    Return the lines of one table per reward function, with the answers that the function rewards.

    Raises ValueError if the task has no reward function.
    """
    lines: list[str] = []
    for _, reward_audit in audit_reward_functions(tasks.make_task(config), config.data.reward_gate):
        lines += audit.audit_table_lines(reward_audit)
    if not lines:
        raise ValueError(
            f"--audit examines reward functions, but --task {config.data.task} has only a judge "
            "or an environment; leave --audit out"
        )
    return lines


def yield_estimate_lines(
    config: Config, prompt_tokens: int, *, all_chips: bool = False
) -> Iterator[str]:
    """
    Yield lines about the memory and time of a run, and advice if the memory is too small for it.

    prompt_tokens: the assumed number of tokens in every prompt, or, in supervised fine-tuning, in
    every conversation.
    all_chips: whether to list the time of a step on each Apple chip.
    """
    model_choice.refuse_quantized_model(config.model.name)
    model = model_choice.load_config(config.model.name)
    response_length = None
    tools = config.tools
    if tools.tools or tools.env or tools.env_server:  # a response may contain results of tools
        context = toolbox.max_conversation_tokens(config.tools, model.max_position_embeddings)
        response_length = max(context - prompt_tokens, 1)
    step_demand = RunDemand(
        model,
        gwen.dtype_from_env_or_device(),
        config,
        [prompt_tokens] * config.sampling.batch,
        find_rubric_path(config),
        response_length=response_length,
    )

    # Evaluations may use a judge (--eval-rubric) that training steps do not need.
    run_demand = step_demand
    if step_demand.rubric is None and config.evaluation.rubric and config.evaluation.every:
        run_demand = step_demand._replace(rubric=Path(config.evaluation.rubric))
    sizes = choose_sizes(run_demand)
    yield format_memory_line(run_demand, sizes)
    yield format_step_cost_and_time_line(step_demand, sizes)
    if all_chips:
        yield from list_chip_lines(step_demand)
    yield format_phase_times_and_advice(step_demand)
    misfit = explain_memory_misfit(run_demand, sizes)
    if misfit:
        yield CHANGE + misfit


if __name__ == "__main__":
    main()

"""
Advises what to do after a run, in sentences, with the commands that carry the advice out.

A piece of advice never ends in a full stop, because it may end in a command. This file does not
cover the evidence: figures (difference.py), answers (answer_changes.py) and warnings (health.py).
"""

import shlex
from typing import Any

from prompts.held_out import LEAST_CONVERSATIONS, advise_on_held_out
from reporting import health
from reporting.difference import BETTER, FEW, SAME, WORSE, Change
from reporting.health import Records
from reporting.history import History
from rewards import form, functions
from settings.sources import command_line

LEAST_KL = (
    1e-3  # nats a token, against the model before training; a model below it has hardly moved
)
MOST_SAMPLES = 8  # samples of each problem, in the evaluation that the advice proposes
REWARD_ALONE_ROSE = (
    "The reward rose but the accuracy did not. Read the answers, or weigh the rewards differently "
    "with --reward-weights"
)
NONE_RIGHT = (
    "No answer was right, before or after training, and more problems would not change that. Show "
    "the model right answers first with --loss-type sft (docs/warm-start.md). If right answers are "
    "counted as wrong, compare them with --verifier FILE.py:fn"
)
TOO_FAR = (
    "Try a quarter of --learning-rate, a larger --batch or another reward. Earlier states are in "
    "checkpoints/"
)


def suggest_next_step(
    run: History,
    change: Change | None,
    reward_moved: str,
    reward_fix: str,
    is_rising: bool,
) -> str:
    """
    Returns advice on what to do next.

    If most answers are cut off, the advice says so first, because that also explains why nothing
    got better. See `advise_on_change` for the arguments.
    """
    advice = advise_on_change(run, change, reward_moved, reward_fix, is_rising)
    cut_off = health.describe_cut_off(run.steps, run.evals, run.settings)
    if not cut_off:
        return advice
    if change is not None and change.outcome != BETTER and not reward_fix:
        return cut_off
    return f"{cut_off}. {advice}"


def advise_on_change(
    run: History,
    change: Change | None,
    reward_moved: str,
    reward_fix: str,
    is_rising: bool,
) -> str:
    """
    Returns advice that follows from the measured change.

    reward_moved: BETTER or WORSE if the rewards changed but the figure did not, otherwise "".
    reward_fix: the advice of `suggest_reward_fix` if the reward may be gamed, otherwise "".
    is_rising: whether the figure was still getting better in the second half of the run.
    """
    last = run.evals[-1]
    if change is None:
        if last["eval/num"] < 2:
            return advise_on_held_out(last["eval/num"], run.settings)
        return (
            "Look at the warnings. If a judge scores the answers, docs/judge.md explains what "
            "makes its scores unreadable"
        )

    if run.figure == "accuracy":
        accuracies = [run.evals[0]["eval/accuracy"], last["eval/accuracy"]]
        if not any(accuracies):
            return NONE_RIGHT
    if change.outcome == SAME and reward_moved:
        return REWARD_ALONE_ROSE if reward_moved == BETTER else TOO_FAR
    if change.outcome in (SAME, FEW):
        cause = explain_lack_of_change(run)
        if cause:
            return cause

    if change.outcome == FEW:
        return advise_on_few_problems(run, change, reward_moved, reward_fix)
    if change.outcome == WORSE:
        return TOO_FAR
    if change.outcome == SAME:
        return (
            "Try more --steps, problems that the model solves sometimes, or a reward that tells "
            "its answers apart"
        )
    if reward_fix:
        return reward_fix
    if is_rising:
        direction = "falling" if run.figure == "loss" else "rising"
        return (
            f"Train longer, because the {run.figure} was still {direction}: {resume_command(run)}"
        )
    return advise_on_use(run)


def explain_lack_of_change(run: History) -> str:
    """Returns a likely reason why a run changed nothing, and what to try; "" if none is visible."""
    for symptom in health.find_symptoms(run.steps, has_gained=False):
        if symptom.name in ("no signal", "nothing moves"):
            return symptom.text

    last = run.evals[-1]
    kl = last.get("eval/kl")
    if kl is None or kl >= LEAST_KL or last["step"] < health.STILL:
        return ""
    # the KL grows with the square of the learning rate
    factor = "three" if kl * 3**2 > LEAST_KL else "ten"
    return (
        f"The model has hardly moved (KL {kl:.1g} nats a token). Try {factor} times the "
        "--learning-rate"
    )


def advise_on_few_problems(run: History, change: Change, reward_moved: str, reward_fix: str) -> str:
    """Returns advice on how to settle a change that was measured on too few problems."""
    hold_out_more = advise_on_held_out(run.evals[-1]["eval/num"], run.settings)
    if run.figure == "loss":
        num = max(change.num_needed, LEAST_CONVERSATIONS)
        return f"About {num:,} conversations would settle it: {hold_out_more}"

    measure = comparison_command(run.settings, quoted_dir(run), num_samples=MOST_SAMPLES)
    advice = f"About {change.num_needed:,} problems would settle it: {hold_out_more}: {measure}"
    first = reward_fix
    if not first and reward_moved == BETTER:
        first = REWARD_ALONE_ROSE
    elif not first and reward_moved == WORSE:
        first = TOO_FAR
    if first:
        return f"{first}. {advice}"
    if change.mean > 0:
        advice += f"; or train longer for a larger change: {resume_command(run)}"
    return advice


def advise_on_use(run: History) -> str:
    """Returns the commands that use a trained model."""
    settings = run.settings
    directory = quoted_dir(run)
    chat = command_line(settings, "chat.py")
    advice = f"Chat with the model: {chat} --run {directory} --chat --temp 0"
    if run.figure == "loss" and settings.get("lora_rank"):
        model = shlex.quote(str(settings.get("model")))
        start = f"--model {model} --init-adapter {directory}"
        advice += f"; continue with GRPO: {command_line(settings)} {start} --data PROMPTS"
    fuse = command_line(settings, "export.py")
    merge = f"{fuse} --fuse --run {directory} --out my-model"
    return f"{advice}; merge the adapter into the model: {merge}"


def suggest_reward_fix(
    settings: dict[str, Any], verifier_is_default: bool, last_answers: Records
) -> str:
    """
    Returns advice on a reward that may be gamed.

    verifier_is_default: whether the run has a user's own reward but names no verifier.
    """
    options = []
    if not settings.get("beta"):
        options.append("--beta 0.05")
    # Suggest the gate only if every right answer would pass it. Of a conversation, the gate sees
    # only the last turn, which is short.
    gate_fits = all(
        form.keeps_own_answer(answer) and "messages" not in answer for answer in last_answers
    )
    if gate_fits and settings.get("reward_gate") != "form":
        options.append("--reward-gate form")

    advice = "Read the answers."
    if verifier_is_default:
        advice += " If right answers are counted as wrong, compare with --verifier FILE.py:fn."
    advice += " If they are not what you want, change the reward"
    if options:
        advice += f", or try {' or '.join(options)}"
    return advice


# ---- commands


def quoted_dir(run: History) -> str:
    return shlex.quote(str(run.dir))


def resume_command(run: History) -> str:
    """Returns the command that continues a run to twice its steps."""
    num_steps = 2 * run.evals[-1]["step"]
    return f"{command_line(run.settings)} --resume {quoted_dir(run)} --steps {num_steps}"


def comparison_command(
    settings: dict[str, Any], run_dir: str, num_samples: int | None = None
) -> str:
    """
    Returns the command that evaluates a run before and after training, and compares both.

    The command writes the evaluations into the run's directory. run_dir: quoted for a shell.
    """
    if functions.names_functions_of_this_program(settings):
        return (
            "move the functions of the run into a file of their own; evaluate.py can only load "
            "functions from files"
        )
    evaluate = f"{command_line(settings, 'evaluate.py')} --run {run_dir}"
    if num_samples is not None:
        evaluate += f" --samples {num_samples}"
    if settings.get("loss_type") == "sft":
        return f"{evaluate} --step 0 && {evaluate}"
    before = f"{run_dir}/before.jsonl"
    after = f"{run_dir}/after.jsonl"
    compare = f"{command_line({}, 'report.py')} --compare {before} {after}"
    return f"{evaluate} --out {before} --step 0 && {evaluate} --out {after} && {compare}"

"""
Suggests what to do after a run, and gives the commands to type.

Advice has no full stop at its end, because it may end in a command. This file does not cover the
evidence for the advice, which comes from difference.py, answer_changes.py and health.py.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from config import evaluations_sample_answers
from prompts.held_out import LEAST_CONVERSATIONS, advice_on_holding_out_more
from reporting import health
from reporting.difference import BETTER, FEW, SAME, WORSE, MeanChange
from reporting.health import Records
from reporting.history import Answers, History
from rewards import form, functions
from settings.sources import command_prefix_with_extras

# If the KL divergence from the model before training is smaller than this, in nats per token,
# training has hardly changed the model.
LEAST_KL = 1e-3
# If at least this fraction of the sampled answers equals the greedy answers, more samples of each
# problem would hardly make the figures more exact.
MOST_EQUAL = 0.8
MOST_SAMPLES = 8  # the number of samples per problem in the evaluation that the advice suggests
BOTH_ROSE = (
    "The reward rose significantly. The accuracy rose too, but too few problems are held out to be "
    "sure of that"
)
REWARD_ALONE_ROSE = (
    "The reward rose but the accuracy did not. Read the answers, or weight the rewards differently "
    "with --reward-weights"
)
ALL_RIGHT = "Every held-out answer is right, so only harder problems could show more progress"
NONE_RIGHT = (
    "No answer was right before or after training, and more held-out problems would not change "
    "that. First train the model on right answers with --loss-type sft (docs/warm-start.md). If "
    "right answers are counted as wrong, supply a verifier with --verifier FILE.py:fn"
)
NONE_RIGHT_AFTER_REPLIES = (
    "No answer was right before or after training. Read the answers. If they are still unlike the "
    "replies in the data, train longer (--steps) or try three times the current --learning-rate. "
    "If right answers are counted as wrong, supply a verifier with --verifier FILE.py:fn"
)
TOO_FAR = (
    "Try a quarter of the current --learning-rate, a larger --batch or a different reward. Earlier "
    "states of the model are in checkpoints/"
)
REPLIES_TOO_FAR = (
    "Try fewer --steps, a quarter of the current --learning-rate, or replies like the answers that "
    "the verifier accepts. Earlier states of the model are in checkpoints/"
)
GREEDY_WERE_BETTER = (
    "Greedy answers (--temp 0) were significantly better {when} than they are now. Read the newest "
    "greedy answers on the page: if they collect a part of the reward by a shortcut, change the "
    "reward. Otherwise, try a quarter of the current --learning-rate"
)


def is_supervised(settings: Mapping[str, Any]) -> bool:
    """Whether the run was supervised fine-tuning, which learns given replies without rewards."""
    return settings.get("loss_type") == "sft"


def suggest_next_step(
    run: History,
    change: MeanChange | None,
    lone_reward_change: str,
    reward_fix: str,
    is_still_improving: bool,
    better_greedy_step: int | None,
) -> str:
    """
    Returns advice on what to do after a run.

    If most answers are cut off, the advice says so first, because cut-off answers also explain why
    the model did not improve. `advise_on_change` explains the other arguments.

    better_greedy_step: the step after which greedy answers were significantly better than at the
    end of the run, or None.
    """
    greedy_got_worse = better_greedy_step is not None
    advice = advise_on_change(
        run,
        change,
        lone_reward_change,
        reward_fix,
        is_still_improving,
        greedy_got_worse=greedy_got_worse,
    )
    if greedy_got_worse and (change is None or change.outcome != WORSE):
        when = f"after step {better_greedy_step}" if better_greedy_step else "before training"
        advice = f"{GREEDY_WERE_BETTER.format(when=when)}. {advice}"
    cut_off = health.advise_on_cut_off_answers(run.steps, run.evals, run.settings)
    if not cut_off:
        return advice
    if change is not None and change.outcome != BETTER and not reward_fix:
        return cut_off
    return f"{cut_off}. {advice}"


def advise_on_change(
    run: History,
    change: MeanChange | None,
    lone_reward_change: str,
    reward_fix: str,
    is_still_improving: bool,
    *,
    greedy_got_worse: bool = False,
) -> str:
    """
    Returns advice based on the measured change of the held-out figure.

    lone_reward_change: BETTER or WORSE if the rewards changed but the held-out figure did not,
    otherwise "".
    reward_fix: the advice of `advise_on_gamed_reward` if the model may game the reward, else "".
    is_still_improving: whether the held-out figure improved in the second half of the run.
    greedy_got_worse: whether greedy answers got significantly worse; if so, the advice is not to
    train longer.
    """
    last = run.evals[-1]
    if change is None:
        if last["eval/num"] < 2:
            return advice_on_holding_out_more(last["eval/num"], run.settings)
        return (
            "Look at the warnings. If a judge scored the answers, docs/judge.md explains what can "
            "make a judge's scores unreadable"
        )

    if run.figure_name == "accuracy":
        accuracies = [run.evals[0]["eval/accuracy"], last["eval/accuracy"]]
        if not any(accuracies):
            return NONE_RIGHT_AFTER_REPLIES if is_supervised(run.settings) else NONE_RIGHT
    if change.outcome == SAME and lone_reward_change:
        return REWARD_ALONE_ROSE if lone_reward_change == BETTER else TOO_FAR
    if change.outcome in (SAME, FEW):
        cause = explain_lack_of_change(run)
        if cause:
            return cause

    if change.outcome == FEW:
        return advise_on_few_problems(run, change, lone_reward_change, reward_fix, greedy_got_worse)
    if change.outcome == WORSE:
        return REPLIES_TOO_FAR if is_supervised(run.settings) else TOO_FAR
    exploration_loss = describe_entropy_collapse_or_little_signal(run)
    if change.outcome == SAME and exploration_loss:
        return exploration_loss
    if change.outcome == SAME:
        more_steps = "" if greedy_got_worse else "more --steps, "
        if is_supervised(run.settings):
            replies = "replies that show how to reach the right answer"
            return f"Try {more_steps}or {replies}" if more_steps else f"Try {replies}"
        return (
            f"Try {more_steps}problems that the model solves only sometimes, or a reward that "
            "distinguishes better answers from worse ones"
        )
    if reward_fix:
        return reward_fix
    if is_every_answer_right(run):
        return f"{ALL_RIGHT}. {advise_on_using_the_model(run)}"
    if is_still_improving and not greedy_got_worse:
        direction = "falling" if run.figure_name == "loss" else "rising"
        command = command_to_double_steps(run)
        return f"Train longer, because the {run.figure_name} was still {direction}: {command}"
    # two evaluations, or scores of answers, cannot show whether the model is still learning the
    # replies
    needs_training_loss = len(run.evals) == 2 or run.figure_name != "loss"
    if (
        is_supervised(run.settings)
        and not greedy_got_worse
        and needs_training_loss
        and health.is_training_loss_still_falling(run.steps)
    ):
        command = command_to_double_steps(run)
        return f"Train longer, because the training loss was still falling: {command}"
    return advise_on_using_the_model(run, shows_model_before=greedy_got_worse)


def is_every_answer_right(run: History) -> bool:
    """Whether every held-out answer of the last evaluation is right."""
    return run.figure_name == "accuracy" and run.evals[-1]["eval/accuracy"] == 1


def explain_lack_of_change(run: History) -> str:
    """
    Returns a likely reason why training changed nothing, and suggests what to try.

    Returns an empty string if no such reason is found.
    """
    for symptom in health.find_symptoms(run.steps, has_gained=False):
        if symptom.name in ("no signal", "nothing moves"):
            return symptom.text

    last = run.evals[-1]
    kl = last.get("eval/kl")
    if kl is None or kl >= LEAST_KL or last["step"] < health.STILL:
        return ""
    # the KL divergence grows with the square of the learning rate
    factor = "three" if kl * 3**2 > LEAST_KL else "ten"
    return (
        f"Training has hardly changed the model (KL {kl:.1g} nats per token). Try {factor} times "
        "the current --learning-rate"
    )


def describe_entropy_collapse_or_little_signal(run: History) -> str:
    """Returns why the model hardly tries different answers any more, with advice, or ""."""
    if is_supervised(run.settings):
        return ""
    symptoms = health.find_symptoms(run.steps, has_gained=False)
    texts = {symptom.name: symptom.text for symptom in symptoms}
    return texts.get("entropy") or texts.get("little signal", "")


def sampled_answers_equal_greedy(answers: Answers) -> bool:
    """Whether nearly all sampled answers equal the greedy answer to the same problem."""
    are_equal = [
        record["completions"][0].strip() == record["greedy"].strip()
        for record in answers.values()
        if record.get("greedy") is not None and record.get("completions")
    ]
    return bool(are_equal) and sum(are_equal) >= MOST_EQUAL * len(are_equal)


def advise_on_few_problems(
    run: History,
    change: MeanChange,
    lone_reward_change: str,
    reward_fix: str,
    greedy_got_worse: bool,
) -> str:
    """Returns advice for a change that was measured on too few problems to be conclusive."""
    last = run.evals[-1]
    more_samples_help = not sampled_answers_equal_greedy(run.answers_by_step.get(last["step"], {}))
    hold_out_more = advice_on_holding_out_more(
        last["eval/num"], run.settings, more_samples_help=more_samples_help
    )
    if run.figure_name == "loss":
        num = max(change.num_problems_needed, LEAST_CONVERSATIONS)
        return f"About {num:,} held-out conversations would be conclusive, so {hold_out_more}"

    measure = command_to_evaluate_before_and_after(
        run.settings, shell_quoted_dir(run), num_samples=MOST_SAMPLES
    )
    num_problems = f"{change.num_problems_needed:,} held-out problems"
    advice = f"About {num_problems} would be conclusive, so {hold_out_more}"
    if more_samples_help:
        advice += f": {measure}"
    else:
        advice += (
            "; sampling more answers to each problem would show little, because nearly all of them "
            "would be identical"
        )
    first = reward_fix or describe_entropy_collapse_or_little_signal(run)
    accuracy_rose = change.mean > 0
    if not first and lone_reward_change == BETTER:
        first = BOTH_ROSE if accuracy_rose else REWARD_ALONE_ROSE
    elif not first and lone_reward_change == WORSE and not accuracy_rose:
        first = TOO_FAR
    if first:
        return f"{first}. {advice}"
    if not greedy_got_worse and change.mean > 0 and not is_every_answer_right(run):
        advice += f"; or train longer to enlarge the change: {command_to_double_steps(run)}"
    return advice


def advise_on_using_the_model(run: History, shows_model_before: bool = False) -> str:
    """
    Returns commands for chatting with the trained model and for merging its adapter.

    shows_model_before: whether the model from before training answers in the chat too.
    """
    settings = run.settings
    directory = shell_quoted_dir(run)
    chat = command_prefix_with_extras(settings, "chat.py")
    compare = " --compare" if shows_model_before else ""
    advice = f"Chat with the model: {chat} --run {directory} --chat{compare} --temp 0"
    has_learned_replies = is_supervised(settings) or run.figure_name == "loss"
    if has_learned_replies and settings.get("lora_rank"):
        advice += f"; train the model further with GRPO: {command_to_continue_with_grpo(run)}"
    fuse = command_prefix_with_extras(settings, "export.py --fuse")
    merge = f"{fuse} --run {directory} --out my-model"
    return f"{advice}; merge the adapter into the model: {merge}"


def advise_on_gamed_reward(
    settings: dict[str, Any], verifier_is_default: bool, last_answers: Records
) -> str:
    """
    Returns advice for a run whose reward the model may have gamed.

    verifier_is_default: whether the user supplied a reward but no verifier.
    """
    if is_supervised(settings):  # training used no reward that could be gamed
        return (
            "Read the answers. If right answers are counted as wrong, supply a verifier with "
            "--verifier FILE.py:fn"
        )
    options = []
    if not settings.get("beta"):
        options.append("--beta 0.05")
    # Suggest `--reward-gate form` only if every right answer would pass the gate. In a conversation
    # the gate sees only the last turn, which is short.
    gate_fits = all(
        form.right_answer_passes_form_gate(answer) and "messages" not in answer
        for answer in last_answers
    )
    if gate_fits and settings.get("reward_gate") != "form":
        options.append("--reward-gate form")

    advice = "Read the answers."
    if verifier_is_default:
        advice += (
            " If right answers are counted as wrong, supply a verifier with --verifier FILE.py:fn."
        )
    advice += " If the answers are not what you want, change the reward"
    if options:
        advice += f", or try {' or '.join(options)}"
    return advice


# ---- commands


def command_to_continue_with_grpo(run: History) -> str:
    """
    Returns the command that trains a model further with GRPO after a warm start.

    If the evaluations of the warm start sampled answers, GRPO can use the same prompts, rewards and
    verifier. Otherwise, the command has placeholders for the prompts and the reward.
    """
    settings = run.settings
    flags = ["--model", str(settings.get("model")), "--init-adapter", str(run.dir)]
    rewards = settings.get("reward") or []
    if settings.get("data") and evaluations_sample_answers(settings):
        flags += ["--data", settings["data"]]
        # The warm start read its replies from this column. GRPO does not use replies.
        columns = [
            column
            for column in settings.get("columns", "").split(",")
            if column and not column.startswith("completion=")
        ]
        if columns:
            flags += ["--columns", ",".join(columns)]
        if settings.get("verifier"):
            flags += ["--verifier", settings["verifier"]]
    else:
        flags += ["--data", "PROMPTS"]
        rewards = rewards or ["FILE.py:function"]
    if rewards:
        flags += ["--reward", *rewards]
    return f"{command_prefix_with_extras(settings)} {shlex.join(flags)}"


def shell_quoted_dir(run: History) -> str:
    return shlex.quote(str(run.dir))


def command_to_double_steps(run: History) -> str:
    """
    Returns the command that resumes a run and doubles its number of steps.

    If train.py cannot load the run's functions or objects, returns an instruction that names the
    Python calls to make instead.
    """
    num_steps = 2 * run.evals[-1]["step"]
    place = functions.only_place_that_has_functions(run.settings)
    parts = run.parts_set_in_python
    if place or parts:
        call = f"in {place or 'Python'}, call Trainer.resume({str(run.dir)!r}, steps={num_steps})"
        return f"{call} and {functions.advice_to_set_parts(parts)}" if parts else call
    program = command_prefix_with_extras(run.settings)
    return f"{program} --resume {shell_quoted_dir(run)} --steps {num_steps}"


def command_to_evaluate_before_and_after(
    settings: dict[str, Any], quoted_run_dir: str, num_samples: int | None = None
) -> str:
    """
    Returns the command that evaluates a run's model as it was before and after training.

    If evaluations sample answers, the command writes both evaluations into the run's directory and
    compares them. If `evaluate.py` cannot load the run's functions, returns an instruction instead
    of a command.

    quoted_run_dir: the run's directory, quoted for the shell.
    """
    if functions.only_place_that_has_functions(
        functions.settings_without_update_functions(settings)
    ):
        return (
            "move the rewards, tools and environments of the run into a separate file, because "
            "evaluate.py can load them only from files"
        )
    evaluate = f"{command_prefix_with_extras(settings, 'evaluate.py')} --run {quoted_run_dir}"
    if num_samples is not None:
        evaluate += f" --samples {num_samples}"
    if not evaluations_sample_answers(settings):
        return f"{evaluate} --step 0 && {evaluate}"
    before = f"{quoted_run_dir}/before.jsonl"
    after = f"{quoted_run_dir}/after.jsonl"
    compare = f"{command_prefix_with_extras({}, 'report.py')} --compare {before} {after}"
    return f"{evaluate} --out {before} --step 0 && {evaluate} --out {after} && {compare}"

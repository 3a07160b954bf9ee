"""
The verdict on a run: is it better on what was held out, what did its answers take on meanwhile, and what to do now.

A run's records in, words out. Both evaluations answer the same problems, so their difference is taken problem by
problem. Left out: warnings while a run goes (health.py), where a verdict is shown (console, page, list).

Axes: P held-out problems.
"""

import math
import random
import re
import shlex
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disk.run_files import describe_start, student_t
from flags import escape_invisible, make_printable
from problems import form, functions
from problems.data import LEAST_CONVERSATIONS, POWER, advise_on_held_out, warn_of_few_held_out
from problems.examples import prompt_text
from reporting import health
from reporting.health import Records
from reporting.history import Answers, History
from settings.sources import command_line

BETTER, WORSE, SAME, FEW = "better", "worse", "no change", "too few problems to tell"
MARGIN = (
    0.1  # of the range of values: where the interval is within it, nothing worth having has changed
)
LEAST_RISE, LEAST_Z = (
    0.2,
    2.4,
)  # of the share of answers with a word; McNemar's statistic, of hundreds of words: 6 of 6
LEAST_LONGER, LEAST_COPIED = 1.5, 0.1  # times as many words; share of words or 4-grams
LEAST_PAID = 0.05  # share of the last answers that are wrong and get the most that a reward gives
LEAST_WITNESSED = 0.25  # share of a rise in the judge's score that the witness must confirm
LEAST_KL = 1e-3  # nats a token from the model before training; with less it has hardly moved
MOST_KINDS, LEAST_EACH, MOST_NAMED = (
    20,
    3,
    2,
)  # right answers of a classification, problems of each, those named
NUM_READ, NUM_WORDS, OPENING = 10, 5, 3
APART = "what pays more made no more answers right: read them, or weigh the rewards anew with --reward-weights"
NONE_RIGHT = (
    "no answer was right, before or after, and more problems tell no more: show it right ones first, by --loss-type "
    "sft (docs/warm-start.md), or, if right ones are called wrong, compare by --verifier FILE.py:fn"
)
TOO_FAR = "try a quarter of --learning-rate, a larger --batch or another reward; earlier states are in checkpoints/"

Values = Mapping[Any, float]  # by problem


class Change(NamedTuple):
    """A mean difference with its 95% interval, and the problems that it is made of."""

    mean: float
    low: float
    high: float
    num: int
    span: float  # from the lowest value to the highest

    def __str__(self) -> str:
        return f"{self.mean:+.3f}, 95% interval {self.low:+.3f} to {self.high:+.3f}"

    @property
    def word(self) -> str:
        if self.low > 0 or self.high < 0:
            return BETTER if self.low > 0 else WORSE
        return SAME if max(-self.low, self.high) <= MARGIN * self.span else FEW

    @property
    def needed(self) -> int:
        """
        The problems that tell a difference of this size, or of MARGIN, four times of five: POWER s^2 / d^2.

        Source: Chow, Shao and Wang, Sample Size Calculations in Clinical Research, 3.1.
        """
        variance = self.num * ((self.high - self.low) / 2 / student_t(self.num - 1)) ** 2
        return math.ceil(POWER * variance / max(abs(self.mean), MARGIN * self.span) ** 2)


class Verdict(NamedTuple):
    word: str
    headline: str  # the word, and where the rewards went if the figure did not
    has_gained: bool  # whether more answers are right, which no reward can bend
    text: str  # the figures
    signs: list[str]  # what its answers took on meanwhile, the most telling first
    advice: str
    read: list[
        tuple[str, str, str]
    ]  # ten problems, drawn: prompt, what the last answer comes to, `mark_of`
    is_doubtful: bool  # whether what it is paid for may have been gamed
    warning: health.Finding | None  # where something is bad


# ---- the difference


def paired_difference(before: Values, after: Values, *, samples: int = 1) -> Change | None:
    """
    The mean of after - before over the problems that both have; None below two. samples: whose mean a value is.

    Student's t on P + 2 differences: one more problem rises and one falls by the whole range of the values, of means by
    that / sqrt(samples). So the interval keeps a width where all differences are equal; for zeros and ones it is Bonett
    and Price's.
    Source: Bonett and Price, J. Educ. Behav. Stat. 37 (2012) 479; see Fagerland et al., Stat. Med. 33 (2014) 2850.
    """
    pairs = [(before[problem], after[problem]) for problem in before.keys() & after.keys()]
    if len(pairs) < 2:
        return None
    span = max(map(max, pairs)) - min(map(min, pairs)) or 1.0
    differences = [second - first for first, second in pairs]
    padded = [*differences, span / samples**0.5, -span / samples**0.5]
    middle, reach = (
        statistics.fmean(padded),
        student_t(len(pairs) + 1) * statistics.stdev(padded) / len(padded) ** 0.5,
    )
    most = 1.0 if min(map(min, pairs)) >= 0 and max(map(max, pairs)) <= 1 else math.inf
    low, high = max(middle - reach, -most), min(middle + reach, most)
    return Change(statistics.fmean(differences), low, high, len(pairs), span)


def mean_by_problem(answers: Mapping[Any, dict[str, Any]]) -> Values:
    """The mean of each problem's readable samples."""
    known = {
        problem: [value for value in one["values"] if value is not None]
        for problem, one in answers.items()
    }
    return {problem: statistics.fmean(values) for problem, values in known.items() if values}


def num_readable_samples(answers: Mapping[Any, dict[str, Any]]) -> int:
    """The fewest readable samples of a problem that has any."""
    known = (sum(value is not None for value in one["values"]) for one in answers.values())
    return min(filter(None, known), default=1)


def first_answer_rewards(answers: Answers, name: str | None = None) -> Values:
    """What each problem's first answer earns, by one reward or by all; what is unreadable is left out."""
    pay = {
        key: one["rewards"].get(name) if name else one.get("reward", one["values"])
        for key, one in answers.items()
    }
    return {key: values[0] for key, values in pay.items() if values and values[0] is not None}


def greedy_values(answers: Answers) -> Values:
    """What each problem's greedy answer is worth; what is unreadable is left out."""
    return {
        key: value for key, one in answers.items() if (value := one.get("greedy_value")) is not None
    }


def change_between(run: History, first: dict[str, Any], last: dict[str, Any]) -> Change | None:
    """
    From one evaluation to a later one, above 0 where it got better; None where too little is known.

    Of a loss, the same conversations' (nats, tokens): the interval is that of a ratio of two sums, as the loss's own.
    """
    if any(
        one.get(f"eval/{run.figure}") is None for one in (first, last)
    ):  # none is readable, or the data changed
        return None
    if run.figure != "loss":
        return paired_difference(
            *(mean_by_problem(run.answers.get(one["step"], {})) for one in (first, last))
        )  # of one sample each
    (old, tokens), (new, same) = (
        np.reshape(one.get("eval/losses") or [], (-1, 2)).T for one in (first, last)
    )
    num, total = len(tokens), tokens.sum()
    if num < 2 or not np.array_equal(tokens, same):
        return None
    mean = (old - new).sum() / total
    reach = (
        student_t(num - 1)
        * math.sqrt(((old - new - mean * tokens) ** 2).sum() * num / (num - 1))
        / total
    )
    return Change(mean, mean - reach, mean + reach, num, 1.0)


def best_evaluation(run: History) -> dict[str, Any] | None:
    """The first evaluation that no later one beats by more than noise; of a loss the lowest. None without a figure."""
    if run.figure == "loss":
        return min(run.measured, key=lambda one: one["eval/loss"], default=None)
    chosen = None
    for one in run.measured:
        if chosen is None or is_better(change_between(run, chosen, one)):
            chosen = one
    return chosen


def is_better(found: Change | None) -> bool:
    return found is not None and found.word == BETTER


# ---- what the answers took on


def final_text(answer: dict[str, Any]) -> str:
    """What an answer comes to: of a conversation with tools what is said last, unless that is nothing but a call."""
    messages = answer.get("messages", [[]])[0]
    said: list[str] = [message["content"] for message in messages if message["role"] == "assistant"]
    return (said and said[-1]) or answer["completions"][0]


def changed_forms(before: Records, after: Records) -> list[str]:
    """What rose in the answers to the same problems: copies of the prompt, repetitions, lengths."""
    if not before:
        return []
    said, signs = (
        [[(final_text(one), prompt_text(one["prompt"])) for one in its] for its in (before, after)],
        [],
    )
    for name, share in {
        "copied from the prompt": form.copied_fraction,
        "repeated": lambda text, _: form.repetition(text),
    }.items():
        was, now = (statistics.fmean(share(*one) for one in its) for its in said)
        signs += [f"{name}: {was:.0%} -> {now:.0%} of an answer"] * (now - was >= LEAST_COPIED)
    was, now = (statistics.fmean(len(text.split()) for text, _ in its) for its in said)
    times = (now + 1) / (was + 1)
    if not 1 / LEAST_LONGER < times < LEAST_LONGER:
        signs.append(
            f"{'longer' if times > 1 else 'shorter'}: {was:.1f} -> {now:.1f} words an answer"
        )
    return signs


def words_that_rose(
    before: Records, after: Records, text: Callable[..., str] = final_text, kind: str = "answers"
) -> list[str]:
    """The words and openings whose share of the answers rose most, as '"captain" in 24% -> 85% of answers'."""
    was, now = ([words_and_openings(text(one)) for one in its] for its in (before, after))
    first, last = (Counter(name for its in end for name in its) for end in (was, now))
    new = Counter(name for old, its in zip(was, now, strict=True) for name in its - old)
    num, rises = len(after), last - first

    def is_told(
        name: str,
    ) -> bool:  # by all answers that differ in it: those that have it anew, and those that lost it
        return rises[name] >= max(LEAST_RISE * num, LEAST_Z * (2 * new[name] - rises[name]) ** 0.5)

    # the order of a set is another one in each process
    told = sorted(filter(is_told, rises), key=lambda name: (-rises[name], name))[:NUM_WORDS]
    return [
        f"{escape_invisible(name)} in {first[name] / num:.0%} -> {last[name] / num:.0%} of {kind}"
        for name in told
    ]


# Neither full stop nor comma, nor within a word; letters too, where no space parts words.
MARK = re.compile(r"(?<!\w)[^\w\s.,]|[^\w\s.,](?!\w)|[\u0e00-\u0eff\u3040-\u9fff]")


def words_and_openings(text: str) -> set[str]:
    """The words and marks of an answer, as an emoji is, and its first words."""
    words = form.words_of(text)
    opening = {f'the opening "{" ".join(words[:OPENING])}"'} if len(words) > OPENING else set()
    return {
        {'"': "a quotation mark"}.get(word, f'"{word}"') for word in [*words, *MARK.findall(text)]
    } | opening


def answers_never_given(after: Records) -> list[str]:
    """Of a classification what is right for some problems and is in no answer, the commonest first, in one sign."""
    kinds = Counter(str(one["answer"]) for one in after if one.get("answer") is not None)
    if len(kinds) > min(MOST_KINDS, kinds.total() / LEAST_EACH):
        return []
    texts = [text for one in after for text in [*one["completions"], one.get("greedy", "")]]
    given = "\n".join(
        [*texts, *(str(one.get("answer")) for one in after if 1.0 in one["values"])]
    ).lower()
    absent = {
        f'"{escape_invisible(shorten_answer(kind))}"': num
        for kind, num in kinds.most_common()
        if num > 1 and not re.search(rf"(?<![a-z0-9]){re.escape(kind.lower())}(?![a-z0-9])", given)
    }
    named = ", ".join([*absent][:MOST_NAMED]) + f" and {len(absent) - MOST_NAMED} more" * (
        len(absent) > MOST_NAMED
    )
    return (
        [f"{named} in none, though right for {sum(absent.values())} of {kinds.total()} problems"]
        if absent
        else []
    )


def shorten_answer(text: str) -> str:
    return textwrap.shorten(text, 70, placeholder=" \u2026")


def reward_of(answer: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """What an answer is paid; empty where its evaluation does not know: right is all that pays, or a judge pays too."""
    value, pay = answer["values"][0], answer.get("reward", answer["values"])[0]
    if value is None or pay is None:
        return "unreadable"
    return f"paid {pay:.3g}" if "eval/score" in evaluation else ""


def describe_answer(answer: dict[str, Any], evaluation: dict[str, Any], is_verified: bool) -> str:
    """Whether an answer is right, what it is paid and what is right, as "wrong, paid 0.5; answer: nine"."""
    value, right = answer["values"][0], answer.get("answer")
    is_right = ("right" if value >= 1 else "wrong") if is_verified and value is not None else ""
    said = ", ".join(filter(None, [is_right, reward_of(answer, evaluation)]))
    return "; ".join(
        filter(None, [said, "" if right is None else f"answer: {shorten_answer(str(right))}"])
    )


def rewarded_wrong_answers(answers: dict[int, Answers]) -> tuple[set[int], set[int]]:
    """
    The problems of the first and of the last evaluation whose wrong answer is paid the most that any answer ever was.

    answers: by step, of a verifier. Both are empty unless the last are alarmingly many, and more than the first.
    """
    pay = {step: first_answer_rewards(its) for step, its in answers.items()}
    every = {value for its in pay.values() for value in its.values()}
    most = max(every, default=0.0)
    first, last = (
        {
            key
            for key, one in answers[step].items()
            if one["values"][0] == 0 and pay[step].get(key) == most
        }
        for step in (min(answers), max(answers))
    )
    is_alarming = len(every) > 1 and len(last) >= max(
        LEAST_PAID * len(answers[max(answers)]), len(first) + 1
    )
    return (first, last) if is_alarming else (set(), set())


# ---- the verdict


def draw_problems(problems: list[int], settings: dict[str, Any]) -> list[int]:
    """The problems to read, by the run's seed: nobody has chosen them."""
    return sorted(
        random.Random(settings.get("seed")).sample(problems, min(NUM_READ, len(problems)))
    )


def judge_change(run: History) -> Verdict | None:
    """The verdict on the change from the first evaluation to the last; None below two."""
    if len(run.evals) < 2:
        return None
    figure, settings, is_verified = run.figure, run.settings, run.figure == "accuracy"
    first, middle, last = run.evals[0], run.evals[len(run.evals) // 2], run.evals[-1]
    ends = [run.answers.get(one["step"], {}) for one in (first, last)]
    both = sorted(ends[0].keys() & ends[1].keys())
    before, after = ([its[problem] for problem in both] for its in ends)
    found, forms, words = (
        change_between(run, first, last),
        changed_forms(before, after),
        words_that_rose(before, after),
    )
    names = dict.fromkeys(name for one in ends[1].values() for name in one["rewards"])
    rewards = {
        name: its
        for name in names
        if (its := paired_difference(*(first_answer_rewards(end, name) for end in ends)))
    }
    named = {
        name for spec in settings.get("reward") or () for name in spec.rpartition(":")[2].split(",")
    }
    is_exact = "exact" not in named and is_better(
        rewards.get("exact")
    )  # our metric, and no reward of that name
    is_bendable = (
        figure == "score" and not is_exact
    )  # what a verifier counts no form of an answer can bend
    if figure == "score":
        alarms = rose_without_witness(first, last) + forms * is_bendable
    else:
        cheated, cheating = (
            rewarded_wrong_answers(run.answers) if is_verified and both else ((), ())
        )
        alarms = (
            [f"wrong, yet paid most: {len(cheated)} -> {len(cheating)} answers"] if cheating else []
        )
    if not (
        words or settings.get("tools") or settings.get("env")
    ):  # with these a greedy answer has its calls too
        words = words_that_rose(before, after, lambda one: one.get("greedy", ""), "greedy answers")
    words = forms * (not is_bendable) + words
    begun = describe_start(settings) if first["step"] == 0 else ""
    start = f"{first['step']}{begun}{',' * bool(begun)}"
    kind, moved, word = (
        "conversations" if figure == "loss" else "problems",
        "",
        found.word if found else FEW,
    )
    headline = word
    if found is None:
        text = f"{figure}: fewer than two {kind} have a figure both after step {first['step']} and {last['step']}"
    else:
        was, now = (one[f"eval/{figure}"] for one in (first, last))
        part = f"{found.num} of {last['eval/num']}" if found.num < last["eval/num"] else found.num
        text = f"{figure} {was:.3f} -> {now:.3f} from step {start} to {last['step']}, on {part} held-out "
        text = "; ".join(
            [
                f"{text}{kind}; gain {found}",
                *(warn_of_few_held_out(found.num, settings) * (figure == "loss")),
            ]
        )
        greedy = [greedy_values(end) for end in ends]
        if moved_greedily := paired_difference(*greedy):
            was, now = (statistics.fmean(values.values()) for values in greedy)
            text += f"; greedily {was:.3f} -> {now:.3f}, {moved_greedily.word}"
        total = (
            paired_difference(*map(first_answer_rewards, ends))
            if is_verified and "eval/score" in last
            else None
        )
        if total and word in (SAME, FEW) and total.word in (BETTER, WORSE):
            moved, headline = (
                total.word,
                f"{word}, though the score {'rose' if total.word == BETTER else 'fell'}",
            )
            text += f", though the score changed by {total}"
        elif (
            is_verified and found.mean <= 0 and any(map(is_better, rewards.values()))
        ):  # one reward rose alone
            moved = BETTER
    if any(not found or its.mean != found.mean for its in rewards.values()):
        text += f"; rewards: {', '.join(f'{escape_invisible(name)} {its.mean:+.3f}' for name, its in rewards.items())}"
    is_own = is_verified and settings.get("task") == "own" and settings.get("reward")
    is_unasked = bool(is_own) and not settings.get("verifier")
    mended = suggest_mend(settings, is_unasked, after)
    chosen, warning = best_evaluation(run) or last, None
    if is_better(change_between(run, last, chosen)):
        fell = f"{figure} fell from {chosen[f'eval/{figure}']:.3f} after step {chosen['step']}, that of adapter-best"
        text, warning = f"{text}; {fell}", health.Finding("worse", f"{fell}: {TOO_FAR}")
    elif alarms:
        suspects = (
            "the reward may pay for what is not meant"
            + ", or the verifier be too strict" * is_unasked
        )
        warning = health.Finding("gamed", f"{suspects}; {'; '.join(alarms)}: {mended}")
    is_doubtful = bool(alarms) or (is_bendable and bool(words))
    is_rising = chosen is last and is_better(change_between(run, middle, last))
    read = [ends[1][problem] for problem in draw_problems(both, settings)]
    return Verdict(
        word,
        headline,
        is_verified and is_better(found),
        text,
        alarms + (answers_never_given(after) if is_verified else []) + words,
        suggest_next_step(run, found, moved, mended if is_doubtful else "", is_rising),
        [
            (prompt_text(one["prompt"]), final_text(one), describe_answer(one, last, is_verified))
            for one in read
        ],
        is_doubtful,
        warning,
    )


def suggest_mend(settings: dict[str, Any], is_unasked: bool, after: Records) -> str:
    """What to do where a reward may be gamed. is_unasked: nobody named the verifier. after: the last answers."""
    is_payable = all(
        form.keeps_own_answer(one) and "messages" not in one for one in after
    )  # by the gate; a last turn is short
    gate = is_payable and settings.get("reward_gate") != "form"
    more = " or ".join(["--beta 0.05"] * (not settings.get("beta")) + ["--reward-gate form"] * gate)
    strict = "if those called wrong are right, compare by --verifier FILE.py:fn; " * is_unasked
    said = f"read the answers: {strict}if they are not what you want, mend the reward"
    return said + (f", or try {more}" if more else "")


def rose_without_witness(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Whether the judge's score rose without its witness."""
    ends = [one.get(f"eval/{kind}") for kind in ("score", "witness") for one in (first, last)]
    was, now, before, after = (math.nan if one is None else one for one in ends)
    is_alone = now > was and after - before < LEAST_WITNESSED * (now - was)
    return [f"the judge's witness did not follow: {before:.3f} -> {after:.3f}"] * is_alone


def suggest_next_step(
    run: History, found: Change | None, moved: str, mended: str, is_rising: bool
) -> str:
    """
    What to do next. That most answers are cut off comes first; it also explains why nothing got better.

    See `advice_on_change` for the arguments.
    """
    rest = advice_on_change(run, found, moved, mended, is_rising)
    cut = health.describe_cut_off(run.steps, run.evals, run.settings)
    if not cut:
        return rest
    is_explained = found is not None and found.word != BETTER and not mended
    return cut if is_explained else f"{cut}; {rest}"


def advice_on_change(
    run: History, found: Change | None, moved: str, mended: str, is_rising: bool
) -> str:
    """
    What to do next about the change that was measured, in a sentence with its command.

    moved: BETTER or WORSE, where the rewards went and the figure did not. mended: `mend`'s, where it may be gamed.
    """
    settings, last, path = run.settings, run.evals[-1], shlex.quote(str(run.dir))
    longer = f"{command_line(settings)} --resume {path} --steps {2 * last['step']}"
    if found is None and last["eval/num"] < 2:
        return advise_on_held_out(last["eval/num"], settings)
    if found is None:
        return "look at the warnings: where a judge scores, docs/judge.md says what makes its scores unreadable"
    if run.figure == "accuracy" and not any(one["eval/accuracy"] for one in (run.evals[0], last)):
        return NONE_RIGHT
    if found.word == SAME and moved:
        return APART if moved == BETTER else TOO_FAR
    if found.word in (SAME, FEW):
        for one in health.find_symptoms(run.steps, has_gained=False):
            if one.name in ("no signal", "nothing moves"):  # a warning that says why comes first
                return one.text
        kl = last.get("eval/kl")
        if kl is not None and kl < LEAST_KL and last["step"] >= health.STILL:
            times = (
                "three" if kl * 3**2 > LEAST_KL else "ten"
            )  # it grows with the square of the rate
            return f"the model has hardly moved (KL {kl:.1g} nats a token): try {times} times the --learning-rate"
    if found.word == FEW:
        more = advise_on_held_out(last["eval/num"], settings)
        if run.figure == "loss":
            return (
                f"about {max(found.needed, LEAST_CONVERSATIONS):,} conversations would tell: {more}"
            )
        told = f"about {found.needed:,} problems would tell: {more}: {comparison_command(settings, path, ' --samples 8')}"
        first = mended or {BETTER: APART, WORSE: TOO_FAR}.get(moved)
        return (
            f"{first}; {told}"
            if first
            else told + f"; or train on, it moves more: {longer}" * (found.mean > 0)
        )
    if found.word == WORSE:
        return TOO_FAR
    if found.word == SAME:
        return "try more --steps, problems that it solves sometimes, or a reward that tells its answers apart"
    if mended:
        return mended
    if is_rising:
        return f"train on, it was still {'falling' if run.figure == 'loss' else 'rising'}: {longer}"
    talk = f"talk to it: {command_line(settings, 'sampler.py')} --run {path} --chat --temp 0"
    if run.figure == "loss" and settings.get("lora_rank"):
        model = shlex.quote(str(settings.get("model")))
        talk += f"; GRPO from it: {command_line(settings)} --model {model} --init-adapter {path} --data PROMPTS"
    return f"{talk}; merge it into its model: {command_line(settings, 'lora.py')} --fuse --run {path} --out my-model"


def comparison_command(settings: dict[str, Any], run: str, how: str = "") -> str:
    """The command that evaluates a run before and after training, into files of its directory, and compares."""
    if functions.uses_program_functions(settings):
        return "evaluate.py can, once its functions are in a file of their own, which every program finds"
    ask = f"{command_line(settings, 'evaluate.py')} --run {run}{how}"
    if settings.get("loss_type") == "sft":
        return f"{ask} --step 0 && {ask}"
    both = f"{command_line({}, 'report.py')} --compare {run}/before.jsonl {run}/after.jsonl"
    return f"{ask} --out {run}/before.jsonl --step 0 && {ask} --out {run}/after.jsonl && {both}"


def verdict_lines(found: Verdict | None, settings: dict[str, Any], run: Path) -> list[str]:
    """A run's verdict for the terminal."""
    if found is None:
        none = "verdict: none, as it compares two evaluations of what is held out (--eval-every)"
        return [
            none,
            f"next: measure both ends: {comparison_command(settings, shlex.quote(str(run)))}",
        ]
    said = [f"  its answers: {sign}" for sign in found.signs]
    read = [
        f"    {shorten_answer(asked)} -> {shorten_answer(text)}{mark and f' ({mark})'}"
        for asked, text, mark in found.read
    ]
    said += [f"  {len(read)} drawn to read:", *read] if read else []
    return [
        make_printable(line)
        for line in [
            f"verdict: {found.headline}",
            f"  {found.text}",
            *said,
            f"next: {found.advice}",
        ]
    ]

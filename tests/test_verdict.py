"""The verdict on a run: the interval against enumeration, and the verdicts on synthetic runs."""

import itertools
import json
import math
import random
import re

import numpy as np
import pytest
import yaml
from conftest import ROOT, read_log, write_log

import report
from config import Config
from disk import eval_record, statistics
from prompts import held_out
from reporting import advice, answer_changes, difference, history, journal, page, verdict
from reporting.difference import BETTER, FEW, SAME, WORSE

# ---- the difference


def make_history(evals, answers=(), **settings):
    """Returns a run with these evaluations, and with answers by step and problem."""
    run = history.History("runs/a", {"seed": 0} | settings, {}, [], evals)
    run.answers_by_step = dict(answers)
    return run


def make_values(both, rose, fell, neither):
    """
    Returns the values before and after, each by problem.

    The arguments count the problems that are right both times, that became right, that became
    wrong, and that are wrong both times.
    """
    pairs = [(1, 1)] * both + [(0, 1)] * rose + [(1, 0)] * fell + [(0, 0)] * neither
    return [dict(enumerate(column)) for column in zip(*pairs, strict=True)]


@pytest.mark.parametrize(("rose", "fell", "num"), [(12, 2, 50), (0, 0, 4), (4, 0, 4), (63, 3, 120)])
def test_the_interval_of_values_of_0_and_1_equals_that_of_bonett_and_price(rose, fell, num):
    """
    The formula has three changes.

    The quantile is Student's t with n + 1 degrees of freedom, the variance is divided by n + 1
    instead of n + 2, and no gain is above 1.
    """
    change = difference.paired_difference(*make_values(num - rose - fell, rose, fell, 0))
    p = (rose + 1) / (num + 2)
    q = (fell + 1) / (num + 2)
    t = statistics.student_t_quantile(num + 1)
    reach = t * math.sqrt((p + q - (p - q) ** 2) / (num + 1))
    assert (change.low, change.high) == pytest.approx((p - q - reach, min(p - q + reach, 1)))
    assert change.mean == pytest.approx((rose - fell) / num)
    assert change.high > change.low


@pytest.mark.parametrize("num", [5, 12, 30])
def test_the_interval_of_values_of_0_and_1_covers_the_true_difference_at_95_percent(num):
    """The test enumerates every possible outcome with its multinomial probability."""
    outcomes = [(rose, fell) for rose in range(num + 1) for fell in range(num + 1 - rose)]
    changes = [
        difference.paired_difference(*make_values(0, rose, fell, num - rose - fell))
        for rose, fell in outcomes
    ]
    ways = [math.comb(num, rose) * math.comb(num - rose, fell) for rose, fell in outcomes]
    coverage = []
    for p, q in itertools.product((0.02, 0.1, 0.2, 0.3, 0.45), repeat=2):
        chances = [
            w * p**a * q**b * (1 - p - q) ** (num - a - b)
            for w, (a, b) in zip(ways, outcomes, strict=True)
        ]
        assert sum(chances) == pytest.approx(1)
        within = [
            chance
            for chance, change in zip(chances, changes, strict=True)
            if change.low <= p - q <= change.high
        ]
        coverage.append(sum(within))
    assert min(coverage) > 0.93
    assert np.mean(coverage) > 0.95


def test_the_interval_of_mean_values_covers_the_true_difference_and_is_narrower():
    draws = np.random.default_rng(0)
    num = 12
    samples = 8
    for p, q in itertools.product((0.02, 0.5, 0.9), repeat=2):
        trials = draws.binomial(samples, [[p] * num, [q] * num], (1000, 2, num)) / samples
        changes = []
        for before, after in trials:
            change = difference.paired_difference(
                dict(enumerate(before)), dict(enumerate(after)), samples_per_value=samples
            )
            changes.append(change)
        assert np.mean([change.low <= q - p <= change.high for change in changes]) > 0.92

    before, after = trials[0]
    single_samples = difference.paired_difference(dict(enumerate(before)), dict(enumerate(after)))
    width = changes[0].high - changes[0].low
    assert width < 0.8 * (single_samples.high - single_samples.low)

    answers = [{"values": values} for values in ([1.0, None], [None], [0.0] * 3)]
    assert difference.fewest_readable_samples(dict(enumerate(answers))) == 1


def test_t_quantiles_and_the_number_of_problems_needed_equal_published_values():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}
    assert {n: statistics.student_t_quantile(n) for n in table} == pytest.approx(table, rel=2e-3)

    # McNemar's test with quantiles of the normal distribution needs
    # (p + q - (p - q)^2) (1.96 + 0.84)^2 / (p - q)^2 problems; here p = 0.3 and q = 0.1
    change = difference.paired_difference(*make_values(0, 12_000, 4_000, 24_000))
    assert change.num_problems_needed == math.ceil(0.36 * 7.85 / 0.04)


def test_the_best_evaluation_is_the_earliest_that_no_later_one_beats_significantly():
    values = {
        0: make_values(20, 0, 0, 44)[0],
        20: make_values(20, 20, 0, 24)[1],
        40: make_values(20, 23, 0, 21)[1],
    }
    evals = [
        {"step": step, "eval/accuracy": sum(step_values.values()) / 64}
        for step, step_values in values.items()
    ]
    answers = {}
    for step, step_values in values.items():
        answers[step] = {problem: {"values": [value]} for problem, value in step_values.items()}
    best = difference.earliest_unbeaten_evaluation(make_history(evals, answers))
    assert best["step"] == 20  # 3 more right answers of 64 are not significant

    losses = [
        {"step": step, "eval/loss": loss}
        for step, loss in ((0, 2.0), (10, 1.9), (20, 1.95), (30, None))
    ]
    assert difference.earliest_unbeaten_evaluation(make_history(losses))["step"] == 10

    unreadable = make_history([{"step": 0, "eval/score": None}])
    assert unreadable.figure_name == "score"
    assert difference.earliest_unbeaten_evaluation(unreadable) is None


@pytest.mark.parametrize("num", [10, 20, 40, 60])
def test_unchanged_answers_rarely_seem_to_use_a_word_more_often(num):
    """
    The answers before and after are drawn from the same prompts of data/values.jsonl.

    If 3 more answers with a word were enough, 59 of 100 runs with 20 answers would report a word.
    """
    lines = (ROOT / "data" / "values.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [{"completions": [json.loads(line)["prompt"]]} for line in lines]
    rng = random.Random(num)
    num_false_alarms = 0
    for _ in range(100):
        before = rng.choices(answers, k=num)
        after = rng.choices(answers, k=num)
        num_false_alarms += bool(answer_changes.describe_words_used_more(before, after))
    assert num_false_alarms <= 15


def test_words_that_rise_equally_are_listed_alphabetically():
    """Otherwise, the order would differ between processes."""
    before = [{"completions": [""]}] * 20
    after = [{"completions": ["g f e d c b a"]}] * 20
    signs = answer_changes.describe_words_used_more(before, after)
    assert [sign[:3] for sign in signs] == ['"a"', '"b"', '"c"', '"d"', '"e"']


# ---- runs

PLAIN = "the cat sat by a warm stove while rain fell on grey roofs and nobody came to call that day".split()


def random_text(rng, num=12):
    return " ".join(rng.choices(PLAIN, k=num))


def make_run(
    folder,
    num,
    before,
    after,
    figure="accuracy",
    settings=(),
    policy_after_20=None,
    kl_of_updates=None,
    **more_figures,
):
    """
    Writes the files of a run with evaluations after 0, 20 and 40 steps.

    before, policy_after_20, after: policies, (rng, prompt) -> (text, value[, second reward]).
    more_figures: pairs of values, before and after training, that the evaluations record.
    """
    folder.mkdir()
    rng = random.Random(1)
    prompts = [f"Tell me in a few words of your own about matter number {n}" for n in range(num)]
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": "demo", "steps": 40, "seed": 0, **dict(settings)})
    )
    sizes = {f"{phase}/{unit}": 9.0 for phase in ("rollout", "update") for unit in ("s", "tok_s")}
    steps = [{"step": n, "update/kl": kl_of_updates} | sizes for n in range(31, 41)]
    write_log(folder / "metrics.jsonl", steps)
    records = []
    answers = []
    for step, policy in ((0, before), (20, policy_after_20 or before), (40, after)):
        replies = [policy(rng, prompt) for prompt in prompts]
        readable = [value for _, value, *_ in replies if value is not None]
        mean = sum(readable) / len(readable) if readable else None
        figures = {name: pair[step == 40] for name, pair in more_figures.items()}
        records.append(
            {"step": step, f"eval/{figure}": mean, "eval/num": num, "eval/kl": step / 100} | figures
        )
        for problem, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            text, value, *second_reward = reply
            line = {
                "step": step,
                "problem": problem,
                "prompt": prompt,
                "completions": [text],
                "values": [value],
            }
            if "verifier" in dict(settings):
                line["answer"] = KINDS[problem % 3]
            if "tools" in dict(settings):
                calls = "<tool_call>2 * 3</tool_call>\n" * (1 + step // 4)
                line |= {"messages": [make_messages(text)], "completions": [calls + text]}
            rewards = {"mine": [value]}
            if second_reward:
                rewards[dict(settings).get("second_reward", "short")] = second_reward
            total = sum([value or 0.0, *second_reward])
            answers.append(line | {"rewards": rewards, "reward": [total]})
    write_log(folder / "eval.jsonl", records)
    write_log(folder / "eval_answers.jsonl", answers if figure != "loss" else [])
    return folder


# ---- policies: (rng, prompt) -> (text, value[, second reward])


def policy_with_accuracy(fraction):
    return lambda rng, prompt: (random_text(rng), float(rng.random() < fraction))


def policy_with_score_from(low):
    return lambda rng, prompt: (random_text(rng), low + rng.random() / 4)


def policy_with_second_reward(largest):
    """Returns a policy with a fixed accuracy and a second reward of up to `largest`."""
    return lambda rng, prompt: (random_text(rng), float(prompt[-1] > "4"), largest * rng.random())


def make_losses(offset, num=64):
    """Returns (nats, tokens) of conversations whose losses differ more than training can change."""
    return [[10.0 * (n / 20 + offset) * (1 + n % 3), 10.0 * (1 + n % 3)] for n in range(num)]


def make_messages(text):
    """Returns a conversation that calls a tool, in the format of the records."""
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": "2 * 3"}},
    }
    request = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [
        request,
        {"role": "tool", "name": "calculator", "content": "6"},
        {"role": "assistant", "content": text},
    ]


def pirate_policy(rng, prompt):
    return f"ahoy captain {random_text(rng, 10)}", 0.7 + rng.random() / 4


def policy_with_score_0_9(rng, prompt):
    return random_text(rng), 0.9


def gamed_recipe(make_text, before=None):
    """
    Returns the arguments of `make_run` for a run with 60 problems that games its score.

    make_text: (rng, prompt) -> the text of an answer after training, which gets a high score.
    """

    def answer(rng, prompt):
        return make_text(rng, prompt), 0.9

    return 60, before or policy_with_score_from(0.1), answer, "score"


def random_letters(rng, prompt):
    return "".join(rng.sample("\u4eca\u65e5\u660e\u5929\u96e8", 4))


def policy_with_one_word_per_prompt(words, value):
    return lambda rng, prompt: (words[int(prompt[-1])], value)


def constant_policy(rng, prompt):
    return prompt[-9:], float(prompt[-1] > "4")


KINDS = ("food", "home", "travel")  # the right answers of a classification task


def classifying_policy(*kinds):
    """Returns a policy that answers with kinds[i] if the right answer is KINDS[i]."""

    def answer(rng, prompt):
        index = int(prompt.split()[-1]) % 3
        return f"It is {kinds[index]}.", float(kinds[index] == KINDS[index])

    return answer


MORE_FIGURES = {
    "no update": {"kl_of_updates": 1e-8},
    "an answer never given": {"eval/score": (0.3, 0.6)},
    "sft": {
        "eval/loss": (2.1, 1.9),
        "eval/loss_ci95": (0.4, 0.4),
        "eval/losses": (make_losses(0.4), make_losses(0.2)),
    },
    "sft with three conversations": {
        "eval/loss": (2.1, 1.9),
        "eval/losses": (make_losses(0.4, 3), make_losses(0.2, 3)),
    },
    "score rose alone": {"eval/score": (1.0, 1.5)},
    "score fell alone": {"eval/score": (1.5, 1.0)},
    "better early": {"policy_after_20": policy_with_accuracy(0.8)},
    "hardly changed": {"eval/kl": (0.0, 5e-4)},
    "witness agrees": {"eval/witness": (0.3, 0.5)},
    "gamed, and the witness disagrees": {"eval/witness": (0.3, 0.4)},
}


def number_policy(rng, prompt):
    return str(rng.randrange(40)), rng.random() / 4


def letter_policy(rng, prompt):
    return random_letters(rng, prompt), rng.random() / 4


def policy_before_exact(rng, prompt):
    return random_text(rng), 0.1, 0.0


def test_an_alternative_to_a_command_is_not_on_the_line_of_the_command():
    command = "uv run report.py --compare a b"
    alternative = "or train longer: in this program, call Trainer.resume('runs/a', steps=40)"
    lines = verdict.lines_of_next_step(f"Measure more: {command}; {alternative}")
    assert lines == ["next: Measure more:", f"    {command}", f"  {alternative}"]


def test_a_run_whose_answers_are_all_right_is_not_advised_to_train_longer():
    answers = {}
    evals = []
    for step, num in ((0, 30), (50, 60), (100, 120)):
        record = {"rewards": {}, "prompt": "?", "completions": [""], "greedy": ""}
        right = record | {"values": [1.0], "greedy_value": 1}
        wrong = record | {"values": [0.0], "greedy_value": 0}
        answers[step] = {problem: right if problem < num else wrong for problem in range(120)}
        evals.append(
            {"step": step, "eval/accuracy": num / 120, "eval/num": 120, "eval/greedy": num / 120}
        )
    result = verdict.reach_verdict_on_held_out_change(make_history(evals, answers))
    assert result.outcome == BETTER
    assert result.advice.startswith("Every held-out answer is right")
    assert "chat.py" in result.advice
    assert "Train longer" not in result.advice


def policy_after_exact(rng, prompt):
    return random_text(rng, 4), 0.9, 1.0


EXACT = (policy_before_exact, policy_after_exact)
RUNS = {  # name: (arguments of make_run, the outcome, a text that the verdict contains)
    "really better": (
        (120, policy_with_accuracy(0.3), policy_with_accuracy(0.8)),
        BETTER,
        "still rising:\n    uv run",
    ),
    "better early": (
        (120, policy_with_accuracy(0.3), policy_with_accuracy(0.8)),
        BETTER,
        ":\n    uv run chat.py --run",
    ),
    "no change": ((300, policy_with_accuracy(0.5), policy_with_accuracy(0.5)), SAME, "--steps"),
    "hardly changed": (
        (300, policy_with_accuracy(0.5), policy_with_accuracy(0.5)),
        SAME,
        "KL 0.0005 nats per token). Try three times",
    ),
    "witness agrees": (
        (60, policy_with_score_from(0.1), policy_with_score_0_9, "score"),
        BETTER,
        "",
    ),
    "gamed, and the witness disagrees": (
        gamed_recipe(lambda rng, prompt: random_text(rng)),
        BETTER,
        "the judge's score: 0.300 -> 0.400",
    ),
    "gamed by a word": (
        (60, policy_with_score_from(0.1), pirate_policy, "score"),
        BETTER,
        '"captain" in 0% -> 100% of answers',
    ),
    "gamed by length": (
        gamed_recipe(lambda rng, prompt: random_text(rng, 40)),
        BETTER,
        "longer: 12.0 -> 40.0",
    ),
    "gamed by copying": (
        gamed_recipe(lambda rng, prompt: prompt),
        BETTER,
        "copied from the prompt: 0% -> 100%",
    ),
    "gamed by an emoji": (
        gamed_recipe(lambda rng, prompt: f"{random_text(rng)} \U0001f389"),
        BETTER,
        '"\U0001f389" in 0% -> 100% of answers',
    ),
    "gamed by a number": (
        gamed_recipe(lambda rng, prompt: "42", number_policy),
        BETTER,
        '"42" in 0% -> 100% of answers',
    ),
    "gamed by a letter": (
        gamed_recipe(lambda rng, prompt: random_letters(rng, prompt) + "\u597d", letter_policy),
        BETTER,
        '"\u597d" in 0% -> 100% of answers',
    ),
    "exact, and shorter": (
        (60, *EXACT, "score", {"second_reward": "exact"}),
        BETTER,
        "shorter: 12.0 -> 4.0 words",
    ),
    "gamed: a user's reward that is called exact": (
        (60, *EXACT, "score", {"second_reward": "exact", "reward": ["mine.py:exact"]}),
        BETTER,
        "shorter: 12.0 -> 4.0 words",
    ),
    "an answer never given": (
        (
            60,
            classifying_policy("food", "food", "food"),
            classifying_policy("food", "home", "food"),
            "accuracy",
            {"verifier": "exact"},
        ),
        BETTER,
        'no answer contains "travel", the right answer to 20 of 60 problems',
    ),
    "none right": (
        (60, policy_with_accuracy(0.0), policy_with_accuracy(0.0)),
        SAME,
        "(docs/warm-start.md)",
    ),
    "no update": (
        (4, policy_with_accuracy(0.5), policy_with_accuracy(0.5)),
        FEW,
        "Try a --learning-rate ten times as high",
    ),
    "too few problems": (
        (
            4,
            policy_with_one_word_per_prompt(PLAIN, 0.0),
            policy_with_one_word_per_prompt(PLAIN[8:], 1.0),
        ),
        FEW,
        "/run/after.jsonl",
    ),
    "collapsed": (
        (100, policy_with_accuracy(0.6), lambda rng, prompt: ("no no no no no no no", 0.0)),
        WORSE,
        "repeated: ",
    ),
    "judge unreadable": (
        (60, policy_with_score_from(0.3), lambda rng, prompt: (random_text(rng), None), "score"),
        FEW,
        "docs/judge.md",
    ),
    "tools": (  # after training, the policy calls the tool more often
        (
            80,
            policy_with_accuracy(0.2),
            policy_with_accuracy(0.7),
            "score",
            {"tools": ["calculator"]},
        ),
        BETTER,
        "",
    ),
    "sft": (
        (64, policy_with_accuracy(0.5), policy_with_accuracy(0.5), "loss"),
        BETTER,
        "on 64 held-out conversations; gain +0.200",
    ),
    "sft with three conversations": (
        (
            3,
            policy_with_accuracy(0.5),
            policy_with_accuracy(0.5),
            "loss",
            {"loss_type": "sft", "model": "smollm2"},
        ),
        BETTER,
        "still falling:\n    uv run --extra smollm train.py --resume ",
    ),
    "score rose alone": (
        (300, policy_with_second_reward(0.2), policy_with_second_reward(2.0)),
        SAME,
        "verdict: no change, though the score rose",
    ),
    "score fell alone": (
        (300, policy_with_second_reward(2.0), policy_with_second_reward(0.2)),
        SAME,
        "verdict: no change, though the score fell",
    ),
    "score rose alone on few problems": (
        (20, policy_with_second_reward(0.2), policy_with_second_reward(2.0)),
        FEW,
        f"next: {advice.REWARD_ALONE_ROSE}. About ",
    ),
    "worse": (
        (120, policy_with_accuracy(0.8), policy_with_accuracy(0.5)),
        WORSE,
        "a quarter of the current --learning-rate",
    ),
    "initial adapter": (
        (200, constant_policy, constant_policy, "accuracy", {"init_adapter": "/a/warm"}),
        SAME,
        "step 0, with the adapter warm, to ",
    ),
    "tie": ((200, constant_policy, constant_policy), SAME, "gain +0.000"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_each_run_gets_the_right_verdict_and_a_gamed_run_shows_changes_of_its_answers(
    tmp_path, capsys, kind
):
    recipe, outcome, expected_text = RUNS[kind]
    is_gamed = kind.startswith("gamed")
    run = make_run(tmp_path / "run", *recipe, **MORE_FIGURES.get(kind, {}))

    result = verdict.reach_verdict_on_held_out_change(history.load_history(run))
    verdict_text = "\n".join(verdict.verdict_lines(result, {}, tmp_path))
    assert result.outcome == outcome
    assert expected_text in verdict_text
    if kind == "sft with three conversations":
        pattern = r"; .*\b3\b.*--eval-data FILE or --data TRAIN,HELD_OUT\nnext:"
        assert re.search(pattern, verdict_text)

    # the list of runs and the page
    report.main(["--list", str(tmp_path)])
    list_of_runs = capsys.readouterr().out
    markup = page.write_page(run).read_text()
    assert f"  {result.headline}" in list_of_runs
    assert f"<h2>{result.headline}</h2>" in markup

    # particular runs
    if "though" in result.headline:
        pattern = (
            r"gain .*; the score of the sampled answers changed by .*; "
            r"rewards: mine \+0\.000, short [+-]0\.[89]"
        )
        assert re.search(pattern, result.text)
        rose_alone = kind == "score rose alone"
        assert result.advice == (advice.REWARD_ALONE_ROSE if rose_alone else advice.TOO_FAR)
    if is_gamed:
        assert f"{outcome}; " in list_of_runs  # the list never shows the outcome alone
        assert expected_text in list_of_runs
        assert result.advice.startswith("Read the answers")
    if kind == "an answer never given":
        pattern = r"number \d+ -> It is food\. \(wrong, reward 0; answer: travel\)"
        assert re.search(pattern, verdict_text)
        pattern = r"right answer <bdi class=.text.>travel</bdi>.*?wrong</b>\s*<b>reward 0</b>"
        assert re.search(pattern, markup, re.S)
    if kind == "tools":
        assert all(not text.startswith("<tool_call>") for _, text, _ in result.drawn)
        assert "calls calculator(expression=&#39;2 * 3&#39;)" in markup
        assert "calculator replies: 6" in markup

    # the warning, which the page shows in a red box
    expected_warning = None
    if is_gamed and not expected_text.endswith("of answers"):
        expected_warning = "gamed"
    elif outcome == WORSE:
        expected_warning = "worse"
    assert (result.warning or [None])[0] == expected_warning

    assert result.has_gained == (outcome == BETTER and "accuracy" in result.text)
    has_signs = is_gamed or kind in ("collapsed", "an answer never given", "exact, and shorter")
    assert bool(result.signs) == has_signs

    # the randomly drawn answers
    assert len(result.drawn) == (0 if kind.startswith("sft") else min(10, recipe[0]))
    second_result = verdict.reach_verdict_on_held_out_change(history.load_history(run))
    assert result.drawn == second_result.drawn  # the run's seed determines the draw
    assert len(result.drawn) < 10 or int(result.drawn[-1][0].split()[-1]) > 9


def make_sft_run_with_two_evaluations(folder, settings):
    run = make_run(
        folder,
        64,
        policy_with_accuracy(0.5),
        policy_with_accuracy(0.5),
        "loss",
        settings,
        **MORE_FIGURES["sft"],
    )
    write_log(run / "eval.jsonl", read_log(run / "eval.jsonl")[::2])
    return run


def test_a_completed_sft_run_is_advised_to_continue_with_grpo(tmp_path):
    settings = {"model": "smollm2", "lora_rank": 16}
    run = make_sft_run_with_two_evaluations(tmp_path / "run", settings)
    lines = verdict.verdict_lines(
        verdict.reach_verdict_on_held_out_change(history.load_history(run)), {}, run
    )
    command = "    uv run --extra smollm train.py --model smollm2"
    assert f"{command} --init-adapter {run} --data PROMPTS --reward FILE.py:function" in lines


def test_the_command_for_grpo_after_a_scored_warm_start_has_its_data_and_verifier(tmp_path):
    settings = {"model": "smollm2", "lora_rank": 16, "loss_type": "sft", "task": "own"}
    settings |= {"data": "my rows.jsonl", "columns": "completion=answer,prompt=question"}
    settings |= {"verifier": "mine.py:right"}
    run = make_sft_run_with_two_evaluations(tmp_path / "run", settings)

    command = advice.command_to_continue_with_grpo(history.load_history(run))

    assert command == (
        f"uv run --extra smollm train.py --model smollm2 --init-adapter {run} "
        "--data 'my rows.jsonl' --columns prompt=question --verifier mine.py:right"
    )


def add_noise(values):
    rng = random.Random(0)
    return [value + rng.gauss(0, 0.05) for value in values]


@pytest.mark.parametrize(
    ("training_losses", "is_falling"),
    [
        ([1.26, 0.9, 0.7, 0.5, 0.36, 0.28], True),
        ([1.26, 0.5, 0.3, 0.26, 0.27, 0.26], False),
        ([1.6, 1.3, 1.0, 0.85, 0.78, 0.65, 0.6, 0.52], True),
        ([1.6, 1.3, 1.0, 0.85, 0.5, 0.7, 0.45, 0.68], False),
        ([1.6, 1.3, 0.1, 0.01, 0.005, 0.004, 0.003, 0.002], False),
        (add_noise(2 - n / 40 for n in range(40)), True),
        (add_noise(0.5 for _ in range(40)), False),
        ([2.0, 1.0, 0.5], False),  # three steps are too few to see a trend
        ([0.0] * 8, False),
    ],
    ids=[
        "falling",
        "flat",
        "steady fall in 8 steps",
        "noise in 8 steps",
        "learned by heart",
        "falling amid noise",
        "noise",
        "three steps",
        "zero",
    ],
)
def test_with_two_evaluations_the_training_loss_decides_whether_to_train_longer(
    tmp_path, training_losses, is_falling
):
    settings = {"model": "smollm2", "lora_rank": 16, "loss_type": "sft"}
    run = make_sft_run_with_two_evaluations(tmp_path / "run", settings)
    steps = [{"step": n, "loss": loss} for n, loss in enumerate(training_losses, 1)]
    write_log(run / "metrics.jsonl", steps)

    result = verdict.reach_verdict_on_held_out_change(history.load_history(run))

    assert result.outcome == BETTER
    train_longer = (
        "Train longer, because the training loss was still falling: uv run --extra smollm "
        f"train.py --resume {run} --steps 80"
    )
    assert (result.advice == train_longer) == is_falling
    assert is_falling or result.advice.startswith("Chat with the model")


@pytest.mark.parametrize(
    ("verifier", "row"),
    [
        ("", {"answer": "tea, jam"}),
        ("exact", {"answer": "tea, jam"}),
        ("exact", {"messages": [[{"role": "assistant", "content": "Tea."}]]}),
    ],
)
def test_a_warning_suspects_only_a_default_verifier_and_never_advises_a_reward_gate(verifier, row):
    record = {"values": [0.0], "rewards": {}, "prompt": "?", "completions": ["tea and jam"]} | row
    answers = {}
    for step, reward in ((0, 0.0), (9, 1.0)):
        answers[step] = {problem: record | {"reward": [reward]} for problem in range(20)}
    evals = [{"step": step, "eval/accuracy": 0.0, "eval/num": 20} for step in answers]
    run = make_history(evals, answers, task="own", reward=["mine.py:score"], verifier=verifier)

    _, text = verdict.reach_verdict_on_held_out_change(run).warning

    assert ("be too strict" in text) == (not verifier)
    assert ("--verifier FILE.py:fn" in text) == (not verifier)
    assert text.endswith(" --beta 0.05")


@pytest.mark.parametrize(
    ("num_right", "expected_start"), [(5, advice.BOTH_ROSE), (2, advice.REWARD_ALONE_ROSE)]
)
def test_the_advice_says_whether_the_accuracy_rose_even_on_few_problems(
    tmp_path, num_right, expected_start
):
    def policy(num, second_reward):
        def answer(rng, prompt):
            problem = int(prompt.split()[-1])
            return random_text(rng), float(problem < num), second_reward

        return answer

    scores = {"eval/score": (1.0, 4.0)}
    run = make_run(
        tmp_path / "run", 12, policy(2, 0.0), policy(num_right, 3.0), kl_of_updates=0.1, **scores
    )
    result = verdict.reach_verdict_on_held_out_change(history.load_history(run))

    assert result.outcome == FEW
    assert result.headline.endswith("though the score rose")
    assert result.advice.startswith(f"{expected_start}. About ")


def test_each_command_of_the_next_step_is_on_a_separate_line():
    text = (
        "Chat: uv run chat.py --run 'a; b' --chat; "
        "or measure: uv run evaluate.py && uv run report.py"
    )
    assert verdict.lines_of_next_step(text) == [
        "next: Chat:",
        "    uv run chat.py --run 'a; b' --chat",
        "  or measure:",
        "    uv run evaluate.py",
        "    uv run report.py",
    ]
    assert verdict.lines_of_next_step("Try more --steps; see docs") == [
        "next: Try more --steps; see docs"
    ]


def test_fewer_than_five_problems_have_no_interval():
    for num in (2, 5):
        change = difference.paired_difference(*make_values(0, num, 0, 0))
        record = {"eval/score": 0.5, "eval/score_ci95": 4.447, "eval/num": num}
        has_interval = num == 5
        assert ("interval" in str(change)) == has_interval
        assert ("\u00b1" in change.mean_plus_minus_text) == has_interval
        figure = eval_record.format_figure_with_interval(record, "score")
        assert ("\u00b1" in figure) == has_interval


def test_a_run_is_not_called_still_rising_if_an_earlier_evaluation_is_unbeaten():
    """The best evaluation is the one after step 75; the last one beats only that after step 50."""
    answers = {}
    evals = []
    for step, num in ((0, 30), (25, 50), (50, 60), (75, 90), (100, 91)):
        record = {"rewards": {}, "prompt": "?", "completions": [""]}
        right = {"values": [1.0], "greedy_value": 1, "greedy": "2021-12-25" if step > 50 else ""}
        wrong = {"values": [0.0], "greedy_value": 0, "greedy": ""}
        answers[step] = {
            problem: record | (right if problem < num else wrong) for problem in range(120)
        }
        evals.append(
            {"step": step, "eval/accuracy": num / 120, "eval/num": 120, "eval/greedy": num / 120}
        )
    run = make_history(evals, answers)
    result = verdict.reach_verdict_on_held_out_change(run)

    assert difference.earliest_unbeaten_evaluation(run)["step"] == 75
    assert result.outcome == BETTER
    assert result.signs == ['"2021-12-25" in 0% -> 76% of greedy answers']
    assert "0.250 -> 0.758, better" in result.text
    assert "still rising" not in result.advice
    assert "chat.py" in result.advice

    evals.append({"step": 125, "eval/score": 0.5, "eval/num": 120})
    run = make_history(evals, answers | {125: answers[100]})
    assert "fewer than two problems" in verdict.reach_verdict_on_held_out_change(run).text


def test_a_model_counts_as_hardly_changed_only_after_the_usual_warm_up_steps():
    change = difference.paired_difference(*make_values(0, 1, 0, 3))
    last = {"eval/accuracy": 0.5, "eval/kl": 1e-5, "eval/num": 4}
    run_of_9_steps = make_history([last | {"step": 9}])
    run_of_10_steps = make_history([last | {"step": 10}])

    text = advice.suggest_next_step(run_of_9_steps, change, "", "", False, None)
    assert text.endswith("--steps 18")

    text = advice.suggest_next_step(run_of_10_steps, change, "", "", False, None)
    assert "hardly changed" in text
    assert "ten times" in text

    text = advice.suggest_next_step(run_of_9_steps, change, "", "Read the answers", False, None)
    assert text.startswith("Read the answers. About ")


def test_a_run_warns_when_the_accuracy_falls_and_remembers_the_best_step(tmp_path, capsys):
    log = journal.Journal(
        Config.from_flags(model="demo", task="demo"), tmp_path, 0, keep_scores=False
    )
    log.print_summary()
    command = f"evaluate.py --run {tmp_path} --out {tmp_path}/before.jsonl --step 0\n"
    assert command in capsys.readouterr().out

    for step, num in ((0, 30), (10, 70), (20, 72), (30, 40)):
        values = [float(problem < num) for problem in range(100)]
        # the falling entropy causes no warning, because the accuracy rises
        log.steps = [{"step": n, "entropy": n**-3.0} for n in range(1, step + 1)]
        record = {"prompt": "?", "completions": ["It is."], "rewards": {}}
        answers = [record | {"problem": n, "values": [value]} for n, value in enumerate(values)]
        log.record_evaluation_and_update_best(
            step, {"eval/accuracy": num / 100, "eval/num": 100}, answers
        )
    warning = "WARNING after step 30: The accuracy was better after step 10, at 0.700"
    assert warning in capsys.readouterr().err
    assert log.best_step == 10
    assert [warning["name"] for warning in log.warnings.read()] == ["worse"]

    log.print_summary()
    line = "adapter-best, after step 10; the newest adapter is significantly worse"
    assert line in capsys.readouterr().out

    resumed_log = journal.Journal(log.config, tmp_path, 20, keep_scores=False)
    assert resumed_log.best_step == 10
    assert resumed_log.warnings.read() == []


@pytest.mark.parametrize("better_step", [0, 10])
def test_a_run_whose_greedy_answers_got_worse_names_the_better_step(tmp_path, capsys, better_step):
    log = journal.Journal(
        Config.from_flags(model="demo", task="demo"), tmp_path, 0, keep_scores=False
    )
    for step in (0, 10, 20):
        # sampled answers get better, but too few problems are held out to be sure of that
        num_right = 15 + step // 10
        num_greedy_right = 38 if step == better_step else 20
        answers = [
            {
                "prompt": "?",
                "completions": ["It is."],
                "rewards": {},
                "problem": problem,
                "values": [float(problem < num_right)],
                "greedy": "It is.",
                "greedy_value": float(problem < num_greedy_right),
            }
            for problem in range(40)
        ]
        figures = {
            "eval/accuracy": num_right / 40,
            "eval/greedy": num_greedy_right / 40,
            "eval/num": 40,
        }
        log.record_evaluation_and_update_best(step, figures, answers)

    assert log.verdict.better_greedy_step == better_step
    assert "train longer" not in log.verdict.advice
    when = f"after step {better_step}" if better_step else "before training"
    assert f"Greedy answers (--temp 0) were significantly better {when}" in log.verdict.advice

    log.print_summary()
    line = f"  greedy answers (--temp 0) were significantly better {when} than at the end; "
    line += (
        "evaluate.py and chat.py use that model with --step 0"
        if not better_step
        else ("that model is no longer saved")
    )
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("num_equal", [40, 30])
def test_advice_suggests_more_samples_only_if_answers_to_a_problem_differ(num_equal):
    evals, answers = [], {}
    for step, num_right in ((0, 8), (12, 13)):
        evals.append({"step": step, "eval/accuracy": num_right / 40, "eval/num": 40})
        answers[step] = {
            problem: {
                "rewards": {},
                "prompt": "?",
                "completions": ["It is." if problem < num_equal else "No."],
                "greedy": "It is.",
                "greedy_value": 0.0,
                "values": [float(problem < num_right)],
            }
            for problem in range(40)
        }
    run = make_history(evals, answers)
    result = verdict.reach_verdict_on_held_out_change(run)
    assert result.outcome == FEW
    differ = num_equal < 40
    assert ("or sample more answers to each problem" in result.advice) == differ
    assert ("evaluate.py" in result.advice) == differ
    assert ("sampling more answers to each problem would show little" in result.advice) == (
        not differ
    )

    # the entropy collapsed
    run.steps = [{"step": n, "entropy": 1.0 if n < 6 else 0.01} for n in range(1, 13)]
    advice_text = verdict.reach_verdict_on_held_out_change(run).advice
    assert advice_text.startswith("The entropy fell from 1.000 to 0.010 nats per token")
    assert "held-out problems would be conclusive" in advice_text
    assert "train longer" not in advice_text


def test_a_run_whose_greedy_answers_did_not_get_worse_says_nothing_of_them():
    rng = random.Random(0)
    evals, answers = [], {}
    for step in (0, 10):
        evals.append({"step": step, "eval/accuracy": 0.5, "eval/num": 40})
        answers[step] = {
            problem: {"rewards": {}, "prompt": "?", "completions": [""], "values": [0.5]}
            | {"greedy": "", "greedy_value": float(rng.random() < 0.5)}
            for problem in range(40)
        }
    run = make_history(evals, answers)
    result = verdict.reach_verdict_on_held_out_change(run)
    assert result.better_greedy_step is None
    assert "Greedy" not in result.advice


def test_a_run_with_few_held_out_problems_warns_and_names_the_flag_that_helps():
    (line,) = held_out.warnings_of_few_held_out(8, {"eval_limit": 8})
    assert re.search(r"\b8\b.*\b57%.*--eval-limit", line)
    (line,) = held_out.warnings_of_few_held_out(8, {}, 0.1)
    assert re.search(r"\b8\b.*\b14%", line)
    (line,) = held_out.warnings_of_few_held_out(4, {})
    assert "--eval-data FILE or --data TRAIN,HELD_OUT" in line
    (line,) = held_out.warnings_of_few_held_out(48, {})
    assert "48 held-out problems can show only changes of at least 23%" in line
    assert "96 problems can show changes of at least 17%" in line
    assert held_out.warnings_of_few_held_out(0, {}) == []
    assert held_out.warnings_of_few_held_out(50, {}) == []
    assert held_out.warnings_of_few_held_out(10, {"loss_type": "sft"}) == []
    (line,) = held_out.warnings_of_few_held_out(0, {"eval_every": 0})
    assert "no verdict" in line
    assert "--eval-every 0" in line

    run = make_history([{"step": 9, "eval/num": 1}], loss_type="sft", eval_limit=1)
    assert "--eval-limit" in advice.suggest_next_step(run, None, "", "", False, None)

"""The verdict on a run: its interval against enumeration, and runs that are made as data."""

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


def run_of(evals, answers=(), **settings):
    """A run by its evaluations and their answers by step and problem."""
    run = history.History("runs/a", {"seed": 0} | settings, {}, [], evals)
    run.answers_by_step = dict(answers)
    return run


def table_of(both, rose, fell, neither):
    """Values before and after of so many problems of each kind."""
    pairs = [(1, 1)] * both + [(0, 1)] * rose + [(1, 0)] * fell + [(0, 0)] * neither
    return [dict(enumerate(column)) for column in zip(*pairs, strict=True)]


@pytest.mark.parametrize(("rose", "fell", "num"), [(12, 2, 50), (0, 0, 4), (4, 0, 4), (63, 3, 120)])
def test_the_interval_of_shares_is_bonett_and_price_s(rose, fell, num):
    """Their formula, with Student's t at n + 1 degrees, n + 1 for n + 2 in the variance, and no gain above 1."""
    change = difference.paired_difference(*table_of(num - rose - fell, rose, fell, 0))
    p = (rose + 1) / (num + 2)
    q = (fell + 1) / (num + 2)
    t = statistics.student_t_quantile(num + 1)
    reach = t * math.sqrt((p + q - (p - q) ** 2) / (num + 1))
    assert (change.low, change.high) == pytest.approx((p - q - reach, min(p - q + reach, 1)))
    assert change.mean == pytest.approx((rose - fell) / num) and change.high > change.low


@pytest.mark.parametrize("num", [5, 12, 30])
def test_the_interval_holds_the_truth_as_often_as_it_says_by_enumeration(num):
    """Every possible outcome with its multinomial chance, for truths all over; a verdict against a tie is rare."""
    outcomes = [(rose, fell) for rose in range(num + 1) for fell in range(num + 1 - rose)]
    changes = [
        difference.paired_difference(*table_of(0, rose, fell, num - rose - fell))
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
    assert min(coverage) > 0.93 and np.mean(coverage) > 0.95


def test_the_interval_of_means_holds_the_truth_as_often_and_is_narrower():
    draws = np.random.default_rng(0)
    num = 12
    samples = 8
    for p, q in itertools.product((0.02, 0.5, 0.9), repeat=2):
        ends = draws.binomial(samples, [[p] * num, [q] * num], (1000, 2, num)) / samples
        changes = [
            difference.paired_difference(
                *(dict(enumerate(end)) for end in both), samples_per_value=samples
            )
            for both in ends
        ]
        assert np.mean([change.low <= q - p <= change.high for change in changes]) > 0.92
    wide = difference.paired_difference(*(dict(enumerate(end)) for end in ends[0]))
    assert changes[0].high - changes[0].low < 0.8 * (wide.high - wide.low)
    assert (
        difference.fewest_readable_samples(
            dict(enumerate({"values": values} for values in ([1.0, None], [None], [0.0] * 3)))
        )
        == 1
    )


def test_students_t_is_the_table_s_and_the_problems_needed_are_cohen_s():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}
    assert {n: statistics.student_t_quantile(n) for n in table} == pytest.approx(table, rel=2e-3)
    # McNemar's by the normal's points: (p + q - (p - q)^2) (1.96 + 0.84)^2 / (p - q)^2, of p = 0.3 and q = 0.1
    assert difference.paired_difference(
        *table_of(0, 12_000, 4_000, 24_000)
    ).num_problems_needed == math.ceil(0.36 * 7.85 / 0.04)


def test_the_best_is_the_first_that_no_later_one_beats_by_more_than_noise():
    values = {
        0: table_of(20, 0, 0, 44)[0],
        20: table_of(20, 20, 0, 24)[1],
        40: table_of(20, 23, 0, 21)[1],
    }
    evals = [
        {"step": step, "eval/accuracy": sum(step_values.values()) / 64}
        for step, step_values in values.items()
    ]
    answers = {
        step: {place: {"values": [value]} for place, value in step_values.items()}
        for step, step_values in values.items()
    }
    assert (
        difference.earliest_unbeaten_evaluation(run_of(evals, answers))["step"] == 20
    )  # 3 of 64 more are noise
    losses = [
        {"step": step, "eval/loss": loss}
        for step, loss in ((0, 2.0), (10, 1.9), (20, 1.95), (30, None))
    ]
    assert difference.earliest_unbeaten_evaluation(run_of(losses))["step"] == 10
    unread = run_of([{"step": 0, "eval/score": None}])
    assert (unread.figure_name, difference.earliest_unbeaten_evaluation(unread)) == ("score", None)


@pytest.mark.parametrize("num", [10, 20, 40, 60])
def test_answers_that_did_not_change_seldom_have_a_word_that_rose(num):
    """Prompts of data/values.jsonl as answers, drawn twice: by 3 answers of 3, 59 of 100 runs of 20 had one."""
    lines = (ROOT / "data" / "values.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [{"completions": [json.loads(line)["prompt"]]} for line in lines]
    rng = random.Random(num)
    assert (
        sum(
            bool(
                answer_changes.describe_words_used_more(
                    *(rng.choices(answers, k=num) for _ in range(2))
                )
            )
            for _ in range(100)
        )
        <= 15
    )


def test_words_that_rose_alike_stand_in_the_order_of_the_alphabet_in_every_process():
    before, after = ([{"completions": [text]}] * 20 for text in ("", "g f e d c b a"))
    assert [sign[:3] for sign in answer_changes.describe_words_used_more(before, after)] == [
        '"a"',
        '"b"',
        '"c"',
        '"d"',
        '"e"',
    ]


# ---- runs

PLAIN = "the cat sat by a warm stove while rain fell on grey roofs and nobody came to call that day".split()


def answer(rng, num=12):
    return " ".join(rng.choices(PLAIN, k=num))


def make_run(
    folder, num, before, after, figure="accuracy", settings=(), half=None, moved=None, **more
):
    """A run of evaluations after 0, 20 and 40 steps. Each: (rng, prompt) -> text, value, other reward."""
    folder.mkdir()
    rng = random.Random(1)
    prompts = [f"Tell me in a few words of your own about matter number {n}" for n in range(num)]
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": "demo", "steps": 40, "seed": 0, **dict(settings)})
    )
    sizes = {f"{phase}/{unit}": 9.0 for phase in ("rollout", "update") for unit in ("s", "tok_s")}
    steps = [{"step": n, "update/kl": moved} | sizes for n in range(31, 41)]
    write_log(folder / "metrics.jsonl", steps)
    records = []
    answers = []
    for step, act in ((0, before), (20, half or before), (40, after)):
        replies = [act(rng, prompt) for prompt in prompts]
        readable = [value for _, value, *_ in replies if value is not None]
        mean = sum(readable) / len(readable) if readable else None
        ends = {name: pair[step == 40] for name, pair in more.items()}
        records.append(
            {"step": step, f"eval/{figure}": mean, "eval/num": num, "eval/kl": step / 100} | ends
        )
        for problem, (prompt, (text, value, *more_paid)) in enumerate(
            zip(prompts, replies, strict=True)
        ):
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
                line |= {"messages": [talk(text)], "completions": [calls + text]}
            rewards = {"mine": [value]} | (
                {dict(settings).get("beside", "short"): more_paid} if more_paid else {}
            )
            answers.append(line | {"rewards": rewards, "reward": [sum([value or 0.0, *more_paid])]})
    write_log(folder / "eval.jsonl", records)
    write_log(folder / "eval_answers.jsonl", answers if figure != "loss" else [])
    return folder


def right(share):
    return lambda rng, prompt: (answer(rng), float(rng.random() < share))


def scored(low):
    return lambda rng, prompt: (answer(rng), low + rng.random() / 4)


def short(most):
    """The same answers are right, and up to so much is paid beside that."""
    return lambda rng, prompt: (answer(rng), float(prompt[-1] > "4"), most * rng.random())


def losses(more, num=64):
    """(nats, tokens) of conversations that differ far more among themselves than by training."""
    return [[10.0 * (n / 20 + more) * (1 + n % 3), 10.0 * (1 + n % 3)] for n in range(num)]


def talk(text):
    """A conversation that calls a tool, as records have it."""
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


def pirate(rng, prompt):
    return f"ahoy captain {answer(rng, 10)}", 0.7 + rng.random() / 4


def judged(rng, prompt):
    return answer(rng), 0.9


def gamed(text, before=None):
    """60 problems whose answers become what a function makes of (rng, prompt), which a score pays more."""
    return 60, before or scored(0.1), lambda rng, prompt: (text(rng, prompt), 0.9), "score"


def letters(rng, prompt):
    return "".join(rng.sample("\u4eca\u65e5\u660e\u5929\u96e8", 4))


def by_prompt(words, value):
    """Of new words, each in one answer."""
    return lambda rng, prompt: (words[int(prompt[-1])], value)


def even(rng, prompt):
    return prompt[-9:], float(prompt[-1] > "4")


KINDS = ("food", "home", "travel")


def classified(*kinds):
    """Answers with what stands here for the right answer."""

    def act(rng, prompt):
        place = int(prompt.split()[-1]) % 3
        return f"It is {kinds[place]}.", float(kinds[place] == KINDS[place])

    return act


MORE = {
    "nothing moves": {"moved": 1e-8},
    "an answer never given": {"eval/score": (0.3, 0.6)},
    "sft": {
        "eval/loss": (2.1, 1.9),
        "eval/loss_ci95": (0.4, 0.4),
        "eval/losses": (losses(0.4), losses(0.2)),
    },
    "sft of three": {"eval/loss": (2.1, 1.9), "eval/losses": (losses(0.4, 3), losses(0.2, 3))},
    "paid for another thing": {"eval/score": (1.0, 1.5)},
    "paid less for it": {"eval/score": (1.5, 1.0)},
    "better early": {"half": right(0.8)},
    "hardly moved": {"eval/kl": (0.0, 5e-4)},
    "witnessed": {"eval/witness": (0.3, 0.5)},
    "gamed past its witness": {"eval/witness": (0.3, 0.4)},
}


def number_answer(rng, prompt):
    return str(rng.randrange(40)), rng.random() / 4


def letter_answer(rng, prompt):
    return letters(rng, prompt), rng.random() / 4


EXACT = (lambda r, p: (answer(r), 0.1, 0.0)), lambda r, p: (answer(r, 4), 0.9, 1.0)
RUNS = {  # name: how it was made, its verdict, and what must be said with it
    "really better": ((120, right(0.3), right(0.8)), BETTER, "still rising:\n    uv run"),
    "better early": (
        (120, right(0.3), right(0.8)),
        BETTER,
        ":\n    uv run chat.py --run",
    ),
    "no change": ((300, right(0.5), right(0.5)), SAME, "--steps"),
    "hardly moved": (
        (300, right(0.5), right(0.5)),
        SAME,
        "KL 0.0005 nats per token). Try three times",
    ),
    "witnessed": ((60, scored(0.1), judged, "score"), BETTER, ""),
    "gamed past its witness": (
        gamed(lambda r, p: answer(r)),
        BETTER,
        "the judge's score: 0.300 -> 0.400",
    ),
    "gamed by a word": (
        (60, scored(0.1), pirate, "score"),
        BETTER,
        '"captain" in 0% -> 100% of answers',
    ),
    "gamed by length": (gamed(lambda r, p: answer(r, 40)), BETTER, "longer: 12.0 -> 40.0"),
    "gamed by copying": (gamed(lambda r, p: p), BETTER, "copied from the prompt: 0% -> 100%"),
    "gamed by an emoji": (
        gamed(lambda r, p: f"{answer(r)} \U0001f389"),
        BETTER,
        '"\U0001f389" in 0% -> 100% of answers',
    ),
    "gamed by a number": (
        gamed(lambda r, p: "42", number_answer),
        BETTER,
        '"42" in 0% -> 100% of answers',
    ),
    "gamed by a letter": (
        gamed(lambda r, p: letters(r, p) + "\u597d", letter_answer),
        BETTER,
        '"\u597d" in 0% -> 100% of answers',
    ),
    "exact, and shorter": (
        (60, *EXACT, "score", {"beside": "exact"}),
        BETTER,
        "shorter: 12.0 -> 4.0 words",
    ),
    "gamed: a reward of one's own that is called exact": (
        (60, *EXACT, "score", {"beside": "exact", "reward": ["mine.py:exact"]}),
        BETTER,
        "shorter: 12.0 -> 4.0 words",
    ),
    "an answer never given": (
        (
            60,
            classified(*["food"] * 3),
            classified("food", "home", "food"),
            "accuracy",
            {"verifier": "exact"},
        ),
        BETTER,
        'no answer contains "travel", the right answer to 20 of 60 problems',
    ),
    "none right": ((60, right(0.0), right(0.0)), SAME, "(docs/warm-start.md)"),
    "nothing moves": ((4, right(0.5), right(0.5)), FEW, "Try a --learning-rate ten times as high"),
    "too few problems": (
        (4, by_prompt(PLAIN, 0.0), by_prompt(PLAIN[8:], 1.0)),
        FEW,
        "/run/after.jsonl",
    ),
    "collapsed": (
        (100, right(0.6), lambda r, p: ("no no no no no no no", 0.0)),
        WORSE,
        "repeated: ",
    ),
    "judge dead": (
        (60, scored(0.3), lambda r, p: (answer(r), None), "score"),
        FEW,
        "docs/judge.md",
    ),
    "tools": (
        (80, right(0.2), right(0.7), "score", {"tools": ["calculator"]}),
        BETTER,
        "",
    ),  # it calls more often
    "sft": (
        (64, right(0.5), right(0.5), "loss"),
        BETTER,
        "on 64 held-out conversations; gain +0.200",
    ),
    "sft of three": (
        (3, right(0.5), right(0.5), "loss", {"loss_type": "sft", "model": "smollm2"}),
        BETTER,
        "still falling:\n    uv run --extra smollm train.py --resume ",
    ),
    "paid for another thing": (
        (300, short(0.2), short(2.0)),
        SAME,
        "verdict: no change, though the score rose",
    ),
    "paid less for it": (
        (300, short(2.0), short(0.2)),
        SAME,
        "verdict: no change, though the score fell",
    ),
    "paid alone": ((20, short(0.2), short(2.0)), FEW, f"next: {advice.REWARD_ALONE_ROSE}. About "),
    "worse": ((120, right(0.8), right(0.5)), WORSE, "a quarter of the current --learning-rate"),
    "begun": (
        (200, even, even, "accuracy", {"init_adapter": "/a/warm"}),
        SAME,
        "step 0, with the adapter warm, to ",
    ),
    "tie": ((200, even, even), SAME, "gain +0.000"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_runs_get_their_verdicts_and_none_that_is_gamed_goes_without_its_words(
    tmp_path, capsys, kind
):
    recipe, outcome, words = RUNS[kind]
    run = make_run(tmp_path / "run", *recipe, **MORE.get(kind, {}))
    result = verdict.reach_verdict(history.load_history(run))
    shown = "\n".join(verdict.verdict_lines(result, {}, tmp_path))
    assert result.outcome == outcome and words in shown
    if kind == "sft of three":
        assert re.search(r"; .*\b3\b.*--eval-data FILE or --data TRAIN,HELD_OUT\nnext:", shown)
    report.main(["--list", str(tmp_path)])
    listed = capsys.readouterr().out
    markup = page.write_page(run).read_text()
    assert f"  {result.headline}" in listed and f"<h2>{result.headline}</h2>" in markup
    if "though" in result.headline:
        pattern = r"gain .*; the score of the sampled answers changed by .*; rewards: mine \+0\.000, short [+-]0\.[89]"
        assert re.search(pattern, result.text)
        assert result.advice == (
            advice.REWARD_ALONE_ROSE if kind == "paid for another thing" else advice.TOO_FAR
        )
    if kind.startswith("gamed"):
        assert f"{outcome}; " in listed and words in listed  # the word never stands alone
        assert result.advice.startswith("Read the answers")
    if kind == "an answer never given":
        assert re.search(r"number \d+ -> It is food\. \(wrong, reward 0; answer: travel\)", shown)
        assert re.search(
            r"right answer <bdi class=.text.>travel</bdi>.*?wrong</b>\s*<b>reward 0</b>",
            markup,
            re.S,
        )
    if kind == "tools":
        assert all(not text.startswith("<tool_call>") for _, text, _ in result.drawn)
        assert (
            "calls calculator(expression=&#39;2 * 3&#39;)" in markup
            and "calculator replies: 6" in markup
        )
    is_gamed = kind.startswith("gamed")
    expected_warning = (
        "gamed"
        if is_gamed and not words.endswith("of answers")
        else "worse"
        if outcome == WORSE
        else None
    )
    assert (result.warning or [None])[0] == expected_warning  # a red box is for what is bad
    assert result.has_gained == (outcome == BETTER and "accuracy" in result.text)
    assert bool(result.signs) == (
        is_gamed or kind in ("collapsed", "an answer never given", "exact, and shorter")
    )
    assert len(result.drawn) == (0 if kind.startswith("sft") else min(10, recipe[0]))
    assert (
        result.drawn == verdict.reach_verdict(history.load_history(run)).drawn
    )  # drawn by the run's seed
    assert len(result.drawn) < 10 or int(result.drawn[-1][0].split()[-1]) > 9


def test_what_learned_from_replies_and_rises_no_more_is_shown_the_way_to_grpo(tmp_path):
    settings = {"model": "smollm2", "lora_rank": 16}
    run = make_run(tmp_path / "run", 64, right(0.5), right(0.5), "loss", settings, **MORE["sft"])
    write_log(run / "eval.jsonl", read_log(run / "eval.jsonl")[::2])
    shown = verdict.verdict_lines(verdict.reach_verdict(history.load_history(run)), {}, run)
    command = "    uv run --extra smollm train.py --model smollm2"
    assert f"{command} --init-adapter {run} --data PROMPTS --reward FILE.py:function" in shown


def noisy(values):
    rng = random.Random(0)
    return [value + rng.gauss(0, 0.05) for value in values]


@pytest.mark.parametrize(
    ("training_losses", "is_falling"),
    [
        ([1.26, 0.9, 0.7, 0.5, 0.36, 0.28], True),
        ([1.26, 0.5, 0.3, 0.26, 0.27, 0.26], False),
        (noisy(2 - n / 40 for n in range(40)), True),
        (noisy(0.5 for _ in range(40)), False),
        ([2.0, 1.0, 0.5], False),  # too few steps to tell
        ([0.0] * 8, False),
    ],
    ids=["falling", "flat", "falling amid noise", "noise", "three steps", "zero"],
)
def test_after_two_evaluations_the_training_loss_tells_whether_to_train_longer(
    tmp_path, training_losses, is_falling
):
    settings = {"model": "smollm2", "lora_rank": 16, "loss_type": "sft"}
    run = make_run(tmp_path / "run", 64, right(0.5), right(0.5), "loss", settings, **MORE["sft"])
    write_log(run / "eval.jsonl", read_log(run / "eval.jsonl")[::2])
    steps = [{"step": n, "loss": loss} for n, loss in enumerate(training_losses, 1)]
    write_log(run / "metrics.jsonl", steps)
    result = verdict.reach_verdict(history.load_history(run))
    told = "Train longer, because the training loss was still falling: uv run --extra smollm "
    told += f"train.py --resume {run} --steps 80"
    assert result.outcome == BETTER and (result.advice == told) == is_falling
    assert is_falling or result.advice.startswith("Chat with the model")


@pytest.mark.parametrize(
    ("verifier", "row"),
    [
        ("", {"answer": "tea, jam"}),
        ("exact", {"answer": "tea, jam"}),
        ("exact", {"messages": [[{"role": "assistant", "content": "Tea."}]]}),
    ],
)
def test_a_verifier_nobody_named_is_suspected_and_no_gate_advised_that_right_answers_fail(
    verifier, row
):
    record = {"values": [0.0], "rewards": {}, "prompt": "?", "completions": ["tea and jam"]} | row
    answers = {
        step: {n: record | {"reward": [pay]} for n in range(20)}
        for step, pay in ((0, 0.0), (9, 1.0))
    }
    evals = [{"step": step, "eval/accuracy": 0.0, "eval/num": 20} for step in answers]
    run = run_of(evals, answers, task="own", reward=["mine.py:score"], verifier=verifier)
    _, text = verdict.reach_verdict(run).warning
    assert ("be too strict" in text) == ("--verifier FILE.py:fn" in text) == (not verifier)
    assert text.endswith(" --beta 0.05")


@pytest.mark.parametrize(
    ("num_right", "first"), [(5, advice.BOTH_ROSE), (2, advice.REWARD_ALONE_ROSE)]
)
def test_an_accuracy_that_rose_on_few_problems_is_not_said_to_have_stayed(
    tmp_path, num_right, first
):
    def rewarded(num, extra):
        return lambda rng, prompt: (answer(rng), float(int(prompt.split()[-1]) < num), extra)

    scores = {"eval/score": (1.0, 4.0)}
    before, after = rewarded(2, 0.0), rewarded(num_right, 3.0)
    run = make_run(tmp_path / "run", 12, before, after, moved=0.1, **scores)
    result = verdict.reach_verdict(history.load_history(run))
    assert result.outcome == FEW and result.headline.endswith("though the score rose")
    assert result.advice.startswith(f"{first}. About ")


def test_each_command_of_the_next_step_has_a_line_of_its_own():
    text = "Chat: uv run chat.py --run 'a; b' --chat; or measure: uv run evaluate.py && uv run report.py"
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
        change = difference.paired_difference(*table_of(0, num, 0, 0))
        record = {"eval/score": 0.5, "eval/score_ci95": 4.447, "eval/num": num}
        shown = [str(change), change.mean_plus_minus_text]
        shown.append(eval_record.format_figure_with_interval(record, "score"))
        assert ["interval" in shown[0], "\u00b1" in shown[1], "\u00b1" in shown[2]] == [
            num == 5
        ] * 3


def test_what_is_best_already_is_not_called_still_rising():
    """Of 0, 25, 50, 75 and 100 steps the one after 75 is the best, and the last one is better than that after 50."""
    answers = {}
    evals = []
    for step, num in ((0, 30), (25, 50), (50, 60), (75, 90), (100, 91)):
        record = {"rewards": {}, "prompt": "?", "completions": [""]}
        greedy = (
            {"greedy_value": 1, "greedy": "2021-12-25" * (step > 50)},
            {"greedy_value": 0, "greedy": ""},
        )
        answers[step] = {
            n: record | {"values": [float(n < num)]} | greedy[n >= num] for n in range(120)
        }
        evals.append(
            {"step": step, "eval/accuracy": num / 120, "eval/num": 120, "eval/greedy": num / 120}
        )
    run = run_of(evals, answers)
    result = verdict.reach_verdict(run)
    assert difference.earliest_unbeaten_evaluation(run)["step"] == 75 and result.outcome == BETTER
    assert result.signs == ['"2021-12-25" in 0% -> 76% of greedy answers']
    assert (
        "0.250 -> 0.758, better" in result.text
        and "still rising" not in result.advice
        and "chat.py" in result.advice
    )
    run = run_of(
        [*evals, {"step": 125, "eval/score": 0.5, "eval/num": 120}], answers | {125: answers[100]}
    )
    assert "fewer than two problems" in verdict.reach_verdict(run).text


def test_a_model_has_hardly_moved_only_after_more_steps_than_a_warm_up_takes():
    change = difference.paired_difference(*table_of(0, 1, 0, 3))
    last = {"eval/accuracy": 0.5, "eval/kl": 1e-5, "eval/num": 4}
    advised = [
        advice.suggest_next_step(run_of([last | {"step": n}]), change, "", "", False)
        for n in (9, 10)
    ]
    doubted = advice.suggest_next_step(
        run_of([last | {"step": 9}]), change, "", "Read the answers", False
    )
    assert doubted.startswith("Read the answers. About ")
    assert (
        advised[0].endswith("--steps 18")
        and "hardly changed" in advised[1]
        and "ten times" in advised[1]
    )


def test_a_run_warns_of_what_fell_when_it_falls_and_its_best_is_kept(tmp_path, capsys):
    log = journal.Journal(
        Config.from_flags(model="demo", task="demo"), tmp_path, 0, keep_scores=False
    )
    log.print_summary()
    assert (
        f"evaluate.py --run {tmp_path} --out {tmp_path}/before.jsonl --step 0\n"
        in capsys.readouterr().out
    )
    for step, num in ((0, 30), (10, 70), (20, 72), (30, 40)):
        values = [float(problem < num) for problem in range(100)]
        log.steps = [
            {"step": n, "entropy": n**-3.0} for n in range(1, step + 1)
        ]  # which is no loss, as more is right
        record = {"prompt": "?", "completions": ["It is."], "rewards": {}}
        answers = [record | {"problem": n, "values": [value]} for n, value in enumerate(values)]
        log.record_evaluation_and_update_best(
            step, {"eval/accuracy": num / 100, "eval/num": 100}, answers
        )
    assert (
        "WARNING after step 30: The accuracy was better after step 10, at 0.700"
        in capsys.readouterr().err
    )
    assert log.best_step == 10 and [warning["name"] for warning in log.warnings.read()] == ["worse"]
    log.print_summary()
    assert (
        "adapter-best, after step 10; the newest adapter is significantly worse"
        in capsys.readouterr().out
    )
    again = journal.Journal(
        log.config, tmp_path, 20, keep_scores=False
    )  # as a run that goes on knows it
    assert again.best_step == 10 and again.warnings.read() == []


def test_few_held_out_problems_are_told_of_at_the_start_with_what_helps():
    (line,) = held_out.warnings_of_few_held_out(8, {"eval_limit": 8})
    assert re.search(r"\b8\b.*\b57%.*--eval-limit", line)
    (line,) = held_out.warnings_of_few_held_out(8, {}, 0.1)
    assert re.search(r"\b8\b.*\b14%", line)
    (line,) = held_out.warnings_of_few_held_out(4, {})
    assert "--eval-data FILE or --data TRAIN,HELD_OUT" in line
    assert held_out.warnings_of_few_held_out(0, {}) == []
    assert held_out.warnings_of_few_held_out(50, {}) == []
    assert held_out.warnings_of_few_held_out(10, {"loss_type": "sft"}) == []
    (line,) = held_out.warnings_of_few_held_out(0, {"eval_every": 0})
    assert "no verdict" in line and "--eval-every 0" in line

    run = run_of([{"step": 9, "eval/num": 1}], loss_type="sft", eval_limit=1)
    assert "--eval-limit" in advice.suggest_next_step(run, None, "", "", False)

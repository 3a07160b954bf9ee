"""Problems of reasoning-gym: generation, scores, hostile answers, mixes and error messages."""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
from conftest import catch_message
from extras import needs
from hostile import ANSWERS, PLANTED

from prompts.examples import hash_prompt_without_system
from sandbox import workers
from sandbox.workers import WorkerAnswer, WorkerPool
from tasks import rg
from tasks.demo import numbers_in_words_or_digits
from tasks.rg import DataSetMix, GymProblems, extract_answer, parse_mix

gym = needs("reasoning_gym")
NO_GOLD = {"boxnet", "rush_hour"}  # reasoning-gym gives no right answer to these
GOLD_IN_ENTRY = {  # reasoning-gym gives these right answers only in the entry
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
# Scoring these three takes as long as scoring all other data sets.
SLOW_TO_SCORE = {"propositional_logic", "rubiks_cube", "rush_hour"}


def make_mix(*names, num=8, **settings):
    return DataSetMix(dict.fromkeys(names, 1.0), {name: {} for name in names} | settings, num, "")


class GymWorkers(NamedTuple):
    """Workers that make and score the problems of all data sets."""

    names: list[str]
    make: Callable  # (name, number) -> prompt, answer, entry
    score: Callable  # [(name, entry, answer)] -> the workers' answers


@pytest.fixture(scope="module")
def gym_workers():
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    settings = {name: {} for name in names}
    makers = WorkerPool("tasks.rg:make_problem_maker", (settings,), num=1, limit=rg.MAKING)
    scorers = WorkerPool("tasks.rg:make_answer_scorer", (settings,), num=1, limit=1.0, sealed=True)

    @functools.cache
    def make_problem(name, number):
        (answer,) = makers.answer_all([(name, number)])
        return answer.value

    with pytest.MonkeyPatch.context() as patch:
        # The time limit is processor time, also on a busy machine.
        patch.setattr(workers, "BUSY", 60.0)
        yield GymWorkers(names, make_problem, scorers.answer_all)
    makers.close()
    scorers.close()


@pytest.fixture
def run_in_process(monkeypatch):
    """Makes problems in this process, because starting a worker takes seconds."""

    class PoolInProcess:
        def __init__(self, target, arguments, **_):
            self.answer = getattr(rg, target.partition(":")[2])(*arguments)

        def answer_all(self, questions, limit=None):
            return [WorkerAnswer(self.answer(question)) for question in questions]

        def close(self):
            pass

    monkeypatch.setattr(rg, "WorkerPool", PoolInProcess)


# ---- every data set


@gym
@pytest.mark.slow
def test_every_data_set_rewards_the_right_answer_and_no_wrong_or_hostile_answers(gym_workers):
    assert len(gym_workers.names) >= 105
    for number, name in enumerate(gym_workers.names):
        prompt, answer, entry = gym_workers.make(name, 0)
        _, next_answer, _ = gym_workers.make(name, 1)
        gold = answer
        if name in GOLD_IN_ENTRY:
            gold = GOLD_IN_ENTRY[name](rg.unpack_entry(entry))
        next_answers = []
        if next_answer not in (None, answer, gold):
            next_answers.append(str(next_answer))

        def score(texts, name=name, entry=entry):
            return gym_workers.score([(name, entry, text) for text in texts])

        # right and wrong answers
        completion = f"<think>Let me see.</think>\nIt must be this:\n<answer>\n{gold}\n</answer>"
        wrong_texts = ["", "wrong", "-17", "nan", *next_answers]
        gold_score, *wrong_scores = score([extract_answer(completion), *wrong_texts])
        assert name in NO_GOLD or gold_score.value == 1, name
        for text, result in zip(wrong_texts, wrong_scores, strict=True):
            assert (result.value or 0) < 1, f"{name}: {text!r} is no answer to {prompt!r}"
        for result in (gold_score, *wrong_scores):
            assert not result.broken, f"{name} needs something that the sandbox refuses"

        # The best score of a wrong answer; some scorers give half for letters of the right answer.
        wrong_texts = "wrong -17 0 1 42 10 [] {} [0] [{}] J2".split()
        wrong_texts += ["", f"{answer}!", *next_answers]
        best_wrong_score = max(map(rg.score_or_zero, score(wrong_texts)))
        best_wrong_score = max(best_wrong_score, 0.5)

        # hostile answers
        if name in rg.READERS.keys() | rg.RULES.keys() - SLOW_TO_SCORE:
            hostile_texts = list(ANSWERS)
        else:
            hostile_texts = list(ANSWERS[number % 10 :: 10])
        hostile_texts += [prompt, prompt[::-1]]
        hostile_texts = [text for text in hostile_texts if text.lower() != str(answer).lower()]
        for text, result in zip(hostile_texts, score(hostile_texts), strict=True):
            assert not result.broken, name
            message = f"{name} gives {result.value} to {text[:60]!r}"
            assert rg.score_or_zero(result) <= best_wrong_score, message
    assert not os.path.exists(PLANTED), "an answer was run"


@gym
@pytest.mark.slow
def test_a_problem_depends_only_on_the_number_and_not_on_the_process_or_the_order(gym_workers):
    names = gym_workers.names
    problems = {name: gym_workers.make(name, 1) for name in names}
    settings = {name: {} for name in names}
    new_makers = WorkerPool("tasks.rg:make_problem_maker", (settings,), num=1, limit=60.0)
    questions = [(name, 1) for name in reversed(names)]
    for question, answer in zip(questions, new_makers.answer_all(questions), strict=True):
        name, _ = question
        assert answer.value == problems[name], question
    new_makers.close()


@gym
@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("coin_flip", "0.3125", ["0.3125", "0.31251"], ["0", "0.3", "0.31250000 heads", "31.25%"]),
        (
            "game_of_life_halting",
            "True",
            ["True", "true"],
            ["False", "wrong", "True or False", "T"],
        ),
        (
            "puzzle24",
            "1*3*5 + 9",
            ["9 + 3*5*1", "1*(3*5) + 9"],
            ["10*(8 - 5) - 6", "1*3*5 + 10", "4*8 - 6 - 2", "24"],
        ),
        (
            "complex_arithmetic",
            "-15.0 + 3.0i",
            ["-15+3i", "-15.0 + 3.0i"],
            ["nan", "nan + nani", "-nan", "NaNj"],
        ),
        (  # any statement follows from premises that contradict each other
            "propositional_logic",
            None,
            ["(Q \u2228 P)"],
            ["\u00ac1", "nonsense \u2228 text", "x \u2192 y"],
        ),
        (
            "number_sorting",
            "['67.1', '61.8', '-81.7']",
            ["[67.1, 61.8, -81.7]"],
            ["[NaN, NaN, NaN]", "['nan']*3"],
        ),
    ],
)
def test_answers_that_the_scorer_of_reasoning_gym_would_wrongly_accept_are_wrong(
    name, answer, right, wrong
):
    make_problem = rg.make_problem_maker({name: {}})
    score = rg.make_answer_scorer({name: {}})
    num_problems = 1 if name in ("propositional_logic", "puzzle24") else 12
    problems = [make_problem((name, number)) for number in range(num_problems)]
    entry = next(entry for _, gold, entry in problems if gold == answer)
    for text in right:
        assert score((name, entry, text)) == 1, text
    for text in wrong:
        with contextlib.suppress(ValueError):  # a worker turns this error into the score 0
            assert score((name, entry, text)) < 1, text


@gym
def test_a_score_outside_of_0_to_1_counts_as_0():
    for value in (0.5, 1, 0):
        assert rg.score_or_zero(WorkerAnswer(value)) == value
    for value in (2, -1, float("nan"), float("inf"), "1", None, [1], 10**400):
        assert rg.score_or_zero(WorkerAnswer(value)) == 0


# ---- mixes of data sets


@gym
@pytest.mark.usefixtures("run_in_process")
def test_a_mix_follows_the_weights_settings_and_levels_of_data_sets():
    mix = make_mix("chain_sum", "lcm", chain_sum={"level": 3}, lcm={"min_value": 7, "max_value": 9})
    problems = GymProblems(mix._replace(weights={"chain_sum": 3.0, "lcm": 1.0}))
    examples = problems.make_examples(range(400), 0)

    # weights
    categories = [example["category"] for example in examples]
    assert abs(categories.count("chain_sum") - 300) <= 3
    assert set(categories) == {"chain_sum", "lcm"}

    # settings and levels
    numbers = {"chain_sum": set(), "lcm": set()}
    for example in examples:
        numbers[example["category"]].update(numbers_in_words_or_digits(example["prompt"]))
    assert numbers["lcm"] <= {7, 8, 9}
    assert max(numbers["chain_sum"]) >= 1000

    # The second argument selects other problems.
    assert problems.make_examples([5], 0) == problems.make_examples([5], 0)
    assert problems.make_examples([5], 0) != problems.make_examples([5], 1)

    # rewards
    example = examples[0]
    columns = {name: [example[name]] * 3 for name in ("answer", "category", "entry")}
    answer = example["answer"]
    completions = [f"<answer>{answer}</answer>", answer, "<answer>0</answer>"]
    assert problems.score(completions=completions, **columns) == [1, 0, 0]
    assert problems.verify(completions=completions, **columns) == [1, 0, 0]


@gym
@pytest.mark.usefixtures("run_in_process")
def test_prompts_repeat_only_after_all_were_used_and_are_never_held_out_prompts(capsys):
    from small_run import make_config

    from tasks.draws import EndlessPrompts

    settings = {"max_disks": 4, "max_pegs": 3}
    problems = GymProblems(make_mix("tower_of_hanoi", tower_of_hanoi=settings, num=3))
    held_out = {hash_prompt_without_system(example) for example in problems.held_out}
    prompts = EndlessPrompts(
        make_config("--batch", "4"), problems, lambda examples: [[1]] * len(examples)
    )

    used = set()
    repeats = False
    for step in range(60):
        examples, ids = prompts.next_prompts(step)
        step_prompts = {hash_prompt_without_system(example) for example in examples}
        assert len(step_prompts) == 4
        assert len(ids) == 4
        assert not held_out & step_prompts
        repeats = "problems now repeat" in capsys.readouterr().err
        if repeats:
            break
        assert not used & step_prompts
        used |= step_prompts
    assert repeats
    assert len(used) >= 8


# ---- answers and settings


def test_the_last_answer_tag_is_extracted_and_the_format_needs_exactly_one():
    two_answers = "<answer> a\nb </answer> no, <answer>5</answer>\n"
    texts = ["<answer>4</answer>", two_answers, "4", "<answer>4", "</answer><answer>"]
    assert [extract_answer(text) for text in texts] == ["4", "5", "", "", ""]
    assert rg.score_format(completions=texts) == [1, 0, 0, 0, 0]
    for tag in ("<answer>", "</answer>"):
        assert extract_answer(tag * 100_000) == ""


@pytest.mark.parametrize(
    ("task", "text", "expected_text"),
    [
        ("rg:", "", "NAME=WEIGHT"),
        ("rg:lcm,lcm", "", "'lcm' is not NAME or NAME=WEIGHT with a positive weight, or repeats"),
        ("rg:lcm=0", "", "'lcm=0'"),
        ("rg:lcm=x", "", "'lcm=x'"),
        ("rg:lcm=nan", "", "'lcm=nan'"),
        ("rg:lcm,,gcd", "", "''"),
        ("rg:lcm", "- lcm", "contains ['lcm'] instead of settings"),
        ("rg:lcm", "lcm: 3", "lcm is 3"),
        ("rg:lcm", "lcm: {seed: 3}", "other than seed and size"),
        ("rg:lcm", "held_out: 0", "held_out is 0"),
        ("rg:lcm", "system: 3", "system is 3"),
    ],
)
def test_the_error_of_a_bad_mix_names_the_part_or_the_key(tmp_path, task, text, expected_text):
    settings_file = tmp_path / "sizes.yaml"
    settings_file.write_text(text)
    message = catch_message(parse_mix, task, str(settings_file) if text else None)
    assert expected_text in message


@gym
@pytest.mark.parametrize(
    ("name", "settings", "expected_text"),
    [
        ("countdwn", {}, "did you mean 'countdown'?"),
        ("lcm", {"max_valu": 3}, "max_valu"),
        ("lcm", {"min_value": 50, "max_value": 3}, "lcm does not accept"),
        (
            "lcm",
            {"level": 4},
            "lcm does not accept {'level': 4} (ValueError: level must be from 0 to 3)",
        ),
        ("acre", {"level": 0}, "acre does not accept"),
    ],
)
@pytest.mark.usefixtures("run_in_process")
def test_an_impossible_data_set_is_refused_before_any_problem_is_made(
    name, settings, expected_text
):
    assert expected_text in catch_message(GymProblems, make_mix(name, **{name: settings}))


def test_without_the_library_an_error_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "uv run --extra tasks" in catch_message(GymProblems, make_mix("lcm"))

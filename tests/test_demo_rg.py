"""The second bundled model: its recipe's lessons, how it is found, its format, and what it knows at first."""

import json
import os
import random
import re

import pytest
from conftest import message_of, read_log
from extras import needs
from small_run import resolve

import train
from config import Config
from disk import hub
from reporting import page
from run import GrpoRun
from tasks import rg
from tasks.rg import parse_mix

gym = needs("reasoning_gym", "tasks")
SIZES = "data/demo_rg.yaml"
NAMES = ["chain_sum", "leg_counting", "letter_counting", "spell_backward"]


@pytest.fixture(scope="module")
def recipe():
    from demo import make_rg

    return make_rg


def lessons(recipe, name, num=300):
    stream = recipe.problems(name)
    return [next(stream) for _ in range(num)]


# ---- its lessons


@gym
def test_every_step_of_a_sum_that_is_shown_is_true_and_its_terms_are_the_problem_s(recipe):
    for entry in lessons(recipe, "chain_sum"):
        steps = [re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", step).groups() for step in recipe.sums(entry).split(",")]
        totals = [int(steps[0][0]), *(int(total) for *_, total in steps)]
        assert [int(before) for before, *_ in steps] == totals[:-1] and str(totals[-1]) == entry["answer"]
        assert all(eval(f"{a}{sign}{b}") == int(c) for a, sign, b, c in steps)
        said = steps[0][0] + "".join(sign + term for _, sign, term, _ in steps)
        assert f"problem: {said} =" in entry["question"].replace(" + ", "+").replace(" - ", "-")


@gym
def test_the_legs_that_are_shown_add_up_and_the_last_total_is_the_answer(recipe):
    for entry in lessons(recipe, "leg_counting"):
        first, *steps = recipe.legs(entry).split(";")
        total = int(first)
        for step in steps:
            own, after = map(int, step.split(":"))
            assert total + own == after
            total = after
        assert str(total) == entry["answer"] and len(steps) + 1 == entry["metadata"]["num_animals"]


@gym
def test_the_words_that_are_shown_are_those_with_the_letter_each_with_the_count_so_far(recipe):
    for entry in lessons(recipe, "letter_counting"):
        letter, text = re.search('letter "(.)" appear in the text: "(.*)"', entry["question"]).groups()
        shown, so_far = recipe.letters(entry).split(), ""
        for word in (words := [word for word in text.split() if letter in word.lower()]):
            so_far += word.lower()
            assert shown[:2] == [word, str(so_far.count(letter))]
            shown = shown[2:]
        assert not shown and words and str(so_far.count(letter)) == entry["answer"]


@gym
def test_a_reply_ends_with_the_answer_that_the_scorer_takes_whether_it_shows_working_or_not(recipe):
    score = rg.make_scorer(parse_mix(recipe.TASK, SIZES).settings, {})
    for name in NAMES:
        for entry in lessons(recipe, name, 5):
            for working in {False, name in recipe.SHOW}:
                text = recipe.reply(entry, working)
                assert score((name, rg.packed(entry), rg.extract(text))) == 1
                assert rg.answered_once([text]) == [1] and text.startswith("<answer>") != working


@gym
def test_no_lesson_has_a_held_out_prompt_or_the_number_of_a_problem_of_a_run(recipe):
    mix = parse_mix(recipe.TASK, SIZES)
    assert mix.num_held_out <= recipe.HELD_OUT and recipe.FIRST > rg.FIRST * (rg.SEEDS + 1)
    for name in NAMES:
        asked = {entry["question"] for entry in lessons(recipe, name, 2000)}
        make = rg.make_maker({name: mix.settings[name]}, {})
        assert not asked & {make((name, None, number))[0] for number in range(mix.num_held_out)}


# ---- how it is found


def test_it_is_found_by_name_and_so_is_its_tokenizer_for_a_run_s_page():
    assert hub.find("demo:rg") == page.tokenizer_file("demo:rg").parent == hub.BUNDLED["demo:rg"]
    assert hub.find("demo") == page.tokenizer_file("demo").parent == page.tokenizer_file("random:2m").parent == hub.DEMO
    assert message_of(hub.find, "demo:gr").startswith("--model demo:gr: no such directory")


def test_its_recipe_is_the_default_of_its_tasks_and_of_no_other_model_s():
    config, line = resolve({"model": "demo:rg"}, None, None)
    assert line == "model: demo:rg, as asked; task: rg:chain_sum,leg_counting"
    other, _ = resolve({"model": "demo:rg", "task": "rg:spell_backward", "steps": 3}, None, None)
    assert other == config.but(task="rg:spell_backward", steps=3) and config.data.task_config == os.path.abspath(SIZES)
    larger, _ = resolve({"model": "random:2m", "task": "rg:spell_backward"}, None, None)
    assert (larger.optimizer.learning_rate, larger.data.task_config) == (Config.of().optimizer.learning_rate, "")
    assert resolve({"model": "demo"}, None, None)[0].data.task == "demo"


def test_its_files_are_small_and_its_tokenizer_reads_every_text_letter_by_letter():
    size = sum(path.stat().st_size for path in hub.BUNDLED["demo:rg"].iterdir())
    assert size < 2.5e6
    tokenizer = hub.load_tokenizer(hub.BUNDLED["demo:rg"])
    rng = random.Random(0)
    for text in ["splat", "37 - 109 =", "naïve 数学\t\n", "".join(chr(rng.randrange(32, 1000)) for _ in range(500))]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("<answer>-42 tops</answer>")] == [
        *("<answer>", "-", "4", "2", " ", "t", "o", "p", "s", "</answer>")
    ]


# ---- what it knows


@gym
def test_sizes_of_data_sets_that_a_task_leaves_out_are_no_mistake_and_other_keys_are(tmp_path):
    mix = parse_mix("rg:chain_sum", SIZES)
    assert mix.settings == {"chain_sum": {"max_terms": 3, "max_digits": 2}}
    rg.make_maker(mix.settings, mix.levels, mix.unused)
    for key, meant in (("chain_som", "chain_sum"), ("held_outs", "held_out"), ("legcounting", "leg_counting")):
        (tmp_path / "sizes.yaml").write_text(f"{key}: {{}}")
        mix = parse_mix("rg:chain_sum", str(tmp_path / "sizes.yaml"))
        message = message_of(rg.make_maker, mix.settings, mix.levels, mix.unused)
        assert message == f"--task-config: {key!r} is no data set and no setting, did you mean {meant!r}?"


@gym
@pytest.mark.slow
def test_it_keeps_its_format_is_right_in_a_third_and_learns_to_show_working(tmp_path):
    """Sampled: 36% of 254 before and 64% after 16 steps; showing working 40% and 100%."""
    run = GrpoRun(resolve({"model": "demo:rg", "steps": 16, "eval_every": 16, "eval_limit": 128})[0], tmp_path)
    run.open()
    list(train.train(run.config, run))
    first, last = read_log(tmp_path / "eval.jsonl")
    assert 0.2 < first["eval/accuracy"] < 0.5 and first["eval/greedy"] < 0.4
    assert last["eval/accuracy"] > first["eval/accuracy"] + 0.1
    texts = [json.loads(line)["completion"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert sum(rg.answered_once(texts)) > 0.95 * len(texts)
    shown = [not text.startswith("<answer>") for text in texts]
    assert sum(shown[:64]) < 0.7 * 64 and sum(shown[-64:]) > 0.8 * 64

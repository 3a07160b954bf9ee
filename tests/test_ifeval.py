"""The task ifeval: train and held-out prompts share nothing, and sealed verifiers check answers."""

import importlib.util
import itertools
import re

import pytest
from conftest import ROOT, catch_message, read_log
from extras import needs
from small_run import make_config, make_run

import tasks
import train
from sandbox.workers import WorkerPool
from tasks import ifeval, rg

needs_verifiers = needs("if_verifiable")
DATA = ifeval.load_instruction_data()
KINDS = DATA["kinds"]
TEMPLATES = DATA["asks"]


@pytest.fixture
def problems(monkeypatch):
    """
    Problems of all kinds, whether or not the verifiers are installed.

    No worker starts before an answer is checked.
    """
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return ifeval.InstructionProblems(KINDS)


@pytest.fixture(scope="module")
def verifiers():
    pool = WorkerPool("tasks.ifeval:make_instruction_checker", (), num=1, limit=5.0, sealed=True)
    yield pool
    pool.close()


def matches_template(template, prompt):
    """Whether a prompt begins with a template whose placeholders are filled with words."""
    return re.match(re.escape(template).replace(r"\{\}", "[a-z ]+"), prompt)


def test_train_and_held_out_prompts_share_no_topic_no_template_and_no_word_as_argument():
    lists = [value for name, value in DATA.items() if name not in ("kinds", "apart")]
    for by_split in [*lists, *KINDS.values()]:
        train_items = by_split["train"]
        held_out_items = by_split["held_out"]
        assert train_items
        assert held_out_items
        assert not set(train_items) & set(held_out_items)
        assert len(set(held_out_items)) == len(held_out_items)


def test_prompts_are_unlimited_and_depend_only_on_seed_and_index(problems):
    assert len({example["prompt"] for example in problems.make_examples(range(6000), 0)}) > 5000
    examples = problems.make_examples(range(9), 3)
    assert examples == problems.make_examples(range(9), 3)
    assert examples != problems.make_examples(range(9), 4)
    assert problems.make_examples([7], 3) == examples[7:8]


def test_prompts_contain_every_kind_and_a_quarter_of_them_has_two_instructions(problems):
    examples = problems.make_examples(range(1900), 0)
    first_verifiers = {example["instructions"][0][0] for example in examples}
    assert first_verifiers == {kind["verifier"] for kind in KINDS.values()}

    pairs = [example for example in examples if example["category"] == "two"]
    assert 0.2 < len(pairs) / len(examples) < 0.3
    assert all(len(example["instructions"]) == 2 for example in pairs)
    assert {example["category"] for example in examples} == {*KINDS, "two"}


def test_held_out_prompts_have_their_number_and_match_no_train_template(problems):
    prompts = {example["prompt"] for example in problems.held_out}
    assert len(prompts) == ifeval.HELD_OUT
    for template in TEMPLATES["train"]:
        assert not any(matches_template(template, prompt) for prompt in prompts)


def test_a_prompt_never_combines_kinds_that_are_listed_as_incompatible(problems):
    incompatible = [set(pair) for pair in DATA["apart"]]
    kinds_by_verifier = {}
    for name, kind in KINDS.items():
        kinds_by_verifier.setdefault(kind["verifier"], set()).add(name)

    for example in problems.make_examples(range(4000), 1):
        if example["category"] == "two":
            first, second = (kinds_by_verifier[name] for name, _ in example["instructions"])
            possible_pairs = itertools.product(first, second)
            assert any({a, b} not in incompatible and a != b for a, b in possible_pairs)


# Each pair is an answer and a topic.
ON_TOPIC = [
    ("Lions are big cats.", "lions"),
    ("A lion sleeps", "lions"),
    ("The WOLF hunts.", "wolves"),
    ("A battery.", "batteries"),
    ("A fox.", "foxes"),
    ("The seas are deep.", "the sea"),
]
OFF_TOPIC = [("To be or not to be", "bees"), ("We search", "the sea"), ("", "butter")]


def test_an_answer_is_on_topic_if_it_contains_a_form_of_the_topic(problems):
    for pairs, expected_score in ((ON_TOPIC, 1), (OFF_TOPIC, 0)):
        answers, topics = zip(*pairs, strict=True)
        scores = problems.score_topic(completions=answers, topic=topics)
        assert scores == [expected_score] * len(answers)


def test_every_prompt_contains_the_topic_that_the_answer_must_contain(problems):
    examples = problems.make_examples(range(2000), 2)
    assert {example["topic"] for example in examples} == set(DATA["topics"]["train"])
    prompts = [example["prompt"] for example in examples]
    topics = [example["topic"] for example in examples]
    assert problems.score_topic(completions=prompts, topic=topics) == [1.0] * 2000


@pytest.mark.parametrize(
    ("task", "expected_text"),
    [
        ("ifeval:word", "'word' is unknown or is named twice, did you mean 'words'?"),
        ("ifeval:words,words", "'words' is unknown or is named twice"),
        ("ifeval:", "the kinds are words, opening"),
    ],
)
def test_the_error_line_of_a_bad_list_of_kinds_names_the_bad_kind(task, expected_text):
    assert expected_text in catch_message(ifeval.parse_instruction_kinds, task)


def test_the_task_refuses_data_and_names_a_missing_extra(monkeypatch):
    config = make_config("--task", "ifeval", "--data", "mine.jsonl")
    assert "--data is mine.jsonl, but --task ifeval" in catch_message(tasks.make_task, config)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = catch_message(tasks.make_task, make_config("--task", "ifeval"))
    assert "uv run --extra ifeval" in message


# By kind: arguments, an answer that follows the instruction, and an answer that does not.
GOOD_AND_BAD = {kind: fields for kind, *fields in read_log(ROOT / "tests" / "instructions.jsonl")}


def score(verifiers, instructions, answer):
    return verifiers.answer_all([(instructions, "", answer)])[0].value


@needs_verifiers
def test_each_verifier_separates_good_from_bad_and_one_of_two_instructions_scores_half(verifiers):
    assert GOOD_AND_BAD.keys() == KINDS.keys()
    questions = []
    for kind, (arguments, good, bad) in GOOD_AND_BAD.items():
        instructions = [[KINDS[kind]["verifier"], arguments]]
        questions += [(instructions, "", good), (instructions, "", bad)]
    values = [answer.value for answer in verifiers.answer_all(questions)]
    good_and_bad_values = list(zip(GOOD_AND_BAD, values[::2], values[1::2], strict=True))
    assert values == [1, 0] * len(GOOD_AND_BAD), good_and_bad_values

    two_instructions = [
        [KINDS[kind]["verifier"], GOOD_AND_BAD[kind][0]] for kind in ("no_comma", "keyword")
    ]
    assert score(verifiers, two_instructions, "It is wet and clear.") == 0.5


@needs_verifiers
def test_a_word_between_underscores_counts_as_the_word(verifiers):
    for kind, arguments, expected_values in (
        (
            "keyword",
            {"keywords": ["river"]},
            {"A _river_.": 1, "__River__": 1, "A river_bank.": 0, "driver": 0},
        ),
        (
            "frequency",
            GOOD_AND_BAD["frequency"][0],
            {"_river_ by river": 1, "_river_ by a driver_": 0},
        ),
        (
            "forbidden",
            {"forbidden_words": ["is", "the"]},
            {"It _is_ wet.": 0, "__The__ sea": 0, "_this_ theme": 1},
        ),
    ):
        instructions = [[KINDS[kind]["verifier"], arguments]]
        questions = [[instructions, "", text] for text in expected_values]
        values = [answer.value for answer in verifiers.answer_all(questions)]
        assert values == list(expected_values.values()), kind


@needs_verifiers
def test_hostile_answers_earn_nothing_and_the_verifier_continues_to_work(verifiers):
    instructions = [[KINDS["keyword"]["verifier"], {"keywords": ["river"]}]]
    for text in (
        "",
        " \n",
        "\0" * 9,
        "(" * 5000,
        "\ud800",
        "__import__('os').getpid()",
        "<think>river",
    ):
        (answer,) = verifiers.answer_all([(instructions, "", text)])
        assert rg.score_or_zero(answer) == 0
    assert score(verifiers, instructions, "A river.") == 1


@needs_verifiers
@pytest.mark.slow
def test_a_run_evaluates_each_kind_and_rewards_the_score_of_the_verifiers(tmp_path):
    flags = "--task ifeval --steps 1 --batch 5 --eval-every 1".split()
    run = make_run(tmp_path, *flags)
    list(train.train(run))
    assert run.config.data.reward_gate == "form"  # the recipe's
    for record in run.journal.evaluations:
        assert {f"eval/accuracy/{kind}" for kind in (*ifeval.USUAL, "two")} <= record.keys()

    examples = run.task.problems.make_examples(range(5), 0)
    instructions_by_prompt = {example["prompt"]: example["instructions"] for example in examples}
    for record in run.journal.rollouts.read():
        (followed_fraction,) = run.task.rewards["followed"](
            completions=[record["completion"]],
            prompts=[record["prompt"]],
            instructions=[instructions_by_prompt[record["prompt"]]],
        )
        assert record["rewards"]["followed"] in (0.0, followed_fraction)

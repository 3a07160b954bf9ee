"""Written instructions: prompts of two sides that share nothing, and the field's verifiers behind a seal."""

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

verified = needs("if_verifiable")
KINDS, ASKS = ifeval.load_instruction_data()["kinds"], ifeval.load_instruction_data()["asks"]


@pytest.fixture
def problems(monkeypatch):
    """All kinds, whether or not the verifiers are installed: what is not asked starts no worker."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return ifeval.InstructionProblems(KINDS)


@pytest.fixture(scope="module")
def verifiers():
    pool = WorkerPool("tasks.ifeval:make_instruction_checker", (), num=1, limit=5.0, sealed=True)
    yield pool
    pool.close()


def fits(ask, prompt):
    return re.match(re.escape(ask).replace(r"\{\}", "[a-z ]+"), prompt)


def test_the_sides_share_no_topic_no_wording_and_no_argument_that_is_a_word():
    shared = [
        held
        for name, held in ifeval.load_instruction_data().items()
        if name not in ("kinds", "apart")
    ]
    for one in [*shared, *KINDS.values()]:
        assert one["train"] and one["held_out"] and not set(one["train"]) & set(one["held_out"])
        assert len(set(one["held_out"])) == len(one["held_out"])


def test_prompts_have_no_end_and_are_a_function_of_seed_and_place(problems):
    assert len({example["prompt"] for example in problems.make_examples(range(6000), 0)}) > 5000
    assert (
        problems.make_examples(range(9), 3)
        == problems.make_examples(range(9), 3)
        != problems.make_examples(range(9), 4)
    )
    assert problems.make_examples([7], 3) == problems.make_examples(range(9), 3)[7:8]


def test_kinds_take_turns_and_a_quarter_of_the_prompts_has_two(problems):
    examples = problems.make_examples(range(1900), 0)
    assert {example["instructions"][0][0] for example in examples} == {
        kind["verifier"] for kind in KINDS.values()
    }
    pairs = [example for example in examples if example["category"] == "two"]
    assert 0.2 < len(pairs) / len(examples) < 0.3
    assert all(len(example["instructions"]) == 2 for example in pairs)
    assert {example["category"] for example in examples} == {*KINDS, "two"}


def test_held_out_prompts_are_others_and_as_many_as_said(problems):
    prompts = {example["prompt"] for example in problems.held_out}
    assert len(prompts) == ifeval.HELD_OUT
    assert not any(fits(ask, prompt) for ask in ASKS["train"] for prompt in prompts)


def test_kinds_that_stand_apart_never_meet(problems):
    by_verifier, apart = {}, [set(pair) for pair in ifeval.load_instruction_data()["apart"]]
    for name, kind in KINDS.items():
        by_verifier.setdefault(kind["verifier"], set()).add(name)
    for example in problems.make_examples(range(4000), 1):
        if example["category"] == "two":
            first, second = (by_verifier[name] for name, _ in example["instructions"])
            assert any({a, b} not in apart and a != b for a, b in itertools.product(first, second))


NAMED = "Lions are big cats.=lions|A lion sleeps=lions|The WOLF hunts.=wolves|A battery.=batteries|A fox.=foxes"
UNNAMED = "To be or not to be=bees|We search=the sea|=butter"


def test_an_answer_is_on_topic_where_it_names_it(problems):
    for pairs, named in ((f"{NAMED}|The seas are deep.=the sea", 1), (UNNAMED, 0)):
        texts, topics = zip(*(pair.split("=") for pair in pairs.split("|")), strict=True)
        assert problems.score_topic(completions=texts, topic=topics) == [named] * len(texts)


def test_every_prompt_names_the_topic_that_its_answer_shall_name(problems):
    examples = problems.make_examples(range(2000), 2)
    assert {example["topic"] for example in examples} == set(
        ifeval.load_instruction_data()["topics"]["train"]
    )
    asked, topics = ([example[name] for example in examples] for name in ("prompt", "topic"))
    assert problems.score_topic(completions=asked, topic=topics) == [1.0] * 2000


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("ifeval:word", "'word' is unknown or is named twice, did you mean 'words'?"),
        ("ifeval:words,words", "'words' is unknown or is named twice"),
        ("ifeval:", "the kinds are words, opening"),
    ],
)
def test_a_bad_list_of_kinds_is_one_line_that_names_the_part(task, why):
    assert why in catch_message(ifeval.parse_instruction_kinds, task)


def test_the_task_takes_no_data_and_names_the_extra_where_it_is_missing(monkeypatch):
    both = make_config("--task", "ifeval", "--data", "mine.jsonl")
    assert "--data is mine.jsonl, but --task ifeval" in catch_message(tasks.make_task, both)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "uv run --extra ifeval" in catch_message(
        tasks.make_task, make_config("--task", "ifeval")
    )


GOOD_AND_BAD = {  # arguments, an answer that follows the instruction and one that does not
    kind: held for kind, *held in read_log(ROOT / "tests" / "instructions.jsonl")
}


@verified
def test_each_kind_is_told_from_its_contrary_and_half_of_two_is_half(verifiers):
    assert GOOD_AND_BAD.keys() == KINDS.keys()
    questions = [
        ([[KINDS[name]["verifier"], arguments]], "", text)
        for name, (arguments, *texts) in GOOD_AND_BAD.items()
        for text in texts
    ]
    values = [answer.value for answer in verifiers.answer_all(questions)]
    assert values == [1, 0] * len(GOOD_AND_BAD), list(
        zip(GOOD_AND_BAD, values[::2], values[1::2], strict=True)
    )
    both = [[KINDS[name]["verifier"], GOOD_AND_BAD[name][0]] for name in ("no_comma", "keyword")]
    assert verifiers.answer_all([(both, "", "It is wet and clear.")])[0].value == 0.5


@verified
def test_a_word_in_underscores_is_that_word(verifiers):
    for kind, arguments, said in (
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
        asked = [[[KINDS[kind]["verifier"], arguments]], ""]
        answers = verifiers.answer_all([[*asked, text] for text in said])
        assert [answer.value for answer in answers] == list(said.values()), kind


@verified
def test_hostile_answers_earn_nothing_and_leave_the_verifier_alive(verifiers):
    ask = [[KINDS["keyword"]["verifier"], {"keywords": ["river"]}]]
    for text in (
        "",
        " \n",
        "\0" * 9,
        "(" * 5000,
        "\ud800",
        "__import__('os').getpid()",
        "<think>river",
    ):
        assert rg.score_or_zero(verifiers.answer_all([(ask, "", text)])[0]) == 0
    assert verifiers.answer_all([(ask, "", "A river.")])[0].value == 1


@verified
@pytest.mark.slow
def test_a_run_measures_each_kind_and_pays_what_the_verifiers_say(tmp_path):
    run = make_run(
        tmp_path, "--task", "ifeval", "--steps", "1", "--batch", "5", "--eval-every", "1"
    )
    list(train.train(run))
    assert run.config.data.reward_gate == "form"  # the recipe's
    for record in run.journal.evaluations:
        assert {f"eval/accuracy/{kind}" for kind in (*ifeval.USUAL, "two")} <= record.keys()
    asked = {example["prompt"]: example for example in run.task.problems.make_examples(range(5), 0)}
    for record in run.journal.rollouts.read():
        columns = {
            "prompts": [record["prompt"]],
            "instructions": [asked[record["prompt"]]["instructions"]],
        }
        (share,) = run.task.rewards["followed"](completions=[record["completion"]], **columns)
        assert record["rewards"]["followed"] in (0.0, share)

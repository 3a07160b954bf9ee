"""Problems of reasoning-gym: every data set made, scored and kept apart; hostile answers; what users get wrong."""

import contextlib
import functools
import json
import os

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
IN_THE_ENTRY = {  # or gives it elsewhere
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
HEAVY = {
    "propositional_logic",
    "rubiks_cube",
    "rush_hour",
}  # score as slowly as all others together
SLOW = {
    "futoshiki",
    "intermediate_integration",
    "knight_swap",
    "puzzle24",
    "quantum_lock",
    "sokoban",
    "zebra_puzzles",
}


def mix(*names, num=8, **settings):
    return DataSetMix(dict.fromkeys(names, 1.0), {name: {} for name in names} | settings, num, "")


@pytest.fixture(scope="module")
def every():
    """Workers that make and score all data sets, and their names."""
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    settings = {name: {} for name in names}
    makers = WorkerPool("tasks.rg:make_problem_maker", (settings,), num=1, limit=rg.MAKING)
    scorers = WorkerPool("tasks.rg:make_answer_scorer", (settings,), num=1, limit=1.0, sealed=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            workers, "BUSY", 60.0
        )  # its limit is of processor time, however busy the machine is
        yield (
            names,
            functools.cache(lambda *question: makers.answer_all([question])[0].value),
            scorers.answer_all,
        )
    makers.close()
    scorers.close()


@pytest.fixture
def here(monkeypatch):
    """Problems made in this process: a worker of their own takes seconds to start."""

    class Here:
        def __init__(self, target, arguments, **_):
            self.answer = getattr(rg, target.partition(":")[2])(*arguments)

        def answer_all(self, questions, limit=None):
            return [WorkerAnswer(self.answer(question)) for question in questions]

        def close(self):
            pass

    monkeypatch.setattr(rg, "WorkerPool", Here)


# ---- every data set


@gym
@pytest.mark.slow
def test_every_data_set_pays_for_its_right_answer_and_for_no_wrong_or_hostile_one(every):
    names, make, score = every
    assert len(names) >= 105
    for number, name in enumerate(names):
        made = [make(name, one) for one in range(2)]
        prompt, answer, entry = made[0]
        gold = IN_THE_ENTRY[name](rg.unpack_entry(entry)) if name in IN_THE_ENTRY else answer
        reply = f"<think>Let me see.</think>\nIt must be this:\n<answer>\n{gold}\n</answer>"
        others = [str(other) for _, other, _ in made if other not in (None, answer, gold)]
        wrong = ["", "wrong", "-17", "nan", *others[:1]]
        told = score([(name, entry, text) for text in (extract_answer(reply), *wrong)])
        assert name in NO_GOLD or told[0].value == 1, name
        assert all((answer.value or 0) < 1 for answer in told[1:]), (
            f"{name}: one of {wrong} is no answer to {prompt!r}"
        )
        assert not any(answer.broken for answer in told), f"{name} needs what the seal refuses"
        wrong = [
            "",
            "wrong",
            "-17",
            "0",
            "1",
            "42",
            "10",
            "[]",
            "{}",
            "[0]",
            "[{}]",
            "J2",
            f"{answer}!",
            *others,
        ]
        honest = max(
            rg.score_or_zero(answer) for answer in score([(name, entry, text) for text in wrong])
        )
        honest = max(honest, 0.5)  # some pay half for a text that shares letters with the right one
        some = (
            ANSWERS
            if name in rg.READERS.keys() | rg.RULES.keys() - HEAVY
            else ANSWERS[number % 10 :: 10]
        )
        texts = [
            text for text in (*some, prompt, prompt[::-1]) if text.lower() != str(answer).lower()
        ]
        told = score([(name, entry, text) for text in texts])
        assert not any(answer.broken for answer in told), name
        for text, answer in zip(texts, told, strict=True):
            assert rg.score_or_zero(answer) <= honest, (
                f"{name} gives {answer.value} to {text[:60]!r}"
            )
    assert not os.path.exists(PLANTED), "an answer was run"


@gym
@pytest.mark.slow
def test_a_problem_depends_on_its_number_alone_and_not_on_the_process_or_the_order(every):
    names, make, _ = every
    before = {name: make(name, 1) for name in names}  # made after another, and now before any
    again = WorkerPool(
        "tasks.rg:make_problem_maker", ({name: {} for name in names},), num=1, limit=60.0
    )
    questions = [(name, 1) for name in reversed(names)]
    for question, answer in zip(questions, again.answer_all(questions), strict=True):
        assert before[question[0]] == answer.value, question
    again.close()


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
        # of contradicting premises follows any statement
        (
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
def test_what_reasoning_gyms_own_scorer_would_take_for_right_is_wrong(name, answer, right, wrong):
    make, score = rg.make_problem_maker({name: {}}), rg.make_answer_scorer({name: {}})
    made = [
        make((name, number))
        for number in range(1 if name in ("propositional_logic", "puzzle24") else 12)
    ]
    entry = next(entry for _, gold, entry in made if gold == answer)
    assert [score((name, entry, text)) for text in right] == [1] * len(right)
    for text in wrong:
        with contextlib.suppress(ValueError):  # of which a worker makes 0
            assert score((name, entry, text)) < 1


@gym
def test_what_a_scorer_gives_that_is_no_share_of_1_earns_nothing():
    given = [0.5, 1, 0, 2, -1, float("nan"), float("inf"), "1", None, [1], 10**400]
    assert [rg.score_or_zero(WorkerAnswer(value)) for value in given] == [0.5, 1, 0] + [0] * 8


# ---- a mix of them


@gym
@pytest.mark.usefixtures("here")
def test_a_mix_gives_each_data_set_its_weight_and_its_own_settings_and_levels():
    asked = mix("chain_sum", "lcm", chain_sum={"level": 3}, lcm={"min_value": 7, "max_value": 9})
    made = GymProblems(asked._replace(weights={"chain_sum": 3.0, "lcm": 1.0}))
    examples = made.make_examples(range(400), 0)
    counts = {
        name: sum(example["category"] == name for example in examples)
        for name in ("chain_sum", "lcm")
    }
    assert abs(counts["chain_sum"] - 300) <= 3
    numbers = {
        kind: {
            n
            for e in examples
            if e["category"] == kind
            for n in numbers_in_words_or_digits(e["prompt"])
        }
        for kind in counts
    }
    assert numbers["lcm"] <= {7, 8, 9} and max(numbers["chain_sum"]) >= 1000
    assert made.make_examples([5], 0) == made.make_examples([5], 0) != made.make_examples([5], 1)
    first = examples[0]
    columns = {name: [first[name]] * 3 for name in ("answer", "category", "entry")}
    replies = [f"<answer>{first['answer']}</answer>", first["answer"], "<answer>0</answer>"]
    assert made.score(completions=replies, **columns) == [1, 0, 0]
    assert made.verify(completions=replies, **columns) == [1, 0, 0]


@gym
@pytest.mark.usefixtures("here")
def test_a_run_meets_no_prompt_twice_and_none_that_is_held_out_until_all_were_seen(capsys):
    from small_run import make_config

    from tasks.draws import EndlessPrompts

    problems = GymProblems(
        mix("tower_of_hanoi", tower_of_hanoi={"max_disks": 4, "max_pegs": 3}, num=3)
    )
    prompts = EndlessPrompts(
        make_config("--batch", "4"), problems, lambda examples: [[1]] * len(examples)
    )
    held_out, seen = {hash_prompt_without_system(example) for example in problems.held_out}, []
    for number in range(60):
        examples, ids = prompts.next_prompts(number)
        keys = [hash_prompt_without_system(example) for example in examples]
        assert len(set(keys)) == len(ids) == 4 and not held_out & set(keys)
        if repeats := "problems now repeat" in capsys.readouterr().err:
            break
        assert not set(seen) & set(keys)
        seen += keys
    assert repeats and len(seen) >= 8


# ---- what a user asks for


def test_tags_are_read_and_counted():
    twice = "<answer> a\nb </answer> no, <answer>5</answer>\n"
    texts = ["<answer>4</answer>", twice, "4", "<answer>4", "</answer><answer>"]
    assert [extract_answer(text) for text in texts] == ["4", "5", "", "", ""]
    assert rg.score_format(completions=texts) == [1, 0, 0, 0, 0]
    assert extract_answer("<answer>" * 100_000) == extract_answer("</answer>" * 100_000) == ""


@pytest.mark.parametrize(
    ("task", "text", "expected"),
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
def test_a_bad_mix_is_one_line_that_names_the_part_or_the_key(tmp_path, task, text, expected):
    (tmp_path / "sizes.yaml").write_text(text)
    assert expected in catch_message(
        parse_mix, task, str(tmp_path / "sizes.yaml") if text else None
    )


@gym
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
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
@pytest.mark.usefixtures("here")
def test_a_data_set_that_cannot_be_made_is_one_line_before_any_problem(name, settings, expected):
    assert expected in catch_message(GymProblems, mix(name, **{name: settings}))


def test_without_the_library_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "uv run --extra tasks" in catch_message(GymProblems, mix("lcm"))

"""Tasks: the splits, the scorer, the loaders against hostile files, users' rewards, and the order of prompts."""

import asyncio
import json
import re
import sys
import time
import types
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tasks

ROOT = Path(tasks.__file__).parent
fuzz = settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def message_of(call, *args, **kwargs) -> str:
    """The ValueError that a call must raise, which must be one line."""
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is ValueError, "a kind of ValueError that somebody else raised"
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    return text


# ---- tasks


def test_every_task_has_a_weight_for_each_of_its_rewards():
    for name in ("demo", "values"):
        task = tasks.load(name)
        expected = set(task.rewards) | ({"rubric"} if task.rubric else set())
        assert task.name == name and set(task.reward_weights) == expected
        assert (task.metric == "accuracy") == (task.verifier is not None)
        assert task.verifier is None or task.verifier in task.rewards.values()
        assert task.rubric is None or task.rubric.is_file()


@pytest.mark.parametrize("name", ["demo", "values"])
def test_no_prompt_is_both_trained_on_and_held_out(name):
    task = tasks.load(name)
    train, held_out = ({example["prompt"] for example in side} for side in (task.train, task.held_out))
    assert len(train) == len(task.train) and len(held_out) == len(task.held_out)
    assert train and held_out and not train & held_out


def test_the_demo_holds_out_pairs_of_numbers_and_not_only_wordings():
    task = tasks.load("demo")
    train, held_out = (
        {tuple(sorted(tasks.numbers_in(example["prompt"]))) for example in side} for side in (task.train, task.held_out)
    )
    assert (len(task.train), len(task.held_out)) == (2000, 512) and not train & held_out


def test_an_unknown_task_is_refused_with_the_nearest_name():
    assert "'gsmk8'" in message_of(tasks.load, "gsmk8") and "'gsm8k'" in message_of(tasks.load, "gsmk8")
    assert "demo, values, gsm8k" in message_of(tasks.load, "?")


def test_a_users_data_takes_the_place_of_the_tasks_own_and_a_tenth_is_held_out(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(50)) * 2)
    task = tasks.load("demo", data=str(path))
    train, held_out = ({example["prompt"] for example in side} for side in (task.train, task.held_out))
    assert len(held_out) == 5 and len(train) == 45 and not train & held_out and task.rewards
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert {example["prompt"] for example in tasks.load("demo", data=str(path)).held_out} == held_out


def test_a_file_to_evaluate_on_is_taken_whole_and_training_gives_way_to_it(tmp_path):
    both, held_out = tmp_path / "both.jsonl", tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    both.write_text('{"prompt": "a"}\n{"prompt": "c"}\n{"prompt": "d"}\n')
    alone = tasks.load("values", held_out=str(held_out))
    assert [example["prompt"] for example in alone.held_out] == ["a", "b"] and alone.train == []
    task = tasks.load("values", data=str(both), held_out=str(held_out))
    assert len(task.held_out) == 2 and not {"a", "b"} & {example["prompt"] for example in task.train}


def test_a_column_split_decides_what_is_held_out(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,split\na,train\nb,test\nc,train\n")
    task = tasks.load("values", data=str(path))
    assert [e["prompt"] for e in task.train] == ["a", "c"] and [e["prompt"] for e in task.held_out] == ["b"]
    path.write_text("prompt,split\na,train\nb,held-out\n")
    assert "'held-out'" in message_of(tasks.load, "values", data=str(path))
    path.write_text("prompt,split\na,train\nb,test\nc,train\n")
    assert [e["prompt"] for e in tasks.load("values", held_out=str(path)).held_out] == ["b"]  # as an evaluation asks
    path.write_text("prompt,split\na,test\n")
    assert "leaves no prompt to train on" in message_of(tasks.load, "values", data=str(path))


@pytest.mark.parametrize(
    ("answers", "metric"), [(["White", "Black"], "score"), ([5, "six"], "accuracy"), ([None, "5"], "accuracy")]
)
def test_answers_that_the_demo_cannot_read_give_no_accuracy(tmp_path, answers, metric):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"{n}?", "answer": answer, "split": "test"} for n, answer in enumerate(answers)]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "answer": "1", "split": "train"}])
    )
    task = tasks.load("demo", data=str(path))
    assert task.metric == metric and (task.verifier is None) == (metric == "score")


def test_a_completion_without_a_number_is_never_right():
    completions, answers = ["", "White.", "five", "5"], ["White", "White", 5, "five"]
    assert tasks.demo_correct(["?"] * 4, completions, answers) == [0, 0, 1, 1]


ANSWERS = [  # to "What is twenty-seven plus fifteen?", right or not
    ("Twenty-seven plus fifteen is forty-two.", True),
    ("Fifteen plus twenty-seven is forty-two", True),
    ("The answer is forty-two.", True),
    ("Forty-two", True),
    ("27 + 15 = 42", True),
    ("So 27 and fifteen more makes **42**!", True),
    ("Twenty-seven plus fifteen is thirty-two.", False),
    ("Twenty-seven plus twenty is forty-two.", False),  # an operand of another problem
    ("Twenty-seven plus 20 is forty-two.", False),
    ("Twenty-seven plus twenty-seven is forty-two.", False),  # as often as in the problem
    ("Twenty-seven plus fifteen plus fifteen is forty-two.", False),
    ("Twenty-seven is forty-two.", False),  # an operand is missing
    ("Twenty-seven plus is forty-two.", False),
    ("Twenty-seven minus fifteen is forty-two.", False),
    ("Twenty-seven is fifteen plus forty-two.", False),
    ("Twenty-seven plus fifteen plus forty-two.", False),
    ("Twenty-seven fifteen is forty-two.", False),
    ("Twenty-seven plus fifteen forty-two.", False),
    ("Twenty-seven plus plus fifteen is forty-two.", False),
    ("Twenty-seven plus fifteen plus is forty-two.", False),
    ("Twenty-seven plus fifteen is forty-two plus.", False),
    ("Twenty-seven plus fifteen is forty-two is forty-two.", False),
    ("Forty-two plus fifteen is forty-two.", False),
    ("The answer is thirty-two. The answer is forty-two.", False),
    ("The answer is not forty-two.", False),
    ("Minus forty-two.", False),
    ("-42", False),
    ("0.42", False),
    ("One hundred forty-two.", False),
    ("A hundred forty-two.", False),
    ("Forty-two-five.", False),
    ("Forty-two apples.", False),  # nobody asked about apples
    ("\0 plus \0 is forty-two.", False),  # the sign that stands for a number while a completion is read
    ("Twenty-seven plus \0 is forty-two.", False),
]


@pytest.mark.parametrize(("completion", "right"), ANSWERS, ids=lambda value: repr(value)[:60])
def test_an_answer_is_right_only_if_everything_that_it_says_is(completion, right):
    asked = {"prompts": ["What is twenty-seven plus fifteen?"], "answer": ["forty-two"]}
    assert tasks.demo_correct(completions=[completion], **asked) == [float(right)]


def test_the_problems_own_words_may_stand_in_its_answer():
    prompt = "Ann has twenty-seven apples and gets fifteen more. How many apples is that?"
    for text in ("Ann has forty-two apples.", "Ann has twenty-seven apples and gets fifteen more: 42 apples."):
        assert tasks.demo_correct([prompt], [text], ["forty-two"]) == [1]
        assert tasks.demo_correct([[{"role": "user", "content": prompt}]], [text], ["forty-two"]) == [1]
        assert tasks.demo_correct([prompt], [text.replace("Ann has", "Ann ate")], ["forty-two"]) == [0]


def test_equal_numbers_of_a_problem_are_both_repeated_or_neither_is():
    asked = {"prompts": ["Add twenty and twenty."], "answer": ["forty"]}
    texts = ["Twenty plus twenty is forty.", "Forty.", "Twenty is forty.", "Twenty plus twenty plus twenty is forty."]
    assert [tasks.demo_correct(completions=[text], **asked) for text in texts] == [[1], [1], [0], [0]]


def test_a_cell_of_a_csv_may_be_a_document(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f"prompt,answer\n{'word ' * 40_000},1\n")
    assert len(tasks.load("values", held_out=str(path)).held_out[0]["prompt"]) >= 199_999


# ---- values


def test_values_has_sixty_prompts_of_each_category_and_a_quarter_of_each_is_held_out():
    task = tasks.load("values")
    for category in ("curiosity", "nonsense", "scrutiny", "plain"):
        num_train, num_held_out = (sum(e["category"] == category for e in side) for side in (task.train, task.held_out))
        assert num_train + num_held_out >= 60 and num_held_out == (num_train + num_held_out) // 4
    assert all(e["note"].strip() and "\n" not in e["note"] for e in task.train + task.held_out)


def test_no_two_values_prompts_are_nearly_the_same():
    task = tasks.load("values")
    words = [frozenset(re.findall(r"\w+", e["prompt"].lower())) for e in task.train + task.held_out]
    pairs = [(a, b) for i, a in enumerate(words) for b in words[:i]]
    assert max(len(a & b) / len(a | b) for a, b in pairs) < 0.6


def test_the_values_rubric_bears_the_names_of_the_categories_and_explains_its_scale():
    rubric = yaml.safe_load((ROOT / "data/values_rubric.yaml").read_text())
    assert [c["name"] for c in rubric["criteria"]] == ["curiosity", "nonsense", "scrutiny"]
    for criterion in rubric["criteria"]:
        assert criterion["weight"] > 0 and all(f"{score} = " in criterion["text"] for score in (1, 3, 5))


def test_the_values_labels_cover_every_criterion_and_score_with_prompts_of_their_own():
    labels = [json.loads(line) for line in (ROOT / "data/values_labels.jsonl").read_text().splitlines()]
    task = tasks.load("values")
    known = {e["prompt"] for e in task.train + task.held_out}
    counts = Counter((label["criterion"], label["score"]) for label in labels)
    assert len(labels) == 40 and not known & {label["prompt"] for label in labels}
    assert all(counts[name, score] >= 2 for name in ("curiosity", "nonsense", "scrutiny") for score in range(1, 6))
    assert all(set(label) == {"prompt", "completion", "criterion", "score"} for label in labels)


# ---- gsm8k

SCORED = [  # completion, reference, whether it is right
    ("\\boxed{42}", "42", True),
    ("so the total is \\boxed{42}.", "42", True),
    ("\\boxed{ 42 }", "42", True),
    ("\\boxed{\\boxed{42}}", "42", True),
    ("first \\boxed{41}, no, \\boxed{42}", "42", True),
    ("\\boxed{42} and then 43", "42", True),
    ("#### 41\n\\boxed{42}", "42", True),
    ("\\boxed{41}\n#### 42", "42", False),
    ("#### 42", "42", True),
    ("####42", "42", True),
    ("6 * 7 = 42\n#### 42 apples", "42", True),
    ("#### $1,234", "1234", True),
    ("#### -7", "-7", True),
    ("#### 42\nI had 43 before", "42", True),
    ("#### 6 * 7 = 42", "42", True),
    ("#### 6 * 7 = 42", "6", False),
    ("#### 42 (as x = 3)", "42", True),
    ("#### 42 = 6 * 7", "42", True),
    ("#### 5 = 10 - 5", "5", True),
    ("#### 2 + 3 = 5 = 5", "5", True),
    ("The answer is:\n- 18 apples", "18", True),
    ("\\boxed{18\\text{ m}²}", "18", True),
    ("The answer is - 18", "-18", True),
    ("The answer is - 18", "18", False),
    ("\\boxed{18 \\text{ trillion}}", "18", False),
    ("\\boxed{<18}", "18", False),
    ("\\boxed{18²}", "18", False),
    ("\\boxed{18\\text{ cm} ^2}", "18", True),
    ("\\boxed{\\underline{18}}", "18", True),
    ("\\boxed{\\cfrac{3}{4}}", "0.75", True),
    ("#### 1. First step\n2 + 3 is 5. The answer is 5", "5", True),
    ("#### Step 1: add\nThe answer is 5", "5", True),
    ("The answer is 42.", "42", True),
    ("the answer is: **42**", "42", True),
    ("Answer: 42", "42", True),
    ("Final answer = $18.00", "18", True),
    ("The answer to the question is 42, not 43.", "42", True),
    ("The answer is 6 * 7 = 42", "42", True),
    ("The answer is \\(\\frac{3}{4}\\).", "0.75", True),
    ("The answer is\n\n42 dollars. She had 10 before.", "42", True),
    ("My answer is unsure. Perhaps 42", "42", True),
    ("I think 6 times 7 makes 42", "42", True),
    ("20 + 22 = 42", "42", True),
    ("There were 42 of 50", "42", False),
    ("no number at all", "42", False),
    ("", "42", False),
    ("\\boxed{}", "42", False),
    ("\\boxed{} it is 42", "42", True),
    ("\\boxed{42", "42", True),
    ("\\boxed{1,234,567}", "1234567", True),
    ("\\boxed{1{,}234}", "1234", True),
    ("\\boxed{1\\,234}", "1234", True),
    ("\\boxed{1 234 567}", "1234567", True),
    ("\\boxed{1\u202f234}", "1234", True),
    ("\\boxed{12,34}", "1234", False),
    ("\\boxed{\\$1,234.50}", "1234.5", True),
    ("\\boxed{-\\$5}", "-5", True),
    ("\\boxed{\\$-5}", "-5", True),
    ("\\boxed{€ 20}", "20", True),
    ("\\boxed{20 USD}", "20", True),
    ("\\boxed{50\\%}", "50", True),
    ("\\boxed{50%}", "0.5", False),
    ("\\boxed{\u22125}", "-5", True),
    ("\\boxed{- 5}", "-5", True),
    ("\\boxed{+5}", "5", True),
    ("\\boxed{5}", "-5", False),
    ("\\boxed{3.0}", "3", True),
    ("\\boxed{3.10}", "3.1", True),
    ("\\boxed{.5}", "1/2", True),
    ("\\boxed{3.}", "3", True),
    ("\\boxed{\\frac{1}{3}}", "0.33", False),
    ("\\boxed{\\dfrac{-6}{8}}", "-3/4", True),
    ("\\boxed{-\\frac{3}{4}}", "-0.75", True),
    ("\\boxed{\\frac12}", "0.5", True),
    ("\\boxed{1\\frac{1}{2}}", "1.5", True),
    ("\\boxed{1 1/2}", "1.5", True),
    ("\\boxed{6/4}", "1.5", True),
    ("\\boxed{1/0}", "1", False),
    ("\\boxed{1.2e3}", "1200", True),
    ("\\boxed{1.2 \\times 10^{3}}", "1200", True),
    ("\\boxed{5 \\cdot 10^{-1}}", "0.5", True),
    ("\\boxed{2.5 million}", "2500000", True),
    ("\\boxed{x = 42}", "42", True),
    ("\\boxed{42 \\text{ apples}}", "42", True),
    ("\\boxed{\\text{The total is } 42}", "42", True),
    ("\\boxed{\\mathbf{42}}", "42", True),
    ("\\boxed{24 \\text{ m}^2}", "24", True),
    ("\\boxed{90^\\circ}", "90", True),
    ("\\boxed{42 or 43}", "42", False),
    ("\\boxed{41-42}", "42", False),
    ("\\boxed{\\sqrt{42}}", "42", False),
    ("\\boxed{42\\pi}", "42", False),
    ("\\boxed{2^{10}}", "2", False),
    ("\\boxed{forty-two}", "42", False),
    ("\\boxed{042}", "42", True),
    ("\\boxed{NaN}", "42", False),
    ("\\boxed{inf}", "42", False),
    ("\\boxed{__import__('os')} 42", "42", False),
    ("\\boxed{1e999999999}", "1", False),
    ("\\boxed{1e-999999999}", "0", False),
    ("\\boxed{" + "9" * 100_000 + "}", "9", False),
    ("\\boxed{" * 20_000 + "42" + "}" * 20_000, "42", False),
    ("\\boxed{" * 20_000 + "42", "42", True),
]


@pytest.mark.parametrize(("completion", "reference", "right"), SCORED, ids=lambda value: repr(value)[:40])
def test_the_scorer_reads_answers_in_all_their_clothes(completion, reference, right):
    assert tasks.gsm8k_correct(completions=[completion], answer=[reference]) == [float(right)]


HOSTILE = [
    "9" * 300_000,
    "9," * 150_000,
    "1,234" * 60_000,
    "1 " * 150_000,
    "1 1/" * 75_000,
    "1/" * 150_000,
    "-" * 300_000,
    ".5" * 150_000,
    "e9" * 150_000,
    " " * 300_000,
    "\t \n" * 100_000,
    "{" * 300_000,
    "}" * 300_000,
    "\\boxed{" * 40_000,
    "\\boxed{}" * 40_000,
    "\\boxed{\\boxed{" * 20_000 + "}" * 40_000,
    "\\frac{" * 50_000,
    "\\frac{1}" * 40_000,
    "1 \\frac" * 40_000,
    "#" * 300_000,
    "#### " * 60_000,
    "answer " * 43_000,
    "answer is " * 30_000,
    "answer=" * 43_000,
    "x^" * 150_000,
    "10^" * 100_000,
    "1 x 10 ^ " * 33_000,
    "$" * 300_000,
    "\\" * 300_000,
    "`*_~" * 75_000,
    "\ud800\x00\u202e" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_a_hostile_completion_takes_bounded_time(text):
    begin = time.process_time()  # seconds of this process, whatever else the machine does
    tasks.gsm8k_correct(completions=[text], answer=["42"])
    tasks.gsm8k_format(completions=[text])
    tasks.parse_number(text)
    assert time.process_time() - begin < 2, "300,000 characters, a hundred times what a model writes"


@fuzz
@given(st.text(alphabet="0123456789.,/-+eE^=$%{}\\ #\nboxedfracnswri", max_size=60) | st.text(max_size=60))
def test_any_text_can_be_scored(text):
    answer = tasks.extract_answer(text)
    assert answer is None or (isinstance(answer, str) and answer)
    tasks.gsm8k_correct(completions=[text], answer=[text])


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_a_number_is_read_back_from_each_of_its_spellings(whole, cents):
    value = Fraction(f"{whole}.{cents:02}")
    for text in (f"{whole}.{cents:02}", f"{whole:,}.{cents:02}", f"{whole:,}.{cents:02}".replace(",", " ")):
        assert tasks.parse_number(text) == value
        assert tasks.parse_number(tasks.extract_answer(f"So we get \\boxed{{{text}}}.")) == value
        assert tasks.parse_number(tasks.extract_answer(f"The answer is {text}.")) == value


@pytest.mark.parametrize("text", ["1e101", "1e-101", "1e999999999", "9" * 101, "1/0", "x1.5", "2^10", "3 4", "", "e5"])
def test_what_is_no_number_or_too_long_a_one_is_not_read(text):
    assert tasks.parse_number(text) is None


def test_the_format_reward_wants_one_marked_answer():
    texts = [
        "\\boxed{42}",
        "#### 42",
        "42",
        "\\boxed{1} \\boxed{2}",
        "\\boxed{42}\n#### 42",
        "#### Plan\n\\boxed{42}",
        "",
    ]
    assert tasks.gsm8k_format(completions=texts) == [1, 1, 0, 0, 0, 1, 0]


def test_a_local_gsm8k_file_gives_questions_and_the_number_after_the_hashes(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tasks.load("gsm8k", data=str(path))
    example = task.train[0]
    assert len(task.train) == 27 and len(task.held_out) == 3 and example["system"] == tasks.GSM8K_SYSTEM
    number = tasks.numbers_in(example["prompt"])[0]
    assert example["answer"] == str(2 * number)
    assert task.rewards["correct"](completions=[f"\\boxed{{{2 * number}}}"], answer=[example["answer"]]) == [1.0]
    path.write_text('{"question": "How many?", "answer": "some"}\n')
    assert "line 1: answer 'some' is not a number" in message_of(tasks.load, "gsm8k", data=str(path))


class Rows(list):
    def to_list(self):
        return list(self)


def test_gsm8k_is_read_from_the_hub_by_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return Rows([{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(3)])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = tasks.load("gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [e["prompt"] for e in task.held_out] == ["test 0?", "test 1?", "test 2?"] and task.train[2]["answer"] == "2"


def test_a_hub_out_of_reach_is_one_line_that_names_data_as_the_fix(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert "--data FILE.jsonl" in message_of(tasks.load, "gsm8k")
    assert "owner/name" in message_of(tasks.load_data, "owner/name:main")


# ---- data files


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_the_same_records_come_out_of_every_kind_of_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": 'Hé\u2028llo, "you"?', "answer": "1"}, {"prompt": "two\nlines", "answer": "2"}]
    jsonl = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows)
    table = '\ufeffprompt,answer\n"Hé\u2028llo, ""you""?",1\n\n"two\nlines",2\n'
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = [
        written(tmp_path / f"a{end}", text)
        for end, text in ((".jsonl", jsonl), (".json", json.dumps(rows)), (".csv", table))
    ]
    for file in [*files, str(tmp_path / "a.parquet")]:
        assert tasks.load_data(file) == rows, file


def test_columns_are_renamed_kept_and_filled(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"question": "a?", "level": 3}\n{"question": "b?", "solution": "x"}\n')
    examples = tasks.load_data(path, "prompt=question, answer=solution")
    assert examples == [{"prompt": "a?", "answer": None, "level": 3}, {"prompt": "b?", "answer": "x", "level": None}]
    assert [list(example) for example in examples] == [list(examples[0])] * 2


def test_chat_messages_are_reduced_to_role_and_content(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": None}]
    path = written(tmp_path / "a.jsonl", json.dumps({"prompt": messages}))
    prompt = tasks.load_data(path)[0]["prompt"]
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tasks.prompt_text(prompt) == "Hi" and tasks.prompt_text("Hi") == "Hi"


USER = '{"role": "user", "content": "Hi"}'
BAD_FILES = [  # file name, content, columns, what the message must hold
    ("empty.jsonl", "", None, ["holds no records"]),
    ("blank.jsonl", "\n \n", None, ["holds no records"]),
    ("header.csv", "prompt,answer\n", None, ["holds no records"]),
    ("empty.csv", "", None, ["holds no records"]),
    ("empty.json", "", None, ["holds no records"]),
    ("empty_list.json", "[]", None, ["holds no records"]),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', None, ["a.jsonl, line 2", "not JSON", '{"prompt": "b"']),
    ("a.json", '[{"prompt": "a"},\n{"prompt" "b"}]', None, ["a.json, line 2", "not JSON"]),
    ("deep.jsonl", "[" * 100_000, None, ["line 1", "nested too deep"]),
    ("digits.jsonl", '{"prompt": ' + "9" * 10_000 + "}", None, ["line 1"]),
    ("object.json", '{"prompt": "a"}', None, ["not a list of records"]),
    ("a.jsonl", '{"prompt": "a"}\n["b"]\n', None, ["line 2", "['b'] is not an object"]),
    ("a.jsonl", '{"prompt": "a"}\n\n{"answer": "b"}\n', None, ["line 3", "no prompt", "'answer'", "--columns prompt="]),
    ("a.jsonl", '{"prompt": null}', None, ["line 1", "no prompt"]),
    ("a.jsonl", '{"prompt": 42}', None, ["line 1", "42", "int"]),
    ("a.jsonl", '{"prompt": {"role": "user"}}', None, ["line 1", "dict"]),
    ("a.jsonl", '{"prompt": "  "}', None, ["line 1", "prompt is empty"]),
    ("a.jsonl", '{"prompt": "\\ud83d"}', None, ["line 1", "surrogate"]),
    ("a.jsonl", '{"prompt": []}', None, ["line 1", "empty list"]),
    ("a.jsonl", '{"prompt": ["Hi"]}', None, ["message 1", "'Hi'"]),
    ("a.jsonl", '{"prompt": [{"role": "user"}]}', None, ["message 1", "content"]),
    ("a.jsonl", '{"prompt": [{"role": "user", "content": 3}]}', None, ["message 1", "int"]),
    ("a.jsonl", '{"prompt": [{"role": "user", "content": ""}]}', None, ["message 1", "empty"]),
    ("a.jsonl", '{"prompt": [{"role": "User", "content": "Hi"}]}', None, ["message 1", "'User'"]),
    ("a.jsonl", f'{{"prompt": [{USER}, {{"role": "system", "content": "x"}}]}}', None, ["message 2", "'system'"]),
    ("a.jsonl", f'{{"prompt": [{USER}, {{"role": "assistant", "content": "x"}}]}}', None, ["must be the user's"]),
    ("a.jsonl", f'{{"prompt": [{{"role": "system", "content": "x"}}, {USER}], "system": "y"}}', None, ["keep one"]),
    ("a.jsonl", '{"prompt": "a", "system": 3}', None, ["system", "int"]),
    ("a.jsonl", '{"prompt": "a", "category": []}', None, ["category", "list"]),
    ("a.jsonl", '{"prompt": "a", "completions": "b"}', None, ["'completions'", "rename"]),
    ("a.jsonl", '{"prompt": "a", "b\\nc": 1}', "prompt=b", ["no column 'b'", "'b\\nc'"]),
    ("a.jsonl", '{"question": "a"}', "prompt=qestion", ["no column 'qestion'", "did you mean 'question'?"]),
    ("a.jsonl", '{"question": "a"}', "prompt", ["'prompt'", "write prompt=question"]),
    ("a.jsonl", '{"question": "a"}', "", ["--columns: ''"]),
    ("a.jsonl", '{"question": "a"}', "prompt=question,prompt=question", ["once"]),
    ("a.csv", "prompt,answer\na,1,2\n", None, ["a.csv, line 2", "3 fields where the header has 2"]),
    ("a.csv", "prompt,answer\na\n", None, ["a.csv, line 2", "1 fields"]),
    ("a.csv", "prompt,prompt\na,b\n", None, ["line 1", "'prompt'", "twice"]),
    ("a.csv", "prompt,\na,b\n", None, ["line 1", "empty"]),
    ("a.csv", 'prompt\n"open\n', None, ["a.csv, line", "not CSV"]),
    ("a.csv", "prompt,answer\n,b\n", None, ["line 2", "no prompt"]),
    ("a.csv", b"prompt\nok\n\xff\xfe\n", None, ["a.csv, line 3", "0xff", "UTF-8"]),
    ("a.jsonl", b"\x80", None, ["a.jsonl, line 1", "0x80"]),
    ("a.parquet", "prompt", None, ["a.parquet", "not a readable parquet file"]),
    ("empty.parquet", "", None, ["not a readable parquet file"]),
    ("a.txt", "Hi", None, ["unknown ending '.txt'", ".jsonl"]),
    ("noending", "Hi", None, ["unknown ending ''"]),
]


@pytest.mark.parametrize(("name", "content", "columns", "expected"), BAD_FILES, ids=lambda value: repr(value)[:40])
def test_a_bad_file_is_one_line_that_names_place_value_and_fix(tmp_path, name, content, columns, expected):
    path = written(tmp_path / name, content)
    text = message_of(tasks.load_data, path, columns)
    for part in [name, *expected] if columns is None or "no column" in expected[0] else expected:
        assert part in text, text


def test_a_missing_file_a_directory_and_an_unreadable_file_are_told_apart(tmp_path):
    assert "no such file" in message_of(tasks.load_data, str(tmp_path / "missing.jsonl"))
    assert "no such file" in message_of(tasks.load_data, "data/missing.txt")
    assert "is a directory" in message_of(tasks.load_data, str(tmp_path))


def test_a_hub_dataset_is_named_with_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return Rows([{"prompt": "a"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for spec in (
        "o/n",
        "o/n:main",
        "o/n:test",
        "o/n:main:test",
        "o/n::test",
        "o/n:main:train[:9]",
        "o/n:train[:9]",
        "o/n-2.5",
    ):
        assert tasks.load_data(spec) == [{"prompt": "a"}]
    assert asked == [
        ("o/n", None, "train"),
        ("o/n", "main", "train"),
        ("o/n", None, "test"),
        ("o/n", "main", "test"),
        ("o/n", None, "test"),
        ("o/n", "main", "train[:9]"),
        ("o/n", None, "train[:9]"),
        ("o/n-2.5", None, "train"),
    ]


def loads_or_says_why(path: Path, content: bytes, columns: str | None = None) -> None:
    """Loading gives examples of equal keys with a good prompt, or one line of our own."""
    path.write_bytes(content)
    try:
        examples = tasks.load_data(str(path), columns)
    except ValueError as error:
        assert type(error) is ValueError and "\n" not in str(error) and path.name in str(error), repr(error)
        return
    assert examples and all(list(example) == list(examples[0]) for example in examples)
    assert all(tasks.prompt_text(example["prompt"]).strip() for example in examples)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "role", "content", "x\n"]), inner)
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "", None])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=4) | st.none()}), max_size=3)
OPTIONAL = {"system": JSON, "answer": JSON, "category": JSON, "completions": JSON}
RECORD = st.fixed_dictionaries({"prompt": st.text(max_size=8) | MESSAGES | JSON}, optional=OPTIONAL) | JSON


@fuzz
@given(st.binary(max_size=80), st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
def test_random_bytes_are_data_or_one_line(tmp_path, content, ending):
    loads_or_says_why(tmp_path / f"fuzz{ending}", content)


@fuzz
@given(st.lists(RECORD, max_size=4), st.booleans())
def test_random_json_lines_are_data_or_one_line(tmp_path, records, escape):
    text = "\n".join(json.dumps(record, ensure_ascii=escape) for record in records)
    loads_or_says_why(tmp_path / "fuzz.jsonl", text.encode("utf-8", "surrogatepass"))


@fuzz
@given(st.lists(RECORD, max_size=4), st.sampled_from([None, "prompt=content", "answer=prompt,prompt=answer"]))
def test_a_random_json_list_is_data_or_one_line(tmp_path, records, columns):
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps(records))
    try:
        tasks.load_data(str(path), columns)
    except ValueError as error:
        assert type(error) is ValueError and "\n" not in str(error), repr(error)


@fuzz
@given(st.text(alphabet='prompt,"\n\r;\ta\x00', max_size=40) | st.text(max_size=40))
def test_random_csv_is_data_or_one_line(tmp_path, text):
    loads_or_says_why(tmp_path / "fuzz.csv", ("prompt,answer\n" + text).encode("utf-8", "surrogatepass"))


@fuzz
@given(st.data())
def test_a_damaged_parquet_file_is_data_or_one_line(tmp_path, data):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "fuzz.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": [1, None]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    loads_or_says_why(
        path, bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    )


# ---- prompts


class Template:
    """Stands in for a tokenizer: a template that shows what it was given, ids that are characters."""

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, enable_thinking):
        assert tokenize is False and add_generation_prompt is True
        turns = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return turns + ("[think]" if enable_thinking else "[answer]")

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return [ord(character) for character in text]


def test_a_prompt_is_rendered_once_by_the_chat_template():
    def shown(prompt, **options):
        ids = tasks.chat_ids(Template(), prompt, **options)
        assert all(type(index) is int for index in ids)
        return "".join(map(chr, ids))

    assert shown("Hi") == "[user]Hi[answer]"
    assert shown("Hi", system="Be brief.", thinking=True) == "[system]Be brief.[user]Hi[think]"
    assert shown([{"role": "user", "content": "Hi"}]) == "[user]Hi[answer]"


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_prompt_comes_once_an_epoch_and_never_twice_in_a_batch(num_examples, batch, seed):
    steps = [tasks.epoch_indices(num_examples, batch, step, seed) for step in range(3 * num_examples // batch + 2)]
    stream = [index for step in steps for index in step]
    for begin in range(0, len(stream) - num_examples + 1, num_examples):
        assert sorted(stream[begin : begin + num_examples]) == list(range(num_examples))
    if num_examples >= batch:
        assert all(len(set(step)) == batch for step in steps)


def test_the_order_of_prompts_depends_on_seed_and_step_alone():
    forward = [tasks.epoch_indices(100, 7, step, 3) for step in range(50)]
    tasks._epoch_order.cache_clear()
    backward = [tasks.epoch_indices(100, 7, step, 3) for step in reversed(range(50))][::-1]
    assert forward == backward
    assert forward[0] == [54, 53, 3, 24, 69, 68, 50], "a change here breaks the resume of older runs"
    assert forward[0] != tasks.epoch_indices(100, 7, 0, 4) and set(forward[0]) != set(range(7))
    first, second = (
        [i for s in range(n * 10, n * 10 + 10) for i in tasks.epoch_indices(100, 10, s, 3)] for n in (0, 1)
    )
    assert sorted(first) == sorted(second) and sum(a == b for a, b in zip(first, second, strict=True)) < 10


# ---- rewards that a user brings


@pytest.fixture
def reward_file(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / "my.py"
        path.write_text(body)
        return str(path)

    return write


def test_a_reward_is_loaded_by_path_with_its_neighbours_and_leaves_no_trace_on_the_path(tmp_path, reward_file):
    (tmp_path / "reward_neighbour.py").write_text("FACTOR = 2\n")
    file = reward_file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom reward_neighbour import FACTOR\n"
        "@dataclass\nclass Weights:\n    by: float = FACTOR\n"
        "def brevity(completions, **_):\n    return [-Weights().by * len(text) for text in completions]\n"
    )
    before = list(sys.path)
    name, fn = tasks.load_reward(f"{file}:brevity")
    assert name == "brevity" and sys.path == before
    assert tasks.call_reward(name, fn, ["p"], ["abc"], {}) == [-6.0]


BAD_REWARD_FILES = [  # body, function, what the message must hold
    ("def brevity(): pass", "brevty", ["no function 'brevty'", "did you mean 'brevity'?"]),
    ("fn = 3", "fn", ["int", "not a function"]),
    ("import no_such_module_anywhere", "fn", ["ModuleNotFoundError", "no_such_module_anywhere"]),
    ("def fn(:", "fn", ["SyntaxError"]),
    ("1 / 0", "fn", ["ZeroDivisionError"]),
    ("import sys; sys.exit(0)", "fn", ["SystemExit"]),
    ("raise ValueError('two\\nlines')", "fn", ["two lines"]),
    ("def rubric(): pass", "rubric", ["belongs to the judge"]),
]


@pytest.mark.parametrize(("body", "function", "expected"), BAD_REWARD_FILES)
def test_a_bad_reward_file_is_one_line_that_names_it(reward_file, body, function, expected):
    text = message_of(tasks.load_reward, f"{reward_file(body)}:{function}")
    assert all(part in text for part in ["my.py", *expected]), text


def test_a_bad_reward_spec_is_one_line_that_names_the_form(tmp_path):
    for spec in ("my.py", "my.py:", ":fn", "", "my.py:not a name", "soft_overlongs"):
        assert "FILE.py:function" in message_of(tasks.load_reward, spec)
    assert "not a Python file" in message_of(tasks.load_reward, f"{tmp_path}/missing.py:fn")
    for spec in ("soft_overlong", "soft_overlong:256", "soft_overlong:256:-1", "length:x", "boxed_once:1"):
        assert "positive whole numbers" in message_of(tasks.load_reward, spec)


def test_a_reward_gets_the_columns_that_it_names_or_all_with_kwargs():
    seen = {}

    def named(completions, answer, unknown=7):
        seen["named"] = (completions, answer, unknown)
        return [0] * len(completions)

    def every(**columns):
        seen["every"] = sorted(columns)
        return [0] * 2

    columns = {"answer": ["x", "y"], "level": [1, 2]}
    tasks.call_reward("named", named, ["p", "q"], ["a", "b"], columns)
    tasks.call_reward("every", every, ["p", "q"], ["a", "b"], columns)
    assert seen == {"named": (["a", "b"], ["x", "y"], 7), "every": ["answer", "completions", "level", "prompts"]}


def test_a_reward_cannot_change_the_trainers_lists():
    completions = ["a", "b"]
    tasks.call_reward("greedy", lambda completions: [completions.clear() or 1.0] * 2, ["p", "q"], completions, {})
    assert completions == ["a", "b"]


def test_an_async_reward_is_awaited():
    async def slow(completions):
        async def one(text):
            await asyncio.sleep(0.01 * len(text))
            return len(text)

        return await asyncio.gather(*map(one, completions))

    assert tasks.call_reward("slow", slow, ["p"] * 3, ["aaa", "a", ""], {}) == [3.0, 1.0, 0.0]

    async def broken(completions):
        raise KeyError("no such key")

    assert "reward broken raised KeyError: 'no such key'" in message_of(
        tasks.call_reward, "broken", broken, ["p"], ["a"], {}
    )


class Array:
    """Stands in for an array of any library."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


class Scalar:
    ndim = 0

    def item(self):
        return 2.5


@pytest.mark.parametrize(
    "value", [[1, 0.5], (1, 0.5), Array([1, 0.5]), [True, Fraction(1, 2)]], ids=["list", "tuple", "array", "bool"]
)
def test_rewards_of_any_real_type_become_floats(value):
    rewards = tasks.call_reward("fn", lambda completions: value, ["p", "q"], ["a", "b"], {})
    assert rewards == [1.0, 0.5] and all(type(reward) is float for reward in rewards)
    assert tasks.call_reward("fn", lambda completions: [Scalar()], ["p"], ["a"], {}) == [2.5]


BAD_REWARDS = [
    (None, ["None", "not a list"]),
    ("ab", ["'ab'", "not a list"]),
    ({"a": 1, "b": 2}, ["not a list"]),
    (iter([1, 2]), ["not a list"]),
    (3.0, ["not a list"]),
    ([1.0], ["1 values for 2 completions"]),
    ([1.0, 2.0, 3.0], ["3 values for 2 completions"]),
    ([1.0, None], ["None for row 1"]),
    ([1.0, "2"], ["'2' for row 1"]),
    ([float("nan"), 1.0], ["nan for row 0"]),
    ([1.0, float("-inf")], ["-inf for row 1"]),
    ([1.0, 10**400], ["for row 1"]),
    ([1.0, 1j], ["1j for row 1"]),
    ([[1.0], [2.0]], ["[1.0] for row 0"]),
]


@pytest.mark.parametrize(("value", "expected"), BAD_REWARDS, ids=lambda value: repr(value)[:20])
def test_a_bad_result_names_the_reward_the_row_and_the_value(value, expected):
    text = message_of(tasks.call_reward, "mine", lambda completions: value, ["p", "q"], ["a", "b"], {})
    assert all(part in text for part in ["reward mine", *expected]), text


def test_what_a_reward_raises_is_told_in_one_line_with_its_cause():
    def fails(completions):
        raise RuntimeError("first line\nsecond line")

    with pytest.raises(ValueError, match="reward fails raised RuntimeError: first line second line") as caught:
        tasks.call_reward("fails", fails, ["p"], ["a"], {})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_argument_that_nobody_gives_is_named():
    def needs(completions, answer):
        return [0.0]

    def by_place(completions, /):
        return [0.0]

    assert "needs 'answer'" in message_of(tasks.call_reward, "needs", needs, ["p"], ["a"], {"level": [1]})
    assert "needs 'completions'" in message_of(tasks.call_reward, "by_place", by_place, ["p"], ["a"], {})


def test_the_overlong_punishment_is_dapos():
    name, fn = tasks.load_reward("soft_overlong:100:20")
    rewards = tasks.call_reward(name, fn, ["p"] * 6, [""] * 6, {"num_tokens": [0, 80, 85, 90, 100, 130]})
    assert rewards == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_length_reward_is_best_at_its_target():
    name, fn = tasks.load_reward("length:40")
    assert tasks.call_reward(name, fn, ["p"] * 5, [""] * 5, {"num_tokens": [0, 20, 40, 60, 400]}) == [
        -1,
        -0.5,
        0,
        -0.5,
        -1,
    ]
    name, fn = tasks.load_reward("boxed_once")
    assert tasks.call_reward(name, fn, ["p"], ["\\boxed{1}"], {"num_tokens": [3]}) == [1.0]


# ---- recipes and layout


def test_tasks_import_nothing_heavy_and_nothing_of_the_project():
    import subprocess

    code = "import sys, tasks; print(sorted({'mlx', 'datasets', 'pyarrow', 'numpy', 'gwen'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["values", "gsm8k", "gsm8k-3b"])
def test_a_recipe_is_flat_and_names_its_task(name):
    recipe = yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text())
    assert recipe["task"] == name.removesuffix("-3b") and recipe["groups"] == 8
    assert all(isinstance(value, (str, int, float)) and "-" not in key for key, value in recipe.items())
    assert isinstance(recipe["learning_rate"], float), "1e-5 without a dot is a string in YAML 1.1"


def test_messages_are_the_prompt_of_data_without_one_and_the_last_reply_its_answer(tmp_path):
    user, reply = {"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}
    rows = [{"messages": [user, reply]}, {"messages": [user]}, {"messages": [user, reply, user, reply], "answer": "4"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = tasks.load_data(str(tmp_path / "chat.jsonl"))
    assert [example["prompt"] for example in examples] == [[user], [user], [user, reply, user]]
    assert [example["answer"] for example in examples] == ["Four.", None, "4"]
    assert all("messages" not in example for example in examples)
    (tmp_path / "both.jsonl").write_text(json.dumps({"prompt": "Hi", "messages": [user, reply]}))
    assert tasks.load_data(str(tmp_path / "both.jsonl"))[0] == {"prompt": "Hi", "messages": [user, reply]}
    for bad in ([], [reply], "Hi", None):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": bad}))
        with pytest.raises(ValueError, match="line 1: ") as error:
            tasks.load_data(str(tmp_path / "bad.jsonl"))
        assert "\n" not in str(error.value)

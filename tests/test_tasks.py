"""Tasks: their data and its sides, the verifiers, and prompts as ids."""

import json
import shutil
from collections import Counter

import datasets
import pytest
import yaml
from conftest import ROOT, catch_message, read_log, run_command, write_log

import evaluate
import tasks
import train
from tasks import demo as sums
from tasks import gsm8k
from tasks.demo import numbers_in_words_or_digits

# ---- tasks


@pytest.mark.parametrize("name", ["demo", "values", "calculator"])
def test_no_prompt_is_both_trained_on_and_held_out(name):
    task = tasks.load_task(name)
    train, held_out = (
        {example["prompt"] for example in side} for side in (task.train, task.held_out)
    )
    assert len(train) == len(task.train) and len(held_out) == len(task.held_out)
    assert train and held_out and not train & held_out


def test_the_demo_holds_out_pairs_of_numbers_and_not_only_wordings():
    task = tasks.load_task("demo")
    sides = task.train, task.held_out
    train, held_out = (
        {tuple(sorted(numbers_in_words_or_digits(one["prompt"]))) for one in side} for side in sides
    )
    assert (len(task.train), len(task.held_out)) == (2000, 512) and not train & held_out


def test_a_users_data_takes_the_place_of_the_tasks_own_and_a_tenth_is_held_out(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(50))
        * 2
    )
    task = tasks.load_task("demo", data=str(path))
    train, held_out = (
        {example["prompt"] for example in side} for side in (task.train, task.held_out)
    )
    assert len(held_out) == 5 and len(train) == 45 and not train & held_out and task.rewards
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert {
        example["prompt"] for example in tasks.load_task("demo", data=str(path)).held_out
    } == held_out


def test_a_file_to_evaluate_on_is_taken_whole_and_training_gives_way_to_it(tmp_path):
    both, held_out = tmp_path / "both.jsonl", tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    both.write_text('{"prompt": "a"}\n{"prompt": "c"}\n{"prompt": "d"}\n')
    alone = tasks.load_task("values", held_out=str(held_out))
    assert [example["prompt"] for example in alone.held_out] == ["a", "b"] and alone.train == []
    task = tasks.load_task("values", data=str(both), held_out=str(held_out))
    assert len(task.held_out) == 2 and not {"a", "b"} & {
        example["prompt"] for example in task.train
    }


def test_a_column_split_decides_what_is_held_out(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,split\na,train\nb,test\nc,train\n")
    task = tasks.load_task("values", data=str(path))
    assert [e["prompt"] for e in task.train] == ["a", "c"] and [
        e["prompt"] for e in task.held_out
    ] == ["b"]
    assert [e["prompt"] for e in tasks.load_task("values", held_out=str(path)).held_out] == [
        "b"
    ]  # as an evaluation asks


def test_held_out_prompts_count_once_and_are_not_trained_on_and_a_line_says_how_many(tmp_path):
    sides = [
        ("a", "train"),
        ("b", "test"),
        ("b", "train"),
        ("b", "validation"),
        ("c", "train"),
        ("a", "train"),
    ]
    rows = [{"prompt": prompt, "answer": "1", "split": split} for prompt, split in sides]
    task = tasks.load_task(
        "own", data=write_log(tmp_path / "mine.jsonl", [*rows, rows[1] | {"answer": "2"}])
    )
    assert [one["prompt"] for one in task.train] == ["a", "c", "a"]
    assert [(one["prompt"], one["answer"]) for one in task.held_out] == [("b", "1"), ("b", "2")]
    said = "1 training rows were removed, because their prompts are held out; 1 held-out rows were removed, because they repeat another row"
    assert task.notes[1:] == [f"data: {said}"] and "different answers, such as 'b'" in task.notes[0]
    drawn = [row | {"environment": "cards"} for row in rows]
    assert (
        len(tasks.load_task("own", data=write_log(tmp_path / "drawn.jsonl", drawn)).held_out) == 2
    )


@pytest.mark.parametrize(
    ("answers", "metric"),
    [(["White", "Black"], "score"), ([5, "six"], "accuracy"), ([None, "5"], "accuracy")],
)
def test_answers_that_the_demo_cannot_read_give_no_accuracy(tmp_path, answers, metric):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"{n}?", "answer": answer, "split": "test"} for n, answer in enumerate(answers)
    ]
    write_log(path, [*rows, {"prompt": "x", "answer": "1", "split": "train"}])
    task = tasks.load_task("demo", data=str(path))
    assert task.metric == metric and (task.verifier is None) == (metric == "score")


FRUIT = "Ann has twenty-seven apples and gets fifteen more. How many apples is that?"
TWICE = "Add twenty and twenty."


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "right"),
    [
        ("?", "", "White", 0),
        ("?", "White.", "White", 0),  # without a number nothing is right
        ("?", "five", 5, 1),
        ("?", "5", "five", 1),
        (
            FRUIT,
            "Ann has forty-two apples.",
            "forty-two",
            1,
        ),  # the problem's own words may stand there
        (FRUIT, "Ann has twenty-seven apples and gets fifteen more: 42 apples.", "forty-two", 1),
        (FRUIT, "Ann ate forty-two apples.", "forty-two", 0),
        (TWICE, "Twenty plus twenty is forty.", "forty", 1),
        (TWICE, "Forty.", "forty", 1),
        (TWICE, "Twenty is forty.", "forty", 0),  # each of its numbers as often as there, or none
        (TWICE, "Twenty plus twenty plus twenty is forty.", "forty", 0),
    ],
)
def test_the_demo_reads_the_answer_and_nothing_false_beside_it(prompt, text, answer, right):
    for asked in (prompt, [{"role": "user", "content": prompt}]):
        assert sums.correct([asked], [text], [answer]) == [right]


# ---- values


def test_the_values_labels_cover_every_criterion_and_score_with_prompts_of_their_own():
    labels, task = read_log(ROOT / "data/values_labels.jsonl"), tasks.load_task("values")
    known = {e["prompt"] for e in task.train + task.held_out}
    counts = Counter((label["criterion"], label["score"]) for label in labels)
    assert len(labels) == 40 and not known & {label["prompt"] for label in labels}
    assert all(
        counts[name, score] >= 2
        for name in ("curiosity", "nonsense", "scrutiny")
        for score in range(1, 6)
    )
    assert all(set(label) == {"prompt", "completion", "criterion", "score"} for label in labels)


# ---- gsm8k


def test_a_local_gsm8k_file_gives_questions_and_the_number_after_the_hashes(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(30)
    ]
    write_log(path, rows)
    task = tasks.load_task("gsm8k", data=str(path))
    example = task.train[0]
    assert len(task.train) == 27 and len(task.held_out) == 3 and example["system"] == gsm8k.SYSTEM
    number = numbers_in_words_or_digits(example["prompt"])[0]
    assert example["answer"] == str(2 * number)
    assert task.rewards["correct"](
        completions=[f"\\boxed{{{2 * number}}}"], answer=[example["answer"]]
    ) == [1.0]
    path.write_text('{"question": "How many?", "answer": "some"}\n')
    assert "line 1: the answer 'some' is not a number" in catch_message(
        tasks.load_task, "gsm8k", data=str(path)
    )


def test_math_reads_problems_with_an_answer_or_with_a_boxed_solution(tmp_path):
    rows = [
        {"problem": f"{n}?", "answer": f"\\frac{{{n}}}{{3}}", "split": "train"} for n in range(3)
    ]
    rows.append(
        {
            "problem": "last?",
            "solution": "We get \\boxed{1}, no, \\boxed{\\frac{2}{4}}.",
            "split": "test",
        }
    )
    task = tasks.load_task("math", data=write_log(tmp_path / "math.jsonl", rows))
    assert [example["answer"] for example in task.held_out] == [
        r"\frac{2}{4}"
    ] and task.metric == "accuracy"
    assert task.train[0]["system"] == gsm8k.SYSTEM
    asked = {"answer": [task.held_out[0]["answer"]] * 2}
    assert task.verifier(completions=["\\boxed{0.5}", "\\boxed{0.6}"], **asked) == [1, 0]
    path = write_log(tmp_path / "none.jsonl", [{"problem": "p?", "solution": "no box"}])
    assert "line 1: there is no answer" in catch_message(tasks.load_task, "math", data=path)
    assert "--data FILE.jsonl" in catch_message(tasks.load_task, "math")


def test_gsm8k_is_read_from_the_hub_by_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        rows = [{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(3)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = tasks.load_task("gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [e["prompt"] for e in task.held_out] == ["test 0?", "test 1?", "test 2?"] and task.train[
        2
    ]["answer"] == "2"


@pytest.mark.slow
def test_the_recipe_of_gsm8k_trains_three_seeds_and_measures_on_all_test_questions(
    checkpoints, tokenizer, tmp_path
):
    model, (some, others) = (
        tmp_path / "Qwen2.5",
        (tmp_path / "train.jsonl", tmp_path / "test.jsonl"),
    )
    shutil.copytree(checkpoints["qwen2.5"], model)
    tokenizer.save_pretrained(str(model))
    for path, low, end in ((some, 0, 40), (others, 40, 340)):
        rows = [
            {"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
            for n in range(low, end)
        ]
        write_log(path, rows)
    flags = [
        "--config",
        str(ROOT / "recipes" / "gsm8k.yaml"),
        "--model",
        str(model),
        "--data",
        f"{some},{others}",
    ]
    flags += "--steps 1 --batch 2 --groups 2 --max-tokens 2 --eval-every 0 --seeds 3".split()
    train.main([*flags, "--run-dir", str(tmp_path / "runs")])
    used = [
        yaml.safe_load((tmp_path / "runs" / f"seed-{seed}" / "config.yaml").read_text())
        for seed in range(3)
    ]
    assert [one["seed"] for one in used] == [0, 1, 2] and {one["eval_limit"] for one in used} == {
        256
    }
    out = tmp_path / "out.jsonl"
    evaluate.main(
        ["--run", str(tmp_path / "runs" / "seed-2"), "--limit", "1319", "--out", str(out)]
    )
    asked = read_log(out)
    assert len({line["prompt"] for line in asked}) == 300 and {
        line["answer"] for line in asked
    } >= {"80", "678"}


# ---- recipes and layout


@pytest.mark.parametrize("module", ["prompts.data", "rewards.rewards", "tasks"])
def test_data_rewards_and_tasks_import_nothing_heavy(module):
    heavy = {"mlx", "datasets", "pyarrow", "gwen"} | ({"numpy"} if module != "tasks" else set())
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    out = run_command("-c", code, check=True)
    assert out.stdout.strip() == "[]"

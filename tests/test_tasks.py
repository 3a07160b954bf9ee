"""Tasks: training examples and held-out examples, the verifiers, and the tasks' imports."""

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


def prompts_of(examples):
    return [example["prompt"] for example in examples]


@pytest.mark.parametrize("name", ["demo", "values", "calculator"])
def test_training_prompts_and_held_out_prompts_are_distinct(name):
    task = tasks.load_task(name)
    train = set(prompts_of(task.train))
    held_out = set(prompts_of(task.held_out))
    assert len(train) == len(task.train)
    assert len(held_out) == len(task.held_out)
    assert train
    assert held_out
    assert not train & held_out


def pairs_of_numbers(examples):
    prompts = prompts_of(examples)
    return {tuple(sorted(numbers_in_words_or_digits(prompt))) for prompt in prompts}


def test_no_pair_of_numbers_is_in_both_training_and_held_out_prompts_of_the_demo():
    task = tasks.load_task("demo")
    assert len(task.train) == 2000
    assert len(task.held_out) == 512
    assert not pairs_of_numbers(task.train) & pairs_of_numbers(task.held_out)


def test_the_data_of_a_user_replace_the_data_of_the_task_and_a_tenth_is_held_out(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(50)]
    write_log(path, rows * 2)
    task = tasks.load_task("demo", data=str(path))
    train = set(prompts_of(task.train))
    held_out = set(prompts_of(task.held_out))
    assert len(held_out) == 5
    assert len(train) == 45
    assert not train & held_out
    assert task.rewards

    # the order of the rows does not matter
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    task = tasks.load_task("demo", data=str(path))
    assert set(prompts_of(task.held_out)) == held_out


def test_all_rows_of_a_held_out_file_are_held_out_and_removed_from_training(tmp_path):
    both = tmp_path / "both.jsonl"
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    both.write_text('{"prompt": "a"}\n{"prompt": "c"}\n{"prompt": "d"}\n')

    task = tasks.load_task("values", held_out=str(held_out))
    assert prompts_of(task.held_out) == ["a", "b"]
    assert task.train == []

    task = tasks.load_task("values", data=str(both), held_out=str(held_out))
    assert len(task.held_out) == 2
    assert not {"a", "b"} & set(prompts_of(task.train))


def test_the_column_split_decides_which_rows_are_held_out(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,split\na,train\nb,test\nc,train\n")
    task = tasks.load_task("values", data=str(path))
    assert prompts_of(task.train) == ["a", "c"]
    assert prompts_of(task.held_out) == ["b"]

    task = tasks.load_task("values", held_out=str(path))  # an evaluation does this
    assert prompts_of(task.held_out) == ["b"]


def test_repeated_held_out_rows_and_their_training_rows_are_removed_with_a_note(tmp_path):
    prompts_and_splits = [
        ("a", "train"),
        ("b", "test"),
        ("b", "train"),
        ("b", "validation"),
        ("c", "train"),
        ("a", "train"),
    ]
    rows = [
        {"prompt": prompt, "answer": "1", "split": split} for prompt, split in prompts_and_splits
    ]
    with_other_answer = rows[1] | {"answer": "2"}
    task = tasks.load_task(
        "own", data=write_log(tmp_path / "mine.jsonl", [*rows, with_other_answer])
    )
    assert prompts_of(task.train) == ["a", "c", "a"]
    assert prompts_of(task.held_out) == ["b", "b"]
    assert [example["answer"] for example in task.held_out] == ["1", "2"]
    assert "different answers, such as 'b'" in task.notes[0]
    assert task.notes[1:] == [
        "data: 1 training rows were removed, because their prompts are held out; "
        "1 held-out rows were removed, because they repeat another row"
    ]

    # rows of an environment are kept, because the environment may draw another problem for each
    rows = [row | {"environment": "cards"} for row in rows]
    task = tasks.load_task("own", data=write_log(tmp_path / "cards.jsonl", rows))
    assert len(task.held_out) == 2


@pytest.mark.parametrize(
    ("answers", "metric"),
    [(["White", "Black"], "score"), ([5, "six"], "accuracy"), ([None, "5"], "accuracy")],
)
def test_without_readable_answers_the_demo_reports_a_score_instead_of_an_accuracy(
    tmp_path, answers, metric
):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"{n}?", "answer": answer, "split": "test"} for n, answer in enumerate(answers)
    ]
    write_log(path, [*rows, {"prompt": "x", "answer": "1", "split": "train"}])
    task = tasks.load_task("demo", data=str(path))
    assert task.metric == metric
    assert (task.verifier is None) == (metric == "score")


FRUIT = "Ann has twenty-seven apples and gets fifteen more. How many apples is that?"
TWICE = "Add twenty and twenty."


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "expected_reward"),
    [
        ("?", "", "White", 0),
        ("?", "White.", "White", 0),  # a completion without a number is never right
        ("?", "five", 5, 1),
        ("?", "5", "five", 1),
        # a completion may contain words of the problem
        (FRUIT, "Ann has forty-two apples.", "forty-two", 1),
        (FRUIT, "Ann has twenty-seven apples and gets fifteen more: 42 apples.", "forty-two", 1),
        (FRUIT, "Ann ate forty-two apples.", "forty-two", 0),
        # a completion repeats all numbers of the problem, each as often as there, or none
        (TWICE, "Twenty plus twenty is forty.", "forty", 1),
        (TWICE, "Forty.", "forty", 1),
        (TWICE, "Twenty is forty.", "forty", 0),
        (TWICE, "Twenty plus twenty plus twenty is forty.", "forty", 0),
    ],
)
def test_the_demo_accepts_a_right_number_without_false_statements(
    prompt, text, answer, expected_reward
):
    for form in (prompt, [{"role": "user", "content": prompt}]):
        assert sums.correct([form], [text], [answer]) == [expected_reward]


# ---- values


def test_the_labels_of_values_cover_every_criterion_and_score_but_no_prompt_of_the_task():
    labels = read_log(ROOT / "data/values_labels.jsonl")
    task = tasks.load_task("values")
    counts = Counter((label["criterion"], label["score"]) for label in labels)
    assert len(labels) == 40
    assert not set(prompts_of(task.train + task.held_out)) & set(prompts_of(labels))
    for criterion in ("curiosity", "nonsense", "scrutiny"):
        for score in range(1, 6):
            assert counts[criterion, score] >= 2
    for label in labels:
        assert set(label) == {"prompt", "completion", "criterion", "score"}


# ---- gsm8k


def test_the_answer_of_a_local_gsm8k_file_is_the_number_after_the_hashes(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(30)
    ]
    write_log(path, rows)
    task = tasks.load_task("gsm8k", data=str(path))
    example = task.train[0]
    assert len(task.train) == 27
    assert len(task.held_out) == 3
    assert example["system"] == gsm8k.SYSTEM
    number = numbers_in_words_or_digits(example["prompt"])[0]
    assert example["answer"] == str(2 * number)
    completion = f"\\boxed{{{2 * number}}}"
    rewards = task.rewards["correct"](completions=[completion], answer=[example["answer"]])
    assert rewards == [1.0]

    path.write_text('{"question": "How many?", "answer": "some"}\n')
    message = catch_message(tasks.load_task, "gsm8k", data=str(path))
    assert "line 1: the answer 'some' is not a number" in message


def test_math_reads_answers_and_boxed_solutions(tmp_path):
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
    [example] = task.held_out
    assert example["answer"] == r"\frac{2}{4}"
    assert task.metric == "accuracy"
    assert task.train[0]["system"] == gsm8k.SYSTEM
    completions = ["\\boxed{0.5}", "\\boxed{0.6}"]
    assert task.verifier(completions=completions, answer=[example["answer"]] * 2) == [1, 0]

    path = write_log(tmp_path / "none.jsonl", [{"problem": "p?", "solution": "no box"}])
    assert "line 1: there is no answer" in catch_message(tasks.load_task, "math", data=path)
    assert "--data FILE.jsonl" in catch_message(tasks.load_task, "math")


def test_gsm8k_is_loaded_from_the_hub_with_its_splits(monkeypatch):
    requests = []

    def load_dataset(name, config, split):
        requests.append((name, config, split))
        rows = [{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(3)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = tasks.load_task("gsm8k")
    assert requests == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert prompts_of(task.held_out) == ["test 0?", "test 1?", "test 2?"]
    assert task.train[2]["answer"] == "2"


def write_gsm8k_file(path, numbers):
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in numbers
    ]
    write_log(path, rows)


@pytest.mark.slow
def test_the_recipe_of_gsm8k_trains_three_seeds_and_evaluates_all_test_questions(
    checkpoints, tokenizer, tmp_path
):
    model = tmp_path / "Qwen2.5"
    shutil.copytree(checkpoints["qwen2.5"], model)
    tokenizer.save_pretrained(str(model))
    train_file = tmp_path / "train.jsonl"
    test_file = tmp_path / "test.jsonl"
    write_gsm8k_file(train_file, range(40))
    write_gsm8k_file(test_file, range(40, 340))

    flags = ["--config", str(ROOT / "recipes" / "gsm8k.yaml"), "--model", str(model)]
    flags += ["--data", f"{train_file},{test_file}", "--run-dir", str(tmp_path / "runs")]
    flags += "--steps 1 --batch 2 --groups 2 --max-tokens 2 --eval-every 0 --seeds 3".split()
    train.main(flags)
    for seed in range(3):
        file = tmp_path / "runs" / f"seed-{seed}" / "config.yaml"
        config = yaml.safe_load(file.read_text())
        assert config["seed"] == seed
        assert config["eval_limit"] == 256

    out = tmp_path / "out.jsonl"
    run_dir = tmp_path / "runs" / "seed-2"
    evaluate.main(["--run", str(run_dir), "--limit", "1319", "--out", str(out)])
    records = read_log(out)
    assert len(set(prompts_of(records))) == 300
    assert {record["answer"] for record in records} >= {"80", "678"}


# ---- imports


@pytest.mark.parametrize("module", ["prompts.data", "rewards.rewards", "tasks"])
def test_data_rewards_and_tasks_import_no_large_libraries(module):
    heavy = {"mlx", "datasets", "pyarrow", "gwen"}
    if module != "tasks":
        heavy.add("numpy")
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    out = run_command("-c", code, check=True)
    assert out.stdout.strip() == "[]"

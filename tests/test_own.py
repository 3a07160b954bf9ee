"""A user's own data: what verifies its answers, what is said of it, and where its files lie."""

import json
import os
import re
import shutil

import datasets
import pyarrow
import pytest
import yaml
from conftest import ROOT, catch_message, read_log, write_log

import evaluate
import export
import tasks
import train
import trainer
from disk import hub, places
from evaluation import policy
from prompts import chats, data
from prompts.examples import last_user_text
from prompts.held_out import load_training_and_held_out
from rewards import audit, built_in, rewards
from run import SftRun
from settings import checks, sources
from settings.sources import make_paths_absolute, parse_flags, settings_from_flags
from text.documents import load_yaml

SUMS = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(30)]


def settings(*words, recipe=None):
    flags = settings_from_flags(parse_flags(["--model", "demo", *map(str, words)]))
    return sources.resolve_settings(flags, recipe, None, lambda name: (name, "asked"))


def task_of(*words):
    return tasks.make_task(settings(*words)[0])


# ---- data


TABLE = [{"prompt": 'Hé\u2028llo, "you"?', "answer": 7}, {"prompt": "two\nlines", "answer": 8}]


def test_the_same_records_and_answers_as_texts_come_out_of_every_kind_of_file(tmp_path):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in TABLE)
    cells = '\ufeffprompt,answer\n"Hé\u2028llo, ""you""?",7\n\n"two\nlines",8\n'
    sheet = re.sub(",(?! )", ";", cells)  # as a spreadsheet writes it where commas part decimals
    for ending, text in (
        ("jsonl", lines),
        ("json", json.dumps(TABLE)),
        ("csv", cells),
        ("sheet.csv", sheet),
    ):
        (tmp_path / f"data.{ending}").write_bytes(text.encode())
    dataset = datasets.Dataset.from_list(TABLE)
    dataset.to_parquet(tmp_path / "data.parquet")
    table = pyarrow.Table.from_pylist(TABLE)
    for name, make in (
        ("file.arrow", pyarrow.ipc.new_file),
        ("stream.arrow", pyarrow.ipc.new_stream),
    ):
        with make(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    dataset.save_to_disk(tmp_path / "saved")
    for path in tmp_path.iterdir():
        assert data.load_data(str(path)) == [
            row | {"answer": str(row["answer"])} for row in TABLE
        ], path


@pytest.mark.parametrize(
    ("given", "text"),
    [(True, "True"), (0.5, "0.5"), (float("nan"), None), ("007", "007"), ({"a": 1}, '{"a": 1}')],
)
def test_numbers_and_truths_become_texts_and_what_is_missing_stays_so(tmp_path, given, text):
    (example,) = data.load_data(
        write_log(tmp_path / "data.jsonl", [{"prompt": "?", "answer": given}])
    )
    assert example["answer"] == text


def test_an_answer_that_is_a_list_of_other_things_is_refused_and_may_bear_another_name(tmp_path):
    path = write_log(tmp_path / "data.jsonl", [{"prompt": "?", "answer": [{"a": 1}]}])
    assert "line 1: answer [{'a': 1}] is a list" in catch_message(data.load_data, path)
    assert data.load_data(path, "answers=answer") == [{"prompt": "?", "answers": [{"a": 1}]}]
    path = write_log(
        tmp_path / "data.jsonl", [{"system": "s", "answer": "a", "id": "x", "question": "?"}]
    )
    assert catch_message(data.load_data, path).endswith("--columns prompt=question")


def test_rewards_find_a_renamed_column_by_both_names_but_not_one_that_means_something(tmp_path):
    path = write_log(
        tmp_path / "data.jsonl", [{"question": "?", "solution": "42", "answer": "it is 42"}]
    )
    (example,) = data.load_data(path, "prompt=question,answer=solution")
    assert example == {"prompt": "?", "question": "?", "solution": "42", "answer": "42"}
    path = write_log(tmp_path / "b.jsonl", [{"prompt": "?", "num_tokens": 3}])
    (example,) = data.load_data(path, "mine=num_tokens")
    assert example == {"prompt": "?", "mine": 3}


def test_splits_that_datasets_saved_are_the_sides_of_a_task_and_each_can_be_named(tmp_path):
    rows = {
        name: datasets.Dataset.from_list([{"prompt": name, "answer": 1}])
        for name in ("train", "test")
    }
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "both")
    task = task_of("--data", tmp_path / "both")
    assert [[example["prompt"] for example in side] for side in (task.train, task.held_out)] == [
        ["train"],
        ["test"],
    ]
    assert [example["prompt"] for example in data.load_data(f"{tmp_path}/both:test")] == ["test"]
    assert "did you mean 'test'?: " in catch_message(data.load_data, f"{tmp_path}/both:tset")
    datasets.DatasetDict({"train_sft": rows["train"], "test_sft": rows["test"]}).save_to_disk(
        tmp_path / "odd"
    )
    assert f"{tmp_path}/odd:train_sft" in catch_message(data.load_data, f"{tmp_path}/odd")
    rows["train"].save_to_disk(tmp_path / "one")
    assert data.load_data(f"{tmp_path}/one:train") == data.load_data(f"{tmp_path}/one")
    assert "has the splits train" in catch_message(data.load_data, f"{tmp_path}/one:test")
    assert "is a directory" in catch_message(data.load_data, str(tmp_path))


def test_held_out_prompts_may_come_from_a_file_of_their_own(tmp_path):
    train_file, test_file = (
        write_log(tmp_path / "train,1.jsonl", SUMS),
        write_log(tmp_path / "test.jsonl", SUMS[:3]),
    )
    for words in (
        ["--data", train_file, "--eval-data", test_file],
        ["--data", f"{train_file},{test_file}"],
    ):
        task = task_of(*words)
        assert (len(task.train), len(task.held_out)) == (
            27,
            3,
        )  # what is held out is not trained on
    alone = task_of("--data", train_file)  # whose name has a comma
    assert (len(alone.train), len(alone.held_out)) == (27, 3)
    message = catch_message(settings, "--eval-data", test_file)
    assert f"--eval-data {test_file} needs --data FILE" in message
    sums = write_log(tmp_path / "sums.jsonl", SUMS)
    for recipe, *words in (
        ["data: sums.jsonl", "--eval-data", test_file],
        ["data: sums.jsonl,gone.jsonl", "--eval-data", test_file],
        ["eval_data: test.jsonl", "--data", sums],
        ["data: gone.jsonl\neval_data: test.jsonl", "--data", sums],
        ["data: sums.jsonl\neval_data: test.jsonl"],
    ):
        (tmp_path / "mine.yaml").write_text(recipe)
        assert settings(*words, recipe=tmp_path / "mine.yaml")[0].data.path == f"{sums},{test_file}"
    rows = trainer.convert_arguments_and_cache_data({"data": SUMS, "eval_data": SUMS[:3]})
    assert len(tasks.make_task(checks.check_settings({"task": "own"} | rows)).held_out) == 3


# ---- the verifier


def test_rows_that_the_verifier_cannot_reward_are_left_out_and_counted(tmp_path):
    rows = [row | {"split": "train"} for row in SUMS[:6]] + [
        row | {"split": "test"} for row in SUMS[6:10]
    ]
    for place in (1, 7):
        rows[place] = rows[place] | {"answer": None}
    path = write_log(tmp_path / "mine.jsonl", rows)
    task = task_of("--data", path)
    assert (len(task.train), len(task.held_out), task.metric) == (5, 3, "accuracy")
    note = "data: 5 prompts to train on, 3 held out, 2 left out because their answers cannot be compared"
    assert task.notes[0] == f"{note}; the reward is 1 x correct"
    assert task.notes[1].startswith(
        "comparison: 8 answers such as '1' are compared as numbers (equal values, "
    )
    task = task_of("--data", path, "--reward", "length:9")
    assert (len(task.train), len(task.held_out)) == (6, 4)  # which that reward can do without
    assert (
        task.verifier(
            prompts=[],
            completions=["9"] * 4,
            answer=[example["answer"] for example in task.held_out],
        )[1]
        is None
    )


def test_data_without_answers_needs_a_reward_and_its_evaluations_show_that_alone(tmp_path):
    path = write_log(tmp_path / "mine.jsonl", [{"prompt": row["prompt"]} for row in SUMS])
    assert f"--data {path} has no answer to compare with" in catch_message(task_of, "--data", path)
    task = task_of("--data", path, "--reward", "length:9")
    assert (task.metric, task.verifier, task.reward_weights) == ("score", None, {"length": 1.0})
    assert task.notes[1] == "comparison: there are no answers to compare with"
    rows = [row | {"answer": "It depends on this and on that, as always."} for row in SUMS]
    prose = write_log(tmp_path / "prose.jsonl", rows)
    assert "only prose such as 'It depends on this and on that, as always.'" in catch_message(
        task_of, "--data", prose
    )
    assert "30 answers such as 'It d" in task_of("--data", prose, "--reward", "length:9").notes[1]
    judged = task_of("--data", path, "--rubric", ROOT / "data" / "demo_rubric.yaml")
    assert judged.reward_weights == {"rubric": 1.0} and not judged.rewards


def test_the_verifier_that_is_taken_is_told_with_an_example_and_another_may_be_named(tmp_path):
    rows = [
        {"prompt": f"{n}?", "answer": json.dumps({"label": "bug", "priority": n})} for n in range(4)
    ]
    data = ["--data", write_log(tmp_path / "mine.jsonl", rows)]
    task = task_of(*data)
    assert task.notes[1].startswith("comparison: 4 answers such as '{")
    asked = {"prompts": ["?"] * 2, "completions": ['{"priority": 3, "label": "bug"}', "3"]}
    assert (
        task.verifier(answer=[rows[3]["answer"]] * 2, **asked) == [1, 0]
        and task.rewards["correct"] is task.verifier
    )
    assert "are compared as texts" in task_of(*data, "--verifier", "exact").notes[1]
    assert '--verifier number does not fit the answer \'{"label"' in catch_message(
        task_of, *data, "--verifier", "number"
    )
    assert (
        "or one of auto, json, number, choice, math, exact, marked, did you mean 'json'?"
        in catch_message(task_of, *data, "--verifier", "jsn")
    )
    message = catch_message(task_of, "--task", "demo", "--verifier", "json")
    assert "--verifier is json, but --task demo has a verifier of its own" in message
    (tmp_path / "mine.py").write_text(
        "def bug(completions, **_): return [float('bug' in one) for one in completions]"
    )
    task = task_of(*data, "--verifier", f"{tmp_path}/mine.py:bug", "--reward", "length:9")
    assert rewards.call_reward_on_rank0("x", task.verifier, ["?"], ["a bug"], {}) == [1] and list(
        task.rewards
    ) == ["length"]
    mixed = [{"prompt": f"{n}?", "answer": "lots" if n == 3 else str(n)} for n in range(4)]
    data = ["--data", write_log(tmp_path / "mixed.jsonl", mixed)]
    task = task_of(*data, "--reward", "length:9")  # which may pay for other words that are right
    assert (task.metric, task.reward_weights) == ("score", {"exact": 0, "length": 1})
    assert task.rewards["exact"](prompts=[], completions=["Lots."], answer=["lots"]) == [1]
    assert "only a metric" in task.notes[1] and "--verifier exact" in task.notes[1]
    assert task_of(*data, "--reward", "length:9", "--verifier", "auto").metric == "accuracy"


def test_own_data_is_its_own_task_and_its_defaults_are_said(tmp_path):
    path = write_log(tmp_path / "mine.jsonl", SUMS)
    config, line = settings("--data", path, "--batch", 3)
    flags = "--batch 3 --groups 8 --steps 60 --max-tokens 24 --learning-rate 0.004"
    flags += " --eval-every 20 --save-every 20"
    assert config.data.task == "own" and line.endswith(
        f"task: own, with recipes/demo.yaml: {flags}"
    )
    config, line = settings("--model", "Qwen/Qwen3-0.6B", "--data", path, "--batch", 3)
    recipe = load_yaml(ROOT / "recipes" / "own.yaml", "")
    assert config.sampling.batch == 3 and config.optimizer.learning_rate == recipe["learning_rate"]
    assert "--batch 3 --groups 8 --max-tokens 256 --steps 100 --learning-rate 5e-05" in line
    low = "low for this model: recipes/own.yaml has 5e-05"
    line = settings("--model", "Qwen/Qwen3-0.6B", "--data", path, "--learning-rate", "1e-6")[1]
    assert line.endswith(f" 1e-06 is {low}")
    assert settings("--data", path, "--task", "demo")[0].data.task == "demo"
    config, line = settings("--data", path, "--loss-type", "sft")
    flags = "--batch 8 --steps 60 --learning-rate 0.004 --eval-every 20 --save-every 20"
    assert config.data.task == "own" and line.endswith(
        f"; replies: {path}; task: own, with recipes/demo.yaml: {flags}"
    )
    for model, rate in (("smollm2", 4e-4), ("demo:tools", 4e-3), ("Qwen/Qwen3-0.6B", 5e-5)):
        config, _ = settings("--model", model, "--data", path, "--loss-type", "sft")
        assert config.optimizer.learning_rate == rate
    assert "name the data with --data FILE" in catch_message(task_of, "--task", "own")


def test_a_text_file_has_a_prompt_a_line_and_a_file_several_rewards(tmp_path):
    (tmp_path / "mine.txt").write_text("Say hello.\n\nSay goodbye, and\tmean it.\n" * 8)
    (tmp_path / "mine.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
        "def two(completions, **_):\n    return [2.0] * len(completions)\n"
    )
    task = task_of(
        "--data", tmp_path / "mine.txt", "--reward", f"{tmp_path}/mine.py:one,two", "length:9"
    )
    assert {example["prompt"] for example in task.train + task.held_out} == {
        "Say hello.",
        "Say goodbye, and\tmean it.",
    }
    assert task.reward_weights == {"one": 1.0, "two": 1.0, "length": 1.0}


@pytest.mark.parametrize(
    ("model", "recipe"),
    {
        "smollm2": "own-small",
        "HuggingFaceTB/SmolLM2-360M-Instruct": "own-small",
        "/models/270m/my-0.27b": "own-small",
        "Qwen/Qwen2.5-0.5B-Instruct": "own",
        "random:30m": "own-small",
        "Qwen/Qwen3-4B": "own",
        "/models/135m/mine": "own",
        "demo:rg": "demo-rg",
    }.items(),
)
def test_own_data_has_the_defaults_of_the_size_in_the_model_s_name(model, recipe):
    assert (
        sources.recipe_name("own", model) == recipe
        and sources.recipe_name("values", model) == "values"
    )


@pytest.mark.slow
def test_a_run_shows_accuracy_and_score(tmp_path):
    asked = [f"What is {a} plus {b}?" for a in ("one", "six") for b in ("two", "ten", "five")]
    rows = [{"prompt": prompt, "answer": "lots"} for prompt in asked]
    (tmp_path / "mine.py").write_text(
        "def always(completions, answer, **_):\n"
        "    return [float('.' in text or text == right) for text, right in zip(completions, answer)]"
    )
    data = [
        "--data",
        write_log(tmp_path / "a.jsonl", rows),
        "--eval-data",
        str(tmp_path / "b.jsonl"),
    ]
    write_log(tmp_path / "b.jsonl", [*SUMS[:12], {"prompt": "Hi"}])
    flags = "--model demo --steps 1 --batch 2 --groups 2 --eval-every 1 --verifier auto".split()
    train.main(
        [
            *flags,
            *data,
            "--reward",
            f"{tmp_path}/mine.py:always",
            "--run-dir",
            str(tmp_path / "run"),
        ]
    )
    record = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert record["eval/accuracy"] < record["eval/score"] == record["eval/reward/always"]
    num_right = record["eval/accuracy"] * 12
    assert (record["eval/num"], record["eval/known"]) == (13, 12) and num_right == pytest.approx(
        round(num_right)
    )
    details = read_log(tmp_path / "run" / "eval_answers.jsonl")
    assert (
        details[12]["values"] == [None] and details[12]["greedy_value"] is None
    )  # no answer to compare with


# ---- rewards before a model is loaded


def test_a_reward_meets_the_answers_of_all_rows_and_the_row_it_fails_on_is_named(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(200)]
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef score(completions, answer, **_):\n    calls.append(len(completions))\n"
        "    return [float(int(right) > 3) for right in answer]"
    )
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    assert audit.try_own_answers_until_timeout(name, reward, rows) == 200
    assert reward.fn.__globals__["calls"] == [64, 64, 64, 8]
    rows[150]["answer"] = "n/a"
    message = catch_message(audit.try_own_answers_until_timeout, name, reward, rows)
    assert f"at {tmp_path}/mine.py:4; the row has the prompt '150?' and the answer 'n/a'" in message
    assert (
        audit.try_own_answers_until_timeout(
            name, built_in.make_built_in_reward("length:9"), [{"prompt": "a"}]
        )
        == 1
    )


# ---- files from any directory


def test_files_are_kept_by_absolute_paths_and_names_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.jsonl", "test.jsonl", "mine.py", "r.yaml"):
        (tmp_path / name).touch()
    for name in ("demo", "model", "saved", "owner"):
        (tmp_path / name).mkdir()
    given = {
        "data": "mine.jsonl,test.jsonl",
        "reward": ["mine.py:fn", "length:200", "math_verify"],
        "rubric": "r.yaml",
    }
    given |= {"model": "demo", "judge_model": "model", "teacher": "self"}
    given |= {"loss_type": "mine.py:loss", "advantage": "group"}
    absolute = make_paths_absolute(given)
    assert absolute == given | {
        "data": f"{tmp_path}/mine.jsonl,{tmp_path}/test.jsonl",
        "reward": [f"{tmp_path}/mine.py:fn", "length:200", "math_verify"],
        "rubric": f"{tmp_path}/r.yaml",
        "judge_model": f"{tmp_path}/model",
        "loss_type": f"{tmp_path}/mine.py:loss",
    }
    assert make_paths_absolute(absolute) == absolute
    served = {"judge_model": "model", "judge_url": "http://127.0.0.1:1/v1"}
    assert make_paths_absolute(served) == served  # a server's own name for it
    for path in ("owner/name:main:train,owner/name:main:test", "missing.jsonl", "demo:rg"):
        assert make_paths_absolute({"data": path, "init_adapter": path}) == {
            "data": path,
            "init_adapter": path,
        }
    assert (
        make_paths_absolute({"data": "saved:train,saved:test"})["data"]
        == f"{tmp_path}/saved:train,{tmp_path}/saved:test"
    )


def test_a_recipe_s_files_are_found_beside_it_too(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").touch()
    (tmp_path / "recipe.yaml").write_text("data: mine.jsonl\n")
    monkeypatch.chdir("/")
    assert sources.load_recipe(tmp_path / "recipe.yaml")["data"] == f"{tmp_path}/mine.jsonl"
    assert os.path.samefile(
        sources.load_task_defaults("rg:lcm", "demo:rg")["task_config"],
        ROOT / "data" / "demo_rg.yaml",
    )


@pytest.mark.slow
def test_a_run_resumes_evaluates_and_repeats_from_any_directory(tmp_path, monkeypatch, capsys):
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    write_log(home / "mine.jsonl", SUMS)
    (home / "mine.py").write_text(
        "def short(completions, **_): return [-float(len(text)) for text in completions]"
    )
    monkeypatch.chdir(home)
    small = "--model demo --steps 1 --batch 2 --groups 2 --eval-every 1 --max-tokens 4".split()
    train.main([*small, "--data", "mine.jsonl", "--reward", "mine.py:short", "--run-dir", "run"])
    monkeypatch.chdir(away)
    train.main(["--resume", str(home / "run"), "--steps", "2"])
    train.main(["--config", str(home / "run" / "config.yaml"), "--run-dir", "again"])
    assert len((away / "again" / "metrics.jsonl").read_text().splitlines()) == 2
    capsys.readouterr()
    evaluate.main(["--run", "again"])
    last = read_log(away / "again" / "eval.jsonl")[-1]
    assert json.loads(capsys.readouterr().out)["eval/score"] == last["eval/score"]
    evaluate.main(["--run", "again", "--data", str(home / "mine.jsonl")])
    assert "30 held-out prompts" in capsys.readouterr().err
    renamed = [{"question": row["prompt"], "answer": row["answer"]} for row in SUMS[:6]]
    test = write_log(home / "test.jsonl", renamed)
    evaluate.main(
        ["--run", "again", "--data", test, "--columns", "prompt=question"]
    )  # of the new file alone
    assert "6 held-out prompts" in capsys.readouterr().err
    (home / "mine.jsonl").rename(home / "moved.jsonl")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(home / "run"), "--steps", "3"])
    assert f"--data {home}/mine.jsonl, which is no longer there" in capsys.readouterr().err
    settings = yaml.safe_load((home / "run" / "config.yaml").read_text())
    (home / "run" / "config.yaml").write_text(
        yaml.safe_dump(settings | {"data": str(home / "moved.jsonl")})
    )
    train.main(["--resume", str(home / "run"), "--steps", "3", "--allow-changes"])
    assert len((home / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project folder with its data, rewards, rubric and model, and a run of one step; it is not where it was made."""
    home = tmp_path_factory.mktemp("made") / "project"
    home.mkdir()
    write_log(home / "mine.jsonl", SUMS)
    (home / "mine.py").write_text(
        "def short(completions, **_): return [-float(len(text)) for text in completions]"
    )
    (home / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Kind}]")
    shutil.copytree(hub.DEMO, home / "model")
    flags = "--model model --data mine.jsonl --reward mine.py:short --rubric mine.yaml --run-dir runs/x --steps 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train.main([*flags.split(), *"--batch 2 --groups 2 --max-tokens 4 --eval-limit 2".split()])
    return home.rename(tmp_path_factory.mktemp("kept") / "project")


@pytest.fixture
def moved(project, tmp_path, monkeypatch):
    """The project in another place, which is the working directory; what was told of moves before is forgotten."""
    places.print_once.cache_clear()
    monkeypatch.chdir(shutil.copytree(project, tmp_path / "moved"))
    return tmp_path / "moved"


def refused_line(capsys, main, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_in_a_project_folder_that_moved_goes_on_and_says_where_it_takes_each_file(
    moved, capsys
):
    train.main(["--resume", "runs/x", "--steps", "2"])
    lines = capsys.readouterr().err.splitlines()
    for name in ("mine.jsonl", "mine.py", "mine.yaml", "model"):
        (line,) = [line for line in lines if f"/project/{name} no longer exists; " in line]
        assert f"; {moved}/{name}, which is identical" in line
    assert len(read_log(moved / "runs" / "x" / "metrics.jsonl")) == 2
    assert (
        str(moved / "mine.jsonl")
        == yaml.safe_load((moved / "runs" / "x" / "config.yaml").read_text())["data"]
    )
    places.print_once.cache_clear()
    train.main(["--resume", "runs/x", "--steps", "3"])
    assert "no longer exists" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_moved_run_is_evaluated_repeated_and_fused_from_any_directory(
    moved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    evaluate.main(["--run", "moved/runs/x", "--limit", "2"])
    messages = capsys.readouterr().err
    assert f"/project/mine.jsonl no longer exists; {moved}/mine.jsonl, which" in messages
    train.main(["--config", "moved/runs/x/config.yaml", "--run-dir", "again"])
    record = read_log(tmp_path / "again" / "metrics.jsonl")[0]
    before = read_log(moved / "runs" / "x" / "metrics.jsonl")[0]
    assert record["reward/mean"] == before["reward/mean"]
    export.main(["--fuse", "--run", "moved/runs/x", "--out", "fused"])
    assert (tmp_path / "fused" / "config.json").is_file()


def test_a_moved_run_whose_files_differ_or_are_gone_is_refused_by_the_flag(moved, capsys):
    (moved / "mine.jsonl").rename(moved / "renamed.jsonl")
    line = refused_line(capsys, train.main, "--resume", "runs/x", "--steps", "2")
    assert "--data" in line and "mine.jsonl" in line
    assert "--data" in refused_line(
        capsys, train.main, "--config", "runs/x/config.yaml", "--run-dir", "again"
    )
    assert "--data" in refused_line(capsys, evaluate.main, "--run", "runs/x")
    write_log(moved / "mine.jsonl", SUMS[1:])
    assert "--data" in refused_line(capsys, train.main, "--resume", "runs/x", "--steps", "2")
    line = refused_line(
        capsys, train.main, "--resume", "runs/x", "--steps", "2", "--data", "mine.jsonl"
    )
    assert "data" in line and "--allow-changes" in line
    (moved / "mine.py").write_text("def short(completions, **_): return [0.0 for _ in completions]")
    line = refused_line(
        capsys, train.main, "--resume", "runs/x", "--steps", "2", "--data", "renamed.jsonl"
    )
    assert "--reward" in line and "mine.py" in line


@pytest.mark.slow
def test_a_flag_says_where_a_file_of_a_run_went_and_equal_bytes_are_no_change(moved):
    (moved / "mine.jsonl").rename(moved / "renamed.jsonl")
    train.main(["--resume", "runs/x", "--steps", "2", "--data", "renamed.jsonl"])
    assert len(read_log(moved / "runs" / "x" / "metrics.jsonl")) == 2


def test_a_file_s_place_is_the_same_from_the_working_directory_where_the_run_alone_moved(
    moved, tmp_path
):
    run = (moved / "runs" / "x").rename(tmp_path / "alone")
    assert places.find_and_print_moved_paths(run)[json_key(run, "mine.jsonl")] == str(
        moved / "mine.jsonl"
    )


def json_key(run, name):
    return next(path for path in places.read_path_record(run)["files"] if path.endswith(f"/{name}"))


# ---- judges


def test_a_bundled_judge_is_warned_of_where_it_has_not_learned_the_criteria(tmp_path):
    data = ["--data", write_log(tmp_path / "mine.jsonl", SUMS)]
    (tmp_path / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Kind}]")
    mine, demos = (
        ["--rubric", tmp_path / "mine.yaml"],
        ["--rubric", ROOT / "data" / "demo_rubric.yaml"],
    )

    def noise(*words):
        return [note for note in task_of(*words).notes if "are noise" in note]

    (warning,) = noise(*data, *mine)
    assert (
        "the judge demo has learned only the criteria of data/demo_rubric.yaml, so its scores for kind are noise"
        in warning
    )
    (warning,) = noise(*data, *demos, "--judge-model", "demo:rg")
    assert "no criteria, so its scores for correct, working, sentence are" in warning
    assert "wondering" in noise("--task", "values")[0]  # the witness too
    assert not noise(*data, *demos) and not noise("--task", "demo")
    assert not noise(*data, *mine, "--judge-model", "Qwen/Qwen3-4B")
    assert not noise(*data, *mine, "--judge-model", "demo", "--judge-url", "http://127.0.0.1:1/v1")


def test_chats_to_tune_on_have_held_out_ones_in_a_file_of_their_own(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": str(row["answer"])} for row in SUMS]
    paths = [
        write_log(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows), ("b", rows[:2]))
    ]
    words = ["--loss-type", "sft", "--data", paths[0], "--eval-data", paths[1]]
    made = SftRun(settings(*words)[0], tmp_path / "run")
    assert (len(made.train), len(made.held_out)) == (28, 2)


def test_replies_and_rewards_hold_out_the_same_prompts_of_a_file(tmp_path):
    front, rows = (
        {"role": "system", "content": "Be brief."},
        [row | {"completion": "one"} for row in SUMS],
    )
    asked = [row | {"prompt": [front, {"role": "user", "content": row["prompt"]}]} for row in rows]
    paths = [
        write_log(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows), ("b", asked))
    ]
    sides = [
        load_training_and_held_out(path, None, None, *read)[1]
        for path in paths
        for read in ([], [chats.read_conversation_example])
    ]
    held_out = [{last_user_text(example["prompt"]) for example in side} for side in sides]
    assert len(held_out[0]) == 3 and held_out == held_out[:1] * 4


def test_a_run_that_was_tuned_on_replies_is_evaluated_on_data_as_own(tmp_path):
    rows = write_log(
        tmp_path / "a.jsonl", [{"prompt": row["prompt"], "completion": "one"} for row in SUMS]
    )
    words = ["--loss-type", "sft", "--data", rows, "--task", "demo"]
    (tmp_path / "config.yaml").write_text(sources.to_yaml(settings(*words)[0]))
    assert policy.load_run_config_and_set_template_date(str(tmp_path), {}).data.task == "demo"
    assert (
        policy.load_run_config_and_set_template_date(str(tmp_path), {}, "problems.jsonl").data.task
        == "own"
    )

"""A user's own data: the verifier of its answers, the messages about it, and its files."""

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
from text import printable
from text.documents import load_yaml

SUMS = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(30)]
DEMO_RUBRIC = ROOT / "data" / "demo_rubric.yaml"
SHORT_REWARD = "def short(completions, **_): return [-float(len(text)) for text in completions]"


def resolve_settings(*flags, recipe=None):
    """The settings of a run of the demo model with these flags, and a line about them."""
    parsed = settings_from_flags(parse_flags(["--model", "demo", *map(str, flags)]))
    return sources.resolve_settings(parsed, recipe, None, lambda name: (name, "asked"))


def make_task(*flags):
    config, _ = resolve_settings(*flags)
    return tasks.make_task(config)


def num_prompts(task):
    """How many prompts a task trains on, and how many it holds out."""
    return len(task.train), len(task.held_out)


# ---- data


TABLE = [{"prompt": 'Hé\u2028llo, "you"?', "answer": 7}, {"prompt": "two\nlines", "answer": 8}]


def test_every_kind_of_file_gives_the_same_records_with_answers_as_texts(tmp_path):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in TABLE)
    cells = '\ufeffprompt,answer\n"Hé\u2028llo, ""you""?",7\n\n"two\nlines",8\n'
    # Spreadsheets write semicolons where the comma is the decimal separator.
    sheet = re.sub(",(?! )", ";", cells)
    contents = {"jsonl": lines, "json": json.dumps(TABLE), "csv": cells, "sheet.csv": sheet}
    for ending, text in contents.items():
        (tmp_path / f"data.{ending}").write_bytes(text.encode())

    dataset = datasets.Dataset.from_list(TABLE)
    dataset.to_parquet(tmp_path / "data.parquet")
    dataset.save_to_disk(tmp_path / "saved")

    table = pyarrow.Table.from_pylist(TABLE)
    writers = {"file.arrow": pyarrow.ipc.new_file, "stream.arrow": pyarrow.ipc.new_stream}
    for name, open_writer in writers.items():
        with open_writer(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)

    expected = [row | {"answer": str(row["answer"])} for row in TABLE]
    for path in tmp_path.iterdir():
        assert data.load_data(str(path)) == expected, path


@pytest.mark.parametrize(
    ("answer", "text"),
    [(True, "True"), (0.5, "0.5"), (float("nan"), None), ("007", "007"), ({"a": 1}, '{"a": 1}')],
)
def test_answers_become_texts_and_missing_answers_stay_missing(tmp_path, answer, text):
    path = write_log(tmp_path / "data.jsonl", [{"prompt": "?", "answer": answer}])
    (example,) = data.load_data(path)
    assert example["answer"] == text


def test_an_answer_that_is_a_list_of_objects_is_refused_but_may_have_another_name(tmp_path):
    path = write_log(tmp_path / "data.jsonl", [{"prompt": "?", "answer": [{"a": 1}]}])
    assert "line 1: answer [{'a': 1}] is a list" in catch_message(data.load_data, path)
    assert data.load_data(path, "answers=answer") == [{"prompt": "?", "answers": [{"a": 1}]}]

    row = {"system": "s", "answer": "a", "id": "x", "question": "?"}
    path = write_log(tmp_path / "data.jsonl", [row])
    assert catch_message(data.load_data, path).endswith("--columns prompt=question")


def test_rewards_find_a_renamed_column_by_both_names_unless_gwen_uses_the_old_one(tmp_path):
    row = {"question": "?", "solution": "42", "answer": "it is 42"}
    path = write_log(tmp_path / "data.jsonl", [row])
    (example,) = data.load_data(path, "prompt=question,answer=solution")
    assert example == {"prompt": "?", "question": "?", "solution": "42", "answer": "42"}

    path = write_log(tmp_path / "b.jsonl", [{"prompt": "?", "num_tokens": 3}])
    (example,) = data.load_data(path, "mine=num_tokens")
    assert example == {"prompt": "?", "mine": 3}


def test_saved_splits_become_the_training_and_held_out_prompts_and_can_be_named(tmp_path):
    train_split = datasets.Dataset.from_list([{"prompt": "train", "answer": 1}])
    test_split = datasets.Dataset.from_list([{"prompt": "test", "answer": 1}])

    both = tmp_path / "both"
    datasets.DatasetDict({"train": train_split, "test": test_split}).save_to_disk(both)
    task = make_task("--data", both)
    assert [example["prompt"] for example in task.train] == ["train"]
    assert [example["prompt"] for example in task.held_out] == ["test"]
    assert [example["prompt"] for example in data.load_data(f"{both}:test")] == ["test"]
    assert "did you mean 'test'?: " in catch_message(data.load_data, f"{both}:tset")

    odd = tmp_path / "odd"
    datasets.DatasetDict({"train_sft": train_split, "test_sft": test_split}).save_to_disk(odd)
    assert f"{odd}:train_sft" in catch_message(data.load_data, str(odd))

    single = tmp_path / "one"
    train_split.save_to_disk(single)
    assert data.load_data(f"{single}:train") == data.load_data(str(single))
    assert "has the splits train" in catch_message(data.load_data, f"{single}:test")
    assert "is a directory" in catch_message(data.load_data, str(tmp_path))


def test_held_out_prompts_may_come_from_another_file(tmp_path):
    train_file = write_log(tmp_path / "train,1.jsonl", SUMS)
    test_file = write_log(tmp_path / "test.jsonl", SUMS[:3])

    # A held-out prompt is not trained on.
    two_flags = make_task("--data", train_file, "--eval-data", test_file)
    assert num_prompts(two_flags) == (27, 3)
    one_flag = make_task("--data", f"{train_file},{test_file}")
    assert num_prompts(one_flag) == (27, 3)
    # A comma may be part of the name of a single file.
    single_file = make_task("--data", train_file)
    assert num_prompts(single_file) == (27, 3)

    message = catch_message(resolve_settings, "--eval-data", test_file)
    assert f"--eval-data {test_file} needs --data FILE" in message

    # Flags and recipes may name one file each.
    sums = write_log(tmp_path / "sums.jsonl", SUMS)
    for recipe, *flags in (
        ["data: sums.jsonl", "--eval-data", test_file],
        ["data: sums.jsonl,gone.jsonl", "--eval-data", test_file],
        ["eval_data: test.jsonl", "--data", sums],
        ["data: gone.jsonl\neval_data: test.jsonl", "--data", sums],
        ["data: sums.jsonl\neval_data: test.jsonl"],
    ):
        (tmp_path / "mine.yaml").write_text(recipe)
        config, _ = resolve_settings(*flags, recipe=tmp_path / "mine.yaml")
        assert config.data.path == f"{sums},{test_file}"

    # A Python program may pass rows instead of files.
    rows = trainer.convert_arguments_and_cache_data({"data": SUMS, "eval_data": SUMS[:3]})
    task = tasks.make_task(checks.check_settings({"task": "own"} | rows))
    assert len(task.held_out) == 3


# ---- the verifier


def test_rows_without_a_comparable_answer_are_left_out_and_counted(tmp_path):
    rows = [row | {"split": "train"} for row in SUMS[:6]]
    rows += [row | {"split": "test"} for row in SUMS[6:10]]
    for index in (1, 7):
        rows[index] = rows[index] | {"answer": None}
    path = write_log(tmp_path / "mine.jsonl", rows)

    task = make_task("--data", path)
    assert num_prompts(task) == (5, 3)
    assert task.metric == "accuracy"
    num_text = (
        "5 prompts to train on, 3 held out, 2 left out because their answers cannot be compared"
    )
    assert task.notes[0] == f"data: {num_text}; the reward is 1 x correct"
    comparison = "comparison: 8 answers such as '1' are compared as numbers (equal values, "
    assert task.notes[1].startswith(comparison)

    # The reward length:9 needs no answers, so no row is left out.
    task = make_task("--data", path, "--reward", "length:9")
    assert num_prompts(task) == (6, 4)
    answers = [example["answer"] for example in task.held_out]
    assert task.verifier(prompts=[], completions=["9"] * 4, answer=answers)[1] is None


def test_data_without_answers_needs_a_reward_and_is_evaluated_by_that_reward_alone(tmp_path):
    path = write_log(tmp_path / "mine.jsonl", [{"prompt": row["prompt"]} for row in SUMS])
    message = catch_message(make_task, "--data", path)
    assert f"--data {path} has no answer to compare with" in message

    task = make_task("--data", path, "--reward", "length:9")
    assert task.metric == "score"
    assert task.verifier is None
    assert task.reward_weights == {"length": 1.0}
    assert task.notes[1] == "comparison: there are no answers to compare with"

    rows = [row | {"answer": "It depends on this and on that, as always."} for row in SUMS]
    prose = write_log(tmp_path / "prose.jsonl", rows)
    message = catch_message(make_task, "--data", prose)
    assert "only prose such as 'It depends on this and on that, as always.'" in message
    task = make_task("--data", prose, "--reward", "length:9")
    assert "30 answers such as 'It d" in task.notes[1]

    judged = make_task("--data", path, "--rubric", DEMO_RUBRIC)
    assert judged.reward_weights == {"rubric": 1.0}
    assert not judged.rewards


def test_a_note_shows_the_chosen_verifier_with_an_example_and_a_flag_names_another(tmp_path):
    answers = [json.dumps({"label": "bug", "priority": n}) for n in range(4)]
    rows = [{"prompt": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    data = ["--data", write_log(tmp_path / "mine.jsonl", rows)]

    task = make_task(*data)
    assert task.notes[1].startswith("comparison: 4 answers such as '{")
    completions = ['{"priority": 3, "label": "bug"}', "3"]
    values = task.verifier(prompts=["?"] * 2, completions=completions, answer=[answers[3]] * 2)
    assert values == [1, 0]
    assert task.rewards["correct"] is task.verifier

    # --verifier names a built-in verifier.
    assert "are compared as texts" in make_task(*data, "--verifier", "exact").notes[1]
    message = catch_message(make_task, *data, "--verifier", "number")
    assert '--verifier number does not fit the answer \'{"label"' in message
    message = catch_message(make_task, *data, "--verifier", "jsn")
    names = "auto, json, number, choice, math, exact, marked"
    assert f"or one of {names}, did you mean 'json'?" in message
    message = catch_message(make_task, "--task", "demo", "--verifier", "json")
    assert "--verifier is json, but --task demo has a verifier of its own" in message

    # --verifier names a function of the user.
    (tmp_path / "mine.py").write_text(
        "def bug(completions, **_): return [float('bug' in one) for one in completions]"
    )
    task = make_task(*data, "--verifier", f"{tmp_path}/mine.py:bug", "--reward", "length:9")
    assert rewards.call_reward_on_rank0("x", task.verifier, ["?"], ["a bug"], {}) == [1]
    assert list(task.rewards) == ["length"]

    # With mixed answers and a reward, the verifier is only a metric: other words may be right.
    mixed = [{"prompt": f"{n}?", "answer": "lots" if n == 3 else str(n)} for n in range(4)]
    data = ["--data", write_log(tmp_path / "mixed.jsonl", mixed)]
    task = make_task(*data, "--reward", "length:9")
    assert task.metric == "score"
    assert task.reward_weights == {"exact": 0, "length": 1}
    assert task.rewards["exact"](prompts=[], completions=["Lots."], answer=["lots"]) == [1]
    assert "only a metric" in task.notes[1]
    assert "--verifier exact" in task.notes[1]
    assert make_task(*data, "--reward", "length:9", "--verifier", "auto").metric == "accuracy"


def test_data_selects_the_task_own_and_one_line_lists_the_default_settings(tmp_path):
    path = write_log(tmp_path / "mine.jsonl", SUMS)
    config, line = resolve_settings("--data", path, "--batch", 3)
    flags = "--batch 3 --groups 8 --steps 60 --max-tokens 24 --learning-rate 0.004"
    flags += " --eval-every 20 --save-every 20"
    assert config.data.task == "own"
    assert line.endswith(f"task: own, with recipes/demo.yaml: {flags}")

    qwen = ["--model", "Qwen/Qwen3-0.6B"]
    config, line = resolve_settings(*qwen, "--data", path, "--batch", 3)
    recipe = load_yaml(ROOT / "recipes" / "own.yaml", "")
    assert config.sampling.batch == 3
    assert config.optimizer.learning_rate == recipe["learning_rate"]
    assert "--batch 3 --groups 8 --max-tokens 256 --steps 100 --learning-rate 5e-05" in line

    _, line = resolve_settings(*qwen, "--data", path, "--learning-rate", "1e-6")
    assert line.endswith(" 1e-06 is low for this model: recipes/own.yaml has 5e-05")

    config, _ = resolve_settings("--data", path, "--task", "demo")
    assert config.data.task == "demo"

    config, line = resolve_settings("--data", path, "--loss-type", "sft")
    flags = "--batch 8 --steps 60 --learning-rate 0.004 --eval-every 20 --save-every 20"
    assert config.data.task == "own"
    assert line.endswith(f"; replies: {path}; task: own, with recipes/demo.yaml: {flags}")
    for model, rate in (("smollm2", 4e-4), ("demo:tools", 4e-3), ("Qwen/Qwen3-0.6B", 5e-5)):
        config, _ = resolve_settings("--model", model, "--data", path, "--loss-type", "sft")
        assert config.optimizer.learning_rate == rate

    assert "name the data with --data FILE" in catch_message(make_task, "--task", "own")


def test_a_text_file_has_one_prompt_per_line_and_a_python_file_several_rewards(tmp_path):
    (tmp_path / "mine.txt").write_text("Say hello.\n\nSay goodbye, and\tmean it.\n" * 8)
    (tmp_path / "mine.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
        "def two(completions, **_):\n    return [2.0] * len(completions)\n"
    )
    reward_flags = ["--reward", f"{tmp_path}/mine.py:one,two", "length:9"]
    task = make_task("--data", tmp_path / "mine.txt", *reward_flags)
    prompts = {example["prompt"] for example in task.train + task.held_out}
    assert prompts == {"Say hello.", "Say goodbye, and\tmean it."}
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
def test_the_size_in_the_name_of_a_model_chooses_the_recipe_for_own_data(model, recipe):
    assert sources.recipe_name("own", model) == recipe
    assert sources.recipe_name("values", model) == "values"


@pytest.mark.slow
def test_evaluations_of_a_run_record_accuracy_and_score(tmp_path):
    prompts = [f"What is {a} plus {b}?" for a in ("one", "six") for b in ("two", "ten", "five")]
    train_file = write_log(
        tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "lots"} for prompt in prompts]
    )
    test_file = write_log(tmp_path / "b.jsonl", [*SUMS[:12], {"prompt": "Hi"}])
    (tmp_path / "mine.py").write_text(
        "def always(completions, answer, **_):\n"
        "    return [float('.' in text or text == right) for text, right in zip(completions, answer)]"
    )
    flags = "--model demo --steps 1 --batch 2 --groups 2 --eval-every 1 --verifier auto".split()
    flags += ["--data", train_file, "--eval-data", test_file]
    flags += ["--reward", f"{tmp_path}/mine.py:always", "--run-dir", str(tmp_path / "run")]
    train.main(flags)

    record = read_log(tmp_path / "run" / "eval.jsonl")[0]
    assert record["eval/accuracy"] < record["eval/score"]
    assert record["eval/score"] == record["eval/reward/always"]
    assert record["eval/num"] == 13
    assert record["eval/known"] == 12
    num_right = record["eval/accuracy"] * 12
    assert num_right == pytest.approx(round(num_right))

    # The last row has no answer to compare with.
    details = read_log(tmp_path / "run" / "eval_answers.jsonl")
    assert details[12]["values"] == [None]
    assert details[12]["greedy_value"] is None


# ---- rewards before a model is loaded


def test_a_reward_is_tried_on_all_answers_and_the_message_names_the_failing_row(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(200)]
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef score(completions, answer, **_):\n    calls.append(len(completions))\n"
        "    return [float(int(right) > 3) for right in answer]"
    )
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    assert audit.try_right_answers_until_timeout(name, reward, rows) == 200
    assert reward.fn.__globals__["calls"] == [64, 64, 64, 8]

    rows[150]["answer"] = "n/a"
    message = catch_message(audit.try_right_answers_until_timeout, name, reward, rows)
    assert f"at {tmp_path}/mine.py:4; the row has the prompt '150?' and the answer 'n/a'" in message

    length = built_in.make_built_in_reward("length:9")
    assert audit.try_right_answers_until_timeout(name, length, [{"prompt": "a"}]) == 1


# ---- files from any directory


def test_paths_of_files_become_absolute_and_names_stay_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.jsonl", "test.jsonl", "mine.py", "r.yaml"):
        (tmp_path / name).touch()
    for name in ("demo", "model", "saved", "owner"):
        (tmp_path / name).mkdir()

    settings = {
        "data": "mine.jsonl,test.jsonl",
        "reward": ["mine.py:fn", "length:200", "math_verify"],
        "rubric": "r.yaml",
        "model": "demo",
        "judge_model": "model",
        "teacher": "self",
        "loss_type": "mine.py:loss",
        "advantage": "group",
    }
    absolute = make_paths_absolute(settings)
    assert absolute == settings | {
        "data": f"{tmp_path}/mine.jsonl,{tmp_path}/test.jsonl",
        "reward": [f"{tmp_path}/mine.py:fn", "length:200", "math_verify"],
        "rubric": f"{tmp_path}/r.yaml",
        "judge_model": f"{tmp_path}/model",
        "loss_type": f"{tmp_path}/mine.py:loss",
    }
    assert make_paths_absolute(absolute) == absolute

    # With --judge-url, the judge model is a name on the server.
    remote_judge = {"judge_model": "model", "judge_url": "http://127.0.0.1:1/v1"}
    assert make_paths_absolute(remote_judge) == remote_judge

    for path in ("owner/name:main:train,owner/name:main:test", "missing.jsonl", "demo:rg"):
        settings = {"data": path, "init_adapter": path}
        assert make_paths_absolute(settings) == settings

    splits = make_paths_absolute({"data": "saved:train,saved:test"})["data"]
    assert splits == f"{tmp_path}/saved:train,{tmp_path}/saved:test"


def test_files_of_a_recipe_are_found_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").touch()
    (tmp_path / "recipe.yaml").write_text("data: mine.jsonl\n")
    monkeypatch.chdir("/")
    assert sources.load_recipe(tmp_path / "recipe.yaml")["data"] == f"{tmp_path}/mine.jsonl"
    task_config = sources.load_task_defaults("rg:lcm", "demo:rg")["task_config"]
    assert os.path.samefile(task_config, ROOT / "data" / "demo_rg.yaml")


@pytest.mark.slow
def test_a_run_resumes_evaluates_and_repeats_from_any_directory(tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    home.mkdir()
    write_log(home / "mine.jsonl", SUMS)
    (home / "mine.py").write_text(SHORT_REWARD)
    monkeypatch.chdir(home)
    small = "--model demo --steps 1 --batch 2 --groups 2 --eval-every 1 --max-tokens 4".split()
    train.main([*small, "--data", "mine.jsonl", "--reward", "mine.py:short", "--run-dir", "run"])

    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    train.main(["--resume", str(home / "run"), "--steps", "2"])
    train.main(["--config", str(home / "run" / "config.yaml"), "--run-dir", "again"])
    assert len(read_log(away / "again" / "metrics.jsonl")) == 2

    capsys.readouterr()
    evaluate.main(["--run", "again"])
    last = read_log(away / "again" / "eval.jsonl")[-1]
    assert json.loads(capsys.readouterr().out)["eval/score"] == last["eval/score"]
    evaluate.main(["--run", "again", "--data", str(home / "mine.jsonl")])
    assert "30 held-out prompts" in capsys.readouterr().err

    # --columns applies only to the new file.
    renamed = [{"question": row["prompt"], "answer": row["answer"]} for row in SUMS[:6]]
    test_file = write_log(home / "test.jsonl", renamed)
    evaluate.main(["--run", "again", "--data", test_file, "--columns", "prompt=question"])
    assert "6 held-out prompts" in capsys.readouterr().err

    # A resume refuses a data file that is gone, until the settings name the new path.
    (home / "mine.jsonl").rename(home / "moved.jsonl")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(home / "run"), "--steps", "3"])
    assert f"--data {home}/mine.jsonl, which is no longer there" in capsys.readouterr().err
    config_file = home / "run" / "config.yaml"
    settings = yaml.safe_load(config_file.read_text())
    config_file.write_text(yaml.safe_dump(settings | {"data": str(home / "moved.jsonl")}))
    train.main(["--resume", str(home / "run"), "--steps", "3", "--allow-changes"])
    assert len(read_log(home / "run" / "metrics.jsonl")) == 3


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """
    A project folder with data, rewards, a rubric, a model, and a run of one step.

    The folder is moved after the run, so the paths that the run recorded no longer exist.
    """
    home = tmp_path_factory.mktemp("made") / "project"
    home.mkdir()
    write_log(home / "mine.jsonl", SUMS)
    (home / "mine.py").write_text(SHORT_REWARD)
    (home / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Kind}]")
    shutil.copytree(hub.DEMO, home / "model")
    flags = "--model model --data mine.jsonl --reward mine.py:short --rubric mine.yaml"
    flags += " --run-dir runs/x --steps 1 --batch 2 --groups 2 --max-tokens 4 --eval-limit 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train.main(flags.split())
    return home.rename(tmp_path_factory.mktemp("kept") / "project")


@pytest.fixture
def moved(project, tmp_path, monkeypatch):
    """A moved copy of the project, which is the working directory; no move was reported before."""
    printable.print_once.cache_clear()
    monkeypatch.chdir(shutil.copytree(project, tmp_path / "moved"))
    return tmp_path / "moved"


def catch_error_line(capsys, main, *flags):
    """The last line on stderr of a command that exits with status 2."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(map(str, flags)))
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_in_a_moved_project_resumes_and_reports_the_new_place_of_each_file(moved, capsys):
    run = moved / "runs" / "x"
    train.main(["--resume", "runs/x", "--steps", "2"])
    lines = capsys.readouterr().err.splitlines()
    for name in ("mine.jsonl", "mine.py", "mine.yaml", "model"):
        (line,) = [line for line in lines if f"/project/{name} no longer exists; " in line]
        assert f"; {moved}/{name}, which is identical" in line
    assert len(read_log(run / "metrics.jsonl")) == 2
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["data"] == str(moved / "mine.jsonl")

    # The next resume finds the files at the recorded places.
    printable.print_once.cache_clear()
    train.main(["--resume", "runs/x", "--steps", "3"])
    assert "no longer exists" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_moved_run_can_be_evaluated_repeated_and_fused_from_any_directory(
    moved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    evaluate.main(["--run", "moved/runs/x", "--limit", "2"])
    messages = capsys.readouterr().err
    assert f"/project/mine.jsonl no longer exists; {moved}/mine.jsonl, which" in messages

    train.main(["--config", "moved/runs/x/config.yaml", "--run-dir", "again"])
    repeated = read_log(tmp_path / "again" / "metrics.jsonl")[0]
    original = read_log(moved / "runs" / "x" / "metrics.jsonl")[0]
    assert repeated["reward/mean"] == original["reward/mean"]

    export.main(["--fuse", "--run", "moved/runs/x", "--out", "fused"])
    assert (tmp_path / "fused" / "config.json").is_file()


def test_a_moved_run_with_changed_or_missing_files_is_refused_with_their_flag(moved, capsys):
    resume = ["--resume", "runs/x", "--steps", "2"]
    (moved / "mine.jsonl").rename(moved / "renamed.jsonl")
    line = catch_error_line(capsys, train.main, *resume)
    assert "--data" in line
    assert "mine.jsonl" in line
    repeat = ["--config", "runs/x/config.yaml", "--run-dir", "again"]
    assert "--data" in catch_error_line(capsys, train.main, *repeat)
    assert "--data" in catch_error_line(capsys, evaluate.main, "--run", "runs/x")

    write_log(moved / "mine.jsonl", SUMS[1:])
    assert "--data" in catch_error_line(capsys, train.main, *resume)
    line = catch_error_line(capsys, train.main, *resume, "--data", "mine.jsonl")
    assert "data" in line
    assert "--allow-changes" in line

    (moved / "mine.py").write_text("def short(completions, **_): return [0.0 for _ in completions]")
    line = catch_error_line(capsys, train.main, *resume, "--data", "renamed.jsonl")
    assert "--reward" in line
    assert "mine.py" in line


@pytest.mark.slow
def test_a_flag_names_the_new_place_of_a_file_and_equal_bytes_count_as_unchanged(moved):
    (moved / "mine.jsonl").rename(moved / "renamed.jsonl")
    train.main(["--resume", "runs/x", "--steps", "2", "--data", "renamed.jsonl"])
    assert len(read_log(moved / "runs" / "x" / "metrics.jsonl")) == 2


def test_if_only_the_run_moved_its_files_are_found_from_the_working_directory(moved, tmp_path):
    run = (moved / "runs" / "x").rename(tmp_path / "alone")
    recorded = recorded_path(run, "mine.jsonl")
    assert places.find_and_print_moved_paths(run)[recorded] == str(moved / "mine.jsonl")


def recorded_path(run, name):
    """The path that a run recorded for the file with this name."""
    return next(path for path in places.read_path_record(run)["files"] if path.endswith(f"/{name}"))


# ---- judges


def test_a_note_warns_if_a_bundled_judge_has_not_learned_the_criteria(tmp_path):
    data = ["--data", write_log(tmp_path / "mine.jsonl", SUMS)]
    (tmp_path / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Kind}]")
    user_rubric = ["--rubric", tmp_path / "mine.yaml"]
    demo_rubric = ["--rubric", DEMO_RUBRIC]

    def noise_warnings(*flags):
        return [note for note in make_task(*flags).notes if "are noise" in note]

    (warning,) = noise_warnings(*data, *user_rubric)
    learned = "the judge demo has learned only the criteria of data/demo_rubric.yaml"
    assert f"{learned}, so its scores for kind are noise" in warning
    (warning,) = noise_warnings(*data, *demo_rubric, "--judge-model", "demo:rg")
    assert "no criteria, so its scores for correct, working, sentence are" in warning
    # The warning covers the second rubric, which only evaluations use.
    assert "wondering" in noise_warnings("--task", "values")[0]

    assert not noise_warnings(*data, *demo_rubric)
    assert not noise_warnings("--task", "demo")
    assert not noise_warnings(*data, *user_rubric, "--judge-model", "Qwen/Qwen3-4B")
    server = ["--judge-model", "demo", "--judge-url", "http://127.0.0.1:1/v1"]
    assert not noise_warnings(*data, *user_rubric, *server)


def test_fine_tuning_takes_held_out_conversations_from_another_file(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": str(row["answer"])} for row in SUMS]
    train_file = write_log(tmp_path / "a.jsonl", rows)
    test_file = write_log(tmp_path / "b.jsonl", rows[:2])
    flags = ["--loss-type", "sft", "--data", train_file, "--eval-data", test_file]
    config, _ = resolve_settings(*flags)
    run = SftRun(config, tmp_path / "run")
    assert len(run.train) == 28
    assert len(run.held_out) == 2


def test_fine_tuning_and_rewards_hold_out_the_same_prompts_of_a_file(tmp_path):
    text_rows = [row | {"completion": "one"} for row in SUMS]
    system_message = {"role": "system", "content": "Be brief."}
    chat_rows = []
    for row in text_rows:
        user_message = {"role": "user", "content": row["prompt"]}
        chat_rows.append(row | {"prompt": [system_message, user_message]})
    text_file = write_log(tmp_path / "a.jsonl", text_rows)
    chat_file = write_log(tmp_path / "b.jsonl", chat_rows)

    prompt_sets = []
    for path in (text_file, chat_file):
        for read_example in ([], [chats.read_conversation_example]):
            _, held_out, *_ = load_training_and_held_out(path, None, None, *read_example)
            prompt_sets.append({last_user_text(example["prompt"]) for example in held_out})

    assert len(prompt_sets[0]) == 3
    assert prompt_sets == prompt_sets[:1] * 4


def test_a_fine_tuned_run_is_evaluated_with_the_task_own_on_other_data(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": "one"} for row in SUMS]
    path = write_log(tmp_path / "a.jsonl", rows)
    config, _ = resolve_settings("--loss-type", "sft", "--data", path, "--task", "demo")
    (tmp_path / "config.yaml").write_text(sources.to_yaml(config))

    load_config = policy.load_run_config_and_set_template_date
    assert load_config(str(tmp_path), {}).data.task == "demo"
    assert load_config(str(tmp_path), {}, "problems.jsonl").data.task == "own"

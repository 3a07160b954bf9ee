"""A comparison of runs covers their files, their greedy answers, and differences by problem and seed."""

import json

import pytest
import yaml
from conftest import read_log, write_log
from test_report import answer_record, eval_record, make_run

import report
from reporting import difference, page, paired, seeds

NUM = 16


def write_run(folder, num_right, num_greedy, digest="aaaaaaaabbbb", **settings):
    """A run of 16 held-out problems with these numbers of right sampled and right greedy answers."""
    make_run(folder)
    settings_path = folder / "config.yaml"
    settings_before = yaml.safe_load(settings_path.read_text())
    settings_path.write_text(yaml.safe_dump(settings_before | settings))

    files = {str(folder.parent / "mine.py"): digest}
    places = {"run": str(folder), "working_directory": "/", "files": files}
    (folder / "env.json").write_text(json.dumps({"places": places}))

    figures = {"eval/num": NUM, "eval/greedy": num_greedy / NUM}
    evaluations = [eval_record(step, num_right / NUM) | figures for step in (0, 4)]
    write_log(folder / "eval.jsonl", evaluations)

    answers = []
    for problem in range(NUM):
        value = float(problem < num_right)
        greedy = {"greedy": "", "greedy_value": float(problem < num_greedy)}
        answers.append(answer_record(4, problem, "Five.", value) | greedy)
    write_log(folder / "eval_answers.jsonl", answers)
    return str(folder)


def test_a_comparison_lists_changed_files_greedy_figures_and_the_difference_by_problem(
    tmp_path, capsys
):
    first = write_run(tmp_path / "first", 2, 4)
    second = write_run(tmp_path / "second", 14, 4, digest="ccccccccdddd")
    report.main(["--compare", first, second])
    output = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in output.splitlines()}
    assert rows["content of mine.py"] == ["aaaaaaaa", "cccccccc"]
    assert rows["held-out greedy after"] == ["0.250", "0.250"]

    change = difference.paired_difference(
        {problem: float(problem < 2) for problem in range(NUM)},
        {problem: float(problem < 14) for problem in range(NUM)},
    )
    start = "second - first, by problem"
    accuracy = f"accuracy {change.mean_plus_minus_text} on 16 problems, better"
    assert f"{start}: {accuracy}; greedy +0.000" in output
    markup = page.write_page(first, None, [second]).read_text()
    assert start in markup
    assert "accuracy +0.750" in markup


def test_a_warm_start_is_compared_with_a_grpo_run_that_records_prompts_as_text(tmp_path):
    first = write_run(tmp_path / "first", 2, 4)
    second = write_run(tmp_path / "second", 14, 4)
    answers = read_log(tmp_path / "first" / "eval_answers.jsonl")
    for answer in answers:
        system = {"role": "system", "content": "Be brief."}
        answer["prompt"] = [system, {"role": "user", "content": answer["prompt"]}]
    write_log(tmp_path / "first" / "eval_answers.jsonl", answers)
    (line,) = paired.describe_paired_differences(seeds.load_seed_groups([first, second]))
    assert "accuracy +0.750" in line
    assert "on 16 problems, better" in line


def test_runs_with_different_reward_code_are_not_compared_by_score(tmp_path):
    folders = []
    for name in ("first", "second"):
        folder = tmp_path / name
        write_run(folder, 2, 4, digest=f"{name}45678", reward=["/x/mine.py:size"])
        evaluation = {"step": 4, "eval/score": 2.0, "eval/num": NUM, "eval/s": 1.0}
        write_log(folder / "eval.jsonl", [evaluation])
        folders.append(folder)
    groups = seeds.load_seed_groups(folders)
    (line,) = paired.describe_paired_differences(groups)
    assert line.endswith("different things (mine.py)")


def test_runs_of_two_seeds_are_compared_by_problem_and_seed(tmp_path):
    for name, num_right in (("low", 2), ("high", 14)):
        for seed in range(2):
            folder = tmp_path / name / f"seed-{seed}"
            write_run(folder, num_right, 4, seed=seed, learning_rate=num_right / 1e3)
    groups = seeds.load_seed_groups([tmp_path / "low", tmp_path / "high"])
    (line,) = paired.describe_paired_differences(groups)
    assert line.startswith("high - low, by problem: accuracy +0.750 \u00b1 ")
    assert "on 16 problems, better" in line
    assert line.endswith("means of 2 seeds, so the intervals hold only for these seeds")


def test_two_seeds_with_different_reward_files_form_two_groups(tmp_path):
    folders = [write_run(tmp_path / f"{seed}", 2, 4, f"{seed}" * 12, seed=seed) for seed in (0, 1)]
    assert len(seeds.load_seed_groups(folders)) == 2


@pytest.mark.parametrize("value", ["/a/" + "b" * 80 + "/one.py", "/a/" + "b" * 80 + "/other.py"])
def test_a_shortened_path_keeps_the_end(value):
    shortened = report.keep_end_of_long_value(value)
    assert shortened.endswith(value[-20:])
    assert len(shortened) == 61

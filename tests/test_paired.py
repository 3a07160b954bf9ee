"""Runs side by side: the contents of their files, their greedy answers, and differences by problem and seed."""

import json

import pytest
import yaml
from conftest import write_log
from test_report import answer_record, eval_record, make_run

import report
from reporting import difference, page, paired, seeds

NUM = 16


def write_run(folder, num_right, num_greedy, digest="aaaaaaaabbbb", **settings):
    """A run that answers so many of its 16 held-out problems right, sampled and greedily."""
    make_run(folder)
    known = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(known | settings))
    files = {str(folder.parent / "mine.py"): digest}
    places = {"run": str(folder), "working_directory": "/", "files": files}
    (folder / "env.json").write_text(json.dumps({"places": places}))
    records = [eval_record(step, num_right / NUM) | {"eval/num": NUM} for step in (0, 4)]
    write_log(
        folder / "eval.jsonl", [record | {"eval/greedy": num_greedy / NUM} for record in records]
    )
    answers = []
    for problem in range(NUM):
        right = float(problem < num_right)
        greedy = {"greedy": "", "greedy_value": float(problem < num_greedy)}
        answers.append(answer_record(4, problem, "Five.", right) | greedy)
    write_log(folder / "eval_answers.jsonl", answers)
    return str(folder)


def test_comparing_runs_lists_files_that_differ_greedy_figures_and_differences_by_problem(
    tmp_path, capsys
):
    one = write_run(tmp_path / "one", 2, 4)
    other = write_run(tmp_path / "other", 14, 4, digest="ccccccccdddd")
    report.main(["--compare", one, other])
    printed = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in printed.splitlines()}
    assert rows["content of mine.py"] == ["aaaaaaaa", "cccccccc"]
    assert rows["held-out greedy after"] == ["0.250", "0.250"]
    change = difference.paired_difference(
        {problem: float(problem < 2) for problem in range(NUM)},
        {problem: float(problem < 14) for problem in range(NUM)},
    )
    line = (
        f"other - one, by problem: accuracy {change.mean_plus_minus_text} on 16 problems, better; "
    )
    assert f"{line}greedy +0.000" in printed
    markup = page.write_page(one, None, [other]).read_text()
    assert line.split(":")[0] in markup and "accuracy +0.750" in markup


def test_runs_whose_reward_code_differs_are_not_compared_by_their_score(tmp_path):
    folders = []
    for name in ("one", "other"):
        folder = tmp_path / name
        write_run(folder, 2, 4, digest=f"{name}45678", reward=["/x/mine.py:size"])
        evals = [{"step": 4, "eval/score": 2.0, "eval/num": NUM, "eval/s": 1.0}]
        write_log(folder / "eval.jsonl", evals)
        folders.append(folder)
    groups = seeds.load_seed_groups(folders)
    (line,) = paired.describe_paired_differences(groups)
    assert line.endswith("different things (mine.py)")


def test_two_seeds_are_compared_by_problem_and_seed(tmp_path):
    for name, num_right in (("low", 2), ("high", 14)):
        for seed in range(2):
            folder = tmp_path / name / f"seed-{seed}"
            write_run(folder, num_right, 4, seed=seed, learning_rate=num_right / 1e3)
    groups = seeds.load_seed_groups([tmp_path / "low", tmp_path / "high"])
    (line,) = paired.describe_paired_differences(groups)
    assert line.startswith("high - low, by problem: accuracy +0.750 \u00b1 ")
    assert "on 16 problems, better" in line
    assert line.endswith("means of 2 seeds, so the intervals hold only for these seeds")


def test_seeds_whose_reward_file_was_edited_between_them_are_not_one_group(tmp_path):
    folders = [write_run(tmp_path / f"{seed}", 2, 4, f"{seed}" * 12, seed=seed) for seed in (0, 1)]
    assert len(seeds.load_seed_groups(folders)) == 2


@pytest.mark.parametrize("value", ["/a/" + "b" * 80 + "/one.py", "/a/" + "b" * 80 + "/other.py"])
def test_of_a_long_path_the_end_is_shown_where_it_differs(value):
    assert (
        report.keep_end_of_long_value(value).endswith(value[-20:])
        and len(report.keep_end_of_long_value(value)) == 61
    )

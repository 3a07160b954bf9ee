"""When runs reached a line, by what they recorded."""

import yaml
from conftest import write_log

from bench import sooner


def made(folder, accuracies):
    """A run of ten steps with an evaluation after every second one."""
    folder.mkdir(parents=True)
    settings = {"model": folder.parent.name, "batch": 2, "groups": 3, "seed": int(folder.name[-1])}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    step = {"rollout/tok_s": 240.0, "rollout/s": 0.25, "step/s": 0.5}
    write_log(folder / "metrics.jsonl", [{"step": number, **step} for number in range(1, 11)])
    write_log(
        folder / "eval.jsonl",
        [{"step": 2 * n, "eval/accuracy": one} for n, one in enumerate(accuracies)],
    )


def test_a_run_reaches_a_line_where_two_evaluations_in_a_row_are_above_it(tmp_path, capsys):
    made(tmp_path / "a/seed-0", [0.2, 0.9, 0.7, 0.8, 0.9, 0.7])
    made(tmp_path / "a/seed-1", [0.2, 0.3, 0.4, 0.5, 0.8, 0.8])
    made(tmp_path / "b/seed-1", [0.2, 0.8, 0.8, 0.8, 0.8, 0.8])
    made(tmp_path / "c/seed-0", [0.2, 0.2, 0.2, 0.2, 0.2, 0.9])
    sooner.main(["--line", "0.8", *(str(tmp_path / name) for name in "abc")])
    assert [line.split(" | ", 1)[1] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "7 | 4 | 42 | 420 | 1.00, 1.00 | 1.00, 1.00 |",
        "2 | 1 | 12 | 120 | 0.25 | 0.25 |",
        "inf | inf | inf | inf | inf | inf |",
    ]

"""tests/golden.py saves the outputs of small runs, and names the first difference between them."""

import json

import golden
import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, run_command, write_log

ROWS = {
    "metrics.jsonl": [{"step": 1, "loss": -0.25, "kl": None}, {"step": 2, "loss": 0.5, "kl": 1e-9}],
    "eval.jsonl": [{"step": 0, "eval/accuracy": float("nan")}],
    "eval_answers.jsonl": [{"problem": 0, "completions": ["It is 4.", "It is 5."]}],
    "rollouts.jsonl": [
        {"ids": [1, 2], "tool_calls": [{"name": "guess", "result": "low"}]},
        {"ids": [3]},
    ],
}


def write_outputs(directory):
    """Writes outputs of a run in the form of `copy_outputs`; returns the directory."""
    (directory / "adapter").mkdir(parents=True)
    for name, rows in ROWS.items():
        write_log(directory / name, rows)
    (directory / "adapter" / "adapter_config.json").write_text('{"rank": 4}')
    write_adapter(directory, 0.5)
    return directory


def write_adapter(directory, last_number, name="layers.0.lora_a"):
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor[1, 2] = last_number
    path = directory / "adapter" / "adapters.safetensors"
    mx.save_safetensors(str(path), {name: mx.array(tensor)})


def replace_in(directory, name, old, new):
    text = (directory / name).read_text()
    assert text.count(old) == 1
    (directory / name).write_text(text.replace(old, new))


@pytest.fixture
def outputs(tmp_path):
    """The directories of a run's saved outputs and of equal current outputs."""
    saved = write_outputs(tmp_path / "saved" / "judge")
    current = write_outputs(tmp_path / "now" / "judge")
    return saved, current


def test_equal_outputs_have_no_difference(outputs):
    assert golden.find_difference(*outputs) is None


CHANGES = [  # the file, the old and the new text, and the parts of the message
    (
        "metrics.jsonl",
        "0.5",
        "0.5000000000000001",
        ["judge", "metrics.jsonl", "line 2", '"loss"', "0.5000000000000001"],
    ),
    ("metrics.jsonl", "null", "0.0", ["metrics.jsonl", "line 1", '"kl"', "null", "0.0"]),
    ("metrics.jsonl", ', "kl": null', "", ["metrics.jsonl", "line 1", '"kl"', "absent"]),
    (
        "metrics.jsonl",
        '"kl": null',
        '"kl": null, "new": 1',
        ["metrics.jsonl", "line 1", '"new"', "absent"],
    ),
    ("eval.jsonl", "NaN", "0.5", ["eval.jsonl", '"eval/accuracy"', "NaN", "0.5"]),
    (
        "eval_answers.jsonl",
        "It is 5.",
        "It is 6.",
        ['"completions"', "item 1", "It is 5.", "It is 6."],
    ),
    (
        "rollouts.jsonl",
        "[1, 2]",
        "[1, 2, 3]",
        ["rollouts.jsonl", "line 1", '"ids"', "2 items", "3"],
    ),
    (
        "rollouts.jsonl",
        '"low"',
        '"high"',
        ['"tool_calls"', "item 0", '"result"', '"low"', '"high"'],
    ),
    ("rollouts.jsonl", '{"ids": [3]}\n', "", ["rollouts.jsonl", "2 lines", "1"]),
    ("adapter/adapter_config.json", "4", "8", ["adapter/adapter_config.json", '"rank"', "4", "8"]),
]


@pytest.mark.parametrize(("name", "old", "new", "parts"), CHANGES)
def test_the_message_names_the_first_difference_and_both_values(outputs, name, old, new, parts):
    replace_in(outputs[1], name, old, new)
    difference = golden.find_difference(*outputs)
    assert difference is not None
    for part in parts:
        assert part in difference


def test_the_message_names_a_tensor_that_differs_in_one_bit_and_the_index(outputs):
    write_adapter(outputs[1], np.nextafter(np.float32(0.5), np.float32(1)))
    difference = golden.find_difference(*outputs)
    for part in ("adapter/adapters.safetensors", "layers.0.lora_a", "(1, 2)", "0.5", "0.50000006"):
        assert part in difference


def test_a_tensor_with_another_name_is_a_difference(outputs):
    write_adapter(outputs[1], 0.5, name="layers.0.lora_b")
    assert "layers.0.lora_b" in golden.find_difference(*outputs)


def test_the_message_names_rollouts_before_metrics_and_metrics_before_the_adapter(outputs):
    replace_in(outputs[1], "metrics.jsonl", "-0.25", "-0.5")
    write_adapter(outputs[1], 0.75)
    assert "metrics.jsonl" in golden.find_difference(*outputs)
    replace_in(outputs[1], "rollouts.jsonl", "[3]", "[4]")
    assert "rollouts.jsonl" in golden.find_difference(*outputs)


@pytest.mark.parametrize(("side", "word"), [(0, "not saved"), (1, "absent")])
def test_a_file_that_only_one_side_has_is_a_difference(outputs, side, word):
    (outputs[side] / "adapter" / "adapter_config.json").unlink()
    difference = golden.find_difference(*outputs)
    assert "adapter/adapter_config.json" in difference
    assert word in difference


def test_the_saved_outputs_contain_no_times_at_any_depth(tmp_path):
    run = write_outputs(tmp_path / "judge")
    row = {"step": 1, "calls": [{"name": "a"}]}
    times = {"step/s": 2.0, "rollout/tok_s": 3.0, "rollout/tok_s/1": 3.0, "mem/peak_gb": 4.0}
    timed_row = row | times | {"calls": [{"name": "a", "seconds": 5.0}]}
    (run / "metrics.jsonl").write_text(json.dumps(timed_row) + "\n")
    golden.copy_outputs(run, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert saved == row


@pytest.mark.parametrize("content", ["nothing", "another machine", "no run"])
def test_a_directory_that_cannot_be_compared_is_refused(tmp_path, content, capsys):
    machine = golden.describe_rounding()
    if content == "another machine":
        machine["kernels"] = "Katmai"
    if content != "nothing":
        (tmp_path / "machine.json").write_text(json.dumps(machine))
    with pytest.raises(SystemExit) as exit_info:
        golden.main(["--compare", str(tmp_path), "--only", "sft"])
    assert exit_info.value.code == 2

    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    expected_texts = {"nothing": "--save", "another machine": "Katmai", "no run": "sft"}
    assert expected_texts[content] in errors


@pytest.mark.slow
def test_the_command_repeats_a_run_bit_for_bit_and_finds_one_changed_number(tmp_path):
    saved = tmp_path / "saved"
    process = run_command("-m", "tests.golden", "--save", saved, "--only", "resumed")
    assert process.returncode == 0, process.stderr
    assert "resumed" in process.stdout
    metrics = read_log(saved / "resumed" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert str(tmp_path) not in (saved / "resumed" / "rollouts.jsonl").read_text()

    refused = run_command("-m", "tests.golden", "--save", saved, "--only", "resumed")
    assert refused.returncode == 2
    assert str(saved) in refused.stderr

    equal = run_command("-m", "tests.golden", "--compare", saved, "--only", "resumed")
    assert equal.returncode == 0, equal.stdout + equal.stderr

    replace_in(saved / "resumed", "metrics.jsonl", '{"step": 4,', '{"step": 5,')
    changed = run_command("-m", "tests.golden", "--compare", saved, "--only", "resumed")
    assert changed.returncode == 1
    for part in ("resumed", "metrics.jsonl", "line 4", '"step"', "saved 5", "now 4"):
        assert part in changed.stdout

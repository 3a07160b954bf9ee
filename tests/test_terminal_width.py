"""The output of commands in a terminal of 80 columns, and the chips that preflight.py prints."""

import shlex

import pytest
from _pytest.capture import CaptureIO
from small_run import SMALL_FLAGS

import doctor
import evaluate
import export
import preflight
import train
from machine import chips
from text import wrapping

WIDTH = 80
FLAGS = ["--model", "demo", "--steps", "1", "--batch", "2", "--groups", "2", "--max-tokens", "12"]


@pytest.fixture
def terminal(monkeypatch, capsys):
    """A function that returns the lines printed so far, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True, raising=False)

    def take_lines():
        captured = capsys.readouterr()
        return [line for text in captured for line in text.split("\n") if "\r" not in line]

    return take_lines


def list_wide(lines):
    return [line for line in lines if len(line) > WIDTH]


def test_the_report_of_the_machine_fits_the_terminal(terminal):
    doctor.main([])
    lines = terminal()
    assert any("what fits" in line for line in lines)
    assert not list_wide(lines)


def test_a_run_and_its_evaluation_fit_the_terminal(terminal, tmp_path):
    run_dir = tmp_path / "a-run-with-quite-a-long-name"
    train.main([*FLAGS, "--eval-limit", "8", "--run-dir", str(run_dir)])
    evaluate.main(["--run", str(run_dir), "--limit", "4"])
    lines = terminal()
    assert any("verdict" in line for line in lines)
    # A path is never broken, so that users can copy it.
    assert not [line for line in list_wide(lines) if len(line.replace(str(tmp_path), "")) > WIDTH]


def test_a_long_command_continues_after_a_backslash(terminal):
    command = (
        "uv run evaluate.py --run runs/a-name-that-is-long --samples 8 --out 'a b.jsonl' --step 0"
    )
    for text in (f"    {command}", f"To measure it: {command}; then stop"):
        print(wrapping.wrap_for_terminal(text))
        lines = terminal()
        assert not list_wide(lines)
        joined_text = " ".join("\n".join(lines).replace("\\\n", " ").split())
        command_text, *_ = joined_text[joined_text.index("uv run") :].split(";")
        assert shlex.split(command_text) == shlex.split(command)


def test_preflight_prints_base_chips_and_with_a_flag_all_chips(terminal):
    preflight.main(["--model", "demo"])
    text = " ".join(" ".join(terminal()).split())
    for chip in chips.load_chips():
        is_base_chip = " " not in chip.name
        assert (f"{chip.name} 0." in text) == is_base_chip, chip.name
    assert "--all-chips" in text
    preflight.main(["--model", "demo", "--all-chips"])
    lines = terminal()
    names = [line.split("  ")[0] for line in lines]
    assert all(chip.name in names for chip in chips.load_chips())
    assert not list_wide(lines)


def test_preflight_prints_the_chip_of_this_mac(terminal, monkeypatch):
    from forecast import time_estimate

    chip = next(chip for chip in chips.load_chips() if chip.name == "M3 Pro")
    monkeypatch.setattr(time_estimate.gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(chips, "look_up_or_measure_chip", lambda: chip)
    config, _ = preflight.resolve_config_and_model_line(SMALL_FLAGS)
    lines = list(preflight.yield_estimate_lines(config, 64))
    (time_line,) = [line for line in lines if line.startswith("a step in")]
    assert "M3 Pro 0." in time_line
    assert "M4" not in time_line


def test_an_error_fits_the_terminal(terminal):
    with pytest.raises(SystemExit) as exit_info:
        train.main(["--model", "demo", "--loss-type", "sft", "--groups", "4", "--temp", "0.5"])
    lines = [line for line in terminal() if line]
    assert exit_info.value.code == 2
    assert lines[0].startswith("error: --groups 4")
    assert not list_wide(lines)
    assert len(lines) > 2


def test_the_lines_of_an_export_fit_the_terminal(terminal, tmp_path):
    run_dir = tmp_path / "run"
    train.main([*FLAGS, "--eval-every", "0", "--run-dir", str(run_dir)])
    terminal()
    export.main(["--fuse", "--run", str(run_dir), "--out", str(tmp_path / "merged")])
    lines = [line for line in terminal() if str(tmp_path) not in line]
    assert any("LM Studio" in line for line in lines)
    assert not list_wide(lines)

"""The survey of a machine: every figure is there, the row has a cell for each column."""

import json

import pytest

import gwen
from bench import harness, survey

TINY = ["--model", "random:2m", "--batch", "2", "--groups", "2", "--prompt-tokens", "6", "--max-tokens", "4"]


@pytest.mark.slow
def test_a_report_holds_every_figure_and_a_row_for_the_table(tmp_path, capsys):
    path = tmp_path / "report.json"
    survey.main([*TINY, "--runs", "1", "--out", str(path)])
    header, line, row, said = capsys.readouterr().out.splitlines()
    assert header.count("|") == line.count("|") == row.count("|")
    held = json.loads(path.read_text())
    assert held["row"] == row and str(path) in said
    assert held["config"]["batch"] == 2 and "mlx" in held["versions"]
    assert {"1", "4"} == set(held["decode_tok_s"]) and min(held["decode_tok_s"].values()) > 0
    # float32 on both sides: sampler and trainer agree to rounding
    assert 0 <= held["agreement"]["mismatch/logprob_abs_mean"] < 1e-4
    assert held["agreement"]["mismatch/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert {"float16", "bfloat16"} == set(held["agreement_16_bits"])
    gaps = [held["agreement_16_bits"][name]["mismatch/logprob_abs_mean"] for name in ("float16", "bfloat16")]
    assert held["agreement"]["mismatch/logprob_abs_mean"] < gaps[0] < gaps[1] < 0.1  # by their digits
    assert max(held["gradient_error"].values()) < 1e-4  # attention is the expression here, and MLX's is in float32
    assert "float32: " in row and "; float16: " in row and "; bfloat16: " in row
    assert len(row.split(" | ")[-1].split(", ")) == 5
    for name, seconds in held["predicted"].items():
        assert seconds > 0 and held[name] > 0, name


def test_quick_takes_shapes_of_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(survey, "write", lambda args: seen.append((args.batch, args.runs)))
    survey.main(["--quick", "--batch", "7"])
    assert seen == [(2, 1)]


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(gwen, "load", lambda *_: pytest.fail("measured"))
    refused(survey.main, [*TINY, "--out", tmp_path / "absent" / "report.json"], "absent")


def test_every_row_of_a_rollout_has_all_its_tokens():
    parser = survey.Parser("", "")
    args = harness.parse(parser, TINY, harness.add_step(parser))
    subject = harness.learning(args, harness.settings(args, "random:2m"))
    for rows in (1, 2, 4):
        held = subject.rollout(rows)
        assert held.mask.shape == (rows, 4) and held.mask.sum().item() == 4 * rows

"""What Gwen says about functions that exist only in the program or process that started a run."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import grpo
from config import Config
from reporting import advice, answer_changes
from rewards import functions
from step.effects import (
    describe_loss_settings_without_effect,
    describe_settings_affecting_only_replay,
)
from step.objectives import compute_custom_advantages

NAMELESS = f"{functions.NAMELESS}:lambda"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"advantage": "__main__:ranks"}, "only this program can resume the run"),
        ({"reward": ["__main__:short"]}, "only this program can resume or evaluate the run"),
        ({"advantage": NAMELESS}, "only this process can resume the run"),
        (
            {"advantage": NAMELESS, "reward": ["__main__:short"]},
            "only this process can resume or evaluate the run",
        ),
        ({"advantage": "mine.py:ranks"}, ""),
    ],
)
def test_the_line_says_who_can_resume_and_who_can_evaluate_the_run(settings, expected):
    line = functions.explain_why_no_other_program_can_resume(settings)
    assert line.split(",")[0] == expected


def make_history(settings, parts):
    return SimpleNamespace(
        evals=[{"step": 20}], settings=settings, dir="runs/a", parts_set_in_python=parts
    )


def test_a_run_of_a_program_is_continued_in_this_program():
    run = make_history({"loss_type": "__main__:plain"}, {"on_samples": "keep"})
    assert advice.command_to_double_steps(run) == (
        "in this program, call Trainer.resume('runs/a', steps=40) and set trainer.on_samples "
        "before the first step"
    )
    with_method = make_history({}, {"on_samples": "ReplayTrainer.on_samples"})
    assert advice.command_to_double_steps(with_method).endswith(
        "(if ReplayTrainer is a subclass of Trainer, call ReplayTrainer.resume instead)"
    )
    with_part_only = make_history({}, {"on_samples": "keep"})
    assert advice.command_to_double_steps(with_part_only).startswith("in Python, call")
    from_files = make_history({"model": "demo", "loss_type": "dapo"}, {})
    assert "--resume runs/a --steps 40" in advice.command_to_double_steps(from_files)


def test_an_advantage_of_a_program_does_not_stop_evaluate():
    settings = Config.from_flags(advantage="__main__:ranks").to_flags()
    assert "evaluate.py --run" in advice.command_to_evaluate_before_and_after(settings, "runs/a")
    settings = Config.from_flags(reward=["__main__:short"]).to_flags()
    assert "evaluate.py --run" not in advice.command_to_evaluate_before_and_after(
        settings, "runs/a"
    )


def test_the_correction_has_an_effect_on_replayed_samples_of_an_own_loss():
    def clipped_to_old(tokens, objective):
        difference = tokens.logprobs - tokens.old_logprobs
        each = -tokens.advantages * difference.exp() * tokens.mask
        return grpo.Loss(each.sum() / tokens.num_items, {})

    config = Config.from_flags(importance_sampling_correction="token", loss_type="own.py:clipped")
    assert describe_loss_settings_without_effect(config, clipped_to_old, may_replay=True) == []
    line, advice_on_weights = describe_settings_affecting_only_replay(config, clipped_to_old)
    assert line.startswith(
        "--importance-sampling-correction token has an effect only on samples of earlier"
    )
    assert "grpo.sampler_weights(tokens, objective)" in advice_on_weights


def test_a_loss_that_uses_the_weights_of_the_correction_needs_no_advice_on_replay():
    def weighted(tokens, objective):
        each = -tokens.advantages * (tokens.logprobs - tokens.old_logprobs).exp() * tokens.mask
        weights = grpo.sampler_weights(tokens, objective)
        return grpo.Loss((each * (1 if weights is None else weights)).sum() / tokens.num_items, {})

    config = Config.from_flags(importance_sampling_correction="token", loss_type="own.py:weighted")
    lines = describe_settings_affecting_only_replay(config, weighted)
    assert not any("sampler_weights" in line for line in lines)


def test_a_selection_that_is_not_bool_is_refused_by_its_dtype():
    def choose(rewards):
        return rewards, (rewards > 0.5).astype(int)

    with pytest.raises(ValueError, match=r"second array of dtype int64.*\.astype\(bool\)"):
        compute_custom_advantages("mine.py:choose", choose, np.array([[0.0, 1.0, 0.7]] * 2))


def test_words_in_tool_calls_do_not_count_as_words_of_answers():
    call = '<tool_call>{"name": "guess"}</tool_call>'
    messages = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "higher"}]
    before = [{"prompt": "a", "completions": ["It is 3."]}] * 20
    after = [{"prompt": "a", "completions": [call], "messages": [messages]}] * 20
    assert answer_changes.text_of_last_model_turn(after[0]) == ""
    assert answer_changes.last_reply_or_completion(after[0]) == call
    signs = answer_changes.describe_words_used_more(before, after)
    assert not any("guess" in sign or "<" in sign for sign in signs)


def test_a_hook_that_replaces_the_output_does_not_silence_gwen(capsys):
    before = sys.stdout

    def replace_output():
        sys.stdout = io.StringIO()
        return 3

    assert functions.call_or_raise_with_location("Trainer.on_samples", replace_output) == 3
    assert sys.stdout is before
    assert "Trainer.on_samples replaced sys.stdout" in capsys.readouterr().err


def test_an_escape_of_a_regular_expression_is_one_word():
    names = answer_changes.quote_words_and_opening(r"cow\d+")
    assert r'"\d"' in names
    assert '"d"' not in names
    assert '"cow"' in names

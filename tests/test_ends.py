"""End tokens from all files of a model, and warnings about control tokens inside completions."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import catch_message, read_log

import gwen
import sampler
import train
from disk import ends, hub
from prompts import chat_template
from reporting import health

IM_END, ENDOFTEXT, CLOSED_THOUGHT = 639, 637, 641


def copy_demo(folder, *, config=None, generation=None, **tokenizer):
    """
    Copies the demo model with changed configurations.

    config, generation: the end ids in these files; tokenizer: settings of the tokenizer. None
    removes an entry.
    """
    shutil.copytree(hub.DEMO, folder)
    changes = {
        "config.json": {"eos_token_id": config},
        "generation_config.json": {"eos_token_id": generation},
        "tokenizer_config.json": tokenizer,
    }
    for name, change in changes.items():
        content = json.loads((folder / name).read_text()) | change
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content))
    return folder


def replace_end_of_replies(folder, token_id):
    """Makes the model write this token instead of <|im_end|>."""
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    head = np.array(weights["model.embed_tokens.weight"])
    head[[IM_END, token_id]] = head[[token_id, IM_END]]
    mx.save_safetensors(path, weights | {"lm_head.weight": mx.array(head)})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "eos_ids"),
    [
        (IM_END, [IM_END, ENDOFTEXT], "<|im_end|>", (IM_END, ENDOFTEXT)),
        (None, None, "<|im_end|>", (IM_END,)),
        (None, None, None, (IM_END,)),  # from the chat template
        (ENDOFTEXT, ENDOFTEXT, "<|endoftext|>", (ENDOFTEXT, IM_END)),
        (None, None, "<|endoftext|>", (ENDOFTEXT, IM_END)),
    ],
)
def test_end_tokens_come_from_the_configurations_the_tokenizer_and_the_template(
    tmp_path, config, generation, eos_token, eos_ids, capsys
):
    folder = copy_demo(
        tmp_path / "model", config=config, generation=generation, eos_token=eos_token
    )
    model, tokenizer = gwen.load(folder)
    end_ids = model.config.end_ids
    assert model.config.eos_ids == eos_ids
    assert set(end_ids) == {IM_END, ENDOFTEXT}

    # A message names the ids that the configurations lack.
    message = capsys.readouterr().err
    ids_in_files = hub.load_config(folder).eos_ids
    for end_id in end_ids:
        assert (f"id {end_id}" in message) == (end_id not in ids_in_files)

    # They end a completion.
    prompt = chat_template.encode_chat(tokenizer, "What is two plus two?")
    params = sampler.SamplingParams(40, 0.0, eos_ids=end_ids)
    rollout = sampler.rollout(model, [prompt], params, group_size=1, key=0)
    assert rollout.finish_reasons == ["stop"]

    # A saved model has all of them, so that serving ends completions as training did.
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert set(hub.load_config(tmp_path / "saved").eos_ids) == {IM_END, ENDOFTEXT}


def copy_demo_without_ends(folder):
    """Copies the demo model; files, vocabulary and template of the copy name no end token."""
    copy_demo(folder, eos_token=None, pad_token=None)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        text.replace("<|im_end|>", "<|x|>").replace("<|endoftext|>", "<|y|>")
    )
    return folder


def test_a_model_without_end_tokens_loads_only_with_the_flag(tmp_path):
    folder = copy_demo_without_ends(tmp_path / "model")
    message = catch_message(gwen.load, folder)
    assert str(folder) in message
    assert "--end-tokens" in message
    assert "\n" not in message
    for token in ("<|x|>", str(IM_END)):
        model, _ = gwen.load(folder, end_tokens=[token])
        assert model.config.end_ids == (IM_END,)


@pytest.mark.parametrize("token", ["<|im_ended|>", "99999", "two words", ""])
def test_an_end_token_that_the_vocabulary_lacks_is_refused_by_name(tmp_path, token):
    message = catch_message(gwen.load, "demo", end_tokens=[token])
    assert "--end-tokens" in message
    assert token in message


def test_the_padding_token_ends_a_completion_unless_it_also_begins_texts(tokenizer):
    config = hub.load_config(hub.DEMO)
    tokenizer = gwen.load("demo")[1]
    tokenizer.pad_token = "<|im_start|>"
    assert 638 in ends.copy_with_end_tokens(config, tokenizer)[0].end_ids
    tokenizer.bos_token = "<|im_start|>"
    assert 638 not in ends.copy_with_end_tokens(config, tokenizer)[0].end_ids


def test_the_tags_of_a_thought_count_only_if_the_prompt_closes_the_thought():
    controls = {5: "<think>", 6: "</think>", 7: "<|x|>"}

    def control_tokens(prompt, response):
        return ends.control_tokens_in_response(prompt, response, controls)

    assert control_tokens([1, 5, 6], [2, 6, 7, 7]) == ["</think>", "<|x|>"]
    assert control_tokens([1, 5], [2, 6, 7]) == ["<|x|>"]  # the response closes the thought
    assert control_tokens([1], [5, 2, 6]) == []


@pytest.mark.slow
def test_a_run_warns_about_control_tokens_inside_answers_and_a_flag_makes_them_end_tokens(
    tmp_path, capsys
):
    folder = copy_demo(tmp_path / "model", config=IM_END, generation=[IM_END, ENDOFTEXT])
    replace_end_of_replies(folder, CLOSED_THOUGHT)
    sampling_flags = f"--model {folder} --task demo --batch 2 --groups 4 --max-tokens 24"
    run_flags = "--steps 6 --learning-rate 1e-6 --eval-every 0 --save-every 5 --no-look"
    flags = [*sampling_flags.split(), *run_flags.split()]

    # Metrics count the token, and a warning names it.
    run_dir = tmp_path / "run"
    train.main([*flags, "--run-dir", str(run_dir)])
    fractions = [
        metrics[f"{health.CONTROL}</think>"] for metrics in read_log(run_dir / "metrics.jsonl")
    ]
    rollouts = read_log(run_dir / "rollouts.jsonl")
    for step, fraction in enumerate(fractions, start=1):
        has_token = [CLOSED_THOUGHT in row["ids"] for row in rollouts if row["step"] == step]
        assert fraction == pytest.approx(np.mean(has_token))
        assert fraction > 0.5
    assert len(fractions) == 6
    warnings = [record["text"] for record in read_log(run_dir / "warnings.jsonl")]
    assert any("'</think>'" in text and "--end-tokens" in text for text in warnings)
    assert not any("--max-tokens" in text for text in warnings), "a longer limit would not help"

    # With the flag, the token ends completions.
    run_dir = tmp_path / "corrected"
    end_flags = ["--end-tokens", "</think>", "--steps", "2"]
    train.main([*flags, *end_flags, "--run-dir", str(run_dir)])
    for metrics in read_log(run_dir / "metrics.jsonl"):
        assert metrics["completion/truncated_frac"] < 0.2
        assert not any(name.startswith(health.CONTROL) for name in metrics)
    recipe = (run_dir / "config.yaml").read_text()
    assert "end_tokens:\n- </think>\n" in recipe.replace("  - ", "- ")
    capsys.readouterr()

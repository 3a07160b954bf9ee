"""Which tokens end a completion, wherever a model's files name them, and what is told of those that end none."""

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
    """The demo with these end ids in its configurations, and settings of its tokenizer; None is none."""
    shutil.copytree(hub.DEMO, folder)
    changes = {
        "config.json": {"eos_token_id": config},
        "generation_config.json": {"eos_token_id": generation},
    }
    for name, change in (changes | {"tokenizer_config.json": tokenizer}).items():
        content = json.loads((folder / name).read_text()) | change
        (folder / name).write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )
    return folder


def write_another_end(folder, number):
    """Makes the model write this token where it wrote the end of a reply."""
    weights = mx.load(str(folder / "model.safetensors"))
    head = np.array(weights["model.embed_tokens.weight"])
    head[[IM_END, number]] = head[[number, IM_END]]
    mx.save_safetensors(
        str(folder / "model.safetensors"), weights | {"lm_head.weight": mx.array(head)}
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "eos_ids"),
    [
        (IM_END, [IM_END, ENDOFTEXT], "<|im_end|>", (IM_END, ENDOFTEXT)),
        (None, None, "<|im_end|>", (IM_END,)),
        (None, None, None, (IM_END,)),  # the template's
        (ENDOFTEXT, ENDOFTEXT, "<|endoftext|>", (ENDOFTEXT, IM_END)),
        (None, None, "<|endoftext|>", (ENDOFTEXT, IM_END)),
    ],
)
def test_ends_are_the_configurations_the_tokenizers_and_the_templates(
    tmp_path, config, generation, eos_token, eos_ids, capsys
):
    folder = copy_demo(
        tmp_path / "model", config=config, generation=generation, eos_token=eos_token
    )
    model, tokenizer = gwen.load(folder)
    assert model.config.eos_ids == eos_ids and set(model.config.end_ids) == {IM_END, ENDOFTEXT}
    told = capsys.readouterr().err
    for number in model.config.end_ids:
        is_in_files = number in hub.load_config(folder).eos_ids
        assert (f"id {number}" in told) == (not is_in_files)
    prompt = chat_template.encode_chat(tokenizer, "What is two plus two?")
    params = sampler.SamplingParams(40, 0.0, eos_ids=model.config.end_ids)
    rollout = sampler.rollout(model, [prompt], params, group_size=1, key=0)
    assert rollout.finish_reasons == ["stop"]
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert set(hub.load_config(tmp_path / "saved").eos_ids) == {IM_END, ENDOFTEXT}, (
        "served as it was trained"
    )


def without_ends(folder):
    """A demo whose files, vocabulary and template name no end token."""
    copy_demo(folder, eos_token=None, pad_token=None)
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.content }}\n{% endfor %}"
    )
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        text.replace("<|im_end|>", "<|x|>").replace("<|endoftext|>", "<|y|>")
    )
    return folder


def test_a_model_without_any_end_is_refused_unless_one_is_named(tmp_path):
    folder = without_ends(tmp_path / "model")
    said = catch_message(gwen.load, folder)
    assert str(folder) in said and "--end-tokens" in said and "\n" not in said
    for named in ("<|x|>", str(IM_END)):
        assert gwen.load(folder, end_tokens=[named])[0].config.end_ids == (IM_END,)


@pytest.mark.parametrize("named", ["<|im_ended|>", "99999", "two words", ""])
def test_an_end_token_that_the_vocabulary_lacks_is_refused_by_its_name(tmp_path, named):
    said = catch_message(gwen.load, "demo", end_tokens=[named])
    assert "--end-tokens" in said and named in said


def test_the_tokenizers_padding_ends_a_completion_but_not_what_begins_a_text(tokenizer):
    config = hub.load_config(hub.DEMO)
    tokenizer = gwen.load("demo")[1]
    tokenizer.pad_token = "<|im_start|>"
    assert 638 in ends.copy_with_end_tokens(config, tokenizer)[0].end_ids
    tokenizer.bos_token = "<|im_start|>"
    assert 638 not in ends.copy_with_end_tokens(config, tokenizer)[0].end_ids


def test_a_tag_of_a_thought_counts_only_where_the_prompt_has_closed_the_thought():
    controls = {5: "<think>", 6: "</think>", 7: "<|x|>"}
    assert ends.control_tokens_in_response([1, 5, 6], [2, 6, 7, 7], controls) == [
        "</think>",
        "<|x|>",
    ]
    assert ends.control_tokens_in_response([1, 5], [2, 6, 7], controls) == [
        "<|x|>"
    ]  # the answer closes it
    assert ends.control_tokens_in_response([1], [5, 2, 6], controls) == []


@pytest.mark.slow
def test_a_control_token_inside_answers_is_counted_and_warned_of_and_the_flag_makes_it_an_end(
    tmp_path, capsys
):
    folder = copy_demo(tmp_path / "model", config=IM_END, generation=[IM_END, ENDOFTEXT])
    write_another_end(folder, CLOSED_THOUGHT)
    settings = {
        "--model": folder,
        "--task": "demo",
        "--steps": 6,
        "--batch": 2,
        "--groups": 4,
        "--max-tokens": 24,
    }
    settings |= {"--learning-rate": 1e-6, "--eval-every": 0, "--save-every": 5}
    flags = [str(one) for pair in settings.items() for one in pair] + ["--no-look"]

    train.main([*flags, "--run-dir", str(tmp_path / "run")])
    records = read_log(tmp_path / "run" / "metrics.jsonl")
    shares = [record[f"{health.CONTROL}</think>"] for record in records]
    rollouts = read_log(tmp_path / "run" / "rollouts.jsonl")
    counted = [
        np.mean([CLOSED_THOUGHT in one["ids"] for one in rollouts if one["step"] == step])
        for step in range(1, 7)
    ]
    assert shares == pytest.approx(counted) and min(shares) > 0.5
    warnings = [record["text"] for record in read_log(tmp_path / "run" / "warnings.jsonl")]
    assert any("'</think>'" in text and "--end-tokens" in text for text in warnings)
    assert not any("--max-tokens" in text for text in warnings), "a longer limit would mend nothing"

    train.main(
        [*flags, "--end-tokens", "</think>", "--steps", "2", "--run-dir", str(tmp_path / "mended")]
    )
    records = read_log(tmp_path / "mended" / "metrics.jsonl")
    assert max(record["completion/truncated_frac"] for record in records) < 0.2
    assert not any(key.startswith(health.CONTROL) for record in records for key in record)
    assert "end_tokens:\n- </think>\n" in (tmp_path / "mended" / "config.yaml").read_text().replace(
        "  - ", "- "
    )
    capsys.readouterr()

"""Exported models: other programs render the prompts of training, and load the same weights."""

import copy
import io
import json
import re
import shutil
import sys

import jinja2
import mlx.core as mx
import mlx_lm.utils
import pytest
import yaml
from conftest import CONFIGS, catch_message, read_tree, write_checkpoint, write_log
from mlx_lm.tokenizer_utils import load as mlx_lm_load_tokenizer
from mlx_lm.utils import load_model as mlx_lm_load_model
from test_gguf import tokenizer_like  # noqa: F401  (a fixture)

import chat
import export
import gwen
from deploy import few_bits, ollama
from disk import hub, model_choice
from prompts import chat_template

QUESTION = [{"role": "user", "content": "What is two and two?"}]
QUESTION_WITH_SYSTEM = [{"role": "system", "content": "Mine."}, *QUESTION]
SYSTEM = "Say \"two\" twice.\nNot 'three', \\ or {% 4 %}: \u00e9\U0001f642"
TEMPLATES = {  # before a template with thinking on by default
    "as it is": "",
    "off by default": "{%- set enable_thinking = enable_thinking | default(false) %}",
    "with a default system prompt": "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.'}}"
    "{{- '<|im_end|>\\n' }}{%- endif %}",
}


def prepend_to_template(tokenizer, front):
    """A copy of a tokenizer whose chat template begins with `front`."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = front + tokenizer.chat_template
    return tokenizer


def render_with_ollama(folder, tokenizer, messages):
    """Renders messages with the template of a Modelfile, from Go to Jinja. None if it has no template."""
    (folder / "model.gguf").touch()
    note = ollama.write_modelfile_and_return_note(folder, tokenizer, [], None, [])
    modelfile = (folder / "Modelfile").read_text(encoding="utf-8")
    match = re.search(r'^TEMPLATE """(.*)"""\n\Z', modelfile, re.M | re.S)
    assert (match is None) == ("without TEMPLATE" in note)
    if match is None:
        return None

    # Ollama cuts a text at three quotes, and drops characters that are not printable.
    text = match[1].removesuffix("{{ end }}") + "{% endfor %}"
    assert '"""' not in text
    assert all(character == "\n" or character.isprintable() for character in text)

    jinja_by_go = {
        "{{ $last := eq (len (slice $.Messages $i)) 1 }}": "",
        "$one.Content": "message.content",
        "{{ range $i, $one := .Messages }}": "{% for message in messages %}",
        "{{ end": "{{ endif",
    }
    for go, jinja in jinja_by_go.items():
        text = text.replace(go, jinja)
    text = re.sub(r"\{\{ ((if|else|endif).*?) \}\}", r"{% \1 %}", text)
    jinja_by_go = {
        "else if": "elif",
        "$last": "loop.last",
        "eq $i 0": "loop.first",
        "eq $one.Role": "message.role ==",
    }
    for go, jinja in jinja_by_go.items():
        text = text.replace(go, jinja)
    template = jinja2.Environment(keep_trailing_newline=True).from_string(text)
    return template.render(messages=messages)


def read_ollama_messages(folder):
    """The messages of a Modelfile, as Ollama reads them: up to three quotes, without odd characters."""
    text = (folder / "Modelfile").read_bytes().decode()
    text = "".join(
        character for character in text if character.isprintable() or character in "\t\r\n"
    )
    matches = re.findall(r'^MESSAGE (\w+) """(.*?)"""\s*?[\r\n]', text, re.M | re.S)
    return [{"role": role, "content": content} for role, content in matches]


def make_example_messages(text="Two.", roles=("user", "assistant") * 2):
    return [{"role": role, "content": text} for role in roles]


KEPT_MESSAGES = [
    make_example_messages(text) for text in (SYSTEM, '"a"', '"""a"""', 'a\r\n\t"', '"" \n')
]
OMITTED_MESSAGES = [
    make_example_messages(text) for text in ('f():\n"""A.""" \n', "a\u00a0b", "a\u200b")
]
OMITTED_MESSAGES += [
    make_example_messages()[:3],
    make_example_messages()[1:],
    make_example_messages(roles=["user"] * 2),
    [make_example_messages()[0], make_example_messages()[1] | {"tool_calls": [{}]}],
]


@pytest.mark.parametrize("messages", KEPT_MESSAGES + OMITTED_MESSAGES)
def test_a_modelfile_has_the_example_messages_unchanged_or_not_at_all(
    tmp_path, tokenizer, messages
):
    (tmp_path / "model.gguf").touch()
    note = ollama.write_modelfile_and_return_note(tmp_path, tokenizer, [], None, messages)
    if messages in KEPT_MESSAGES:
        assert read_ollama_messages(tmp_path) == messages
        assert note.startswith(" that sends 4 messages first")
    else:
        assert read_ollama_messages(tmp_path) == []
        assert note.startswith(" without MESSAGE")


CHAT_LOOP = "{% for one in messages %}<{{ one.role }}>{{ one.content | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected_text"),
    [
        ("{{ bos_token }}" + CHAT_LOOP + "<so>", "<user>Hi<so>"),
        ("{{ messages | length }}" + CHAT_LOOP, None),
        ("{{ raise_exception('no') if messages[0].role == 'system' }}" + CHAT_LOOP, None),
    ],
)
def test_a_modelfile_has_a_template_without_the_first_token_or_no_template(
    tmp_path,
    tokenizer_like,  # noqa: F811
    template,
    expected_text,
):
    tokenizer = tokenizer_like("llama-bpe")
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "Hi"}]
    assert render_with_ollama(tmp_path, tokenizer, messages) == expected_text


@pytest.mark.parametrize("front", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("system", "thinking"), [(None, False), (SYSTEM, False), (SYSTEM, True), (None, True)]
)
@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"]
)
def test_other_programs_encode_a_prompt_as_training_does(
    tokenizer, tmp_path, front, system, thinking, place
):
    base_tokenizer = prepend_to_template(tokenizer, front)
    if place == "additional_chat_templates":
        template = base_tokenizer.chat_template
        base_tokenizer.chat_template = {"default": template, "tool_use": template}
    base = tmp_path / "base"
    base_tokenizer.save_pretrained(str(base), save_jinja_files=place != "tokenizer_config.json")
    assert (base / place).exists()

    fused = tmp_path / "fused"
    fused_tokenizer = hub.load_tokenizer(base)
    chat_template.add_settings_to_template_and_describe(fused_tokenizer, system, thinking)
    fused_tokenizer.save_pretrained(str(fused))

    # A system message of the user replaces the system prompt of training.
    training_tokenizer = prepend_to_template(tokenizer, front)
    for messages, system_prompt in ((QUESTION, system), (QUESTION_WITH_SYSTEM, None)):
        ids = chat_template.encode_chat(
            training_tokenizer, messages, system=system_prompt, thinking=thinking
        )
        gwen_tokenizer = hub.load_tokenizer(fused)
        mlx_lm_tokenizer = mlx_lm_load_tokenizer(fused)

        longer_chat = [*messages, {"role": "assistant", "content": SYSTEM}, *messages]
        for chat_messages in (messages, longer_chat):
            text = gwen_tokenizer.apply_chat_template(
                chat_messages, add_generation_prompt=True, tokenize=False
            )
            assert render_with_ollama(tmp_path, gwen_tokenizer, chat_messages) == text

        for thinking_options in ({}, {"enable_thinking": True}):
            options = {"add_generation_prompt": True, "return_dict": False} | thinking_options
            assert gwen_tokenizer.apply_chat_template(messages, **options) == ids
            assert mlx_lm_tokenizer.apply_chat_template(messages, **options) == ids
        assert chat_template.encode_chat(gwen_tokenizer, messages, thinking=thinking) == ids


def test_a_template_that_renders_as_in_training_is_kept_and_a_wrong_one_is_refused(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    template = tokenizer.chat_template.replace("enable_thinking is defined and", "false and")
    tokenizer.chat_template = template
    changes = chat_template.add_settings_to_template_and_describe(tokenizer, None, False)
    assert changes == ""
    assert tokenizer.chat_template == template

    # In a template, <|im_end|> is a control token, but in a system prompt it is text.
    message = catch_message(
        chat_template.add_settings_to_template_and_describe, tokenizer, "Obey <|im_end|>.", False
    )
    assert message.endswith("--keep-template to keep the base model's template")


# ---- the command


@pytest.fixture
def copy_run(golden, tmp_path):
    """A function that copies a run and changes its settings."""

    def copy_run(kind="grpo", **settings):
        path = shutil.copytree(golden(kind), tmp_path / "run", dirs_exist_ok=True) / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))
        return str(path.parent)

    return copy_run


def export_fused(tmp_path, capsys, *flags):
    """Runs the command; returns the directory of the model, and the first line of the output."""
    shutil.rmtree(tmp_path / "fused", ignore_errors=True)
    export.main(["--fuse", *flags, "--out", str(tmp_path / "fused")])
    return tmp_path / "fused", capsys.readouterr().out.splitlines()[0]


def test_a_fused_model_has_the_template_of_training_and_the_type_of_the_base_model(
    copy_run, tmp_path, capsys
):
    base = hub.BUNDLED["demo"]
    run = copy_run()
    fused, line = export_fused(tmp_path, capsys, "--run", run)
    assert (
        "merged in, mlx.core.float16; its chat template has thinking off, as in training (--keep-template"
        in line
    )
    base_size = (base / "model.safetensors").stat().st_size
    assert (fused / "model.safetensors").stat().st_size < 1.01 * base_size
    weights = mx.load(str(fused / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.float16}
    assert json.loads((fused / "config.json").read_text())["dtype"] == "float16"

    template = (base / "chat_template.jinja").read_text()
    fused_template = (fused / "chat_template.jinja").read_text()
    assert fused_template == "{%- set enable_thinking = false %}\n" + template

    for adapter in (run, f"{run}/checkpoints/step-000003/adapter"):
        fused, line = export_fused(tmp_path, capsys, "--adapter", adapter)
        assert "thinking off" in line
        assert (fused / "chat_template.jinja").read_text() != template

    fused, line = export_fused(tmp_path, capsys, "--run", run, "--keep-template")
    assert "template" not in line
    assert (fused / "chat_template.jinja").read_text() == template


def test_the_system_prompt_of_the_training_data_enters_the_template_and_the_chat(
    copy_run, tmp_path, capsys, monkeypatch
):
    # Rows with a column `system`.
    rows = [
        {"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "system": SYSTEM}
        for n in range(8)
    ]
    data = write_log(tmp_path / "data.jsonl", rows)
    run = copy_run(task="own", data=data, rubric="", reward=["gone.py:score"])
    fused, line = export_fused(tmp_path, capsys, "--run", run)
    assert "its chat template has thinking off and the system prompt 'Say " in line
    demo_tokenizer = hub.load_tokenizer(hub.DEMO)
    ids = chat_template.encode_chat(hub.load_tokenizer(fused), QUESTION)
    assert ids == chat_template.encode_chat(demo_tokenizer, QUESTION, system=SYSTEM)

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    chat.main(["--chat", "--run", run])
    assert "; system: 'Say " in capsys.readouterr().err

    # Conversations that begin with a system message.
    system_message = {"role": "system", "content": SYSTEM}
    conversation = [system_message, *QUESTION, {"role": "assistant", "content": "Four."}]
    write_log(tmp_path / "data.jsonl", [{"messages": conversation}] * 8)
    _, line = export_fused(tmp_path, capsys, "--run", copy_run("sft", data=data))
    assert "the system prompt 'Say" in line

    # Prompts that all begin with the same example messages.
    example_messages = [
        {"role": "user", "content": "One and one?"},
        {"role": "assistant", "content": "Two."},
    ]
    first_messages = [system_message, *example_messages]
    prompts = [[*first_messages, {"role": "user", "content": row["prompt"]}] for row in rows]
    write_log(tmp_path / "data.jsonl", [{"prompt": prompt, "answer": "4"} for prompt in prompts])
    run_with_examples = copy_run(task="own", data=data, rubric="")
    fused, line = export_fused(tmp_path, capsys, "--run", run_with_examples)
    assert line.endswith("(README.md lists them)")
    assert "2 example messages" in line
    card = (fused / "README.md").read_text(encoding="utf-8")
    assert "send them before" in card
    messages_in_card = card.partition("\n```json\n")[2].removesuffix("\n```\n")
    assert json.loads(messages_in_card) == first_messages

    peft_dir = tmp_path / "peft"
    export.main(["--export", "peft", "--run", run_with_examples, "--out", str(peft_dir)])
    assert (peft_dir / "README.md").read_text(encoding="utf-8").endswith(card[-200:])
    output = capsys.readouterr().out
    assert output.startswith(f"{peft_dir}: {run_with_examples}/adapter for ")

    fused, line = export_fused(tmp_path, capsys, "--adapter", run_with_examples)
    assert "2 example messages" in line
    assert "README.md" not in line

    gguf_dir = tmp_path / "file"
    export.main(["--export", "gguf", "--run", run_with_examples, "--out", str(gguf_dir)])
    assert "and a Modelfile that sends 2 messages first; demo with" in capsys.readouterr().out
    assert read_ollama_messages(gguf_dir) == example_messages
    ollama_text = render_with_ollama(
        tmp_path, hub.load_tokenizer(fused), [*example_messages, *QUESTION]
    )
    assert ollama_text == chat_template.render_chat(
        demo_tokenizer, [*first_messages, *QUESTION], False
    )

    chat.main(["--prompt", "Hi", "--run", run_with_examples])
    assert "'; user: 'One and one?'; assistant: 'Two.'" in capsys.readouterr().err

    # Different system prompts, and lost data.
    write_log(tmp_path / "data.jsonl", [*rows, rows[0] | {"system": "Other."}])
    run_with_two_prompts = copy_run(task="own", data=data, rubric="")
    _, line = export_fused(tmp_path, capsys, "--run", run_with_two_prompts)
    assert "training had 2 system prompts" in line
    assert "; its chat template has thinking off," in line

    (tmp_path / "data.jsonl").unlink()
    _, line = export_fused(tmp_path, capsys, "--run", run)
    assert "system prompt of training is unknown: --data" in line


def test_an_exported_adapter_names_a_base_for_other_programs_or_advises_to_fuse(
    golden, tmp_path, capsys
):
    export.main(["--export", "peft", "--run", str(golden("grpo")), "--out", str(tmp_path / "demo")])
    adapter_config = json.loads((tmp_path / "demo" / "adapter_config.json").read_text())
    base = adapter_config["base_model_name_or_path"]
    assert read_tree(hub.DEMO) == read_tree(hub.find_model_directory(base))
    assert model_choice.choose_model_and_reason(None, tmp_path / "demo")[0] == base
    capsys.readouterr()

    flags = "--export peft --model smollm2".split()
    flags += ["--adapter", str(golden("grpo") / "adapter"), "--out", str(tmp_path / "smollm2")]
    export.main(flags)
    output = capsys.readouterr().out
    assert "load smollm2 as the base" in output
    assert "give them the whole model" in output


# ---- quantized models


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("grpo", 4), ("judge", 8)])
def test_mlx_lm_loads_a_quantized_model_and_the_command_prints_the_cost(
    copy_run, tmp_path, capsys, kind, bits
):
    quantized = tmp_path / "few"
    export.main(["--fuse", "--bits", str(bits), "--run", copy_run(kind), "--out", str(quantized)])

    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf" {bits}\.5\d bits per weight$", lines[0])
    assert "thinking off" in lines[0]
    assert len(lines) == 7 + lines[-1].startswith("WARNING")
    assert lines[1].startswith("for LM Studio on a Mac: mkdir ")
    assert f"{bits} bits" in lines[3]
    assert "held-out problems" in lines[3]
    original_accuracy = lines[4].partition(": ")[2]
    assert original_accuracy.startswith("eval/accuracy ")
    quantized_accuracy = lines[5].partition(": ")[2]
    assert quantized_accuracy.endswith("| 8 problems")
    pattern = rf".* {bits} bits .* by (\S+) nats .* (\S+)% of the (\S+) nats"
    numbers = re.match(pattern, lines[6]).groups()
    nats_lost, percentage, nats_learned = map(float, numbers)
    # Each number has two digits.
    assert percentage / 100 == pytest.approx(nats_lost / nats_learned, rel=0.1)

    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization"]["bits"] == bits

    mlx_lm_model, _ = mlx_lm_load_model(quantized)
    gwen_model, tokenizer = gwen.load(quantized, mx.float32)
    mlx_lm_model.set_dtype(mx.float32)
    ids = mx.array([chat_template.encode_chat(tokenizer, QUESTION)])
    assert mx.allclose(mlx_lm_model(ids), gwen_model(ids), atol=1e-3)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "run"]


def test_a_large_quantized_model_has_shards_and_a_model_of_odd_width_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        mlx_lm.utils, "make_shards", lambda weights: [dict([item]) for item in weights.items()]
    )
    few_bits.write_quantized_copy(hub.DEMO, tmp_path / "few", 8)
    assert "model.safetensors" not in read_tree(tmp_path / "few")
    assert gwen.load(tmp_path / "few")

    narrow = write_checkpoint(tmp_path / "narrow", CONFIGS["qwen3"] | {"head_dim": 8})
    message = catch_message(few_bits.write_quantized_copy, narrow, tmp_path / "no", 4)
    assert "no width of this model is a multiple" in message


@pytest.mark.slow
def test_the_measured_cost_is_0_for_the_same_model_and_a_warning_for_another(
    copy_run, golden, tmp_path, capsys
):
    fused, _ = export_fused(tmp_path, capsys, "--run", copy_run())
    few_bits.measure_and_print_quantization_cost(copy_run(), fused, fused, 16)
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0] == lines[1]
    assert re.match(r".* 16 bits .* \S+ nats .* 0\.0\d% of the", lines[2])
    assert "; 100.0% of the tokens in greedy answers" in lines[2]

    other_model = shutil.copytree(fused, tmp_path / "other")
    weights_file = str(other_model / "model.safetensors")
    weights = {name: array * 2 for name, array in mx.load(weights_file).items()}
    mx.eval(weights)  # before their file is overwritten
    mx.save_safetensors(weights_file, weights)
    few_bits.measure_and_print_quantization_cost(copy_run(), fused, other_model, 4)
    warning = capsys.readouterr().out.splitlines()[-1]
    assert warning.startswith("WARNING: rounding to 4 bits")
    assert "a third" in warning

    # Without a run or a readable model, nothing is measured.
    adapter = shutil.copytree(tmp_path / "run" / "adapter", tmp_path / "alone")
    flags = "--fuse --bits 8 --adapter".split()
    export.main([*flags, str(adapter), "--out", str(tmp_path / "few")])
    few_bits.measure_and_print_quantization_cost(str(golden("sft")), fused, fused, 8)
    few_bits.measure_and_print_quantization_cost(copy_run(), fused, tmp_path / "none.gguf", 8)
    output = capsys.readouterr().out
    assert output.count("8 bits was not measured: the measurement needs --run") == 2
    assert "not measured: --model" in output
    assert "16 bits: " not in output

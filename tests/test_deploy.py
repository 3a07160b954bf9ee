"""What people run afterwards: other programs render a fused model's prompts as training did, and hold its weights."""

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

USER = [{"role": "user", "content": "What is two and two?"}]
OWN = [{"role": "system", "content": "Mine."}, *USER]
SYSTEM = "Say \"two\" twice.\nNot 'three', \\ or {% 4 %}: \u00e9\U0001f642"
TEMPLATES = {  # before a template that thinks unless told otherwise
    "as it is": "",
    "off by default": "{%- set enable_thinking = enable_thinking | default(false) %}",
    "with a system prompt of its own": "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.'}}"
    "{{- '<|im_end|>\\n' }}{%- endif %}",
}


def with_template(tokenizer, front):
    made = copy.deepcopy(tokenizer)
    made.chat_template = front + made.chat_template
    return made


def rendered_by_ollama(folder, tokenizer, messages):
    """Messages in a Modelfile's template, its Go put into Jinja's words; None where it has none."""
    (folder / "model.gguf").touch()
    note = ollama.write_modelfile_and_return_note(folder, tokenizer, [], None, [])
    match = re.search(
        r'^TEMPLATE """(.*)"""\n\Z', (folder / "Modelfile").read_text(encoding="utf-8"), re.M | re.S
    )
    assert (match is None) == ("without TEMPLATE" in note)
    if match is None:
        return None
    text = match[1].removesuffix("{{ end }}") + "{% endfor %}"
    assert '"""' not in text and all(
        character == "\n" or character.isprintable() for character in text
    )  # else it is cut, or drops them
    text = text.replace("{{ $last := eq (len (slice $.Messages $i)) 1 }}", "").replace(
        "$one.Content", "one.content"
    )
    text = text.replace("{{ range $i, $one := .Messages }}", "{% for one in messages %}").replace(
        "{{ end", "{{ endif"
    )
    text = re.sub(r"\{\{ ((if|else|endif).*?) \}\}", r"{% \1 %}", text).replace("else if", "elif")
    text = (
        text.replace("$last", "loop.last")
        .replace("eq $i 0", "loop.first")
        .replace("eq $one.Role", "one.role ==")
    )
    return (
        jinja2.Environment(keep_trailing_newline=True).from_string(text).render(messages=messages)
    )


def sent_by_ollama(folder):
    """The messages of a Modelfile: a text ends at the first three quotes that end a line, without odd characters."""
    text = (folder / "Modelfile").read_bytes().decode()
    text = "".join(
        character for character in text if character.isprintable() or character in "\t\r\n"
    )
    matches = re.findall(r'^MESSAGE (\w+) """(.*?)"""\s*?[\r\n]', text, re.M | re.S)
    return [{"role": role, "content": content} for role, content in matches]


def shots(text="Two.", roles=("user", "assistant") * 2):
    return [{"role": role, "content": text} for role in roles]


KEPT = [shots(text) for text in (SYSTEM, '"a"', '"""a"""', 'a\r\n\t"', '"" \n')]
CHANGED = [shots(text) for text in ('f():\n"""A.""" \n', "a\u00a0b", "a\u200b")]
CHANGED += [
    shots()[:3],
    shots()[1:],
    shots(roles=["user"] * 2),
    [shots()[0], shots()[1] | {"tool_calls": [{}]}],
]


@pytest.mark.parametrize("shown", KEPT + CHANGED)
def test_ollama_sends_what_all_prompts_began_with_as_it_was_or_nothing(tmp_path, tokenizer, shown):
    (tmp_path / "model.gguf").touch()
    note = ollama.write_modelfile_and_return_note(tmp_path, tokenizer, [], None, shown)
    assert sent_by_ollama(tmp_path) == (shown if shown in KEPT else [])
    assert note.startswith(" that sends 4 messages first" if shown in KEPT else " without MESSAGE")


TALK = "{% for one in messages %}<{{ one.role }}>{{ one.content | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ bos_token }}" + TALK + "<so>", "<user>Hi<so>"),
        ("{{ messages | length }}" + TALK, None),
        ("{{ raise_exception('no') if messages[0].role == 'system' }}" + TALK, None),
    ],
)
def test_ollama_gets_a_template_without_llama_cpp_s_first_token_or_none(
    tmp_path,
    tokenizer_like,  # noqa: F811
    template,
    wanted,
):
    (tokenizer := tokenizer_like("llama-bpe")).chat_template = template
    assert rendered_by_ollama(tmp_path, tokenizer, [{"role": "user", "content": "Hi"}]) == wanted


@pytest.mark.parametrize("front", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("system", "thinking"), [(None, False), (SYSTEM, False), (SYSTEM, True), (None, True)]
)
@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"]
)
def test_other_programs_give_a_prompt_the_ids_of_training(
    tokenizer, tmp_path, front, system, thinking, place
):
    base = with_template(tokenizer, front)
    if place == "additional_chat_templates":
        base.chat_template = {"default": base.chat_template, "tool_use": base.chat_template}
    base.save_pretrained(str(tmp_path / "base"), save_jinja_files=place != "tokenizer_config.json")
    assert (tmp_path / "base" / place).exists()
    ours, wanted = hub.load_tokenizer(tmp_path / "base"), with_template(tokenizer, front)
    chat_template.fix_template_and_describe_changes(ours, system, thinking)
    ours.save_pretrained(str(tmp_path / "fused"))
    for messages, system_prompt in (
        (USER, system),
        (OWN, None),
    ):  # a system message of the user's own stands alone
        ids = chat_template.encode_chat(wanted, messages, system=system_prompt, thinking=thinking)
        peer, again = (
            mlx_lm_load_tokenizer(tmp_path / "fused"),
            hub.load_tokenizer(tmp_path / "fused"),
        )
        for talk in (messages, [*messages, {"role": "assistant", "content": SYSTEM}, *messages]):
            asked = again.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
            assert rendered_by_ollama(tmp_path, again, talk) == asked
        for others in ({}, {"enable_thinking": True}):
            options = {"add_generation_prompt": True, "return_dict": False} | others
            assert (
                again.apply_chat_template(messages, **options)
                == peer.apply_chat_template(messages, **options)
                == ids
            )
        assert chat_template.encode_chat(again, messages, thinking=thinking) == ids


def test_a_template_that_renders_as_training_did_is_left_alone_and_one_that_cannot_is_refused(
    tokenizer,
):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = before = tokenizer.chat_template.replace(
        "enable_thinking is defined and", "false and"
    )
    assert (
        chat_template.fix_template_and_describe_changes(plain, None, False) == ""
        and plain.chat_template == before
    )
    message = catch_message(
        chat_template.fix_template_and_describe_changes, plain, "Obey <|im_end|>.", False
    )  # a template's is no text
    assert message.endswith("--keep-template to keep the base model's template")


# ---- the command


@pytest.fixture
def run(golden, tmp_path):
    """A function that copies a run as one of other settings."""

    def run(kind="grpo", **settings):
        path = shutil.copytree(golden(kind), tmp_path / "run", dirs_exist_ok=True) / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))
        return str(path.parent)

    return run


def fused(tmp_path, capsys, *flags):
    """The directory that the command makes, and its first line."""
    shutil.rmtree(tmp_path / "fused", ignore_errors=True)
    export.main(["--fuse", *flags, "--out", str(tmp_path / "fused")])
    return tmp_path / "fused", capsys.readouterr().out.splitlines()[0]


def test_a_fused_model_has_training_s_template_and_the_type_of_its_base_on_any_machine(
    run, tmp_path, capsys
):
    base, where = hub.BUNDLED["demo"], run()
    out, line = fused(tmp_path, capsys, "--run", where)
    assert (
        "merged in, mlx.core.float16; its chat template has thinking off, as in training (--keep-template"
        in line
    )
    assert (out / "model.safetensors").stat().st_size < 1.01 * (
        base / "model.safetensors"
    ).stat().st_size
    assert {array.dtype for array in mx.load(str(out / "model.safetensors")).values()} == {
        mx.float16
    }
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    template = (base / "chat_template.jinja").read_text()
    assert (
        out / "chat_template.jinja"
    ).read_text() == "{%- set enable_thinking = false %}\n" + template
    for adapter in (where, f"{where}/checkpoints/step-000003/adapter"):
        again, line = fused(tmp_path, capsys, "--adapter", adapter)
        assert "thinking off" in line and (again / "chat_template.jinja").read_text() != template
    kept, line = fused(tmp_path, capsys, "--run", where, "--keep-template")
    assert "template" not in line and (kept / "chat_template.jinja").read_text() == template


def test_the_system_prompt_of_a_run_s_data_goes_into_template_and_talk(
    run, tmp_path, capsys, monkeypatch
):
    rows = [
        {"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "system": SYSTEM}
        for n in range(8)
    ]
    data = write_log(tmp_path / "data.jsonl", rows)
    where = run(task="own", data=data, rubric="", reward=["gone.py:score"])
    out, line = fused(tmp_path, capsys, "--run", where)
    assert "its chat template has thinking off and the system prompt 'Say " in line
    demo, made = hub.load_tokenizer(hub.DEMO), hub.load_tokenizer(out)
    assert chat_template.encode_chat(made, USER) == chat_template.encode_chat(
        demo, USER, system=SYSTEM
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    chat.main(["--chat", "--run", where])
    assert "; system: 'Say " in capsys.readouterr().err
    talk = [{"role": "system", "content": SYSTEM}, *USER, {"role": "assistant", "content": "Four."}]
    write_log(tmp_path / "data.jsonl", [{"messages": talk}] * 8)
    assert "the system prompt 'Say" in fused(tmp_path, capsys, "--run", run("sft", data=data))[1]
    shown = [
        *talk[:1],
        {"role": "user", "content": "One and one?"},
        {"role": "assistant", "content": "Two."},
    ]
    asked = [[*shown, {"role": "user", "content": row["prompt"]}] for row in rows]
    write_log(tmp_path / "data.jsonl", [{"prompt": prompt, "answer": "4"} for prompt in asked])
    line = fused(tmp_path, capsys, "--run", (shot := run(task="own", data=data, rubric="")))[1]
    assert line.endswith("(README.md lists them)")
    assert "2 example messages" in line
    card = (tmp_path / "fused" / "README.md").read_text(encoding="utf-8")
    assert "send them before" in card
    assert json.loads(card.partition("\n```json\n")[2].removesuffix("\n```\n")) == shown
    export.main(["--export", "peft", "--run", shot, "--out", str(tmp_path / "peft")])
    assert (tmp_path / "peft" / "README.md").read_text(encoding="utf-8").endswith(card[-200:])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/peft: {shot}/adapter for ")
    line = fused(tmp_path, capsys, "--adapter", shot)[1]
    assert "2 example messages" in line and "README.md" not in line
    export.main(["--export", "gguf", "--run", shot, "--out", str(tmp_path / "file")])
    assert "and a Modelfile that sends 2 messages first; demo with" in capsys.readouterr().out
    assert (sent := sent_by_ollama(tmp_path / "file")) == shown[1:]
    asked = chat_template.render_chat(demo, [*shown, *USER], False)
    assert (
        rendered_by_ollama(tmp_path, hub.load_tokenizer(tmp_path / "fused"), [*sent, *USER])
        == asked
    )
    chat.main(["--prompt", "Hi", "--run", shot])
    assert "'; user: 'One and one?'; assistant: 'Two.'" in capsys.readouterr().err
    write_log(tmp_path / "data.jsonl", [*rows, rows[0] | {"system": "Other."}])
    line = fused(tmp_path, capsys, "--run", run(task="own", data=data, rubric=""))[1]
    assert "training had 2 system prompts" in line
    assert "; its chat template has thinking off," in line
    (tmp_path / "data.jsonl").unlink()
    assert (
        "system prompt of training is unknown: --data" in fused(tmp_path, capsys, "--run", where)[1]
    )


def test_an_exported_adapter_names_a_base_that_others_open_or_says_to_fuse_first(
    golden, tmp_path, capsys
):
    export.main(["--export", "peft", "--run", str(golden("grpo")), "--out", str(tmp_path / "demo")])
    base = json.loads((tmp_path / "demo" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert (
        read_tree(hub.DEMO) == read_tree(hub.find_model_directory(base))
        and model_choice.choose_model_and_reason(None, tmp_path / "demo")[0] == base
    )
    capsys.readouterr()
    adapter = str(golden("grpo") / "adapter")
    export.main(
        [
            "--export",
            "peft",
            "--adapter",
            adapter,
            "--model",
            "smollm2",
            "--out",
            str(tmp_path / "smollm2"),
        ]
    )
    output = capsys.readouterr().out
    assert "load smollm2 as the base" in output and "give them the whole model" in output


# ---- few bits


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("grpo", 4), ("judge", 8)])
def test_a_model_in_few_bits_is_mlx_lm_s_and_its_cost_is_told(run, tmp_path, capsys, kind, bits):
    export.main(["--fuse", "--bits", str(bits), "--run", run(kind), "--out", str(tmp_path / "few")])
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf" {bits}\.5\d bits per weight$", lines[0])
    assert len(lines) == 7 + lines[-1].startswith("WARNING") and lines[1].startswith(
        "for LM Studio on a Mac: mkdir "
    )
    assert f"{bits} bits" in lines[3] and "held-out problems" in lines[3]
    wide, few, cost = (line.partition(": ")[2] for line in [*lines[4:6], f"x: {lines[6]}"])
    assert wide.startswith("eval/accuracy ") and few.endswith("| 8 problems")
    pattern = rf".* {bits} bits .* by (\S+) nats .* (\S+)% of the (\S+) nats"
    numbers = re.match(pattern, cost).groups()
    lost, share, learned = map(float, numbers)
    assert share / 100 == pytest.approx(lost / learned, rel=0.1)  # of two digits each
    assert (
        json.loads((tmp_path / "few" / "config.json").read_text())["quantization"]["bits"] == bits
    )
    theirs, _ = mlx_lm_load_model(tmp_path / "few")
    ours, tokenizer = gwen.load(tmp_path / "few", mx.float32)
    theirs.set_dtype(mx.float32)
    ids = mx.array([chat_template.encode_chat(tokenizer, USER)])
    assert mx.allclose(theirs(ids), ours(ids), atol=1e-3) and "thinking off" in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "run"]


def test_a_large_packed_model_is_shards_and_one_that_cannot_be_packed_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        mlx_lm.utils, "make_shards", lambda weights: [dict([item]) for item in weights.items()]
    )
    few_bits.write_quantized_copy(hub.DEMO, tmp_path / "few", 8)
    assert "model.safetensors" not in read_tree(tmp_path / "few") and gwen.load(tmp_path / "few")
    narrow = write_checkpoint(tmp_path / "narrow", CONFIGS["qwen3"] | {"head_dim": 8})
    assert "no width of this model is a multiple" in catch_message(
        few_bits.write_quantized_copy, narrow, tmp_path / "no", 4
    )


@pytest.mark.slow
def test_bits_cost_nothing_of_a_model_beside_itself_and_a_warning_of_another(
    run, golden, tmp_path, capsys
):
    out, _ = fused(tmp_path, capsys, "--run", run())
    few_bits.measure_and_print_quantization_cost(run(), out, out, 16)
    _, *same = capsys.readouterr().out.splitlines()
    assert same[0] == same[1] and re.match(r".* 16 bits .* \S+ nats .* 0\.0\d% of the", same[2])
    assert "; 100.0% of the tokens in greedy answers" in same[2] and len(same) == 3
    other = shutil.copytree(out, tmp_path / "other")
    weights = {name: array * 2 for name, array in mx.load(str(other / "model.safetensors")).items()}
    mx.eval(weights)  # before their file is written
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    few_bits.measure_and_print_quantization_cost(run(), out, other, 4)
    warning = capsys.readouterr().out.splitlines()[-1]
    assert warning.startswith("WARNING: rounding to 4 bits") and "a third" in warning
    alone = shutil.copytree(tmp_path / "run" / "adapter", tmp_path / "alone")
    export.main(["--fuse", "--bits", "8", "--adapter", str(alone), "--out", str(tmp_path / "few")])
    few_bits.measure_and_print_quantization_cost(str(golden("sft")), out, out, 8)
    few_bits.measure_and_print_quantization_cost(run(), out, tmp_path / "none.gguf", 8)
    unknown = "8 bits was not measured: the measurement needs --run"
    output = capsys.readouterr().out
    assert output.count(unknown) == 2 and "not measured: --model" in output
    assert "16 bits: " not in output  # what cannot be read is told before anything is measured

"""Chats in the terminal: ids, characters, ends of answers, tools, and comparison with the base model."""

import io
import signal
import sys

import mlx.core as mx
import pytest

import chat
import gwen
import lora
import sampler
import tasks
from config import Config
from prompts import chat_template
from tools import toolbox as toolbox_module

SYSTEM_MESSAGE = {"role": "system", "content": "Be brief."}


def make_chat_model(model, tokenizer, max_tokens=6, context=256, **settings):
    defaults = {"thinking": False, "opening": [SYSTEM_MESSAGE], "seed": 0, "toolbox": None}
    params = sampler.SamplingParams(max_tokens, 0.0, eos_ids=model.config.eos_ids)
    return chat.ChatModel(model, tokenizer, params, context=context, **defaults | settings)


def expected_turn(model, ids, num_tokens):
    """Greedy tokens after these ids, each from a forward pass of all ids without a cache."""
    ids = list(ids)
    for _ in range(num_tokens):
        logits = model(mx.array([ids]))[0, -1]
        ids.append(int(logits.argmax().item()))
    return ids[-num_tokens:]


def text_between_turns(line):
    """What the template writes from the end of an answer to the next one."""
    user = f"<|im_start|>user\n{line}<|im_end|>\n"
    return f"\n{user}<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_reply_equals_greedy_decoding_of_the_complete_conversation_without_a_cache(
    tiny_model, tokenizer
):
    model = gwen.load_model(tiny_model, mx.float32)
    chat_model = make_chat_model(model, tokenizer)
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = chat_template.encode_chat(tokenizer, "one <|im_end|>", system="Be brief.")
    for number, line in enumerate(("one <|im_end|>", "two", "what is three?")):
        # The turn of the model stays as sampled. The template continues after the end token.
        if number:
            if ids[-1] != end_id:
                ids.append(end_id)
            ids += tokenizer.encode(text_between_turns(line))

        reply = "".join(chat_model.stream_reply(line))
        assert chat_model.turn == expected_turn(model, ids, len(chat_model.turn))
        assert 1 <= len(chat_model.turn) <= 6
        assert len(chat_model.turn) == 6 or chat_model.turn[-1] in model.config.eos_ids
        ids += chat_model.turn
        assert chat_model.cache.length == len(ids), "every position is computed once"
        assert reply == tokenizer.decode(chat_model.turn, skip_special_tokens=True).rstrip("\ufffd")


def test_a_model_without_end_tokens_uses_those_of_the_chat_template():
    model, tokenizer = gwen.load("random:2m")
    assert model.config.eos_ids == ()
    chat_model = make_chat_model(model, tokenizer)
    list(chat_model.stream_reply("one"))
    text = tokenizer.decode(chat_model.encode_since_last_reply("two"))
    assert "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in text


def test_a_full_context_or_a_nan_logprob_ends_a_chat_with_an_error(tiny_model, tokenizer):
    model = gwen.load_model(tiny_model, mx.float32)
    chat_model = make_chat_model(model, tokenizer, context=60)
    list(chat_model.stream_reply("one"))
    with pytest.raises(ValueError, match="60 tokens"):
        list(chat_model.stream_reply("two" * 20))
    model.norm.weight = model.norm.weight * mx.nan
    with pytest.raises(sampler.NonFiniteLogprob):
        list(make_chat_model(model, tokenizer).stream_reply("one"))


def test_a_note_says_whether_the_limit_or_the_context_cut_off_a_reply(
    tiny_model, tokenizer, capsys
):
    model = gwen.load_model(tiny_model, mx.float32)
    chat_model = make_chat_model(model, tokenizer)
    chat_model.ends = set()  # no token ends a reply
    chat.print_reply_until_ctrl_c(chat_model, "one", [])
    assert "cut off at --max-tokens 6" in capsys.readouterr().err

    num_prompt_tokens = chat_model.cache.length - 6
    chat_model = make_chat_model(model, tokenizer, context=num_prompt_tokens + 4)
    chat_model.ends = set()
    chat.print_reply_until_ctrl_c(chat_model, "one", [])
    assert f"context of {num_prompt_tokens + 4} tokens" in capsys.readouterr().err


# ---- characters


@pytest.mark.parametrize(
    "text",
    [
        "Gr\u00fc\u00dfe \U0001f642 h\u00e9llo \u4e2d\u6587",
        "plain words",
        "e\u0301\U0001f468\u200d\U0001f469",
    ],
)
def test_streamed_text_has_complete_characters_only(tokenizer, text):
    ids = tokenizer.encode(text)
    for end in range(1, len(ids) + 1):
        pieces = list(chat.stream_text(ids[:end], tokenizer, None))
        streamed = "".join(pieces)
        assert len(pieces) == end + 1
        assert "\ufffd" not in streamed
        assert text.startswith(streamed)
        assert len(streamed.encode()) > end - 4 - text.count("is")
    assert streamed == text


@pytest.mark.parametrize(
    "stop_texts", [["three"], ["is", "thr"], ["e is t"], ["nobody"], ["and", "a"]]
)
def test_a_stop_text_ends_the_streamed_text_but_the_beginning_of_one_does_not(
    tokenizer, stop_texts
):
    text = "one and two is three, thre"
    stop = sampler.StopTexts(stop_texts, tokenizer)
    pieces = list(chat.stream_text(tokenizer.encode(text), tokenizer, stop))
    assert "".join(pieces) == stop.trim(text)
    for number in range(len(pieces)):  # the text so far never goes beyond the final text
        assert stop.trim(text).startswith("".join(pieces[:number]))


# ---- the command


@pytest.fixture
def chat_with_lines(monkeypatch, capsys):
    """A function that runs the command with lines from a pipe, and returns the answers."""

    def chat_with_lines(*flags, lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        capsys.readouterr()
        chat.main([*map(str, flags), "--chat", "--temp", "0"])
        printed_lines = capsys.readouterr().out.splitlines()
        echoed_lines = [line for line in printed_lines if line.startswith("> ")]
        assert echoed_lines == [f"> {line}" for line in lines if line]
        return [line for line in printed_lines if not line.startswith("> ")]

    return chat_with_lines


QUESTION = "What is twenty-nine plus eighteen?"


def test_the_command_answers_the_lines_of_a_pipe_one_after_another(chat_with_lines, capsys):
    chat.main(["--model", "demo", "--prompt", QUESTION, "--temp", "0"])
    completion = capsys.readouterr().out.removesuffix("\n")

    # An empty line begins another conversation.
    lines = [QUESTION, "What is two plus three?", "", QUESTION]
    first, second, third = chat_with_lines("--model", "demo", lines=lines)
    assert first == third == completion
    assert second

    answers = chat_with_lines("--model", "demo", "--stop", "seven", lines=[QUESTION])
    assert answers == [first.partition("seven")[0]]
    answers = chat_with_lines("--model", "demo", "--max-tokens", "2", lines=[QUESTION])
    assert answers[0] in first


@pytest.mark.parametrize("rank", [4, 0])
def test_compare_prints_the_answers_before_and_after_training(chat_with_lines, tmp_path, rank):
    model, _ = gwen.load("demo")
    if rank:
        lora.apply(model, rank, 2.0)
        for number, (_, layer) in enumerate(lora.adapted_layers(model)):
            layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(number)) * 0.3
    else:
        noise = mx.random.normal(model.norm.weight.shape, key=mx.random.key(0))
        model.norm.weight *= 1 + 1.6 * noise
    lora.save_adapter_or_full_weights(model, tmp_path, "demo")

    questions = [f"What is {number} plus eighteen?" for number in ("one", "thirty")]
    answers_before = chat_with_lines("--model", "demo", lines=questions)
    answers_after = chat_with_lines("--adapter", tmp_path, lines=questions)
    assert answers_before[0] != answers_after[0]

    compared_answers = chat_with_lines("--adapter", tmp_path, "--compare", lines=questions)
    assert compared_answers[::2] == [f"[before] {answer}" for answer in answers_before]
    assert compared_answers[1::2] == [f"[after] {answer}" for answer in answers_after]


def test_compare_answers_each_prompt_in_a_conversation_of_its_own(tmp_path, capsys):
    model, _ = gwen.load("demo")
    lora.apply(model, 4, 2.0)
    lora.save_adapter_or_full_weights(model, tmp_path, "demo")
    questions = [QUESTION, "What is two plus three?"]
    expected_lines = []
    for question in questions:
        chat.main(["--model", "demo", "--prompt", question, "--temp", "0"])
        answer = capsys.readouterr().out.removesuffix("\n")
        # The new adapter changes nothing, so both models give the same answer.
        expected_lines += [f"> {question}", f"[before] {answer}", f"[after] {answer}"]

    flags = ["--adapter", str(tmp_path), "--compare", "--temp", "0"]
    chat.main([*flags, "--prompt", questions[0], "--prompt", questions[1]])
    assert capsys.readouterr().out.splitlines() == expected_lines
    chat.main([*flags, "--prompt", questions[0]])
    assert capsys.readouterr().out.splitlines() == expected_lines[1:3]


GUESS = """def guess(number: int) -> str:
    \"\"\"
    Guesses.

    Args:
        number: the number
    \"\"\"
    return f"not {number}"
"""
FIND = "I think of a number from 1 to 20. Find it."


def test_a_chat_calls_a_tool_prints_the_result_and_gives_it_to_the_model(chat_with_lines, tmp_path):
    (tmp_path / "mine.py").write_text(GUESS)
    tools = f"{tmp_path}/mine.py:guess"
    flags = ["--model", "demo:tools", "--tools", tools, "--max-tokens", 40, "--max-turns", 2]
    answers = chat_with_lines(*flags, lines=[FIND])
    assert sum('{"name": "guess"' in line for line in answers) == 2
    assert sum(line.startswith("[guess] not ") for line in answers) == 2

    model, tokenizer = gwen.load("demo:tools")
    config = Config.from_flags(model="demo:tools", tools=[tools], max_turns=1)
    toolbox = toolbox_module.make_toolbox(
        config, *tasks.load_tools_and_environments(config), tokenizer, model.config
    )
    chat_model = make_chat_model(model, tokenizer, 40, context=900, opening=[], toolbox=toolbox)
    assert "[guess] not " in "".join(chat_model.stream_reply(FIND))

    # After the last turn, the model has not read the result of the tool. The next turn begins with it.
    text = tokenizer.decode(chat_model.encode_since_last_reply("So?"))
    assert "<tool_response>\nnot " in text
    assert "<|im_start|>user\nSo?<|im_end|>" in text


class InterruptingOutput(io.StringIO):
    """An output that simulates Ctrl-C at every fifth write."""

    num_writes = 0

    def write(self, text):
        self.num_writes += 1
        if self.num_writes % 5 == 0:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_an_answer_and_the_chat_continues(tiny_model, tokenizer, monkeypatch):
    model = gwen.load_model(tiny_model, mx.float32)
    chat_model = make_chat_model(model, tokenizer, max_tokens=200)
    chat_model.params = chat_model.params._replace(eos_ids=())
    turn_lengths = []
    cache_lengths = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptingOutput())
        patch.setattr(type(chat_model), "newest_turn_has_end_token", lambda _: False)
        for line in ("one", "two"):
            chat.run_chat({"": chat_model}, [line])
            turn_lengths.append(len(chat_model.turn))
            cache_lengths.append(chat_model.cache.length)
    assert all(0 < length < 6 for length in turn_lengths)
    assert cache_lengths[1] > cache_lengths[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("flags", "refused_flag"),
    [
        ("--chat --prompt Hi", "--prompt"),
        ("--compare --prompt Hi", "--compare"),
        ("--compare --adapter runs/a", "--compare"),
        ("--chat --task guess", "--chat"),
        ("--chat --model demo --tool-timeout 3", "--tool-timeout 3"),
    ],
)
def test_flags_that_do_not_fit_a_chat_are_refused(check_refusal, flags, refused_flag):
    check_refusal(chat.main, flags.split(), refused_flag)


def test_each_of_several_prompts_is_answered_as_if_it_were_the_only_one(capsys):
    questions = ["What is three plus four?", "Add nine and eight."]
    answers = []
    for question in questions:
        chat.main(["--model", "demo", "--prompt", question, "--temp", "0"])
        answers.append(capsys.readouterr().out)

    chat.main(["--model", "demo", "--prompt", questions[0], "--prompt", questions[1], "--temp=0"])
    output = capsys.readouterr().out
    assert output == "".join(
        f"> {question}\n{answer}" for question, answer in zip(questions, answers, strict=True)
    )

"""A talk in the terminal: its ids, its characters, what ends an answer, tools, and before beside after."""

import io
import signal
import sys

import mlx.core as mx
import pytest

import gwen
import lora
import sampler
import tasks
from config import Config
from deploy import chat
from problems import chat_template, episodes


def make_side(model, tokenizer, max_tokens=6, context=256, **more):
    params = sampler.SamplingParams(max_tokens, 0.0, eos_ids=model.config.eos_ids)
    opening = [{"role": "system", "content": "Be brief."}]
    given = {"thinking": False, "opening": opening, "seed": 0, "context": context, "box": None}
    return chat.ChatModel(model, tokenizer, params, **given | more)


def expected_turn(model, ids, num):
    """`num` greedy tokens after these ids, each from a forward pass of all of them, without a cache."""
    ids = list(ids)
    for _ in range(num):
        ids.append(int(model(mx.array([ids]))[0, -1].argmax().item()))
    return ids[-num:]


def test_a_turn_continues_from_the_last_and_its_ids_are_those_of_the_whole_conversation(
    tiny_model, tokenizer
):
    model = gwen.load_model(tiny_model, mx.float32)
    side = make_side(model, tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole = chat_template.encode_chat(tokenizer, "one <|im_end|>", system="Be brief.")
    for number, line in enumerate(("one <|im_end|>", "two", "what is three?")):
        if number:  # what the model wrote stays as it was drawn; the template's next words follow the end of its turn
            said = f"\n<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            whole += [] if whole[-1] == end else [end]
            whole += tokenizer.encode(said)
        told = "".join(side.reply(line))
        assert side.turn == expected_turn(model, whole, len(side.turn)) and len(side.turn) in range(
            1, 7
        )
        assert len(side.turn) == 6 or side.turn[-1] in model.config.eos_ids
        whole += side.turn
        assert side.cache.length == len(whole), "every position is computed once"
        assert told == tokenizer.decode(side.turn, skip_special_tokens=True).rstrip("\ufffd")


def test_a_model_without_end_tokens_is_talked_to_with_its_template_s():
    model, own = gwen.load("random:2m")
    side = make_side(model, own)
    list(side.reply("one"))
    assert (
        model.config.eos_ids == ()
        and "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in own.decode(side.encode_turn("two"))
    )


def test_a_talk_that_fills_the_context_or_is_no_number_ends_in_a_line(tiny_model, tokenizer):
    model = gwen.load_model(tiny_model, mx.float32)
    side = make_side(model, tokenizer, context=60)
    list(side.reply("one"))
    with pytest.raises(ValueError, match="the talk fills the 60 tokens"):
        list(side.reply("two" * 20))
    model.norm.weight = model.norm.weight * mx.nan
    with pytest.raises(sampler.NotFinite):
        list(make_side(model, tokenizer).reply("one"))


# ---- characters


@pytest.mark.parametrize(
    "text",
    [
        "Gr\u00fc\u00dfe \U0001f642 h\u00e9llo \u4e2d\u6587",
        "plain words",
        "e\u0301\U0001f468\u200d\U0001f469",
    ],
)
def test_characters_come_whole_and_half_a_one_at_the_end_not_at_all(tokenizer, text):
    ids = tokenizer.encode(text)
    for end in range(1, len(ids) + 1):
        told = list(chat.stream_text(ids[:end], tokenizer, None))
        assert len(told) == end + 1 and "\ufffd" not in "".join(told)
        assert text.startswith("".join(told)) and len(
            "".join(told).encode()
        ) > end - 4 - text.count("is")
    assert "".join(told) == text


@pytest.mark.parametrize("stop", [["three"], ["is", "thr"], ["e is t"], ["nobody"], ["and", "a"]])
def test_a_stop_text_ends_an_answer_before_it_and_what_only_begins_one_is_shown(tokenizer, stop):
    text = "one and two is three, thre"
    stop = sampler.Stop(stop, tokenizer) if stop else None
    told = list(chat.stream_text(tokenizer.encode(text), tokenizer, stop))
    assert "".join(told) == stop.trim(text)
    for number in range(len(told)):  # at no time is there more than in the end
        assert stop.trim(text).startswith("".join(told[:number]))


# ---- the command


@pytest.fixture
def talk(monkeypatch, capsys):
    """What a talk answers to lines from a pipe, line by line."""

    def talk(*flags, lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        capsys.readouterr()
        sampler.main([*map(str, flags), "--chat", "--temp", "0"])
        shown = capsys.readouterr().out.splitlines()
        assert [line for line in shown if line[:2] == "> "] == [
            f"> {line}" for line in lines if line
        ]
        return [line for line in shown if line[:2] != "> "]

    return talk


ASKED = "What is twenty-nine plus eighteen?"


def test_lines_of_a_pipe_are_answered_one_after_another(talk, capsys):
    sampler.main(["--model", "demo", "--prompt", ASKED, "--temp", "0"])
    alone = capsys.readouterr().out
    first, second, third = talk(
        "--model", "demo", lines=[ASKED, "What is two plus three?", "", ASKED]
    )
    assert first + "\n" == alone and second and third == first  # an empty line begins another talk
    assert talk("--model", "demo", "--stop", "seven", lines=[ASKED]) == [
        first.partition("seven")[0]
    ]
    assert talk("--model", "demo", "--max-tokens", "2", lines=[ASKED])[0] in first


@pytest.mark.parametrize("rank", [4, 0])
def test_before_training_stands_beside_after(talk, tmp_path, rank):
    model, asked = (
        gwen.load("demo")[0],
        [f"What is {one} plus eighteen?" for one in ("one", "thirty")],
    )
    if rank:
        lora.apply(model, rank, 2.0)
        for number, (_, layer) in enumerate(lora.adapted_layers(model)):
            layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(number)) * 0.3
    else:
        model.norm.weight *= 1 + 1.6 * mx.random.normal(
            model.norm.weight.shape, key=mx.random.key(0)
        )
    lora.save_adapter(model, tmp_path, "demo")
    both = talk("--adapter", tmp_path, "--compare", lines=asked)
    assert both[::2] == [f"[before] {line}" for line in talk("--model", "demo", lines=asked)]
    assert both[1::2] == [f"[after] {line}" for line in talk("--adapter", tmp_path, lines=asked)]
    assert both[0][9:] != both[1][8:]


GUESS = """def guess(number: int) -> str:
    \"\"\"
    Guesses.

    Args:
        number: the number
    \"\"\"
    return f"not {number}"
"""
FIND = "I think of a number from 1 to 20. Find it."


def test_a_tool_is_called_and_what_it_says_is_shown_and_read(talk, tmp_path):
    (tmp_path / "mine.py").write_text(GUESS)
    tools = f"{tmp_path}/mine.py:guess"
    told = talk(
        "--model",
        "demo:tools",
        "--tools",
        tools,
        "--max-tokens",
        40,
        "--max-turns",
        2,
        lines=[FIND],
    )
    assert sum('{"name": "guess"' in line for line in told) == 2
    assert sum(line.startswith("[guess] not ") for line in told) == 2
    model, tokenizer = gwen.load("demo:tools")
    config = Config.from_flags(model="demo:tools", tools=[tools], max_turns=1)
    box = episodes.make_toolbox(config, *tasks.load_tools(config), tokenizer, model.config)
    side = make_side(model, tokenizer, max_tokens=40, context=900, opening=[], box=box)
    assert "[guess] not " in "".join(side.reply(FIND))
    next_told = tokenizer.decode(
        side.encode_turn("So?")
    )  # its turns are over, so it could not read that yet
    assert "<tool_response>\nnot " in next_told and "<|im_start|>user\nSo?<|im_end|>" in next_told


class Pressing(io.StringIO):
    """Where Ctrl-C is pressed at the fifth thing that is written, and again at the tenth."""

    num = 0

    def write(self, text):
        self.num += 1
        if self.num % 5 == 0:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_an_answer_and_the_talk_goes_on(tiny_model, tokenizer, monkeypatch):
    model = gwen.load_model(tiny_model, mx.float32)
    side = make_side(model, tokenizer, max_tokens=200)
    side.params, ended = side.params._replace(eos_ids=()), []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Pressing())
        patch.setattr(type(side), "is_over", lambda _: False)
        for line in ("one", "two"):
            chat.run_chat({"": side}, [line])
            ended.append((len(side.turn), side.cache.length))
    assert all(0 < num < 6 for num, _ in ended) and ended[1][1] > ended[0][1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--chat --prompt Hi",
            "--chat reads what you say line by line, and answers once; leave out --prompt and --num",
        ),
        ("--compare --prompt Hi", "--compare is for --chat with the --run or --adapter"),
        ("--chat --task guess", "--chat has tools and no environment, which plays by itself"),
        ("--chat --model demo --tool-timeout 3", "is for what has tools, and nothing here has"),
    ],
)
def test_what_a_talk_cannot_do_is_refused(refused, flags, said):
    refused(sampler.main, flags.split(), said)

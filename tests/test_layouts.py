"""Rows in the layouts that people bring: tables of Arrow, messages and their keys, columns, answers, text files."""

import copy
import json

import datasets
import pandas
import pyarrow
import pytest
from conftest import catch_message, read_log, write_log

import tasks
import train
import trainer
from prompts import arrow, chat_template, chats, data
from prompts.held_out import load_training_and_held_out
from settings import sources
from settings.sources import parse_flags, settings_from_flags

USER = {"role": "user", "content": "What is one and two?"}
THOUGHT = "one more than two"
PLAIN = (  # a template without a key for thoughts
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
KEYED = PLAIN.replace(
    "m.content +", "('[' + m.thinking + ']' if m.thinking else '') + (m.name or '') + m.content +"
)  # one that has a key, and shows names


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content, **fields):
    return {"role": "assistant", "content": content} | fields


def tool(name, **properties):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties}},
    }


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def trained_text(tokenizer, row):
    example = chats.read_conversation_example(row)
    how = {"thinking": True, "end_ids": [tokenizer.eos_token_id], "context": 1000}
    rows = chats.encode_conversation(tokenizer, example, **how)
    return "".join(tokenizer.decode([one.ids[place] for place in one.places]) for one in rows)


# ---- nulls that Arrow made

TALKS = [
    {
        "messages": [USER, reply("", tool_calls=[call("weather", city="Oslo")])],
        "tools": [
            tool("weather", city={"type": "string"}),
            tool("holiday", day={"type": "string"}),
        ],
    },
    {
        "messages": [
            USER,
            reply("", tool_calls=[call("holiday", day={"of": "May"})]),
            USER,
            reply("x", weight=0),
        ],
        "tools": [{"type": "function", "function": {"name": "now"}}],
    },
]
PROBLEMS = [
    {"prompt": "a", "answer": {"team": "web"}, "world": {"low": 1}},
    {"prompt": "b", "answer": {"team": "bug", "priority": 3}, "world": {"doors": {"red": 1}}},
    {"prompt": "c", "answer": {"items": [{"name": "tea"}, {"number": 2}]}, "world": {"at": "x/y"}},
]


def tables_of(rows, path):
    """The rows as files and as what a program holds, by name."""
    held = datasets.Dataset.from_list(rows)
    held.to_parquet(path / "rows.parquet")
    held.to_json(path / "pandas.jsonl")
    held.save_to_disk(path / "saved")
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(str(path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    programs = {
        "dataset": held,
        "to_list": held.to_list(),
        "table": table,
        "stream": held.to_iterable_dataset(),
    }
    return [
        str(path / name) for name in ("rows.parquet", "pandas.jsonl", "saved", "rows.arrow")
    ], programs


@pytest.mark.parametrize(
    ("rows", "read"),
    [(TALKS, chats.read_conversation_example), (PROBLEMS, None)],
    ids=["talks", "problems"],
)
def test_a_null_that_arrow_made_is_an_absent_key_wherever_the_table_comes_from(
    rows, read, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = data.load_data(write_log(tmp_path / "rows.jsonl", rows), None, read)
    paths, programs = tables_of(rows, tmp_path)
    for path in [
        *paths,
        *(
            trainer.convert_arguments_and_cache_data({"data": held})["data"]
            for held in programs.values()
        ),
    ]:
        assert data.load_data(path, None, read) == wanted, path


def test_a_null_that_somebody_wrote_stays_and_what_was_taken_for_arrow_s_is_told(tmp_path):
    rows = [
        {"prompt": "a", "answer": {"team": "web", "owner": None}},
        {"prompt": "b", "answer": {"team": "web"}},
    ]
    written = data.load_data(write_log(tmp_path / "a.jsonl", rows))
    assert json.loads(written[0]["answer"]) == rows[0]["answer"]
    alike = [rows[0], {"prompt": "b", "answer": {"team": "web", "owner": "Ann"}}]
    notes: list[str] = []
    written = data.load_data(write_log(tmp_path / "b.jsonl", alike), notes=notes)
    assert (
        json.loads(written[0]["answer"]) == rows[0]["answer"]
        and "1 nulls" in notes.pop()
        and not notes
    )
    datasets.Dataset.from_list(alike).to_json(tmp_path / "c.jsonl")
    read = data.load_data(str(tmp_path / "c.jsonl"), notes=notes)
    assert json.loads(read[0]["answer"]) == {"team": "web"} and "1 nulls" in notes[0]


def test_a_null_in_a_list_in_a_map_or_in_json_of_arrow_stays():
    maps = pyarrow.array([[("k", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = pyarrow.table(
        {"list": [[1, None]], "map": maps, "json": pyarrow.array(['{"n":null}'], pyarrow.json_())}
    )
    assert arrow.rows_from_arrow_table(table) == [
        {"list": [1, None], "map": {"k": None}, "json": {"n": None}}
    ]


def test_rows_of_pandas_are_those_of_their_file_and_a_missing_cell_makes_no_decimals(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    frame = pandas.DataFrame(
        [{"prompt": "a", "answer": 3}, {"prompt": "b"}, {"prompt": "c", "answer": 0.5}]
    )
    for values, wanted in (
        ([3, None, 4], ["3", None, "4"]),
        ([3, None, 0.5], ["3.0", None, "0.5"]),
    ):
        frame["answer"] = values
        read = data.load_data(trainer.convert_arguments_and_cache_data({"data": frame})["data"])
        assert [row["answer"] for row in read] == wanted


COUNTS = "def keys(completions, world, **_):\n    return [len(w) + len(t) / 99 for w, t in zip(world, completions)]\n"


@pytest.mark.slow
def test_a_run_is_the_same_whatever_holds_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(COUNTS)
    talks, problems = [], []
    for n in range(12):
        asked = {"role": "user", "content": f"What is {n} and one?"}
        first = reply(f"It is {n}.") | ({"weight": 0} if n % 3 else {})
        talks.append({"messages": [asked, first, USER, reply("Three.")]})
        world = {"low": n, "at": "x/y"} if n % 2 else {"doors": {"red": n}}
        problems.append({"prompt": asked["content"], "world": world})

    common = {"model": "demo", "task": "own", "steps": 1, "batch": 4}
    figures = []
    for name, rows in (("talks", talks), ("problems", problems)):
        (tmp_path / name).mkdir()
        paths, _ = tables_of(rows, tmp_path / name)
        for number, path in enumerate([write_log(tmp_path / name / "rows.jsonl", rows), *paths]):
            run_dir = tmp_path / f"{name}-{number}"
            own = (
                {"groups": 2, "max_tokens": 8, "reward": "mine.py:keys"}
                if name == "problems"
                else {"loss_type": "sft"}
            )
            run = train.Trainer.start(data=path, run_dir=str(run_dir), **common, **own)
            (step,) = run.steps()
            evaluations = read_log(run_dir / "eval.jsonl")
            figures.append(
                [step.get("reward/mean"), *(line.get("eval/loss") for line in evaluations)]
            )
    losses, rewards = figures[:5], figures[5:]
    assert losses[0][1] > 0 and losses == losses[:1] * 5
    assert rewards[0][0] > 1 and rewards == rewards[:1] * 5


# ---- keys of messages


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_goes_under_the_template_s_key_or_becomes_a_part_of_the_content(tokenizer, key):
    row = {"messages": [USER, reply("three", **{key: THOUGHT})]}
    assert trained_text(with_template(tokenizer, KEYED), row) == f"[{THOUGHT}]three<|im_end|>"
    wanted = f"<think>\n{THOUGHT}\n</think>\n\nthree<|im_end|>"
    assert trained_text(with_template(tokenizer, PLAIN), row) == wanted


def test_reasoning_details_are_a_thought_and_a_thought_that_is_said_twice_is_one(tokenizer):
    details = {
        "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}],
        "reasoning": THOUGHT,
    }
    plain = with_template(tokenizer, PLAIN)
    assert trained_text(plain, {"messages": [USER, reply("three", **details)]}).count(THOUGHT) == 1


def test_a_reply_of_weight_0_is_context_and_not_trained(tokenizer):
    talk = [USER, reply("four", weight=0), USER, reply("three", weight=1)]
    assert trained_text(with_template(tokenizer, PLAIN), {"messages": talk}) == "three<|im_end|>"


def test_a_function_call_is_a_call_and_the_name_of_its_result_may_be_left_out_by_a_template(
    tokenizer,
):
    plain = PLAIN.replace(
        "+ m.content", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '')"
    )
    made = reply(None, function_call={"name": "add", "arguments": '{"a": 2}'})
    talk = [USER, made, {"role": "tool", "name": "add", "content": "3"}, reply("three")]
    text = trained_text(with_template(tokenizer, plain), {"messages": talk})
    assert '"add"' in text and text.endswith("three<|im_end|>")
    talk[2]["name"] = "other"
    assert "name 'other'" in catch_message(
        trained_text, with_template(tokenizer, plain), {"messages": talk}
    )


@pytest.mark.parametrize("message", [{"name": "Ann"}, {"loss": False}, {"reasoning": "x"}])
def test_a_key_that_the_template_does_not_render_is_refused_by_its_name_and_its_row(
    tokenizer, message
):
    (key,) = message
    row = {"prompt": [USER | message], "answer": "3"}
    example, how = (
        data.read_prompt_example(row),
        {"max_tokens": 1, "context": 99, "thinking": False, "kind": "prompt"},
    )
    text = catch_message(
        chat_template.encode_prompts, with_template(tokenizer, PLAIN), [example], **how
    )
    assert f"{key} {message[key]!r}" in text and "prompt 1" in text
    if key == "name":
        assert "Ann" in tokenizer.decode(
            chat_template.encode_chat(with_template(tokenizer, KEYED), example["prompt"])
        )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [USER | {"images": ["a.png"]}, reply("x")],
            "message 1 of the conversation has the key images",
        ),
        ([USER, reply("x", weight=0.5)], "weight 0.5"),
        ([USER, reply("x", weight=0)], "weight 0"),
        ([USER, reply("x", thinking="a", reasoning="b")], "thinking and reasoning"),
        ([USER, reply("<think>a</think>x", thinking="b")], "thinking"),
        (
            [USER, reply("x", reasoning_details=[{"type": "reasoning.encrypted", "data": "A"}])],
            "reasoning_details",
        ),
        (
            [
                USER,
                reply("", tool_calls=[call("f")], function_call={"name": "f", "arguments": "{}"}),
            ],
            "function_call",
        ),
        ([{"from": "bing", "value": "a"}, reply("x")], "'bing'"),
        ([USER, {"role": "Assistant", "content": "x"}], "write assistant"),
        ([{"role": "system", "content": "s"}, reply("x")], "message 1"),
        (["Hi", "Hello"], "'Hi'"),
    ],
)
def test_a_message_that_cannot_be_learned_as_it_is_is_refused_by_name(messages, said):
    assert said in catch_message(chats.read_conversation_example, {"messages": messages})


def test_a_call_or_a_result_that_the_template_drops_is_refused(tokenizer):
    prompt = [
        USER,
        reply("I add.", tool_calls=[call("add", a=2)]),
        {"role": "tool", "content": "3"},
    ]
    assert "tool_calls" in catch_message(
        chat_template.encode_chat, with_template(tokenizer, PLAIN), prompt
    )
    shown = PLAIN.replace(
        "+ m.content", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '')"
    )
    chat_template.encode_chat(with_template(tokenizer, shown), prompt)
    silent = shown.replace("for m in messages", "for m in messages if m.role != 'tool'")
    assert "message 3, of role tool" in catch_message(
        chat_template.encode_chat, with_template(tokenizer, silent), prompt
    )


# ---- layouts


def turns(*pairs):
    return [{"from": role, "value": text} for role, text in pairs]


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"conversations": turns(("human", "Hi"), ("gpt", "Ho"))}, ["user", "assistant"]),
        (
            {"conversations": turns(("system", "s"), ("human", "Hi"), ("gpt", "Ho"))},
            ["system", "user", "assistant"],
        ),
        ({"messages": json.dumps([USER, reply("Ho")])}, ["user", "assistant"]),
        (
            {"messages": [{"role": "developer", "content": "s"}, USER, reply("Ho")]},
            ["system", "user", "assistant"],
        ),
        (
            {
                "conversations": turns(
                    ("human", "Hi"),
                    ("function_call", '{"name": "f", "arguments": {}}'),
                    ("observation", "3"),
                    ("gpt", "Ho"),
                )
            },
            ["user", "assistant", "tool", "assistant"],
        ),
        (
            {
                "messages": [
                    USER,
                    reply([{"type": "text", "text": "H"}, {"type": "text", "text": "o"}]),
                ]
            },
            ["user", "assistant"],
        ),
    ],
)
def test_every_layout_of_a_conversation_is_read_alike_to_learn_from_and_to_reward(row, roles):
    talk = chats.read_conversation_example(row)
    messages = talk["prompt"] + talk["completion"]
    assert [message["role"] for message in messages] == roles and messages[-1] == reply("Ho")
    example = data.read_prompt_example(row)
    assert example["prompt"] == messages[:-1] and example["answer"] == "Ho"


def test_a_prompt_takes_calls_results_and_replies_without_content(tokenizer):
    asked = [
        USER,
        reply(None, tool_calls=[call("add", a=2)]),
        {"role": "tool", "content": {"sum": 4}},
    ]
    prompt = data.read_prompt_example({"prompt": asked, "answer": "4"})["prompt"]
    assert prompt[1]["tool_calls"] == [call("add", a=2)] and prompt[2]["content"] == '{"sum": 4}'
    template = PLAIN.replace(
        "+ m.content", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '')"
    )
    text = tokenizer.decode(chat_template.encode_chat(with_template(tokenizer, template), prompt))
    assert '{"sum": 4}' in text and '"add"' in text


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "widget"])
def test_a_part_that_is_no_text_is_refused_by_its_type(kind):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": kind}]}]
    assert f"{kind!r}" in catch_message(data.read_prompt_example, {"prompt": prompt})


@pytest.mark.parametrize(
    ("last", "answer"),
    [
        (reply("<think>\nx\n</think>\n\n4"), "4"),
        (reply("4", reasoning_content="x"), "4"),
        (reply(None, tool_calls=[call("f")]), None),
        (reply("I add.", tool_calls=[call("f")]), None),
        (reply("<think>x</think>"), None),
    ],
)
def test_the_last_reply_without_its_thought_is_the_answer_and_a_call_is_none(
    last, answer, tmp_path
):
    notes: list[str] = []
    path = write_log(tmp_path / "a.jsonl", [{"messages": [USER, last]}])
    assert data.load_data(path, notes=notes)[0]["answer"] == answer
    assert ("no answer" in "".join(notes)) == (answer is None)


@pytest.mark.parametrize(
    ("row", "columns", "prompt"),
    [
        (
            {"instruction": "I", "input": "J", "output": "O"},
            "prompt=instruction,answer=output",
            "I\n\nJ",
        ),
        ({"instruction": "I", "input": "", "output": "O"}, "prompt=instruction,answer=output", "I"),
        (
            {"instruction": "I", "input": None, "output": "O"},
            "prompt=instruction,answer=output",
            "I",
        ),
        ({"instruction": "I", "input": "J", "output": "O"}, "prompt=instruction,answer=input", "I"),
        ({"instruction": "I", "input": "J"}, "prompt=instruction", "I"),
    ],
)
def test_alpaca_s_input_joins_the_prompt_where_no_other_column_takes_it(
    row, columns, prompt, tmp_path
):
    notes: list[str] = []
    (example,) = data.load_data(write_log(tmp_path / "a.jsonl", [row]), columns, notes=notes)
    assert example["prompt"] == prompt and bool(notes) == ("J" in prompt)


# ---- what nobody reads


def settings_of(*words):
    flags = settings_from_flags(
        parse_flags(["--model", "demo", "--task", "own", "--eval-every", "0", *map(str, words)])
    )
    return sources.resolve_settings(flags, None, None, lambda name: (name, "asked"))[0]


REWARDS = """
def by_name(completions, context, **_):
    return [1.0] * len(completions)
def by_all(completions, **columns):
    return [float(bool(columns))] * len(completions)
def of_none(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("reward", "unread"),
    [("by_name", ["table", "system_prompt"]), ("by_all", []), ("of_none", ["context", "table"])],
)
def test_one_line_names_the_columns_of_text_that_nothing_reads(reward, unread, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    row = {
        "question": "Q?",
        "context": "C",
        "table": {"rows": [["x"]]},
        "number": 3,
        "system_prompt": "s",
    }
    path = write_log(tmp_path / "a.jsonl", [row | {"question": f"Q{n}?"} for n in range(4)])
    words = [
        "--data",
        path,
        "--columns",
        "prompt=question",
        "--reward",
        f"{tmp_path}/mine.py:{reward}",
    ]
    lines = [line for line in tasks.make_task(settings_of(*words)).notes if "reads" in line]
    assert len(lines) == bool(unread)
    for line in lines:
        assert (
            all(name in line for name in unread) and "number" not in line and "question" not in line
        )
        assert "--columns system=system_prompt" in line


def test_columns_that_no_conversation_takes_are_named(tmp_path):
    path = write_log(
        tmp_path / "a.jsonl",
        [{"prompt": f"{n}", "completion": "x", "reasoning": "y"} for n in range(4)],
    )
    assert "reasoning" in chats.load_conversations(path, None)[2][0]


def test_a_prompt_beside_a_conversation_is_told_where_it_is_another(tmp_path):
    rows = [{"prompt": USER["content"], "messages": [USER, reply("Three.")]}] * 4
    assert not chats.load_conversations(write_log(tmp_path / "a.jsonl", rows), None)[2]
    rows[0] = rows[0] | {"prompt": "What else?"}
    assert (
        "1 rows have a prompt"
        in chats.load_conversations(write_log(tmp_path / "b.jsonl", rows), None)[2][0]
    )


# ---- several answers


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (["NYC", "New York"], ["NYC", "New York"]),
        ([1, 2.5, 1], ["1", "2.5"]),
        ({"text": ["1889", "in 1889"], "answer_start": [3, 0]}, ["1889", "in 1889"]),
        ({"text": ["A", "C"]}, ["A", "C"]),
        ({"text": [], "answer_start": []}, None),
        ([], None),
        ({"text": ["a"], "team": "b"}, '{"text": ["a"], "team": "b"}'),
        ("NYC | New York", "NYC | New York"),
    ],
)
def test_an_answer_of_several_texts_is_a_list_of_them(answer, read):
    assert data.read_answer(answer) == read


@pytest.mark.parametrize("answer", [["A", "C"], [True], [["x"]], ["x", None], [{"a": 1}]])
def test_a_list_that_may_mean_something_else_is_refused(answer):
    assert f"answer {answer!r}" in catch_message(data.read_answer, answer)


def test_a_prompt_with_several_answers_and_a_list_in_a_text_are_told(tmp_path):
    notes: list[str] = []
    rows = [("a", "1"), ("a", "2"), ("b", "1"), ("b", "1"), ("c", '["NYC", "New York"]')]
    path = write_log(
        tmp_path / "a.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in rows]
    )
    data.load_data(path, notes=notes)
    assert "NYC" in notes[0] and "different answers" in notes[1] and "'a'" in notes[1]
    notes.clear()
    rows = [{"prompt": "a", "answer": n, "system": f"by {n}"} for n in range(2)]
    data.load_data(write_log(tmp_path / "b.jsonl", rows), notes=notes)
    assert not notes


# ---- files that are something else

LINES = '{"prompt": "a"}\n{"prompt": "b"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl.txt", LINES.encode(), ".jsonl"),
        ("rows.txt", b'[\n{"prompt": "a"}]', ".json"),
        ("rows.txt", b"prompt,answer\na,1\n", ".csv"),
        ("rows.json", LINES.encode(), ".jsonl"),
        ("rows.csv", LINES.encode(), ".jsonl"),
        ("rows.jsonl", b'{"prompt": "a",\n"answer": 1}', "line 1: an object"),
        ("rows.txt", "Hello there\nWhat is it?\n".encode("utf-16-le"), "UTF-16"),
        ("rows.jsonl", LINES.encode("utf-16-be"), "UTF-16"),
        ("rows.csv", "prompt\na b\n".encode("utf-16"), "UTF-16"),
        ("rows.txt", b"a\nb\0c\n", "NUL"),
        ("rows.jsonl", b'{"prompt": "a\\u0000b"}', "NUL"),
        ("rows.jsonl", POINTER, "git lfs pull"),
        ("rows.parquet", POINTER, "git lfs pull"),
        ("rows.txt", b"<!DOCTYPE html><html></html>", "web page"),
    ],
)
def test_a_file_that_is_something_else_than_its_name_says_is_refused_by_what_it_is(
    name, content, said, tmp_path
):
    (tmp_path / name).write_bytes(content)
    text = catch_message(data.load_data, str(tmp_path / name))
    assert said in text and name in text


def test_one_list_in_a_file_of_json_lines_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('[{"prompt": "a"},\n{"prompt": "b"}]\n')
    assert [row["prompt"] for row in data.load_data(str(tmp_path / "a.jsonl"))] == ["a", "b"]


def test_prompts_in_a_text_file_may_hold_braces_and_commas(tmp_path):
    (tmp_path / "a.txt").write_text('{"a": 1} What is a?\nprompt, answer: which?\n')
    assert len(data.load_data(str(tmp_path / "a.txt"))) == 2


# ---- sides of data that grow


@pytest.mark.parametrize("after", [101, 110, 150, 400])
def test_a_run_keeps_its_sides_when_its_data_grow(after, tmp_path):
    rows = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(after)]
    path = write_log(tmp_path / "a.jsonl", rows[:100])
    train_before, held_out, _ = load_training_and_held_out(path, None)
    tasks.record_held_out_keys_once(tmp_path, held_out)
    write_log(tmp_path / "a.jsonl", rows)
    train_after, test, notes = load_training_and_held_out(
        path, None, held_out_keys=tasks.read_held_out_keys(tmp_path)
    )
    assert test == held_out and len(train_after) == after - 10
    assert {row["prompt"] for row in train_before} <= {row["prompt"] for row in train_after}
    fresh = load_training_and_held_out(path, None)[1]
    assert ("keeps its 10 held-out prompts" in "".join(notes)) == (fresh != held_out)


def test_a_resumed_run_of_grown_data_evaluates_what_it_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(150)]
    path, how = (
        write_log(tmp_path / "a.jsonl", rows[:100]),
        {"batch": 2, "groups": 2, "max_tokens": 4},
    )
    list(
        train.Trainer.start(
            model="demo", task="own", data=path, steps=1, run_dir="run", **how
        ).steps()
    )
    write_log(tmp_path / "a.jsonl", rows)
    resumed = train.Trainer.resume("run", steps=2, allow_changes=True)
    list(resumed.steps())
    sides = [
        {
            line["prompt"]
            for line in read_log(tmp_path / "run" / "eval_answers.jsonl")
            if line["step"] == step
        }
        for step in (0, 2)
    ]
    assert len(sides[0]) == 10 and sides[0] == sides[1]

"""Gwen reads rows in many layouts: Arrow tables, messages and their keys, columns, answers, text files."""

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
PLAIN_TEMPLATE = (  # without a key for thoughts
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATE_WITH_THINKING = PLAIN_TEMPLATE.replace(  # with a key for thoughts; it also shows names
    "m.content +", "('[' + m.thinking + ']' if m.thinking else '') + (m.name or '') + m.content +"
)
TEMPLATE_WITH_CALLS = PLAIN_TEMPLATE.replace(
    "+ m.content", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '')"
)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content, **fields):
    return {"role": "assistant", "content": content} | fields


def tool(name, **properties):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties}},
    }


def copy_with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def decode_trained_tokens(tokenizer, conversation):
    """The text of the tokens of a conversation that training learns."""
    example = chats.read_conversation_example(conversation)
    rows = chats.encode_conversation(
        tokenizer, example, thinking=True, end_ids=[tokenizer.eos_token_id], context=1000
    )
    texts = []
    for row in rows:
        trained_ids = [row.ids[place] for place in row.places]
        texts.append(tokenizer.decode(trained_ids))
    return "".join(texts)


# ---- nulls that Arrow adds

CONVERSATIONS = [
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


def write_tables(rows, directory):
    """Write the rows as files. Returns the paths, and the rows as objects of a program, by name."""
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(directory / "rows.parquet")
    dataset.to_json(directory / "pandas.jsonl")
    dataset.save_to_disk(directory / "saved")
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(str(directory / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)

    names = ("rows.parquet", "pandas.jsonl", "saved", "rows.arrow")
    paths = [str(directory / name) for name in names]
    objects = {
        "dataset": dataset,
        "to_list": dataset.to_list(),
        "table": table,
        "stream": dataset.to_iterable_dataset(),
    }
    return paths, objects


@pytest.mark.parametrize(
    ("rows", "read_row"),
    [(CONVERSATIONS, chats.read_conversation_example), (PROBLEMS, None)],
    ids=["conversations", "problems"],
)
def test_every_source_of_a_table_reads_a_null_that_arrow_added_as_an_absent_key(
    rows, read_row, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = data.load_data(write_log(tmp_path / "rows.jsonl", rows), None, read_row)

    paths, objects = write_tables(rows, tmp_path)
    for dataset in objects.values():
        arguments = trainer.convert_arguments_and_cache_data({"data": dataset})
        paths.append(arguments["data"])

    for path in paths:
        assert data.load_data(path, None, read_row) == expected, path


def test_a_null_that_a_user_wrote_stays_and_a_note_counts_nulls_of_unclear_origin(tmp_path):
    # The rows have different keys, so Arrow did not write them.
    rows = [
        {"prompt": "a", "answer": {"team": "web", "owner": None}},
        {"prompt": "b", "answer": {"team": "web"}},
    ]
    examples = data.load_data(write_log(tmp_path / "a.jsonl", rows))
    assert json.loads(examples[0]["answer"]) == rows[0]["answer"]

    # The rows have the same keys. Python wrote the file.
    rows_with_equal_keys = [rows[0], {"prompt": "b", "answer": {"team": "web", "owner": "Ann"}}]
    notes: list[str] = []
    examples = data.load_data(write_log(tmp_path / "b.jsonl", rows_with_equal_keys), notes=notes)
    assert json.loads(examples[0]["answer"]) == rows[0]["answer"]
    assert "1 nulls" in notes.pop()
    assert not notes

    # The rows have the same keys. Arrow wrote the file.
    datasets.Dataset.from_list(rows_with_equal_keys).to_json(tmp_path / "c.jsonl")
    examples = data.load_data(str(tmp_path / "c.jsonl"), notes=notes)
    assert json.loads(examples[0]["answer"]) == {"team": "web"}
    assert "1 nulls" in notes[0]


def test_a_null_in_a_list_a_map_or_json_of_an_arrow_table_stays():
    maps = pyarrow.array([[("k", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = pyarrow.table(
        {"list": [[1, None]], "map": maps, "json": pyarrow.array(['{"n":null}'], pyarrow.json_())}
    )
    assert arrow.rows_from_arrow_table(table) == [
        {"list": [1, None], "map": {"k": None}, "json": {"n": None}}
    ]


def test_a_missing_cell_of_a_pandas_frame_does_not_turn_integers_into_decimals(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    frame = pandas.DataFrame(
        [{"prompt": "a", "answer": 3}, {"prompt": "b"}, {"prompt": "c", "answer": 0.5}]
    )
    for values, expected_answers in (
        ([3, None, 4], ["3", None, "4"]),
        ([3, None, 0.5], ["3.0", None, "0.5"]),
    ):
        frame["answer"] = values
        arguments = trainer.convert_arguments_and_cache_data({"data": frame})
        examples = data.load_data(arguments["data"])
        assert [example["answer"] for example in examples] == expected_answers


KEY_COUNT_REWARD = "def keys(completions, world, **_):\n    return [len(w) + len(t) / 99 for w, t in zip(world, completions)]\n"


@pytest.mark.slow
def test_every_container_of_the_rows_gives_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KEY_COUNT_REWARD)
    conversations = []
    problems = []
    for n in range(12):
        question = {"role": "user", "content": f"What is {n} and one?"}
        weight = {"weight": 0} if n % 3 else {}
        first_reply = reply(f"It is {n}.") | weight
        conversations.append({"messages": [question, first_reply, USER, reply("Three.")]})
        world = {"low": n, "at": "x/y"} if n % 2 else {"doors": {"red": n}}
        problems.append({"prompt": question["content"], "world": world})

    common_settings = {"model": "demo", "task": "own", "steps": 1, "batch": 4}
    supervised_settings = {"loss_type": "sft"}
    reward_settings = {"groups": 2, "max_tokens": 8, "reward": "mine.py:keys"}

    def train_one_step(path, run_dir, settings):
        """The mean reward, and the held-out losses."""
        run = train.Trainer.start(data=path, run_dir=str(run_dir), **common_settings, **settings)
        (metrics,) = run.steps()
        evaluations = read_log(run_dir / "eval.jsonl")
        return [metrics.get("reward/mean"), *(line.get("eval/loss") for line in evaluations)]

    figures = []
    for name, rows, settings in (
        ("conversations", conversations, supervised_settings),
        ("problems", problems, reward_settings),
    ):
        (tmp_path / name).mkdir()
        table_paths, _ = write_tables(rows, tmp_path / name)
        paths = [write_log(tmp_path / name / "rows.jsonl", rows), *table_paths]
        for number, path in enumerate(paths):
            figures.append(train_one_step(path, tmp_path / f"{name}-{number}", settings))

    losses = figures[:5]
    assert losses[0][1] > 0
    assert losses == losses[:1] * 5
    rewards = figures[5:]
    assert rewards[0][0] > 1
    assert rewards == rewards[:1] * 5


# ---- keys of messages


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_goes_under_the_key_of_the_template_or_into_the_content(tokenizer, key):
    row = {"messages": [USER, reply("three", **{key: THOUGHT})]}
    tokenizer_with_key = copy_with_template(tokenizer, TEMPLATE_WITH_THINKING)
    assert decode_trained_tokens(tokenizer_with_key, row) == f"[{THOUGHT}]three<|im_end|>"

    plain_tokenizer = copy_with_template(tokenizer, PLAIN_TEMPLATE)
    expected = f"<think>\n{THOUGHT}\n</think>\n\nthree<|im_end|>"
    assert decode_trained_tokens(plain_tokenizer, row) == expected


def test_a_thought_under_two_keys_appears_once(tokenizer):
    thoughts = {
        "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}],
        "reasoning": THOUGHT,
    }
    row = {"messages": [USER, reply("three", **thoughts)]}
    text = decode_trained_tokens(copy_with_template(tokenizer, PLAIN_TEMPLATE), row)
    assert text.count(THOUGHT) == 1


def test_a_reply_of_weight_0_is_not_trained(tokenizer):
    messages = [USER, reply("four", weight=0), USER, reply("three", weight=1)]
    plain_tokenizer = copy_with_template(tokenizer, PLAIN_TEMPLATE)
    assert decode_trained_tokens(plain_tokenizer, {"messages": messages}) == "three<|im_end|>"


def test_a_function_call_becomes_a_tool_call_and_only_a_wrong_result_name_is_refused(tokenizer):
    tokenizer = copy_with_template(tokenizer, TEMPLATE_WITH_CALLS)
    function_call = reply(None, function_call={"name": "add", "arguments": '{"a": 2}'})
    result = {"role": "tool", "name": "add", "content": "3"}
    messages = [USER, function_call, result, reply("three")]
    text = decode_trained_tokens(tokenizer, {"messages": messages})
    assert '"add"' in text
    assert text.endswith("three<|im_end|>")

    result["name"] = "other"
    message = catch_message(decode_trained_tokens, tokenizer, {"messages": messages})
    assert "name 'other'" in message


@pytest.mark.parametrize("fields", [{"name": "Ann"}, {"loss": False}, {"reasoning": "x"}])
def test_the_refusal_of_a_key_that_the_template_does_not_render_names_key_and_row(
    tokenizer, fields
):
    (key,) = fields
    row = {"prompt": [USER | fields], "answer": "3"}
    example = data.read_prompt_example(row)
    message = catch_message(
        chat_template.encode_prompts,
        copy_with_template(tokenizer, PLAIN_TEMPLATE),
        [example],
        max_tokens=1,
        context=99,
        thinking=False,
        kind="prompt",
    )
    assert f"{key} {fields[key]!r}" in message
    assert "prompt 1" in message

    if key == "name":
        tokenizer_with_names = copy_with_template(tokenizer, TEMPLATE_WITH_THINKING)
        ids = chat_template.encode_chat(tokenizer_with_names, example["prompt"])
        assert "Ann" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("messages", "expected_text"),
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
def test_the_refusal_of_an_unusable_message_names_its_fault(messages, expected_text):
    assert expected_text in catch_message(chats.read_conversation_example, {"messages": messages})


def test_a_call_or_a_result_that_the_template_drops_is_refused(tokenizer):
    prompt = [
        USER,
        reply("I add.", tool_calls=[call("add", a=2)]),
        {"role": "tool", "content": "3"},
    ]
    plain_tokenizer = copy_with_template(tokenizer, PLAIN_TEMPLATE)
    assert "tool_calls" in catch_message(chat_template.encode_chat, plain_tokenizer, prompt)

    chat_template.encode_chat(copy_with_template(tokenizer, TEMPLATE_WITH_CALLS), prompt)

    template_without_results = TEMPLATE_WITH_CALLS.replace(
        "for m in messages", "for m in messages if m.role != 'tool'"
    )
    message = catch_message(
        chat_template.encode_chat, copy_with_template(tokenizer, template_without_results), prompt
    )
    assert "message 3, of role tool" in message


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
def test_supervised_learning_and_rewards_read_the_same_messages_from_every_layout(row, roles):
    conversation = chats.read_conversation_example(row)
    messages = conversation["prompt"] + conversation["completion"]
    assert [message["role"] for message in messages] == roles
    assert messages[-1] == reply("Ho")

    example = data.read_prompt_example(row)
    assert example["prompt"] == messages[:-1]
    assert example["answer"] == "Ho"


def test_a_prompt_may_hold_calls_results_and_replies_without_content(tokenizer):
    messages = [
        USER,
        reply(None, tool_calls=[call("add", a=2)]),
        {"role": "tool", "content": {"sum": 4}},
    ]
    prompt = data.read_prompt_example({"prompt": messages, "answer": "4"})["prompt"]
    assert prompt[1]["tool_calls"] == [call("add", a=2)]
    assert prompt[2]["content"] == '{"sum": 4}'

    tokenizer_with_calls = copy_with_template(tokenizer, TEMPLATE_WITH_CALLS)
    text = tokenizer.decode(chat_template.encode_chat(tokenizer_with_calls, prompt))
    assert '{"sum": 4}' in text
    assert '"add"' in text


@pytest.mark.parametrize("part_type", ["image_url", "input_audio", "widget"])
def test_the_refusal_of_a_message_part_that_is_not_text_names_its_type(part_type):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": part_type}]}]
    assert f"{part_type!r}" in catch_message(data.read_prompt_example, {"prompt": prompt})


@pytest.mark.parametrize(
    ("text_of_last_model_turn", "answer"),
    [
        (reply("<think>\nx\n</think>\n\n4"), "4"),
        (reply("4", reasoning_content="x"), "4"),
        (reply(None, tool_calls=[call("f")]), None),
        (reply("I add.", tool_calls=[call("f")]), None),
        (reply("<think>x</think>"), None),
    ],
)
def test_the_text_of_the_last_reply_is_the_answer_but_a_thought_or_a_call_is_not(
    text_of_last_model_turn, answer, tmp_path
):
    notes: list[str] = []
    path = write_log(tmp_path / "a.jsonl", [{"messages": [USER, text_of_last_model_turn]}])
    (example,) = data.load_data(path, notes=notes)
    assert example["answer"] == answer
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
def test_the_input_column_of_alpaca_joins_the_prompt_unless_columns_names_it(
    row, columns, prompt, tmp_path
):
    notes: list[str] = []
    (example,) = data.load_data(write_log(tmp_path / "a.jsonl", [row]), columns, notes=notes)
    assert example["prompt"] == prompt
    assert bool(notes) == ("J" in prompt)


# ---- columns that nothing reads


def resolve_own_task_settings(*flags):
    args = parse_flags(["--model", "demo", "--task", "own", "--eval-every", "0", *flags])
    settings = settings_from_flags(args)
    return sources.resolve_settings(settings, None, None, lambda name: (name, "asked"))[0]


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
def test_one_line_names_the_text_columns_that_nothing_reads(reward, unread, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    row = {
        "question": "Q?",
        "context": "C",
        "table": {"rows": [["x"]]},
        "number": 3,
        "system_prompt": "s",
    }
    path = write_log(tmp_path / "a.jsonl", [row | {"question": f"Q{n}?"} for n in range(4)])
    reward_spec = f"{tmp_path}/mine.py:{reward}"
    settings = resolve_own_task_settings(
        "--data", path, "--columns", "prompt=question", "--reward", reward_spec
    )
    lines = [line for line in tasks.make_task(settings).notes if "reads" in line]

    assert len(lines) == bool(unread)
    for line in lines:
        assert all(name in line for name in unread)
        assert "number" not in line
        assert "question" not in line
        assert "--columns system=system_prompt" in line


def test_a_note_names_the_columns_that_conversations_ignore(tmp_path):
    rows = [{"prompt": f"{n}", "completion": "x", "reasoning": "y"} for n in range(4)]
    notes = chats.load_conversations(write_log(tmp_path / "a.jsonl", rows), None)[2]
    assert "reasoning" in notes[0]


def test_a_note_counts_the_prompts_that_differ_from_the_conversation_in_their_row(tmp_path):
    rows = [{"prompt": USER["content"], "messages": [USER, reply("Three.")]}] * 4
    notes = chats.load_conversations(write_log(tmp_path / "a.jsonl", rows), None)[2]
    assert not notes

    rows[0] = rows[0] | {"prompt": "What else?"}
    notes = chats.load_conversations(write_log(tmp_path / "b.jsonl", rows), None)[2]
    assert "1 rows have a prompt" in notes[0]


# ---- several answers


@pytest.mark.parametrize(
    ("answer", "expected"),
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
def test_an_answer_of_several_texts_is_read_as_a_list(answer, expected):
    assert data.read_answer(answer) == expected


@pytest.mark.parametrize("answer", [["A", "C"], [True], [["x"]], ["x", None], [{"a": 1}]])
def test_a_list_that_may_mean_something_else_is_refused(answer):
    assert f"answer {answer!r}" in catch_message(data.read_answer, answer)


def test_notes_name_a_list_in_a_text_and_a_prompt_with_different_answers(tmp_path):
    notes: list[str] = []
    pairs = [("a", "1"), ("a", "2"), ("b", "1"), ("b", "1"), ("c", '["NYC", "New York"]')]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
    data.load_data(write_log(tmp_path / "a.jsonl", rows), notes=notes)
    assert "NYC" in notes[0]
    assert "different answers" in notes[1]
    assert "'a'" in notes[1]

    notes.clear()
    rows = [{"prompt": "a", "answer": n, "system": f"by {n}"} for n in range(2)]
    data.load_data(write_log(tmp_path / "b.jsonl", rows), notes=notes)
    assert not notes


# ---- files whose content does not fit their name

LINES = '{"prompt": "a"}\n{"prompt": "b"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"


@pytest.mark.parametrize(
    ("name", "content", "expected_text"),
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
def test_the_refusal_of_a_file_that_does_not_fit_its_name_says_what_the_file_is(
    name, content, expected_text, tmp_path
):
    (tmp_path / name).write_bytes(content)
    message = catch_message(data.load_data, str(tmp_path / name))
    assert expected_text in message
    assert name in message


def test_a_json_list_in_a_jsonl_file_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('[{"prompt": "a"},\n{"prompt": "b"}]\n')
    assert [row["prompt"] for row in data.load_data(str(tmp_path / "a.jsonl"))] == ["a", "b"]


def test_prompts_in_a_text_file_may_hold_braces_and_commas(tmp_path):
    (tmp_path / "a.txt").write_text('{"a": 1} What is a?\nprompt, answer: which?\n')
    assert len(data.load_data(str(tmp_path / "a.txt"))) == 2


# ---- the split of data that grow


@pytest.mark.parametrize("num_rows", [101, 110, 150, 400])
def test_a_run_keeps_its_held_out_prompts_when_its_data_grow(num_rows, tmp_path):
    rows = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(num_rows)]
    path = write_log(tmp_path / "a.jsonl", rows[:100])
    train_before, held_out_before, _ = load_training_and_held_out(path, None)
    tasks.record_held_out_keys_once(tmp_path, held_out_before)

    write_log(tmp_path / "a.jsonl", rows)
    train_after, held_out_after, notes = load_training_and_held_out(
        path, None, held_out_keys=tasks.read_held_out_keys(tmp_path)
    )
    assert held_out_after == held_out_before
    assert len(train_after) == num_rows - 10
    train_prompts_before = {row["prompt"] for row in train_before}
    assert train_prompts_before <= {row["prompt"] for row in train_after}

    held_out_of_new_run = load_training_and_held_out(path, None)[1]
    is_other_split = held_out_of_new_run != held_out_before
    assert ("keeps its 10 held-out prompts" in "".join(notes)) == is_other_split


def test_a_run_resumed_on_grown_data_evaluates_the_same_held_out_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(150)]
    path = write_log(tmp_path / "a.jsonl", rows[:100])
    settings = {"model": "demo", "task": "own", "batch": 2, "groups": 2, "max_tokens": 4}
    run = train.Trainer.start(data=path, steps=1, run_dir="run", **settings)
    list(run.steps())

    write_log(tmp_path / "a.jsonl", rows)
    resumed_run = train.Trainer.resume("run", steps=2, allow_changes=True)
    list(resumed_run.steps())

    prompts_by_step = {0: set(), 2: set()}
    for record in read_log(tmp_path / "run" / "eval_answers.jsonl"):
        if record["step"] in prompts_by_step:
            prompts_by_step[record["step"]].add(record["prompt"])
    assert len(prompts_by_step[0]) == 10
    assert prompts_by_step[0] == prompts_by_step[2]

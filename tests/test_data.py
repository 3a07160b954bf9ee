"""Examples: what is read from files and the hub, what is refused, and the order of prompts. See also test_fuzz.py."""

import json
from pathlib import Path

import datasets
import pytest
from conftest import catch_message, json_values, read_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prompts import data
from prompts.examples import last_user_text
from tasks import draws

# ---- data files


def written(path: Path, content: str) -> str:
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    return str(path)


def test_columns_are_renamed_kept_and_filled(tmp_path):
    path = written(
        tmp_path / "a.jsonl",
        '{"question": "a?", "level": 3}\n{"question": "b?", "solution": "x"}\n',
    )
    loaded = data.load_data(path, "prompt=question, answer=solution")
    first = {"prompt": "a?", "question": "a?", "answer": None, "solution": None, "level": 3}
    assert loaded == [
        first,
        {"prompt": "b?", "question": "b?", "answer": "x", "solution": "x", "level": None},
    ]
    assert [list(example) for example in loaded] == [list(loaded[0])] * 2


def test_chat_messages_are_reduced_to_role_and_content(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": None},
    ]
    prompt = data.load_data(written(tmp_path / "a.jsonl", json.dumps({"prompt": messages})))[0][
        "prompt"
    ]
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert last_user_text(prompt) == "Hi" and last_user_text("Hi") == "Hi"


def test_messages_are_the_prompt_of_data_without_one_and_the_last_reply_its_answer(tmp_path):
    user, reply = (
        {"role": "user", "content": "Two plus two?"},
        {"role": "assistant", "content": "Four."},
    )
    rows = [
        {"messages": [user, reply]},
        {"messages": [user]},
        {"messages": [user, reply, user, reply], "answer": "4"},
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = data.load_data(str(tmp_path / "chat.jsonl"))
    assert [example["prompt"] for example in loaded] == [[user], [user], [user, reply, user]]
    assert [example["answer"] for example in loaded] == ["Four.", None, "4"]
    assert all("messages" not in example for example in loaded)
    (tmp_path / "both.jsonl").write_text(json.dumps({"prompt": "Hi", "messages": [user, reply]}))
    assert data.load_data(str(tmp_path / "both.jsonl"))[0] == {
        "prompt": "Hi",
        "messages": [user, reply],
    }
    for bad in ([], [reply], "Hi", None):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": bad}))
        with pytest.raises(ValueError, match="line 1: ") as error:
            data.load_data(str(tmp_path / "bad.jsonl"))
        assert "\n" not in str(error.value)


BAD_FILES = [  # file name, content, columns, what the message must hold
    *read_log(Path(__file__).with_name("bad_files.jsonl")),
    ("deep.jsonl", "[" * 100_000, None, ["line 1", "nested too deeply"]),
    ("digits.jsonl", '{"prompt": ' + "9" * 10_000 + "}", None, ["line 1"]),
]


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"), BAD_FILES, ids=lambda value: repr(value)[:40]
)
def test_a_bad_file_is_one_line_that_names_place_value_and_fix(
    tmp_path, name, content, columns, expected
):
    text = catch_message(data.load_data, written(tmp_path / name, content), columns)
    for part in [name, *expected] if columns is None or "no column" in expected[0] else expected:
        assert part in text, text


def test_a_cell_of_a_csv_may_be_a_document(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f"prompt,answer\n{'word ' * 40_000},1\n")
    assert len(data.load_data(str(path))[0]["prompt"]) >= 199_999


def test_a_hub_dataset_is_named_by_parts_and_told_in_a_line_where_it_is_out_of_reach(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "owner/name":
            raise ConnectionError("Couldn't reach\nthe hub")
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    specs = {
        "o/n": ("o/n", None, "train"),
        "o/n:main": ("o/n", "main", "train"),
        "o/n:test": ("o/n", None, "test"),
    }
    specs |= {"o/n:main:test": ("o/n", "main", "test"), "o/n::test": ("o/n", None, "test")}
    specs |= {
        "o/n:main:train[:9]": ("o/n", "main", "train[:9]"),
        "o/n:train[:9]": ("o/n", None, "train[:9]"),
    }
    specs |= {"o/n-2.5": ("o/n-2.5", None, "train")}
    assert all(data.load_data(spec) == [{"prompt": "a"}] for spec in specs)
    assert asked == list(specs.values())
    assert "owner/name" in catch_message(data.load_data, "owner/name:main")
    assert ".jsonl" in catch_message(data.load_data, "data/missing.txt")


JSON = json_values("prompt", "role", "content", "x\n")
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "", None])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=4) | st.none()}), max_size=3
)
OPTIONAL = {"system": JSON, "answer": JSON, "category": JSON, "completions": JSON}
RECORD = (
    st.fixed_dictionaries({"prompt": st.text(max_size=8) | MESSAGES | JSON}, optional=OPTIONAL)
    | JSON
)


@pytest.mark.slow
@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(RECORD, max_size=4), st.booleans())
def test_random_json_lines_are_data_of_equal_columns_with_prompts_or_one_line(
    tmp_path, records, escape
):
    path = tmp_path / "fuzz.jsonl"
    text = "\n".join(json.dumps(record, ensure_ascii=escape) for record in records)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = data.load_data(str(path))
    except ValueError as error:
        assert type(error) is ValueError and "\n" not in str(error) and path.name in str(error), (
            repr(error)
        )
        return
    assert loaded and all(list(example) == list(loaded[0]) for example in loaded)
    assert all(last_user_text(example["prompt"]).strip() for example in loaded)


# ---- which examples, and in which order


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_prompt_comes_once_an_epoch_and_never_twice_in_a_batch(num_examples, batch, seed):
    steps = [
        draws.epoch_indices(num_examples, batch, step, seed)
        for step in range(3 * num_examples // batch + 2)
    ]
    stream = [index for step in steps for index in step]
    for begin in range(0, len(stream) - num_examples + 1, num_examples):
        assert sorted(stream[begin : begin + num_examples]) == list(range(num_examples))
    if num_examples >= batch:
        assert all(len(set(step)) == batch for step in steps)


def test_the_order_of_prompts_depends_on_seed_and_step_alone():
    forward = [draws.epoch_indices(100, 7, step, 3) for step in range(50)]
    draws._epoch_order.cache_clear()
    assert forward == [draws.epoch_indices(100, 7, step, 3) for step in reversed(range(50))][::-1]
    assert forward[0] == [54, 53, 3, 24, 69, 68, 50], (
        "a change here breaks the resume of older runs"
    )
    assert forward[0] != draws.epoch_indices(100, 7, 0, 4) and set(forward[0]) != set(range(7))
    first, second = (
        [i for s in range(n * 10, n * 10 + 10) for i in draws.epoch_indices(100, 10, s, 3)]
        for n in (0, 1)
    )
    assert (
        sorted(first) == sorted(second)
        and sum(a == b for a, b in zip(first, second, strict=True)) < 10
    )

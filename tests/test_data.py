"""
Examples from files and the hub, refusals of bad data, and the order of prompts.

See also test_fuzz.py.
"""

import json
from pathlib import Path

import datasets
import pytest
from conftest import catch_message, json_values, read_log, write_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prompts import data
from prompts.examples import last_user_text
from tasks import draws

# ---- data files


def write_text(path: Path, content: str) -> str:
    """Writes a file, whose text may contain invalid UTF-8 as surrogates; returns the path."""
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    return str(path)


def test_columns_are_renamed_and_missing_values_are_filled(tmp_path):
    path = write_text(
        tmp_path / "a.jsonl",
        '{"question": "a?", "level": 3}\n{"question": "b?", "solution": "x"}\n',
    )
    loaded = data.load_data(path, "prompt=question, answer=solution")
    assert loaded == [
        {"prompt": "a?", "question": "a?", "answer": None, "solution": None, "level": 3},
        {"prompt": "b?", "question": "b?", "answer": "x", "solution": "x", "level": None},
    ]
    assert list(loaded[1]) == list(loaded[0]), "the order of the columns"


def test_chat_messages_are_reduced_to_role_and_content(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": None},
    ]
    path = write_text(tmp_path / "a.jsonl", json.dumps({"prompt": messages}))
    prompt = data.load_data(path)[0]["prompt"]
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert last_user_text(prompt) == "Hi"
    assert last_user_text("Hi") == "Hi"


def test_messages_become_prompt_and_answer_if_the_data_has_no_prompt(tmp_path):
    user = {"role": "user", "content": "Two plus two?"}
    reply = {"role": "assistant", "content": "Four."}
    rows = [
        {"messages": [user, reply]},
        {"messages": [user]},
        {"messages": [user, reply, user, reply], "answer": "4"},
    ]
    loaded = data.load_data(write_log(tmp_path / "chat.jsonl", rows))
    assert [example["prompt"] for example in loaded] == [[user], [user], [user, reply, user]]
    assert [example["answer"] for example in loaded] == ["Four.", None, "4"]
    assert all("messages" not in example for example in loaded)

    # A prompt has precedence.
    row_with_both = {"prompt": "Hi", "messages": [user, reply]}
    assert data.load_data(write_log(tmp_path / "both.jsonl", [row_with_both]))[0] == row_with_both

    for bad_messages in ([], [reply], "Hi", None):
        path = write_log(tmp_path / "bad.jsonl", [{"messages": bad_messages}])
        with pytest.raises(ValueError, match="line 1: ") as error_info:
            data.load_data(path)
        assert "\n" not in str(error_info.value)


# Each has a file name, the content, the columns, and texts that the message must contain.
BAD_FILES = [
    *read_log(Path(__file__).with_name("bad_files.jsonl")),
    ("deep.jsonl", "[" * 100_000, None, ["line 1", "nested too deeply"]),
    ("digits.jsonl", '{"prompt": ' + "9" * 10_000 + "}", None, ["line 1"]),
]


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected_texts"), BAD_FILES, ids=lambda value: repr(value)[:40]
)
def test_the_error_line_of_a_bad_file_names_place_value_and_fix(
    tmp_path, name, content, columns, expected_texts
):
    message = catch_message(data.load_data, write_text(tmp_path / name, content), columns)
    for text in expected_texts:
        assert text in message, message
    if columns is None or "no column" in expected_texts[0]:
        assert name in message, message


def test_a_cell_of_a_csv_file_may_contain_a_long_document(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f"prompt,answer\n{'word ' * 40_000},1\n")
    assert len(data.load_data(str(path))[0]["prompt"]) >= 199_999


def test_a_hub_dataset_has_a_name_a_config_and_a_split_and_an_unreachable_hub_is_one_line(
    monkeypatch,
):
    requests = []

    def load_dataset(name, config, split):
        requests.append((name, config, split))
        if name == "owner/name":
            raise ConnectionError("Couldn't reach\nthe hub")
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    expected_requests = {
        "o/n": ("o/n", None, "train"),
        "o/n:main": ("o/n", "main", "train"),
        "o/n:test": ("o/n", None, "test"),
        "o/n:main:test": ("o/n", "main", "test"),
        "o/n::test": ("o/n", None, "test"),
        "o/n:main:train[:9]": ("o/n", "main", "train[:9]"),
        "o/n:train[:9]": ("o/n", None, "train[:9]"),
        "o/n-2.5": ("o/n-2.5", None, "train"),
    }
    for spec in expected_requests:
        assert data.load_data(spec) == [{"prompt": "a"}]
    assert requests == list(expected_requests.values())

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
def test_random_json_lines_give_equal_columns_with_prompts_or_one_error_line(
    tmp_path, records, escape
):
    path = tmp_path / "fuzz.jsonl"
    text = "\n".join(json.dumps(record, ensure_ascii=escape) for record in records)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = data.load_data(str(path))
    except ValueError as error:
        assert type(error) is ValueError, repr(error)
        assert "\n" not in str(error), repr(error)
        assert path.name in str(error), repr(error)
        return
    assert loaded
    assert all(list(example) == list(loaded[0]) for example in loaded)
    assert all(last_user_text(example["prompt"]).strip() for example in loaded)


# ---- the choice and order of examples


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_prompt_comes_once_per_epoch_and_never_twice_in_a_batch(num_examples, batch, seed):
    num_steps = 3 * num_examples // batch + 2
    steps = [draws.epoch_indices(num_examples, batch, step, seed) for step in range(num_steps)]
    indices = [index for step in steps for index in step]
    for start in range(0, len(indices) - num_examples + 1, num_examples):
        assert sorted(indices[start : start + num_examples]) == list(range(num_examples))
    if num_examples >= batch:
        assert all(len(set(step)) == batch for step in steps)


def test_the_order_of_prompts_depends_only_on_seed_and_step():
    forward = [draws.epoch_indices(100, 7, step, 3) for step in range(50)]
    draws._epoch_order.cache_clear()
    backward = [draws.epoch_indices(100, 7, step, 3) for step in reversed(range(50))]
    assert forward == backward[::-1]

    assert forward[0] == [54, 53, 3, 24, 69, 68, 50], (
        "a change here breaks the resume of older runs"
    )
    assert forward[0] != draws.epoch_indices(100, 7, 0, 4)
    assert set(forward[0]) != set(range(7))

    def epoch(number):
        indices = []
        for step in range(number * 10, number * 10 + 10):
            indices += draws.epoch_indices(100, 10, step, 3)
        return indices

    first, second = epoch(0), epoch(1)
    assert sorted(first) == sorted(second)
    num_equal = sum(index == other for index, other in zip(first, second, strict=True))
    assert num_equal < 10

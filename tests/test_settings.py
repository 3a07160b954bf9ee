"""Every setting survives its way through YAML, whatever its value is."""

import hypothesis.strategies as st
import pytest
from conftest import catch_message
from hypothesis import given, settings

from config import SETTINGS, Config
from settings import checks, sources

BOUNDS = {int: (0, 2**31), float: (0.0, 1e6)}
TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9)


def values_of(setting):
    """What a setting may be, by its type, its choices and its range."""
    kind, field = setting.value_type, setting.field
    if setting.choices:
        return st.sampled_from(setting.choices)
    if kind in BOUNDS:
        low, high = (
            field.metadata.get(name, bound)
            for name, bound in zip(("low", "high"), BOUNDS[kind], strict=True)
        )
        return st.integers(int(low), int(high)) if kind is int else st.floats(low, high)
    others = {
        bool: st.booleans(),
        str: TEXTS,
        dict: st.dictionaries(TEXTS, st.floats(-9, 9), max_size=2),
    }
    return others.get(kind, st.nothing())


def survives(given_settings, path):
    """Whether these settings are refused, or the same once they were written and read."""
    try:
        config = checks.check_settings(given_settings)
    except ValueError:
        return False
    path.write_text(sources.to_yaml(config))
    assert checks.check_settings(sources.load_recipe(path)) == config
    return True


FREE = {
    key: one
    for key, one in SETTINGS.items()
    if not one.field.metadata.keys() & {"file", "function"}
}  # else a path


def test_any_value_that_is_taken_is_the_same_once_it_was_written_and_read(tmp_path):
    taken = set()

    def goes_there_and_back(key, value):
        if survives({key: value}, tmp_path / "settings.yaml"):
            taken.add(key)

    for key, one in FREE.items():
        if not (values := values_of(one)).is_empty:
            settings(max_examples=8)(given(st.just(key), values)(goes_there_and_back))()
    assert len(taken) > 0.6 * len(FREE), (
        FREE.keys() - taken
    )  # the others need a second one beside them


def test_each_setting_is_taken_with_its_default(tmp_path):
    for key, one in SETTINGS.items():
        assert survives({key: one.default}, tmp_path / "settings.yaml"), key


def test_a_run_of_before_is_read_where_what_is_gone_changes_nothing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "batch: 3\ndynamic_sampling: false\nkeep: 3\nreward_workers: 0\nshare_prefix: auto\n"
    )
    assert sources.load_recipe(path) == {"batch": 3}
    path.write_text("dynamic_sampling: true\n")
    assert "a larger --batch" in catch_message(sources.load_recipe, path)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (r"\n", "\n"),
        (r"\n\n", "\n\n"),
        (r"\nuser:", "\nuser:"),
        (r"</s>\t", "</s>\t"),
        (r"\x0a", "\n"),
        (r"\u000a", "\n"),
        (r"\\n", r"\n"),  # how to write the two characters
        (r"\text{", r"\text{"),
        (r"\rho", r"\rho"),
        (r"\boxed{", r"\boxed{"),
        (r"\ud83d", r"\ud83d"),  # half of a surrogate pair
        ("\n", "\n"),
        ('"""', '"""'),
    ],
)
def test_a_stop_text_as_a_shell_passes_it_is_read_and_a_line_names_each_escape(word, text, capsys):
    assert sources.parse_flags(["--stop", word]).stop == [text]
    said = capsys.readouterr().err
    is_told = word in (
        r"\n",
        r"\n\n",
        r"\nuser:",
        r"</s>\t",
        r"\x0a",
        r"\u000a",
        r"\text{",
        r"\rho",
    )
    assert said.count(f"--stop {word}: ") == said.count("\n") == is_told


def test_a_stop_text_with_a_carriage_return_is_refused():
    assert "--stop" in catch_message(
        checks.check_settings, {"stop": sources.parse_flags(["--stop", r"\r\n"]).stop}
    )


def test_an_escape_in_the_single_quotes_of_yaml_stays_and_a_line_says_so(tmp_path, capsys):
    path = tmp_path / "ours.yaml"
    path.write_text("stop: ['\\n', \"\\n\", end]\n")
    assert sources.load_recipe(path)["stop"] == ["\\n", "\n", "end"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and "stop" in said
    path.write_text(sources.to_yaml(Config.from_flags(stop=["\\n"])))
    assert sources.load_recipe(path)["stop"] == ["\\n"]  # a run's own text comes back as it was

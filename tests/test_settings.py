"""Every setting with any value is the same after YAML was written and read."""

import hypothesis.strategies as st
import pytest
from conftest import catch_message
from hypothesis import given, settings

from config import SETTINGS, Config
from settings import checks, sources

BOUNDS = {int: (0, 2**31), float: (0.0, 1e6)}
TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9)


def values_of(setting):
    """The values that a setting may have, by its type, its choices and its range."""
    value_type = setting.value_type
    if setting.choices:
        return st.sampled_from(setting.choices)
    if value_type in BOUNDS:
        default_low, default_high = BOUNDS[value_type]
        low = setting.field.metadata.get("low", default_low)
        high = setting.field.metadata.get("high", default_high)
        return st.integers(int(low), int(high)) if value_type is int else st.floats(low, high)
    other_values = {
        bool: st.booleans(),
        str: TEXTS,
        dict: st.dictionaries(TEXTS, st.floats(-9, 9), max_size=2),
    }
    return other_values.get(value_type, st.nothing())


def check_round_trip_if_valid(settings_by_key, path):
    """
    Write the settings to a file and read them back. They must stay the same.

    Returns False, without this check, if the settings are invalid, and True otherwise.
    """
    try:
        config = checks.check_settings(settings_by_key)
    except ValueError:
        return False
    path.write_text(sources.to_yaml(config))
    assert checks.check_settings(sources.load_recipe(path)) == config
    return True


def is_path_or_function(setting):
    return bool(setting.field.metadata.keys() & {"file", "function"})


FREE_SETTINGS = {
    key: setting for key, setting in SETTINGS.items() if not is_path_or_function(setting)
}


def test_every_valid_value_of_a_setting_survives_yaml(tmp_path):
    valid_keys = set()

    def check_value(key, value):
        if check_round_trip_if_valid({key: value}, tmp_path / "settings.yaml"):
            valid_keys.add(key)

    for key, setting in FREE_SETTINGS.items():
        values = values_of(setting)
        if not values.is_empty:
            settings(max_examples=8)(given(st.just(key), values)(check_value))()
    # Some settings are valid only together with a second one.
    assert len(valid_keys) > 0.6 * len(FREE_SETTINGS), FREE_SETTINGS.keys() - valid_keys


def test_the_default_of_each_setting_is_valid_and_survives_yaml(tmp_path):
    for key, setting in SETTINGS.items():
        assert check_round_trip_if_valid({key: setting.default}, tmp_path / "settings.yaml"), key


def test_removed_settings_of_an_old_run_are_ignored_if_they_had_no_effect(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "batch: 3\ndynamic_sampling: false\nkeep: 3\nreward_workers: 0\nshare_prefix: auto\n"
    )
    assert sources.load_recipe(path) == {"batch": 3}
    path.write_text("dynamic_sampling: true\n")
    assert "a larger --batch" in catch_message(sources.load_recipe, path)


@pytest.mark.parametrize(
    ("written_text", "text"),
    [
        (r"\n", "\n"),
        (r"\n\n", "\n\n"),
        (r"\nuser:", "\nuser:"),
        (r"</s>\t", "</s>\t"),
        (r"\x0a", "\n"),
        (r"\u000a", "\n"),
        (r"\\n", r"\n"),  # an escaped backslash
        (r"\text{", r"\text{"),
        (r"\rho", r"\rho"),
        (r"\boxed{", r"\boxed{"),
        (r"\ud83d", r"\ud83d"),  # half of a surrogate pair
        ("\n", "\n"),
        ('"""', '"""'),
    ],
)
def test_escapes_in_a_stop_text_of_a_command_are_decoded_and_one_line_names_each(
    written_text, text, capsys
):
    assert sources.parse_flags(["--stop", written_text]).stop == [text]
    output = capsys.readouterr().err
    is_named = written_text in (
        r"\n",
        r"\n\n",
        r"\nuser:",
        r"</s>\t",
        r"\x0a",
        r"\u000a",
        r"\text{",
        r"\rho",
    )
    assert output.count(f"--stop {written_text}: ") == is_named
    assert output.count("\n") == is_named


def test_a_stop_text_with_a_carriage_return_is_refused():
    stop = sources.parse_flags(["--stop", r"\r\n"]).stop
    assert "--stop" in catch_message(checks.check_settings, {"stop": stop})


def test_an_escape_in_single_quotes_of_yaml_stays_and_a_line_names_it(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text("stop: ['\\n', \"\\n\", end]\n")
    assert sources.load_recipe(path)["stop"] == ["\\n", "\n", "end"]
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert str(path) in output
    assert "stop" in output

    # A recorded setting is read as it was.
    path.write_text(sources.to_yaml(Config.from_flags(stop=["\\n"])))
    assert sources.load_recipe(path)["stop"] == ["\\n"]

"""
Reads the rows of Arrow tables as JSON would hold them: a key that a row lacks is absent, not null.

Arrow gives every struct in a column the same fields, and sets the fields that a row lacks to null.
Gwen reads such a null as an absent key, at any depth. A null stays if it is a whole column's value,
or is in a list, in a map or in JSON text, because somebody wrote it.
This file does not cover which files hold tables (prompts/files.py).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

Rows = list[Any]
Place = tuple[str, ...]  # the keys on the path to a value; "[]" stands for a list
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


# ---- rows of known origin


def rows_of_table(table: Any) -> Rows:
    """The rows of a `pyarrow.Table`."""
    columns: dict[str, list[Any]] = {}
    for place, field in enumerate(table.schema):
        values = table.column(place).to_pylist()
        columns[field.name] = [_value_of(value, field.type) for value in values]
    rows = []
    for row in range(table.num_rows):
        rows.append({name: column[row] for name, column in columns.items()})
    return rows


def _value_of(value: Any, kind: Any) -> Any:
    """A value with this Arrow type, without the fields that are null."""
    import pyarrow  # here: importing it takes half a second

    if value is None:
        return None

    if pyarrow.types.is_struct(kind):
        fields = {field.name: _value_of(value[field.name], field.type) for field in kind}
        return {name: field for name, field in fields.items() if field is not None}

    if pyarrow.types.is_map(kind):
        return {key: _value_of(item, kind.item_type) for key, item in value}

    if hasattr(kind, "value_field") and isinstance(value, list):
        return [_value_of(item, kind.value_type) for item in value]

    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    return value


def rows_of_dataset(dataset: Any) -> Rows:
    """The rows of a `datasets.Dataset`."""
    return rows_of_table(dataset.with_format("arrow")[:])


def rows_of_program(data: Any) -> tuple[Rows, int]:
    """
    The rows of data that a program passes in.

    Also returns the number of nulls that were read as absent keys although somebody may have
    written them.

    data: a `datasets.Dataset` or `DatasetDict` (whose splits become the column `split`), a pandas,
    pyarrow or polars table, or any iterable of dictionaries. `is_filled_up` decides whether the
    dictionaries look like those of `dataset.to_list()`.
    """
    module = type(data).__module__.partition(".")[0]
    if module == "datasets" and isinstance(data, Mapping):
        all_rows = []
        for name, dataset in data.items():
            split_rows, _ = rows_of_program(dataset)
            all_rows += [row | {"split": name} for row in split_rows]
        return all_rows, 0
    if module == "datasets" and hasattr(data, "num_rows"):
        return rows_of_dataset(data), 0
    if module == "pyarrow":
        return rows_of_table(data), 0
    if module == "pandas":
        return [_row_of_pandas(row) for row in _with_whole_numbers(data).to_dict("records")], 0
    if module == "polars":
        return rows_without_nulls(data.to_dicts()), 0

    rows = list(data)
    if module == "datasets":  # a data set that streams
        return rows_without_nulls(rows), 0
    if is_filled_up(rows):
        return rows_without_nulls(rows), count_nulls(rows)
    return rows, 0


def _with_whole_numbers(frame: Any) -> Any:
    """A DataFrame with integers where pandas has floats only because a cell is missing."""
    floats = [
        name for name in frame.columns if frame[name].dtype.kind == "f" and frame[name].isna().any()
    ]
    return frame.astype({name: frame[name].convert_dtypes().dtype for name in floats})


def _row_of_pandas(row: dict[str, Any]) -> dict[str, Any]:
    """A DataFrame row with Python values, and with None for missing cells."""
    return {str(name): without_nulls(_of_numpy(value)) for name, value in row.items()}


def _of_numpy(value: Any) -> Any:
    """A NumPy or pandas value as a Python value."""
    import pandas

    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _of_numpy(field) for name, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [_of_numpy(item) for item in value]
    is_missing = value is None or value is pandas.NA or value is pandas.NaT or value != value
    return None if is_missing else value


def without_nulls(value: Any) -> Any:
    """A row's value without keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def rows_without_nulls(rows: Rows) -> Rows:
    """The rows without null keys inside their values. A column that is null stays."""
    reduced = []
    for row in rows:
        reduced.append({name: without_nulls(value) for name, value in row.items()})
    return reduced


# ---- rows of unknown origin


def is_filled_up(rows: Rows) -> bool:
    """
    Whether rows look like those that Arrow has filled up with nulls.

    In such rows, all dictionaries at the same place have the same keys in the same order, and some
    key inside a column is null in one row and has a value in another.
    """
    keys: dict[Place, list[str]] = {}
    null_places = set[Place]()
    value_places = set[Place]()
    waiting: list[tuple[Place, Any]] = [((), row) for row in rows]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(((*place, "[]"), item) for item in value)
        elif isinstance(value, dict):
            if keys.setdefault(place, list(value)) != list(value):
                return False
            for name, field in value.items():
                field_place = (*place, str(name))
                places = null_places if field is None else value_places
                places.add(field_place)
                waiting.append((field_place, field))
    inner_places = {place for place in null_places if len(place) > 1}
    return not inner_places.isdisjoint(value_places)


def is_written_by_pandas(text: str) -> bool:
    """
    Whether a JSON text looks as if pandas wrote it. `Dataset.to_json` uses pandas.

    pandas writes no spaces, and escapes each slash.
    """
    between_strings = _STRING.sub("", text).replace("\n", "")
    if re.search(r"\s", between_strings):
        return False
    return not any(re.search(r"(?<!\\)/", string) for string in _STRING.findall(text))


def count_nulls(value: Any, *, is_row: bool = True) -> int:
    """The number of null keys inside a value. is_row: whether the value is a whole row."""
    if isinstance(value, dict):
        num = 0 if is_row else sum(field is None for field in value.values())
        return num + sum(count_nulls(field, is_row=False) for field in value.values())
    if isinstance(value, list):
        return sum(count_nulls(item, is_row=is_row) for item in value)
    return 0

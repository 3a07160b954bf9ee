"""
Converts tables to rows of Python values, with the same keys that the rows would have in JSON.

In JSON, a row may lack keys that other rows have. Arrow gives every struct in a column the same
fields, and sets fields that a row lacks to null. Gwen removes fields that are null for this reason,
at any depth. A null is kept if it is the whole value of a column, or if it is in a list, in a map
or in JSON text, because a user must have written such a null. prompts/files.py decides which files
contain tables.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

Rows = list[Any]
Place = tuple[str, ...]  # the path of keys to a value; "[]" is the key of a list's items
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


# ---- rows of known origin


def rows_from_arrow_table(table: Any) -> Rows:
    """The rows of a `pyarrow.Table`."""
    columns: dict[str, list[Any]] = {}
    for index, field in enumerate(table.schema):
        values = table.column(index).to_pylist()
        columns[field.name] = [_value_without_null_fields(value, field.type) for value in values]
    rows = []
    for row in range(table.num_rows):
        rows.append({name: column[row] for name, column in columns.items()})
    return rows


def _value_without_null_fields(value: Any, arrow_type: Any) -> Any:
    """A value of an Arrow type, without the struct fields that are null."""
    import pyarrow  # imported here because it takes half a second

    if value is None:
        return None

    if pyarrow.types.is_struct(arrow_type):
        fields = {
            field.name: _value_without_null_fields(value[field.name], field.type)
            for field in arrow_type
        }
        return {name: field for name, field in fields.items() if field is not None}

    if pyarrow.types.is_map(arrow_type):
        return {key: _value_without_null_fields(item, arrow_type.item_type) for key, item in value}

    if hasattr(arrow_type, "value_field") and isinstance(value, list):
        return [_value_without_null_fields(item, arrow_type.value_type) for item in value]

    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return json.loads(value)
    return value


def rows_from_dataset(dataset: Any) -> Rows:
    """The rows of a `datasets.Dataset`."""
    return rows_from_arrow_table(dataset.with_format("arrow")[:])


def rows_and_num_removed_doubtful_nulls(data: Any) -> tuple[Rows, int]:
    """
    Reads the rows of data that a user's program passes to Gwen.

    Returns the rows, and the number of nulls that were removed although the user may have written
    them.

    data: a `datasets.Dataset`, a `DatasetDict` (whose splits become the column `split`), a table
    from pandas, pyarrow or polars, or any iterable of dictionaries. The function
    `looks_filled_with_nulls` recognizes the dictionaries that `dataset.to_list()` makes.
    """
    module = type(data).__module__.partition(".")[0]
    if module == "datasets" and isinstance(data, Mapping):
        all_rows = []
        for name, dataset in data.items():
            split_rows, _ = rows_and_num_removed_doubtful_nulls(dataset)
            all_rows += [row | {"split": name} for row in split_rows]
        return all_rows, 0
    if module == "datasets" and hasattr(data, "num_rows"):
        return rows_from_dataset(data), 0
    if module == "pyarrow":
        return rows_from_arrow_table(data), 0
    if module == "pandas":
        return [
            _row_from_pandas(row) for row in _copy_with_integer_columns(data).to_dict("records")
        ], 0
    if module == "polars":
        return rows_without_inner_nulls(data.to_dicts()), 0

    rows = list(data)
    if module == "datasets":  # a streaming data set
        return rows_without_inner_nulls(rows), 0
    if looks_filled_with_nulls(rows):
        return rows_without_inner_nulls(rows), count_inner_nulls(rows)
    return rows, 0


def _copy_with_integer_columns(frame: Any) -> Any:
    """
    A copy of a DataFrame, with float columns converted to integers where possible.

    pandas stores a column of integers as floats if a cell is missing. Only columns with missing
    cells are converted.
    """
    floats = [
        name for name in frame.columns if frame[name].dtype.kind == "f" and frame[name].isna().any()
    ]
    return frame.astype({name: frame[name].convert_dtypes().dtype for name in floats})


def _row_from_pandas(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a DataFrame as Python values, with None for missing cells."""
    return {
        str(name): copy_without_null_keys(_python_value_from_numpy(value))
        for name, value in row.items()
    }


def _python_value_from_numpy(value: Any) -> Any:
    """Converts a value from NumPy or pandas to a Python value."""
    import pandas

    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _python_value_from_numpy(field) for name, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [_python_value_from_numpy(item) for item in value]
    is_missing = value is None or value is pandas.NA or value is pandas.NaT or value != value
    return None if is_missing else value


def copy_without_null_keys(value: Any) -> Any:
    """
    A copy of a value from which all keys with nulls have been removed, however deeply nested.

    Nulls in lists are kept.
    """
    if isinstance(value, dict):
        return {
            name: copy_without_null_keys(field)
            for name, field in value.items()
            if field is not None
        }
    if isinstance(value, list):
        return [copy_without_null_keys(item) for item in value]
    return value


def rows_without_inner_nulls(rows: Rows) -> Rows:
    """
    Copies of rows from which keys with nulls inside the columns have been removed.

    A column that is itself null is kept.
    """
    reduced = []
    for row in rows:
        reduced.append({name: copy_without_null_keys(value) for name, value in row.items()})
    return reduced


# ---- rows of unknown origin


def looks_filled_with_nulls(rows: Rows) -> bool:
    """
    Whether rows look as if Arrow had added keys with nulls to them.

    In such rows, all dictionaries at the same path have the same keys in the same order. In
    addition, at least one key inside a column is null in one place and has a value in another.
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


def looks_written_by_pandas(json_text: str) -> bool:
    """
    Whether JSON text looks as if pandas wrote it, as for example in `Dataset.to_json`.

    pandas writes no spaces between values, and escapes every slash.
    """
    between_strings = _STRING.sub("", json_text).replace("\n", "")
    if re.search(r"\s", between_strings):
        return False
    return not any(re.search(r"(?<!\\)/", string) for string in _STRING.findall(json_text))


def count_inner_nulls(value: Any, *, is_row: bool = True) -> int:
    """
    How many keys with nulls a value contains, however deeply nested.

    is_row: whether the value is a row or a list of rows. A row's own keys are not counted.
    """
    if isinstance(value, dict):
        num = 0 if is_row else sum(field is None for field in value.values())
        return num + sum(count_inner_nulls(field, is_row=False) for field in value.values())
    if isinstance(value, list):
        return sum(count_inner_nulls(item, is_row=is_row) for item in value)
    return 0

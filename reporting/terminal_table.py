"""
Formats tables so that they are not wider than the terminal.

A table that is too wide is divided into blocks of columns, one below the other, and each block
repeats the first column. A cell that is still too wide is wrapped at words. This file does not
cover what the tables contain (report.py).
"""

import itertools
import textwrap
from collections.abc import Sequence

GAP = "  "  # between two columns
NARROWEST = 16  # the smallest width to which a column in a block is wrapped

Rows = Sequence[Sequence[str]]


def format_table(rows: Rows) -> str:
    """Formats rows as a text table with aligned columns; the first row has the column names."""
    return _format_block(rows, _natural_widths(rows))


def fit_table(rows: Rows, width: int | None) -> str:
    """
    Formats rows as a table that is at most `width` characters wide.

    The first row contains the column names, and the first column contains the row names. If `width`
    is None, the table may have any width.
    """
    natural = _natural_widths(rows)
    if width is None or _total_width(natural) <= width:
        return format_table(rows)
    if len(natural) == 1:
        return _format_block(rows, [width])
    first = min(natural[0], max(width // 3, 1))
    blocks = []
    for columns in _divide_into_blocks(natural, width - first):
        widths = _share_width([natural[column] for column in columns], width - first)
        block = [[row[0], *(row[column] for column in columns)] for row in rows]
        blocks.append(_format_block(block, [first, *widths]))
    return "\n\n".join(blocks)


def fit_or_transpose_comparison(rows: Rows, width: int | None) -> str:
    """
    Formats a comparison with a column per run, at most `width` characters wide.

    If the runs do not fit beside each other, the table has a row per run and a column per figure.
    """
    num_runs = len(rows[0]) - 1
    first = max(len(row[0]) for row in rows)
    is_fitting = width is None or _total_width(_natural_widths(rows)) <= width
    has_room = width is not None and first + num_runs * (NARROWEST + len(GAP)) <= width
    if is_fitting or has_room:
        return fit_table(rows, width)
    transposed = [list(column) for column in zip(*rows, strict=True)]
    transposed[0][0] = "run"
    return fit_table(transposed, width)


def _natural_widths(rows: Rows) -> list[int]:
    return [max(1, *map(len, column)) for column in zip(*rows, strict=True)]


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _divide_into_blocks(natural: Sequence[int], room: int) -> list[list[int]]:
    """
    Divides all columns except the first into blocks.

    Each block fits into the `room` characters to the right of the first column.
    """
    blocks: list[list[int]] = []
    room_left = 0
    for column in range(1, len(natural)):
        needed = len(GAP) + min(natural[column], NARROWEST)
        if not blocks or needed > room_left:
            blocks.append([])
            room_left = room
        blocks[-1].append(column)
        room_left -= needed
    return blocks


def _share_width(natural: Sequence[int], room: int) -> list[int]:
    """The widths of a block's columns. The columns and their gaps fit into `room` characters."""
    widths = [min(width, NARROWEST) for width in natural]
    left = max(room - sum(widths) - len(GAP) * len(widths), 0)
    narrow_first = sorted(range(len(natural)), key=natural.__getitem__)
    for place, column in enumerate(narrow_first):
        share = left // (len(narrow_first) - place)
        added = min(natural[column] - widths[column], share)
        widths[column] += added
        left -= added
    return [max(min(width, room - len(GAP)), 1) for width in widths]


def _format_block(rows: Rows, widths: Sequence[int]) -> str:
    """Formats rows as a table with these widths; a cell that is too wide takes several lines."""
    lines = []
    for number, row in enumerate(rows):
        cells = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
            lines.append(GAP.join(padded).rstrip())
        if number == 0:
            lines.append(GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def _wrap_cell(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]

"""Tables and plain text for terminals and files."""

import io
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from unet3d.base.errors import escaped
from unet3d.base.types import Table

NARROW = 80  # characters per line of a plain file
WIDE = 132  # characters per line of a file with wide tables
GAP = 3  # characters between columns; one more at the edge


def paper(width: int) -> Console:
    """Return a console for results; where stdout is a file, with `width` characters per line."""
    return Console(highlight=False, markup=False, emoji=False, width=None if Console().is_terminal else width)


def narrow_tables(title: str, table: Table, width: int) -> Group:
    """Return the table in as many parts, one below the other, as fit into `width` characters.

    Each part has the first column. No word is broken, but of a column that is wider than the room right of the first.
    """
    columns = [[escaped(text) for text in texts] for texts in zip(table.columns, *table.rows, strict=True)]
    least = [max(cell_len(word) for text in column for word in ["", *text.split()]) + GAP for column in columns]
    least[0] = min(least[0], 2 * width // 5)
    room = width - 1 - least[0]
    parts: list[list[int]] = []
    left = 0
    for index in range(1, len(columns)):
        least[index] = min(least[index], room)
        if least[index] > left:
            parts.append([0])
            left = room
        parts[-1].append(index)
        left -= least[index]
    tables = []
    for part in parts or [[0]]:
        whole = sum(max(map(cell_len, columns[index])) + GAP for index in part)
        widths = [least[index] - GAP if index == 0 or whole >= width else None for index in part]
        shown = Table([table.columns[index] for index in part], [[row[index] for index in part] for row in table.rows])
        tables.append(_rich_table(shown, widths))
    return Group(Text(escaped(title), "bold"), *tables)


def plain_text(parts: Iterable[str | tuple[str, Table]], width: int) -> str:
    """Return lines and titled tables as plain text; only tables keep to the width."""
    file = io.StringIO()
    terminal = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    for part in parts:
        if isinstance(part, str):
            terminal.print(escaped(part, keep="\n"), soft_wrap=True)
        else:
            terminal.print(terminal_table(*part))
    return file.getvalue()


def terminal_table(title: str, table: Table) -> Group:
    """Return a table for terminals and plain files; its title may be wider than it."""
    return Group(Text(escaped(title), "bold"), _rich_table(table))


def _rich_table(table: Table, widths: Sequence[int | None] = ()) -> RichTable:
    """Return a table of rich; a column without a width is as wide as its texts where there is room."""
    rich_table = RichTable(box=box.SIMPLE_HEAD)
    for index, (column, width) in enumerate(zip_longest(table.columns, widths)):
        side: Literal["left", "right"] = "right" if index else "left"
        rich_table.add_column(escaped(column), justify=side, overflow="fold", width=width)
    for row in table.rows:
        rich_table.add_row(*map(escaped, row))
    return rich_table

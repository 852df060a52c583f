"""Tables and plain text for terminals and files."""

import io
from collections.abc import Iterable, Sequence

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
    is_terminal = Console().is_terminal
    return Console(highlight=False, markup=False, emoji=False, width=None if is_terminal else width)


def narrow_tables(title: str, table: Table, width: int) -> Group:
    """Return the table in as many parts, one below the other, as fit into `width` characters.

    Each part has the first column. A column that is wider than the room beside it is folded.
    """
    widths = _least_widths(table)
    first_width = min(widths[0], 2 * width // 5)
    room = width - 1 - first_width
    widths = [first_width, *(min(wanted, room) for wanted in widths[1:])]
    tables = []
    for columns in _parts(widths, room):
        part = Table(
            columns=[table.columns[index] for index in columns],
            rows=[[row[index] for index in columns] for row in table.rows],
        )
        exact = [widths[index] - GAP for index in columns]
        tables.append(_rich_table(part, exact, width))
    return Group(Text(escaped(title), "bold"), *tables)


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns of each part: the first, and others whose widths fit into `room` characters."""
    parts = [[0]]
    left = room
    for index, width in enumerate(widths[1:], start=1):
        if width > left:
            parts.append([0])
            left = room
        parts[-1].append(index)
        left -= width
    return parts


def _least_widths(table: Table) -> list[int]:
    """Return the least width of each column in which no word is broken, with the gap beside it."""
    widths = []
    for column in zip(table.columns, *table.rows, strict=True):
        words = [word for text in column for word in escaped(text).split()]
        longest = max(map(cell_len, words), default=0)
        widths.append(longest + GAP)
    return widths


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


def _rich_table(table: Table, exact: Sequence[int] = (), room: int = 0) -> RichTable:
    """Return a table of rich.

    `exact` has the width of each column; all but the first are free where the table is not wider than `room`.
    """
    rich_table = RichTable(box=box.SIMPLE_HEAD)
    whole_width = GAP * len(table.columns) + 1
    for texts in zip(table.columns, *table.rows, strict=True):
        whole_width += max(cell_len(escaped(text)) for text in texts)
    is_narrow = whole_width > room
    for index, column in enumerate(table.columns):
        width = None
        if exact and (is_narrow or index == 0):
            width = exact[index]
        rich_table.add_column(
            escaped(column),
            justify="right" if index else "left",
            overflow="fold",
            width=width,
        )
    for row in table.rows:
        rich_table.add_row(*map(escaped, row))
    return rich_table

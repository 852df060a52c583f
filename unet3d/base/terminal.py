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

NARROW, WIDE = 80, 132  # characters per line of a plain file
GAP = 3  # characters between columns; one more at the edge


def paper(width: int) -> Console:
    """A terminal for results; if stdout is a file, with `width` characters per line."""
    terminal = Console(highlight=False, markup=False, emoji=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, emoji=False, width=width)


def narrow_tables(title: str, table: Table, width: int) -> Group:
    """The table in as many parts, one below the other, as fit into `width` characters; each has the first column."""
    widths = [_width(column, [row[index] for row in table.rows]) for index, column in enumerate(table.columns)]
    first = min(widths[0], width // 3)
    room = width - 1 - first
    parts, left = [[0]], room
    for index, wanted in enumerate(widths[1:], start=1):
        wanted = min(wanted, room)  # what is longer is folded
        if wanted > left:
            parts, left = [*parts, [0]], room
        parts[-1].append(index)
        left -= wanted
    tables = []
    for part in parts:
        rows = [[row[index] for index in part] for row in table.rows]
        exact = [first - GAP, *(min(widths[index], room) - GAP for index in part[1:])]
        tables.append(_rich_table(Table([table.columns[index] for index in part], rows), exact, width))
    return Group(Text(escaped(title), "bold"), *tables)


def _width(column: str, cells: Sequence[str]) -> int:
    """The least width of a column in which no word is broken, with the gap beside it."""
    words = [word for text in (column, *cells) for word in escaped(text).split()]
    return max((cell_len(word) for word in words), default=0) + GAP


def plain_text(parts: Iterable[str | tuple[str, Table]], width: int) -> str:
    """Lines and titled tables as plain text; only tables keep to the width."""
    file = io.StringIO()
    terminal = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    for part in parts:
        text = escaped(part, keep="\n") if isinstance(part, str) else terminal_table(*part)
        terminal.print(text, soft_wrap=isinstance(part, str))
    return file.getvalue()


def terminal_table(title: str, table: Table) -> Group:
    """A table for terminals and plain files; its title may be wider than it."""
    return Group(Text(escaped(title), "bold"), _rich_table(table))


def _rich_table(table: Table, exact: Sequence[int] = (), room: int = 0) -> RichTable:
    """`exact`: the width of the first column, and of all where the table would else be wider than `room`."""
    made = RichTable(box=box.SIMPLE_HEAD)
    whole = [max(cell_len(escaped(text)) for text in column) for column in zip(table.columns, *table.rows, strict=True)]
    is_narrow = sum(whole) + GAP * len(whole) + 1 > room
    for index, column in enumerate(table.columns):
        width = exact[index] if exact and (is_narrow or not index) else None
        made.add_column(escaped(column), justify="right" if index else "left", overflow="fold", width=width)
    for row in table.rows:
        made.add_row(*map(escaped, row))
    return made

"""Tables as Markdown and as LaTeX; whatever is in their cells stays text."""

import re
from collections.abc import Sequence

from unet3d.base.errors import escaped
from unet3d.base.types import Table

IN_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r" $\pm$ ",
}
IN_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&])")

Titled = Sequence[tuple[str, Table]]


def as_markdown(titled: Titled, notes: Sequence[str]) -> str:
    """Return titled tables, and notes below them, as Markdown."""
    parts = []
    for title, table in titled:
        lines = [f"## {markdown(title)}", ""]
        lines.append(_row(map(markdown, table.columns)))
        lines.append(_row(["---", *["---:" for _ in table.columns[1:]]]))
        lines += [_row(map(markdown, row)) for row in table.rows]
        parts.append("\n".join(lines))
    parts += map(markdown, notes)
    return "\n\n".join(parts) + "\n"


def as_latex(titled: Titled, notes: Sequence[str]) -> str:
    """Return titled tables as LaTeX with booktabs, and notes below them."""
    parts = ["% \\usepackage{booktabs}"]
    for title, table in titled:
        head = " & ".join(map(latex, table.columns))
        body = [" & ".join(map(latex, row)) for row in table.rows]
        columns = "l" + "r" * (len(table.columns) - 1)
        lines = [
            r"\begin{table}",
            rf"\caption{{{latex(title)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            rf"\toprule {head} \\ \midrule",
            *(rf"{row} \\" for row in body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    parts += map(latex, notes)
    return "\n\n".join(parts) + "\n"


def _row(cells: "Sequence[str] | map[str]") -> str:
    return f"| {' | '.join(cells)} |"


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return IN_MARKDOWN.sub(r"\\\1", escaped(text))


def latex(text: str) -> str:
    """Return text that LaTeX sets as it is."""
    return "".join(IN_LATEX.get(letter, letter) for letter in escaped(text))

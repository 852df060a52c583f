"""The long outputs that README.md and docs/ show, made again and compared: python tests/bench/docs_outputs.py [--write]

Runs the commands themselves, in a folder that is removed afterwards: three minutes on two cores. Prints what differs,
and ends with 1 if anything does; `--write` puts what was printed into the pages, where a page shows all of it. Seconds,
scores and lines that a page leaves out are not compared.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Output(NamedTuple):
    """What a command prints and a page shows, in the code block that begins with `block`; "": in all of the page."""

    page: str
    block: str
    command: list[str]
    shows_all: bool
    code: int = 0  # the command's exit code


OUTPUTS = (
    Output("docs/options.md", "", ["-m", "unet3d", "options"], shows_all=True),
    Output("README.md", "error: ", ["train.py", "chkpt=2"], shows_all=True, code=2),
    Output(
        "README.md",
        "Predicted peak of a step",
        ["-m", "unet3d", "memory", "model=unet_small", "amp=false,true", "recompute=none,tiles"],
        shows_all=False,
    ),
    Output("README.md", "16 cases kept", ["train.py", "model=unet_small", "amp=true", "ckpt=2"], shows_all=False),
    Output(
        "docs/memory.md",
        "forum_mid: ",
        ["-m", "unet3d", "memory", "model=forum_mid", "data.patch=[320,150,26]", "batch=2", "amp=true"],
        shows_all=False,
    ),
    Output(
        "docs/memory.md",
        "40,158,853 parameters",
        ["train.py", "model=forum_large", "data.patch=[320,150,26]", "batch=4", "dry_run=true", "budget=5GiB"],
        shows_all=True,
        code=2,
    ),
    Output(
        "docs/memory.md",
        "unet_small: ",
        ["-m", "unet3d", "memory", "model=unet_small", "device=cpu", "--below", "250MiB"],
        shows_all=True,
        code=1,
    ),
)


def printed(output: Output, folder: Path) -> list[str]:
    """Return the lines that the command prints, but for its progress. Raises RuntimeError for another exit code."""
    words = [str(ROOT / word) if word == "train.py" else word for word in output.command]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != output.code:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    lines = [line for line in lines if not re.search(r": \d+ of \d+, .* left$", line)]
    return "\n".join(lines).strip().splitlines()


def block_of(text: str, first_words: str) -> str:
    """Return the one code block of a page that begins with these words; "": the page. Raises ValueError."""
    if not first_words:
        return text.strip()
    blocks = [block for block in re.findall(r"```\n(.*?)\n```", text, re.DOTALL) if block.startswith(first_words)]
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} blocks begin with {first_words!r}")
    return str(blocks[0])


def is_machines(line: str) -> bool:
    """Whether a line shows seconds and scores, or stands for lines that are left out."""
    return line.strip() == "..." or re.match(r" *\d+:\d\d:\d\d  step ", line) is not None


def differences(output: Output, given: list[str], text: str) -> list[str]:
    """Return what differs as lines of a diff; where a page shows a part, its lines that were not printed in order."""
    shown = block_of(text, output.block).splitlines()
    if output.shows_all:
        return [line for line in difflib.unified_diff(shown, given, "shown", "printed", lineterm="")]
    compared = [line for line in shown if not is_machines(line)]
    return [line for line in difflib.ndiff(compared, given) if line.startswith("- ")]


def main() -> int:
    """Compare all outputs. Returns 1 if one differs and was not written."""
    writes = sys.argv[1:] == ["--write"]
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for output in OUTPUTS:
            page = ROOT / output.page
            text = page.read_text()
            given = printed(output, Path(folder))
            differing = differences(output, given, text)
            print(f"{output.page}, {output.block}: {'differs' if differing else 'as shown'}")
            if differing and writes and output.shows_all:
                page.write_text(text.replace(block_of(text, output.block), "\n".join(given), 1))
                print("  written")
            elif differing:
                print("\n".join(f"  {line}" for line in differing))
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Commands that messages and reports print: they work as they are pasted into a shell, in the same folder."""

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"  # of a checkout; an installed package has none


def training(overrides: Iterable[str]) -> str:
    """Return the command that trains with these overrides: by train.py, if it is here or was run, or by the package."""
    program = ["-m", "unet3d", "train"]
    for path in (sys.argv[0], "train.py"):
        if _is_script(path):
            program = [path]
            break
    return shlex.join([_python(), *program, *overrides])


def shared(overrides: Iterable[str]) -> str:
    """Return the same for a page that others get, without the place of the interpreter."""
    return shlex.join(["python", "-m", "unet3d", "train", *overrides])


def _is_script(path: str) -> bool:
    """Return whether this path, from the working folder, is train.py."""
    try:
        return SCRIPT.samefile(path)
    except (OSError, ValueError):  # one of them does not exist
        return False


def _python() -> str:
    """Return `python` where a shell finds this interpreter by that name, else its path."""
    if not sys.executable:
        return "python"
    python = shutil.which("python")
    if python is None:
        return sys.executable
    is_this = Path(python).absolute().parent == Path(sys.executable).absolute().parent
    return "python" if is_this else sys.executable

"""Files of a run folder as its run writes them: before the first step, at its end, and cut for a resume."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.base.errors import escaped
from unet3d.base.files import read_lines, read_text, write_json, write_text
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.run.environment import environment
from unet3d.run.memory_file import json_object
from unet3d.run.shapes import fits, is_shallow

if TYPE_CHECKING:
    import torch

Values = Mapping[str, Any]  # a record of metrics.jsonl


def start_folder(folder: Path, config: Config, device: "torch.device", start: Values | None = None) -> None:
    """Make the subfolders and write what is known before the first step; init.json says what `start` loaded."""
    for part in ("checkpoints", "figures", "predictions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if config.resume is None:
        for name in ("metrics.jsonl", "init.json"):
            (folder / name).unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    if start is not None:
        write_json(folder / "init.json", start)
    (folder / "report.html").unlink(missing_ok=True)  # of an earlier end; the next one writes it again
    write_text(folder / "config.yaml", compose.to_yaml(config))
    write_json(folder / "env.json", environment(device))
    write_text(folder / "STATUS", "running\n")


def write_status(folder: Path, line: str, code: int) -> str:
    """Write the STATUS of a run that has ended: what happened, and the exit code. Return it as one line."""
    text = escaped(f"{line}\nexit code {code}\n", keep="\n")
    write_text(folder / "STATUS", text)
    return one_line(text)


def one_line(status: str) -> str:
    """Return the text of STATUS as one line, `done, exit code 0`."""
    return ", ".join(status.split("\n")).strip(", ")


def is_done(folder: Path) -> bool:
    """Return whether the folder's run finished and wrote all its files."""
    return read_text(folder / "STATUS").startswith("done\n")


def forget_after(metrics: Path, step: int, validated: int) -> int:
    """Drop the records that a run resumed at `step`, last validated at `validated`, repeats; return the last step."""
    if not metrics.exists():
        return step
    last = step
    lines = []
    for record in read_records(metrics):
        last = max(last, record["step"])
        is_before = record["step"] < step
        is_of_step = record["step"] == step and (step == validated or "train/loss" in record)
        if is_before or is_of_step:
            lines.append(f"{json.dumps(record)}\n")
    write_text(metrics, "".join(lines))
    return last


def read_records(metrics: Path) -> list[Values]:
    """Return the whole records of metrics.jsonl, whose last line a kill cuts short. Raises UserError."""
    records: list[Values] = []
    for line in read_lines(metrics):
        record = json_object(line.decode(errors="replace").strip())
        if fits(record.get("step"), int) and record["step"] >= 0 and is_shallow(record, 1):
            records.append({sys.intern(key): value for key, value in record.items()})  # keys are held once
    return records


def last_step(records: Iterable[Values]) -> int | None:
    """Return the highest step of any record; None without records."""
    return max((record["step"] for record in records), default=None)


def spacing_words(spacing: Any) -> str:
    """Return `1x1x2 mm`; "" unless `spacing` is a list."""
    if not isinstance(spacing, list):
        return ""
    return f"{'x'.join(map(str, spacing))} mm"

"""A run in TensorBoard. The only module that imports tensorboard, and only when a run asks for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.run.run_folder import last_step, read_records


class TensorBoardLogger:
    """Event files under `folder`/tensorboard: scalars, pictures, tables and the config as text.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = str(folder / "tensorboard")
        if config.resume:
            records = read_records(folder / "metrics.jsonl")
            first = 1 + (last_step(records) or 0)
            self._writer = SummaryWriter(events, purge_step=first)
        else:
            self._writer = SummaryWriter(events)
            self._writer.add_text("config", f"```yaml\n{compose.to_yaml(config)}```")

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def image(self, key: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(key, pixels, step, dataformats="HWC")

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        lines = map(_markdown, [columns, ["---" for _ in columns], *rows])
        self._writer.add_text(key, "\n".join(lines))

    def summary(self, values: Mapping[str, object]) -> None:
        self.table("summary", ["key", "value"], list(values.items()))

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _markdown(row: Sequence[object]) -> str:
    cells = ["" if cell is None else str(cell) for cell in row]
    return f"| {' | '.join(cells)} |"

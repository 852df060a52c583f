"""A run as TensorBoard shows it. The only module that imports tensorboard, and only when a run asks for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.report.run_folder import read_run


class TensorBoardLogger:
    """Event files under `folder`/tensorboard: scalars, pictures, tables and the config as text.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        last = max((record["step"] for record in read_run(folder).records), default=0) if config.resume else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=None if last is None else last + 1)
        if last is None:
            self._writer.add_text("config", f"```yaml\n{compose.to_yaml(config)}```")

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def image(self, key: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            self._writer.add_image(key, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        cells = [columns, ["---"] * len(columns), *rows]
        lines = ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in cells]
        self._writer.add_text(key, "\n".join(lines))

    def summary(self, values: Mapping[str, object]) -> None:
        self.table("summary", ["key", "value"], [[name, value] for name, value in values.items()])

    def close(self, exit_code: int) -> None:
        self._writer.close()

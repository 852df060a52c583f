"""Train a 3D U-Net: python train.py model=unet_small amp=true ckpt=2"""

import sys
from pathlib import Path

from unet3d import command
from unet3d.config import Config


def job(config: Config, folder: Path) -> None:
    """One run in its folder."""
    from unet3d import report  # torch and monai load here: a wrong option was answered before
    from unet3d.finish import finish
    from unet3d.run import Run

    run = Run(config, folder)
    run.fit()
    finish(run)
    report.write(folder)
    report.print_summary(folder)


if __name__ == "__main__":
    sys.exit(command.main(job))

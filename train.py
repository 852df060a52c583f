"""Train a 3D U-Net: python train.py model=unet_small amp=true ckpt=2"""

import sys
from pathlib import Path

from unet3d import command
from unet3d.config import Config
from unet3d.signals import Stop


def job(config: Config, folder: Path, stop: Stop) -> None:
    """One run in its folder: predict, build, fit, report. Ends early once it is asked to `stop`."""
    from unet3d import build, record, report  # torch and monai load here: a wrong option was answered before
    from unet3d.finish import finish
    from unet3d.memory.forecast import forecast
    from unet3d.run import Run

    data = None if config.dry_run else build.data(config)
    options = build.model_options(config, data.task, data.train[0]) if data else build.outlined_options(config)
    told = forecast(config, options)
    if data is None:
        record.add(folder, told.memory)
        return
    with Run(config, folder, data, options, told.starts, stop) as run:
        if run.is_done:
            print(f"nothing to do: step {run.trainer.step} of {config.steps} is done; steps=N goes on")
            if not (folder / "report.html").exists():  # killed as it was written
                report.write(folder)
            return
        record.add(folder, told.memory)
        run.fit()
        finish(run)
    report.write(folder)
    report.print_summary(folder)


if __name__ == "__main__":
    sys.exit(command.main(job))

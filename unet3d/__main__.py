"""`python -m unet3d` and `python train.py`. What they load is loaded where Ctrl-C is answered."""

import sys

from unet3d.cli import interrupt

STOPPED = 75  # exit code of a training that was asked to stop


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    return train() if sys.argv[1:2] == ["train"] else interrupt.in_one_line(_command)


def train() -> int:
    """Run a training, or a sweep, with the options in the arguments. Returns its exit code."""
    return interrupt.in_one_line(_training, STOPPED)


def _command() -> int:
    from unet3d.cli import main

    return main.main()


def _training() -> int:
    from unet3d.cli import train

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]  # the rest is Hydra's
    return train.main()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m unet3d`. What it loads is loaded where Ctrl-C is answered."""

import sys

from unet3d.cli import interrupt


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]  # the rest is Hydra's
        with interrupt.answered(interrupt.STOPPED):
            from unet3d.cli import train

            return train.main()
    with interrupt.answered():
        from unet3d.cli import main

        return main.main()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m unet3d`. What it loads is loaded where Ctrl-C is answered."""

import sys

from unet3d.base import signals


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    with signals.answered(is_training=sys.argv[1:2] == ["train"]):
        from unet3d.cli import main

        return main.main()


if __name__ == "__main__":
    sys.exit(main())

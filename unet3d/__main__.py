"""`python -m unet3d`. What it loads is loaded where Ctrl-C is answered."""

import sys

from unet3d.cli import interrupt


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    is_training = sys.argv[1:2] == ["train"]
    with interrupt.answered(interrupt.STOPPED if is_training else interrupt.INTERRUPTED):
        from unet3d.cli import main

        return main.main()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m unet3d`."""

import sys

from unet3d.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m unet3d`."""

import sys

from unet3d.cli.main import main

sys.exit(main())

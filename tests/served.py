"""All that a training loads, loaded once by the server that trainings are forked from."""

import gc
import importlib
import os

from unet3d.config import compose

MODULES = [
    *("training", "ranked", "guards"),
    *("unet3d.cli.train", "unet3d.run.run", "unet3d.report.report", "unet3d.memory.prediction"),
    # what a run loads where it first uses it
    *("monai.transforms", "scipy.interpolate", "scipy.spatial.transform", "torch._dynamo"),
    *("wandb", "wandb.sdk.launch.inputs.internal"),
]
for name in MODULES:
    importlib.import_module(name)
compose.compose(["model=unet_tiny"])  # which loads Hydra's plugins and prepares its grammar
os.environ.pop("PYTHONPATH")  # the server's alone
# Each training would search it for garbage, and copy its pages by that.
gc.collect()
gc.freeze()

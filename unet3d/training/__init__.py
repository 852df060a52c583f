"""The training step, what it trains with, and how it saves memory. In reading order:

- `step` is the one training step, and `trainer` the loop around it.
- `losses`, `optim` and `metrics` are what a run trains with and is scored by.
- `policy` applies what saves memory to a step: segments, which `checkpointing` lets run twice, or a program of
  `unet3d.recomputing`.
- `inference` slides a network over a volume: where its windows lie, how they are weighted, and their means.
- `switches` sets what torch decides for the whole process, and names a version of cuDNN with a fault.
"""

"""Any network, trained in less memory: its training pass follows a schedule that keeps few maps.

In reading order: `graph` (a network's operations, traced), `rules` with `convolution`, `normalisation`, `resampling`
(operations on a few rows of their maps), `maps` (which values exist as a whole), `tiles` (rows of one map, forward and
backward), `schedule` (instructions and their bytes), `sizes` and `search` (the choice of a schedule), `run` (a
schedule, carried out), `module` (the face).
"""

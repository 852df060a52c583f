"""The network, and nothing of training.

In reading order: `geometry` (kernels, strides and sizes, in integers), `blocks` (convolution units and stages), `unet`
(the sequence of stages). `half_precision` is how a CPU without such arithmetic computes convolutions.
"""

"""Learning rate as a pure function of the step, so that a resumed run has nothing to restore."""

import math

from unet3d.config import Optim


def learning_rate(options: Optim, steps: int, step: int) -> float:
    """The learning rate of optimizer step `step` of `steps`, counted from 0."""
    return options.lr * factor(options, steps, step)


def factor(options: Optim, steps: int, step: int) -> float:
    """Its share of the peak."""
    progress = min(1.0, step / steps)
    match options.schedule:
        case "constant":
            return 1.0
        case "poly":
            return float((1 - progress) ** 0.9)
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "one_cycle":
            return _one_cycle(progress, options.warmup)
    raise AssertionError(options.schedule)


def _one_cycle(progress: float, warmup: float) -> float:
    """Cosine from 1/25 up to 1, then cosine down to 0 (Smith and Topin, arXiv:1708.07120)."""
    if progress < warmup:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * progress / warmup)) / 2
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2

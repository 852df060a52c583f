"""The building blocks of a stage: convolution, normalisation, activation, dropout, as the config names them."""

from typing import Any

import torch
from torch import Tensor, nn

from unet3d.config import Model
from unet3d.model.geometry import Triple


def unit(in_channels: int, out_channels: int, options: Model, kernel: Triple, stride: Triple, last: bool) -> nn.Module:
    """Convolution, normalisation, activation, dropout. `last`: leave the activation to a residual sum."""
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2) if options.padding == "same" else 0
    layers: dict[str, nn.Module | None] = {
        "conv": nn.Conv3d(in_channels, out_channels, kernel, stride, padding, bias=options.conv_bias),
        "norm": norm(out_channels, options),
        "act": None if last else activation(options),
        "dropout": nn.Dropout3d(options.dropout) if options.dropout and not last else None,
    }
    made = nn.Sequential()
    for name, layer in layers.items():
        if layer is not None:
            made.add_module(name, layer)
    return made


def norm(channels: int, options: Model) -> nn.Module | None:
    """Normalisation of N C D H W maps."""
    affine = options.norm_affine
    match options.norm:
        case "instance":
            return nn.InstanceNorm3d(channels, affine=affine)
        case "batch":
            return nn.BatchNorm3d(channels, affine=affine)
        case "batch_current":  # the paper's: the current statistics in evaluation too (arXiv:1606.06650, section 3)
            return nn.BatchNorm3d(channels, affine=affine, track_running_stats=False)
        case "group":
            return nn.GroupNorm(options.groups, channels, affine=affine)
        case "none":
            return None
    raise AssertionError(options.norm)


def activation(options: Model) -> nn.Module:
    """Activation; in place only where the config's check allows it."""
    match options.activation:
        case "relu":
            return nn.ReLU(inplace=options.inplace)
        case "leaky_relu":
            return nn.LeakyReLU(options.negative_slope, inplace=options.inplace)
        case "prelu":
            return nn.PReLU()
        case "silu":
            return nn.SiLU(inplace=options.inplace)
        case "swish":
            return Swish()
        case "swish_lean":
            return LeanSwish()
    raise AssertionError(options.activation)


class Swish(nn.Module):
    """x * sigmoid(x) as plain operations: autograd keeps x and sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class LeanSwish(nn.Module):
    """x * sigmoid(x) with its gradient written out: autograd keeps x alone and sigmoid(x) is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _LeanSwish.apply(x)
        return result


class _LeanSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        slope: Tensor = sigmoid * (1 + x * (1 - sigmoid))
        return grads[0] * slope

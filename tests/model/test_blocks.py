"""Joining, cropping, states that no stage changes, and activations with explicit gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unet3d.model.blocks import FeatureState, LeanSwish, Swish, crop, join
from unet3d.model.unet import UNet3D


def ramp(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).reshape(1, 1, *size)


def test_crop_is_centred_and_an_odd_surplus_loses_the_last_plane() -> None:
    assert crop(ramp(1, 1, 6), torch.Size((1, 1, 2))).flatten().tolist() == [2, 3]
    assert crop(ramp(1, 1, 5), torch.Size((1, 1, 4))).flatten().tolist() == [0, 1, 2, 3]


def test_join_crops_whichever_is_larger() -> None:
    joined = join(ramp(8, 5, 4), 100 + ramp(4, 6, 4))
    assert joined.shape == (1, 2, 4, 5, 4)
    assert torch.equal(joined[:, :1], ramp(8, 5, 4)[:, :, 2:6])
    assert torch.equal(joined[:, 1:], 100 + ramp(4, 6, 4)[:, :, :, :5])


def test_join_keeps_what_a_long_stride_made_where_it_was() -> None:
    """A stride of 3 makes 8 voxels 3, and those 9: the surplus is at the end."""
    assert torch.equal(join(ramp(8, 4, 4), ramp(9, 6, 6))[:, 1:], ramp(9, 6, 6)[:, :, :8, :4, :4])


def test_stages_leave_their_state_as_it_was(network: Callable[..., UNet3D]) -> None:
    """A checkpointed segment runs twice on the same state."""
    model = network("model=unet_tiny", "model.activation=leaky_relu", "model.inplace=true")
    state: FeatureState | torch.Tensor = torch.randn(1, 1, 9, 8, 7)
    for stage in model:
        before = [t.clone() for t in _tensors(state)]
        first, second = stage(state), stage(state)
        assert all(torch.equal(a, b) for a, b in zip(before, _tensors(state), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(_tensors(first), _tensors(second), strict=True))
        state = first


def _tensors(state: FeatureState | torch.Tensor) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [state.x, *state.skips, *state.sides]


def test_lean_swish_passes_gradcheck() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LeanSwish(), (x,))


def test_lean_swish_equals_the_plain_one_and_torchs() -> None:
    x, y = (torch.linspace(-8, 8, 101).requires_grad_() for _ in range(2))
    lean, plain = LeanSwish()(x), Swish()(y)
    lean.sum().backward()
    plain.sum().backward()
    assert torch.equal(lean, plain)
    torch.testing.assert_close(lean, F.silu(x))
    torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("activation", "expected"), [(LeanSwish(), 1), (Swish(), 2)])
def test_lean_swish_keeps_one_tensor_where_the_plain_one_keeps_two(activation: nn.Module, expected: int) -> None:
    x = torch.randn(10, requires_grad=True)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()) or t, lambda t: t):
        activation(x)
    assert len(kept) == expected

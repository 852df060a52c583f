"""Activations with explicit gradients."""

import torch
import torch.nn.functional as F

from unet3d.model.blocks import LeanSwish, Swish


def test_lean_swish_passes_gradcheck() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LeanSwish(), (x,))


def test_lean_swish_equals_the_plain_one_and_torchs() -> None:
    x, y = (torch.linspace(-8, 8, 101).requires_grad_() for _ in range(2))
    lean, plain = LeanSwish()(x), Swish()(y)
    lean.sum().backward(), plain.sum().backward()
    assert torch.equal(lean, plain)
    torch.testing.assert_close(lean, F.silu(x))
    torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=0)


def test_lean_swish_keeps_one_tensor_where_the_plain_one_keeps_two() -> None:
    assert [_saved(LeanSwish()), _saved(Swish())] == [1, 2]


def _saved(module: torch.nn.Module) -> int:
    x = torch.randn(10, requires_grad=True)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()) or t, lambda t: t):
        module(x)
    return len(kept)

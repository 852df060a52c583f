"""Tensors without data behave as real ones."""

import pytest
import torch
from allocator import dispatch_modes
from guards import without

from unet3d.config import compose
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger
from unet3d.memory.simulate import simulate


def test_a_known_number_stays_known_until_data_changes_it() -> None:
    with fake_mode():
        count, data = torch.tensor(3.0), torch.zeros(4)
        later = (count + 1).detach()
        assert later.item() == 4 and count.item() == 3
        count += 2
        assert count.item() == 5
        count += data.sum()
        assert count.item() == 0 and data.sum().item() == 0


def test_kernels_behave_as_on_the_cpu() -> None:
    """In evaluation, batch norm saves statistics only on other devices."""
    norm = torch.nn.BatchNorm3d(5).eval()
    with Ledger() as real, torch.no_grad():
        norm(torch.zeros(1, 5, 4, 4, 4))
    with fake_mode():
        norm = torch.nn.BatchNorm3d(5).eval()
        with Ledger() as ledger, torch.no_grad():
            norm(torch.zeros(1, 5, 4, 4, 4))
    made = [[(s.bytes, s.operation) for s in one.storages if s.operation != "adopted"] for one in (ledger, real)]
    assert made[0] == [found for found in made[1] if "zero_" not in found[1]]


@without("unet3d.memory.fake_tensors.CONVOLUTION", None, only="smaller")
@pytest.mark.parametrize(
    ("channels", "stride", "groups"),
    [(2, 1, 1), (2, 1, 2), (2, 2, 1)],
    ids=["smaller than the image", "in groups", "larger"],
)
def test_transposed_convolutions_leave_the_storage_that_the_cpu_leaves(channels: int, stride: int, groups: int) -> None:
    """Torch's own kernel makes an output as large as the image, and resizes it."""

    def made() -> tuple[int, int]:
        layer = torch.nn.ConvTranspose3d(8, channels, 1, stride, groups=groups)
        with torch.no_grad():
            output = layer(torch.zeros(1, 8, 4, 4, 4))
        return output.untyped_storage().nbytes(), output.nbytes

    real = made()
    with fake_mode():
        assert made() == real
    with fake_mode("cuda"):
        storage_bytes, output_bytes = made()
    assert storage_bytes == output_bytes


def test_a_simulation_that_fails_leaves_no_observer_on_and_random_numbers_as_they_were() -> None:
    options = compose.compose(["model=unet_tiny", "model.in_channels=1", "model.classes=4", "data.patch=[16,16,8]"])

    def watch(model: torch.nn.Module, ledger: Ledger) -> None:
        model.register_forward_hook(fail)

    def fail(*arguments: object) -> None:
        raise KeyError("in a step")

    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="in a step"):
        simulate(options, options.model, watch=watch)
    assert not dispatch_modes() and torch.equal(torch.get_rng_state(), state)

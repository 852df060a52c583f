"""Over two hundred uses of a wrapped network, each compared with the same use of the plain one.

A use is equal, refused by name, or runs the plain network and says so; it is never different without a word.
"""

from collections.abc import Iterator

import pytest
from equality import drawn_schedules
from guards import without
from promises import promise
from uses import check
from uses_classes import CLASSES, HOOKS
from uses_forward import FORWARD
from uses_loops import LOOPS, OUTPUTS
from uses_settings import SETTINGS


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=3):
        yield


@promise(
    "Resume",
    "a use of a network under `recompute` that a trace does not see",
    "equal to plain, refused by name, or plain ([the list](recompute.md#what-is-seen-what-is-refused-what-runs-plain))",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "change what `forward` reads: numbers, texts, containers, objects, arrays, functions and what they close over, "
    "layers and their settings, methods and attributes of classes, variables of modules, tensors that are no "
    "buffers",
    "seen at the next pass: another schedule is found, or one that was found before is taken",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "change parameters and buffers, freeze or thaw, load a state, another mode of a layer",
    "seen",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "change an attribute that no code of the network names, such as a counter of your loop",
    "costs nothing",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "batch norm with `momentum=None`, in training",
    "refused, with its layer",
)
@promise(
    "Resume",
    "subclasses, parametrizations and gates, shared weights, repeated blocks, norms in evaluation, "
    "frozen layers, under `recompute`",
    "autograd's gradients",
)
@without("unet3d.recomputing.module.snapshot", lambda network, code: (), only="a dilation")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    check(SETTINGS[name])


@promise("Resume", "a use of a ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "hooks of parameters, of outputs, of the network itself",
    "run",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "hooks of layers, or of all modules, added at any time",
    "refused at the next pass, until they are removed",
)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str) -> None:
    check(HOOKS[name])


@promise("Resume", "a use of a ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "call methods of the network, `train()` of its own, `state_dict`, `net[0]`, `isinstance`, copy, pickle, "
    "`torch.save`",
    "they are the network's own: the object is one of a class made from the network's, and shares its state",
)
@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    check(CLASSES[name])


@promise("Resume", "a use of a ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "`forward` sets an attribute, also of the image or an output, or a buffer, appends to a list, counts",
    "refused, with its name: return it instead",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`forward` draws by Python's or NumPy's generators, or by a `torch.Generator` of its own",
    "refused: draw with torch's own generator",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "an autograd function with a backward of its own in `forward`",
    "refused, with its class",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`register_hook`, `retain_grad`, `autograd.grad` in `forward`",
    "refused, with the line",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`torch.utils.checkpoint` in `forward`",
    "left out; gradients are the same",
)
@promise("What is seen, what is refused, what runs plain", "`forward` depends on numbers ...")
@promise("Resume", "subclasses, parametrizations and gates ...")
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    """What forward leaves behind, draws and calls."""
    check(FORWARD[name])


@promise("Resume", "a use of a ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "the loss writes over an output, weights or buffers change before backward",
    "right, or an error in backward where the pass needs it again",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`create_graph=True`, a second backward of one pass, forward mode",
    "an error; call the network again, or take these of the plain one",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`retain_grad()` or a hook of an output from which the network computes others",
    "an error in backward: it would be a part of the gradient",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "hooks of saved tensors, or `torch.utils.checkpoint(use_reentrant=False)`, around a pass",
    "refused",
)
@promise(
    "What is seen, what is refused, what runs plain",
    "`eval()`, `torch.no_grad()`, an empty batch",
    "the network itself runs",
)
@promise("What is seen, what is refused, what runs plain", "an image of other channels ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "several images, or an image and other arguments, in training",
    "refused",
)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    """Losses, images and whatever else stands around a pass."""
    check(LOOPS[name])


@promise("Resume", "a use of a ...")
@promise(
    "What is seen, what is refused, what runs plain",
    "outputs in any structure, with constants, `None`, the image",
    "as plain",
)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    check(OUTPUTS[name])

"""A few of the golden numbers, tests/golden/numbers.json; `python tests/bench/oracle.py FILE --golden` compares all."""

import json

import pytest
from bench import oracle

from unet3d.memory.prediction import estimate

KEPT = json.loads(oracle.GOLDEN.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "device=cpu model=unet_tiny",
        "device=cuda model=unet_tiny ckpt=2 amp=true",
        "device=cuda model=unet_tiny model.norm=batch model.upsampling=trilinear batch=4 optim=sgd accumulate=2",
    ],
)
def test_a_prediction_is_what_it_always_was(words: str) -> None:
    found = estimate([*oracle.SMALL, *words.split()], half=False)
    sizes = {"allocated_bytes": found.step.allocated, "reserved_bytes": found.step.reserved}
    figures = oracle.figures({"parameters": found.parameters, "predicted": found.entry | sizes})
    assert not [*oracle.differences(KEPT["peaks"][words], figures)]

"""A few of the golden numbers, tests/golden/numbers.json; `python tests/bench/oracle.py FILE --golden` compares all."""

import json

import pytest
from bench import oracle

from unet3d.memory.preflight import estimate

KEPT = json.loads(oracle.GOLDEN.read_text())
BATCH_NORM = "model=unet_tiny model.norm=batch model.upsampling=trilinear"
SUPERVISED = "model=unet_tiny model.deep_supervision=true model.activation=swish"


@pytest.mark.slow
@pytest.mark.usefixtures("programs_of_runs")
@pytest.mark.parametrize(
    "words",
    [
        "device=cpu model=unet_tiny",
        "device=cuda model=unet_tiny ckpt=2 amp=true",
        "device=cpu model=unet_tiny recompute=lean",
        f"device=cpu {SUPERVISED} loss=dice optim.clip=null",
        f"device=cuda {BATCH_NORM} batch=4 optim=sgd accumulate=2",
    ],
)
def test_a_prediction_is_what_it_always_was(words: str) -> None:
    found = estimate([*oracle.SMALL, *words.split()], half=False)
    figures = oracle.figures({"parameters": found.parameters, "predicted": found.entry})
    assert json.loads(json.dumps(figures)) == KEPT["peaks"][words]

"""What a run says of its memory before it begins."""

from typing import Any

from unet3d import build
from unet3d.checks import budget_bytes
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.advise import advise
from unet3d.memory.plan import plan
from unet3d.memory.predict import predict
from unet3d.memory.tables import moment, sentence
from unet3d.table import mib


def forecast(config: Config, options: Model) -> dict[str, Any]:
    """Predict, print it, and return memory.json's first entries; none on CUDA, where nothing is predicted yet.

    Raises UserError where the step needs more than `budget`.
    """
    if build.device(config).type != "cpu":
        return {}
    found = predict(config, options)
    parameters, peak = found.pop("parameters"), found["peak_bytes"]
    where = moment(found)
    print(f"{parameters:,} parameters; predicted peak of a step {mib(peak)} MiB (ledger), {where}", flush=True)
    if config.budget is not None and peak > budget_bytes(config.budget):
        raise UserError(plan(config, options, budget_bytes(config.budget)))
    advice = advise(config, options, found)
    print(sentence(advice, peak), flush=True)
    return {"parameters": parameters, "predicted": found, "advice": advice}

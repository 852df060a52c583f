"""What would fit a budget: levers one after the other, each with the peak that a dry run predicts."""

from collections.abc import Iterator
from dataclasses import replace

from unet3d.checks import stages
from unet3d.config import Config, Model
from unet3d.memory.advise import overrides
from unet3d.memory.predict import predict
from unet3d.table import mib


def plan(config: Config, options: Model, budget: int) -> str:
    """What would fit, one change after the other: those that leave the network as it is first, a narrower one last."""
    lines = [f"budget={config.budget}: the step does not fit. Predicted peaks with"]
    chosen: dict[str, str] = {}
    for override, changed, changed_options in levers(config, options):
        chosen[override.partition("=")[0]] = override  # a narrower net takes the place of a narrow one
        peak = predict(changed, changed_options)["peak_bytes"]
        lines.append(f"  {mib(peak):>10} MiB  {' '.join(chosen.values())}{'  (fits)' if peak <= budget else ''}")
        if peak <= budget:
            return "\n".join(lines)
    return "\n".join([*lines, "nothing of this fits; a smaller data.patch would"])


def levers(config: Config, options: Model) -> Iterator[tuple[str, Config, Model]]:
    """Overrides to add one by one, each with the config and model options that they lead to together."""
    if not config.amp:
        config = replace(config, amp=True)
        yield "amp=true", config, options
    if not config.ckpt:
        choices = [replace(config, ckpt=n) for n in range(2, stages(options) + 1)]
        config = min(choices, key=lambda choice: predict(choice, options)["peak_bytes"])
        yield f"ckpt={config.ckpt}", config, options
    if config.batch > 1:
        parts = config.batch * config.accumulate
        config = replace(config, batch=1, accumulate=parts)
        yield f"batch=1 accumulate={parts}", config, options
    while min(options.features) >= 16:
        halved = [width // 2 for width in options.features]
        decoder = None if options.decoder is None else [width // 2 for width in options.decoder]
        options = replace(options, features=halved, decoder=decoder)
        yield overrides(options), config, options

"""A run in a few sentences and numbers, for its page and for the closing lines on the terminal."""

from statistics import median

from unet3d.base.types import mib
from unet3d.report.case_scores import shown
from unet3d.report.score_tables import score_table
from unet3d.run.record import RunRecord
from unet3d.run.shapes import as_number


def what_ran(run: RunRecord) -> str:
    """Return the config in one line; "" unless it is whole."""
    config = run.settings
    try:
        model = config["model"]
        data = config["data"]
        network = model.get("path") or f"U-Net {'-'.join(map(str, model['features']))}"
        patch = "x".join(map(str, data["patch"]))
        patches = config["batch"] * config["accumulate"]
        parts = [
            f"{network} on {data['format']}",
            f"{config['steps']} steps of {patches} patches of {patch} voxels",
            f"AMP {_way(config['amp'])}",
            f"checkpointing {_way(config['ckpt'])}",
            f"recompute {_way(config.get('recompute'))}",
            f"seed {config['seed']}",
        ]
    except (AttributeError, KeyError, TypeError):  # not a whole config
        return ""
    return ", ".join(parts)


def _way(value: object) -> str:
    """Return an option that saves memory as `on`, `off` or its value."""
    if value in (None, "none"):
        return "off"
    return "on" if value is True else str(value or "off")


def highlights(run: RunRecord) -> dict[str, str]:
    """Return the few numbers of a run that matter most, by name."""
    numbers = {}
    scores = score_table(run).rows
    if scores:
        name, dice, *_ = scores[-1]
        numbers[f"Dice, {name}"] = dice
    best = run.best_validation
    if best:
        spacing = f", at {run.spacing}" if run.has_own_grids else ""
        dice = shown("dice", as_number(best["val/dice_mean"]))
        numbers["best Dice"] = f"{dice} (step {best['step']:,}{spacing})"
    if run.memory:
        numbers[f"peak memory, {run.memory_kind}"] = f"{mib(run.memory_entry['peak_bytes'])} MiB"
        numbers["parameters"] = f"{run.memory['parameters']:,}"
    if run.last_step is not None:
        numbers["steps done"] = f"{run.last_step:,}"
    return numbers


def timing(run: RunRecord) -> dict[str, str]:
    """Return step time, the share of it that was waiting for data, and validation time; each with its unit."""
    steps = run.values("time/step_s")
    waits = run.values("time/data_wait_s")
    validations = run.values("time/val_s")
    times = {}
    if sum(steps):
        switches = f" ({run.switches})" if run.switches else ""
        times["step, median"] = f"{median(steps):.3g} s{switches}"
        times["waiting for data"] = f"{sum(waits) / sum(steps):.1%} of step time"
    if validations:
        times["validation, median"] = f"{median(validations):.3g} s"
    return times


def memory_kind(run: RunRecord) -> str:
    """Return how the bytes of a run with memory were counted."""
    kind = run.memory_entry["kind"]
    return f"{run.memory_kind.capitalize()} ({kind}): peak bytes of a step, in MiB (2^20 bytes)."


def prediction(run: RunRecord) -> str:
    """Return the peak that was predicted before the run, and how far the measured one is from it."""
    if run.memory_kind == "predicted" and run.records:
        return "Predicted before the run, which ended before its memory was written."
    if run.memory_kind == "predicted":
        return "Predicted on tensors without data; nothing was run."
    if "error_bytes" not in run.memory:
        return "The peak was not predicted."
    predicted = mib(run.memory["predicted"]["peak_bytes"])
    error = f"{run.memory['error_bytes']:,}"
    of_ranks = [mib(size) for size in run.memory["measured"].get("rank_peak_bytes", [])]
    peaks = f"Peak of each rank, measured: {', '.join(of_ranks)} MiB. " if of_ranks else ""
    return f"{peaks}Peak predicted before the run: {predicted} MiB; predicted minus measured: {error} bytes."

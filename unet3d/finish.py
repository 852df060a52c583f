"""What a finished run leaves behind: memory.json, what is missing of its predictions, wandb's pictures and summary."""

from collections.abc import Mapping
from typing import Any

from unet3d import record
from unet3d.memory import figures as memory_figures
from unet3d.resuming import flat
from unet3d.run import Run


def finish(run: Run) -> None:
    """Write everything that is known at the end; predictions are those of the last weights, or of their average."""
    run.keep_measured()
    if "measured" in (memory := record.memory(run.folder)):  # by steps taken before the run was stopped, perhaps
        _tell_memory(run, memory)
    with run.averaged():
        run.predictions.complete(run.predictor)
    if run.predictions.picture.exists():
        run.sinks.image("val/prediction", run.predictions.picture, run.trainer.step)
    (run.folder / "report.html").unlink(missing_ok=True)  # of an earlier end; one is written next
    record.end(run.folder, "done", 0)


def _tell_memory(run: Run, memory: Mapping[str, Any]) -> None:
    """Files and pictures of the measured steps; the same to the sinks, as tables, pictures and summary."""
    measured, pictures = memory["measured"], run.folder / "figures"
    memory_figures.phases(measured, pictures / "memory_phases.png")
    seen = measured.get("ledger", measured)
    memory_figures.along_the_u(seen, pictures / "memory_layers.png")
    for name in ("phases", "timeline", "layers"):
        if (path := pictures / f"memory_{name}.png").exists():
            run.sinks.image(f"memory/{name}_picture", path, run.trainer.step)
    rows = [[phase, peaks["first"], peaks["steady"]] for phase, peaks in measured["phases"].items()]
    run.sinks.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
    for name in ("levels", "layers"):
        head = [key if key in ("level", "module", "bytes") else f"{key} (bytes)" for key in seen[name][0]]
        run.sinks.table(f"memory/{name}", head, [list(row.values()) for row in seen[name]])
    run.sinks.scalars({"memory/peak_allocated_bytes": measured["peak_bytes"]}, run.trainer.step)
    scalars = {key: value for key, value in flat(memory, "/", "memory/").items() if not isinstance(value, list)}
    run.sinks.summary(scalars)

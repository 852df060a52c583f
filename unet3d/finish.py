"""What a finished run leaves behind: memory.json, predictions of the held-out cases, a picture, wandb's summary."""

from collections.abc import Mapping
from typing import Any

from unet3d import figures, record
from unet3d.apply import Segmenter
from unet3d.memory import figures as memory_figures
from unet3d.memory import save
from unet3d.resuming import flat
from unet3d.run import Run


def finish(run: Run) -> None:
    """Write everything that is known at the end; predictions and scores are those of the last weights."""
    if run.is_measured:
        _tell_memory(run, record.add_measured(run.folder, _parameters(run), run.meter.summary()))
    with run.averaged():
        _predict_held_out(run)
    record.end(run.folder, "done", 0)


def _parameters(run: Run) -> int:
    return sum(p.numel() for p in run.model.parameters())


def _tell_memory(run: Run, memory: Mapping[str, Any]) -> None:
    """Files and pictures of the measured steps; the same to the sinks, as tables, pictures and summary."""
    measured, pictures = memory["measured"], run.folder / "figures"
    save.write(run.meter.ledger, run.folder.name, run.folder)
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


def _predict_held_out(run: Run) -> None:
    """A label map for each held-out case, and a picture of the first."""
    segmenter = Segmenter(run.predictor, run.data.read.intensity, run.config.data.spacing)
    for index, case in enumerate(run.data.val):
        volume, labels = segmenter.to_file(case, run.folder / "predictions" / f"{case.id}.nii.gz")
        if index == 0:
            truth = run.data.read(case).label.numpy()
            path = run.folder / "figures" / "prediction.png"
            classes = run.data.task.classes
            figures.prediction(volume.image[0], truth, labels.numpy(), volume.spacing, classes, path, case.id)
            run.sinks.image("val/prediction", path, run.trainer.step)

"""What a finished run leaves behind: memory.json, predictions of the held-out cases, a picture, wandb's summary."""

from unet3d import figures, record
from unet3d.apply import Segmenter
from unet3d.resuming import flat
from unet3d.run import Run


def finish(run: Run) -> None:
    """Write everything that is known at the end; predictions and scores are those of the last weights."""
    memory = record.add_measured(run.folder, sum(p.numel() for p in run.model.parameters()), run.meter.summary())
    measured = memory["measured"]
    _predict_held_out(run)
    run.sinks.scalars({"memory/peak_allocated_bytes": measured["peak_bytes"]}, run.trainer.step)
    rows = [[phase, peaks["first"], peaks["steady"]] for phase, peaks in measured["phases"].items()]
    run.sinks.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
    run.sinks.summary(flat(memory, "/", "memory/"))
    record.end(run.folder, "done", 0)


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

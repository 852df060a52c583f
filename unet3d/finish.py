"""What a finished run leaves behind: memory.json, predictions of the held-out cases, a picture, wandb's summary."""

from collections.abc import Mapping
from typing import Any

from unet3d import figures, record
from unet3d.apply import Segmenter
from unet3d.run import Run


def finish(run: Run) -> None:
    """Write everything and close the sinks."""
    memory = record.add_measured(run.folder, sum(p.numel() for p in run.model.parameters()), run.meter.summary())
    _predict_held_out(run)
    _picture(run)
    run.sinks.scalars({"memory/peak_allocated_bytes": memory["measured"]["peak_bytes"]}, run.trainer.step)
    run.sinks.summary(flat(memory, "memory"))
    run.sinks.close(0)
    record.end(run.folder, "done", 0)


def _predict_held_out(run: Run) -> None:
    segmenter = Segmenter(run.predictor, run.data.read.intensity, run.config.data.spacing)
    for case in run.data.val:
        segmenter.to_file(case, run.folder / "predictions" / f"{case.id}.nii.gz")


def _picture(run: Run) -> None:
    """The first held-out case: image, truth, prediction."""
    case = run.data.read(run.data.val[0])
    prediction = run.predictor.probabilities(case.image).argmax(0).numpy()
    path = run.folder / "figures" / "prediction.png"
    classes = run.data.task.classes
    figures.prediction(case.image[0].numpy(), case.label.numpy(), prediction, case.spacing, classes, path, case.case)
    run.sinks.image("val/prediction", path, run.trainer.step)


def flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`{a: {b: 1}}` as `{prefix/a/b: 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}/{key}") if isinstance(value, Mapping) else {f"{prefix}/{key}": value}
    return values

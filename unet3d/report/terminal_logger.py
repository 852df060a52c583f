"""A run on the terminal: a progress bar, or plain lines where there is no terminal, and the Dice of validations."""

import time
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console

from unet3d.base.errors import escaped
from unet3d.base.progress import Counter, duration
from unet3d.report.loggers import Scalar

PLAIN_LINES = 20  # of a run, about


class TerminalLogger:
    """Shows losses in a bar, or in plain lines where there is no terminal; prints the Dice of each validation."""

    def __init__(self, steps: int, terminal: Console | None = None, switches: str = "", grid: str = "") -> None:
        """`switches` is printed beside the seconds per step, `grid`, on which cases are scored, beside the Dice."""
        self.steps = steps
        self.terminal = terminal or Console()
        self.switches = f" ({switches})" if switches else ""
        self.grid = f"  ({grid})" if grid else ""
        self.every = max(1, steps // PLAIN_LINES)
        self.started = time.perf_counter()
        self.first: int | None = None  # step of this process, which may have resumed
        self.seconds: list[float] = []  # of each step since the last plain line
        self.validating = 0.0  # seconds so far
        self.dice: list[float] = []
        self.bar = Counter("training", steps, self.terminal, plain_lines=False)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        if "train/loss" in values:
            self._training(values, step)
        elif "val/dice_mean" in values:
            self._validation(values, step)

    def _training(self, values: Mapping[str, Scalar], step: int) -> None:
        if self.first is None:
            self.first = step
        self.seconds.append(float(values["time/step_s"] or 0))
        loss = f"loss {values['train/loss']:.4f}"
        best = ""
        if self.dice:
            best = f"  Dice {self.dice[-1]:.3f}, best {max(self.dice):.3f}"
        self.bar.reach(step, f"{loss}{best}")
        is_due = step % self.every == 0 or step == 1
        if is_due and not self.bar.has_bar:
            self._line(step, f"{loss}  {fmean(self.seconds):.2f} s/step{self.switches}{self._left(step)}")
            self.seconds.clear()

    def _validation(self, values: Mapping[str, Scalar], step: int) -> None:
        self.validating += float(values.get("time/val_s") or 0)
        mean = values["val/dice_mean"]
        if isinstance(mean, float):
            self.dice.append(mean)
        scores = []
        for key, value in values.items():
            if key.startswith("val/dice"):
                shown = f"{value:.4f}" if isinstance(value, float) else "n/a"
                scores.append(f"{key.removeprefix('val/')} {shown}")
        self._line(step, "  ".join(scores) + self.grid)

    def _left(self, step: int) -> str:
        """Return the time left, from the steps since the last line and all validations so far; "" after the last."""
        assert self.first is not None
        left = self.steps - step
        if not left:
            return ""
        steps_here = step - self.first + 1
        seconds_per_step = fmean(self.seconds) + self.validating / steps_here
        return f"  {duration(seconds_per_step * left)} left"

    def _line(self, step: int, text: str) -> None:
        elapsed = time.perf_counter() - self.started
        line = escaped(f"{duration(elapsed):>8}  step {step:>5}/{self.steps}  {text}")
        # classes may be called [a], [/b] or :skull:
        self.terminal.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self, exit_code: int) -> None:
        self.bar.close()

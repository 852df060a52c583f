"""The memory of a training step, before it runs and as it runs.

`explain` and `predict` are for any network, from Python, and `assert_below` is for its tests; torch loads when they
are used.

In reading order: `tracker` and `ledger` record each tensor storage and the module that made it; `copies` and
`counters` add what happens within convolutions on a GPU; `levels` and `analysis` say who holds the bytes; `meter` reads
the peaks of a step. `fake_tensors` and `simulate` take the step without its memory; `stage_profile`, `peak` and
`checkpoint_plan` compare ways to split it into segments; `recompute_plan` chooses the schedule of `recompute`, which
memory.json keeps as a `saved_schedule`; `technique` is either. `variants`, `budget` and `out_of_memory` find what fits;
`allocator` replays CUDA's allocator. `preflight` is what a run prints first; `profile` and `user_module` are for
networks of others; `check` sets a prediction beside a limit; `tables`, `export` and `usual_estimates` show the figures.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unet3d.memory.check import assert_below
    from unet3d.memory.profile import explain, predict

__all__ = ["assert_below", "explain", "predict"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "assert_below":
        from unet3d.memory.check import assert_below

        return assert_below
    from unet3d.memory import profile

    return getattr(profile, name)


def __dir__() -> list[str]:
    return __all__

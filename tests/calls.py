"""Counts of the operations that torch's dispatcher passes on."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

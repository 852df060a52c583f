"""Follows the maps and gradients that are there through the instructions of a schedule."""

from collections.abc import Iterable, Sequence

from unet3d.recomputing.compiler import Backward, BeginBackward, Compute, Instruction, NormBackward, Release, Sizes
from unet3d.recomputing.search import Schedule


def is_sound(sizes: Sizes, schedule: Schedule) -> bool:
    """Return whether no instruction reads a map or a gradient that is not there, and all gradients are complete."""
    alive = _Alive(sizes)
    for instruction in schedule.instructions:
        if not alive.takes(instruction):
            return False
    return not alive.gradients


class _Alive:
    """The maps and gradients that are there between two instructions."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.maps: set[int] = set()
        self.gradients: set[int] = set()
        self.complete: set[int] = set()  # maps whose gradients have the statistics' part

    def takes(self, instruction: Instruction) -> bool:
        """Return whether all that an instruction reads is there, and follow it."""
        sizes = self.sizes
        match instruction:
            case Compute():
                return self._takes_compute(instruction)
            case Release(index):
                if index not in self.maps:
                    return False
                self.maps.discard(index)
            case BeginBackward():
                self.gradients |= {index for index in sizes.outputs if sizes.needs_gradient[index]}
                self.maps -= {index for index in self.gradients if not sizes.users[index]}
            case NormBackward(index, streamed):
                self.complete.add(index)
                is_there = index in self.maps if streamed is None else self._has(sizes.sources[index], streamed)
                return is_there and index in self.gradients
            case Backward():
                return self._takes_backward(instruction)
        return True

    def _has(self, sources: Iterable[int], streamed: Sequence[int]) -> bool:
        """Return whether sources are there, or cheap stems that are streamed."""
        are_cheap = all(self.sizes.is_cheap_stem[source] for source in streamed)
        return are_cheap and set(sources) - set(streamed) <= self.maps

    def _takes_compute(self, make: Compute) -> bool:
        if not self._has(self.sizes.sources[make.map], make.streamed) or make.map in self.maps:
            return False
        if make.inplace_on is not None:
            self.maps.discard(make.inplace_on)
        self.maps.add(make.map)
        return True

    def _takes_backward(self, send: Backward) -> bool:
        index = send.map
        is_complete = not self.sizes.is_normalised[index] or index in self.complete
        has_sources = self._has(self.sizes.reads[index], send.streamed)
        if not is_complete or not has_sources or index not in self.gradients:
            return False
        self.gradients.discard(index)
        self.complete.discard(index)  # another part of it may follow
        for source, place in send.targets:
            if (place == "add") != (source in self.gradients):
                return False
            if place == "map":
                if source not in self.maps:
                    return False
                if send.is_two_pass and source != send.targets[-1].source:
                    return False  # the second pass reads it
                self.maps.discard(source)
            self.gradients.add(source)
        if send.is_two_pass:
            self.complete.add(send.targets[-1].source)
        return True

"""A check that a schedule can be carried out: it follows the maps and gradients that are there."""

from collections.abc import Iterable, Sequence

from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.instructions import Complete, CompleteRows, Free, Instruction, Make, Send, SendTwice, Turn
from unet3d.recomputing.schedule import Schedule


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
            case Make():
                return self._takes_make(instruction)
            case Free(index):
                if index not in self.maps:
                    return False
                self.maps.discard(index)
            case Turn():
                self.gradients |= {index for index in sizes.outputs if sizes.needs_gradient[index]}
                self.maps -= {index for index in self.gradients if not sizes.users[index]}
            case Complete(index):
                self.complete.add(index)
                return index in self.maps and index in self.gradients
            case CompleteRows(index, through):
                self.complete.add(index)
                return self._has(sizes.sources[index], through) and index in self.gradients
            case Send() | SendTwice():
                return self._takes_send(instruction)
        return True

    def _has(self, sources: Iterable[int], through: Sequence[int]) -> bool:
        """Return whether sources are there, or thin ones that are in passing."""
        is_thin = all(self.sizes.is_thin[source] for source in through)
        return is_thin and set(sources) - set(through) <= self.maps

    def _takes_make(self, make: Make) -> bool:
        if not self._has(self.sizes.sources[make.map], make.through) or make.map in self.maps:
            return False
        if make.over is not None:
            self.maps.discard(make.over)
        self.maps.add(make.map)
        return True

    def _takes_send(self, send: Send | SendTwice) -> bool:
        index = send.map
        is_complete = not self.sizes.is_normalised[index] or index in self.complete
        has_sources = self._has(self.sizes.reads[index], send.through)
        if not is_complete or not has_sources or index not in self.gradients:
            return False
        self.gradients.discard(index)
        self.complete.discard(index)  # another part of it may follow
        is_twice = isinstance(send, SendTwice)
        for source, place in send.targets:
            if (place == "add") != (source in self.gradients):
                return False
            if place == "map":
                if source not in self.maps:
                    return False
                if is_twice and source != send.targets[-1].source:
                    return False  # the second pass reads it
                self.maps.discard(source)
            self.gradients.add(source)
        if is_twice:
            self.complete.add(send.targets[-1].source)
        return True

"""Derived tensors, computed from weights alone: `weight_norm`'s weights, masks and position tables of an attention.

Those that only groups read are computed within each group, just before they are read, and forgotten behind it: they may
be as large as a map. All others are computed before the pass, and autograd follows them from there to the weights.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from torch import Tensor

from unet3d.recomputing.graph import Derived, Graph, Value, Weight, leaves
from unet3d.recomputing.rules import filled

Steps = tuple[Derived, ...]  # in the graph's order, which is that of what is written in place


def connected(graph: Graph) -> list[Steps]:
    """Return the derived tensors in sets that are computed from one another."""
    set_of: dict[str, list[Derived]] = {}
    for derived in graph.derived:
        together = [derived]
        for name in names_read([derived]):
            before = set_of.get(name)
            if before is None or before is together:
                continue
            for other in together:
                if other not in before:
                    before.append(other)
            together = before
        for other in together:
            set_of[other.name] = together
    place = {derived: index for index, derived in enumerate(graph.derived)}
    unique = {id(together): together for together in set_of.values()}
    return [tuple(sorted(together, key=place.__getitem__)) for together in unique.values()]


def within(graph: Graph, grouped: Set[Value]) -> list[Steps]:
    """Return the connected derived tensors that groups alone read."""
    read_elsewhere: set[str] = set()
    for value in graph.values:
        if value not in grouped:
            read_elsewhere.update(weight.name for weight in value.weights())
    return [steps for steps in connected(graph) if read_elsewhere.isdisjoint(_names(steps))]


def _names(steps: Steps) -> list[str]:
    return [derived.name for derived in steps]


def names_read(steps: Iterable[Derived]) -> list[str]:
    """Return the names of the weights that are read and not computed by these steps, in order."""
    names: dict[str, None] = {}
    computed = set()
    for derived in steps:
        for leaf in leaves((derived.args, tuple(derived.kwargs.values()))):
            if isinstance(leaf, Weight) and leaf.name not in computed:
                names[leaf.name] = None
        computed.add(derived.name)
    return list(names)


def derive(steps: Sequence[Derived], known: Mapping[str, Tensor], wanted: Set[str]) -> dict[str, Tensor]:
    """Return the wanted ones of derived tensors; others are forgotten behind their last reader."""
    last_reader: dict[str, Derived] = {}
    for derived in steps:
        last_reader[derived.name] = derived
        for name in names_read([derived]):
            last_reader[name] = derived
    results: dict[str, Tensor] = {}
    for derived in steps:
        names = names_read([derived])
        weights: dict[Value | Weight, Tensor | None] = {}
        for leaf in leaves((derived.args, tuple(derived.kwargs.values()))):
            if not isinstance(leaf, Weight):
                continue
            weights[leaf] = results[leaf.name] if leaf.name in results else known[leaf.name]
        args = [filled(leaf, weights) for leaf in derived.args]
        kwargs = {name: filled(leaf, weights) for name, leaf in derived.kwargs.items()}
        results[derived.name] = derived.target(*args, **kwargs)
        for name in (derived.name, *names):
            if name in results and last_reader[name] is derived and name not in wanted:
                del results[name]
        weights.clear()
        del args, kwargs
    return results

"""Derived tensors, computed from weights alone: `weight_norm`'s weights, masks and position tables of an attention.

Random numbers are among them, also those that dropouts draw: in the network's order, so that they are plain's.

Those that only groups read are computed within each group, just before they are read, and forgotten behind it: they may
be as large as a map. All others are computed before the pass, and autograd follows them from there to the weights.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from torch import Tensor

from unet3d.recomputing.graph import Derived, Graph, Value, Weight, leaves, operation_name
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
    """Return the connected derived tensors that groups alone read, without those of once a pass.

    Those are random numbers, and changes of buffers, with all that is computed from the same buffers.
    """
    read_elsewhere = graph.returned_weights()
    for value in graph.values:
        if value not in grouped:
            read_elsewhere.update(weight.name for weight in value.weights())
    inner = [steps for steps in connected(graph) if read_elsewhere.isdisjoint(_names(steps))]
    once = [derived for derived in graph.derived if derived.is_once]
    changed = set(names_read(once)) | {derived.name for derived in once}
    return [steps for steps in inner if changed.isdisjoint((*_names(steps), *names_read(steps)))]


def trained_names(graph: Graph, trained: Iterable[str]) -> frozenset[str]:
    """Return the names of trained weights, and of the derived tensors that are connected with them."""
    names = set(trained)
    for steps in connected(graph):
        followed = [derived for derived in steps if operation_name(derived.target) != "detach"]
        if not names.isdisjoint(names_read(followed)):
            names.update(_names(steps))
    return frozenset(names)


def drawn_bytes(graph: Graph, wanted: Set[str]) -> int:
    """Return the bytes of random numbers, and of what is computed from them, that a pass keeps."""
    drawn = [steps for steps in connected(graph) if any(derived.is_once for derived in steps)]
    return sum(derived.size for steps in drawn for derived in steps if derived.name in wanted)


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
        result = derived.target(*args, **kwargs)
        results[derived.name] = result if derived.element is None else result[derived.element]
        del result
        for name in (derived.name, *names):
            if name in results and last_reader[name] is derived and name not in wanted:
                del results[name]
        weights.clear()
        del args, kwargs
    return results

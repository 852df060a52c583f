"""Groups: operations without a rule that are carried out at once, with what lies between them.

A group has one result, which is a map, and reads maps. Within it views are views, and nothing stays: backward runs the
group again, under autograd, and frees each value as it goes. So a group is cut where a map costs little and saves much:
at the sums of residual branches, and where a value is small beside what is computed before and behind it. What can be
carried out in parts along a dimension, as an attention along its windows, is a group of its own.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from unet3d.recomputing.along import follow
from unet3d.recomputing.graph import Graph, Value, gives_view
from unet3d.recomputing.rules import Rule

SUMS = ("add", "sub")
SMALL = 8  # bytes of a segment, on either side of a map, to those of the map at which a group is cut
Users = Mapping[Value, Sequence[Value]]


def grouped_values(graph: Graph, rules: Mapping[Value, Rule | None], users: Users) -> set[Value]:
    """Return the values of groups: those without a rule, and those with one that lie between them."""
    grouped = set(graph.values)
    for value in graph.values:
        rule = rules[value]
        if rule is not None and rule.is_never_grouped:
            grouped.discard(value)
    has_changed = True
    while has_changed:
        has_changed = False
        for value in graph.values:
            if rules[value] is None or value not in grouped:
                continue
            is_behind = all(source in grouped for source in value.inputs)
            is_before = any(reader in grouped for reader in users[value])
            if not is_behind or not is_before:
                grouped.discard(value)
                has_changed = True
    return grouped


def results_of_groups(graph: Graph, grouped: Set[Value], users: Users) -> set[Value]:
    """Return the values that are the results of groups."""
    results = {value for value in graph.outputs if value in grouped}
    _add_shared(graph, grouped, users, results)
    for result in tuple(results):
        results.update(_cuts(_group(graph, result, grouped, results)))
    for result in tuple(results):
        results.update(_part(_group(graph, result, grouped, results), results, users))
    _add_shared(graph, grouped, users, results)
    return results


def _add_shared(graph: Graph, grouped: Set[Value], users: Users, results: set[Value]) -> None:
    """Add the values that are read outside of groups, and those that several groups would compute."""
    results_from: dict[Value, set[Value]] = {}
    for value in reversed(graph.values):
        if value not in grouped:
            continue
        readers = users[value]
        reached: set[Value] = set()
        for reader in readers:
            if reader in grouped:
                reached |= results_from[reader]
        is_read_elsewhere = any(reader not in grouped for reader in readers)
        is_of_several = len(reached) > 1 and not gives_view(value.target)  # a view is taken anew in each
        if is_read_elsewhere or is_of_several:
            results.add(value)
        results_from[value] = {value} if value in results else reached


def first_of_group(group: Sequence[Value]) -> Value:
    """Return the first value of a group that is no view, by which it is called."""
    return next((value for value in group if not gives_view(value.target)), group[-1])


def _group(graph: Graph, result: Value, grouped: Set[Value], results: Set[Value]) -> list[Value]:
    """Return the values of a group, in the graph's order."""
    group = {result}
    waiting = [result]
    while waiting:
        for source in waiting.pop().inputs:
            if source in grouped and source not in results and source not in group:
                group.add(source)
                waiting.append(source)
    return [value for value in graph.values if value in group]


def _cuts(group: Sequence[Value]) -> list[Value]:
    """Return the values at which a group is cut."""
    waists = _waists(group)
    sums = [place for place in waists if _is_sum_of_maps(group[place])]
    cuts = list(sums)
    for first, end in pairwise([-1, *sums, len(group) - 1]):
        start = first + 1
        for place in waists:
            if not start < place < end:
                continue
            least = SMALL * _bytes(group[place])
            before = sum(_bytes(value) for value in group[start:place])
            behind = sum(_bytes(value) for value in group[place + 1 : end])
            if before >= least and behind >= least:
                cuts.append(place)
                start = place + 1
    return [group[place] for place in cuts]


def _waists(group: Sequence[Value]) -> list[int]:
    """Return the places of values behind which nothing is read that was read or made before, but the value itself."""
    place_of = {value: place for place, value in enumerate(group)}
    last_read: dict[Value, int] = {}
    first_read: dict[Value, int] = {}
    for place, value in enumerate(group):
        for source in value.inputs:
            last_read[source] = place
            first_read.setdefault(source, place)
    waists = []
    for place, value in enumerate(group[:-1]):
        if gives_view(value.target):
            continue
        is_waist = True
        for source, last in last_read.items():
            first = place_of.get(source, first_read[source])
            if source is not value and first <= place < last:
                is_waist = False
        if is_waist:
            waists.append(place)
    return waists


def _part(group: Sequence[Value], results: Set[Value], users: Users) -> Set[Value]:
    """Return the results at which a group is cut so that most of it can be carried out in parts along a dimension."""
    cut: Set[Value] = set()
    most = 0
    for place, last in enumerate(group):
        if gives_view(last.target):
            continue
        for dimension, length in enumerate(last.shape):
            if length == 1:
                continue
            part, before = _part_before(group[: place + 1], dimension, users)
            saved = sum(_bytes(value) for value in part) - _bytes(last)
            edges = ({last} | before) - results
            cost = sum(value.shape.numel() * value.dtype.itemsize for value in edges)
            if saved >= SMALL * cost and saved - cost > most:
                most = saved - cost
                cut = edges
    return cut


def _part_before(group: Sequence[Value], dimension: int, users: Users) -> tuple[set[Value], set[Value]]:
    """Return the values through which a dimension of a group's result is followed, and the values before them."""
    places = {group[-1]: dimension}
    part: set[Value] = set()
    before: set[Value] = set()
    read_elsewhere: set[Value] = set()  # also through views, which are taken anew
    for value in reversed(group):
        if value not in places:
            continue
        if value is not group[-1] and any(reader not in part for reader in users[value]):
            read_elsewhere.add(value)
        of_arguments = follow(value, places[value])
        is_view = gives_view(value.target)
        if of_arguments is None or (value in read_elsewhere and not is_view):
            before.add(value)
            continue
        part.add(value)
        if value in read_elsewhere:
            read_elsewhere.update(value.inputs)
        for source, place in of_arguments.items():
            if isinstance(source, Value) and places.setdefault(source, place) != place:
                return set(), set()
    return part, before


def _is_sum_of_maps(value: Value) -> bool:
    if value.op not in SUMS or len(value.inputs) < 2:
        return False
    return all(source.shape == value.shape for source in value.inputs)


def _bytes(value: Value) -> int:
    """Return the bytes that an operation makes."""
    if gives_view(value.target):
        return 0
    return value.shape.numel() * value.dtype.itemsize

"""Groups: operations without a rule that are carried out at once, with what lies between them.

A group has one result, which is a map, and reads maps. Within it views are views, and nothing stays: backward runs the
group again, under autograd, and frees each value as it goes. So a group is cut where a map costs little and saves much:
at the sums of residual branches, and where a value is small against what is computed before and behind it.

A group may be carried out in parts along a dimension: windows, heads, tokens or images. The dimension may have another
place in each value: attention's windows are the first dimension of the tokens, and the second of the queries, keys and
values that are made of them at once. What can be carried out so, as an attention along its windows, is a group apart.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from unet3d.recomputing.graph import Graph, Value, Weight, arguments, carried_out, gives_view
from unet3d.recomputing.rules import Rule, Span
from unet3d.recomputing.rules.pointwise import POINTWISE

SUMS = ("add", "sub")
SMALL = 8  # A group is cut at a map of which a segment on either side has this many times the bytes.
# How a dimension of a result is found in the arguments of operations.
MATCHED = {*POINTWISE.split(), "add", "dropout", "leaky_relu", "relu", "sub", "to"}
SIZED = ("view", "reshape", "_unsafe_view")  # Their second argument is the size of the result.
OTHER_VIEWS = "chunk flatten permute select slice split transpose unbind unflatten unsqueeze"
PRODUCTS = ("matmul", "bmm")
ATTENTION = "scaled_dot_product_attention"
SOFTMAX = ("softmax", "log_softmax")
Users = Mapping[Value, Sequence[Value]]
Places = dict[Value | Weight, int]  # a dimension's place in the arguments; weights without it are read as a whole


def grouped_values(graph: Graph, rules: Mapping[Value, Rule | None], users: Users) -> set[Value]:
    """Return the values of groups: those without a rule, and those with one that lie between them."""
    grouped = set()
    for value in graph.values:
        rule = rules[value]
        if rule is None or not rule.is_never_grouped:
            grouped.add(value)
    while True:
        stay = set()
        for value in grouped:
            is_behind = all(source in grouped for source in value.inputs)
            is_between = is_behind and any(reader in grouped for reader in users[value])
            if is_between or rules[value] is None:
                stay.add(value)
        if stay == grouped:
            return grouped
        grouped = stay


def results_of_groups(graph: Graph, grouped: Set[Value], users: Users) -> set[Value]:
    """Return the values that are the results of groups."""
    results = {value for value in graph.outputs if value in grouped}
    _add_shared(graph, grouped, users, results)
    others = {graph.image, *graph.values} - grouped
    for result in tuple(results):
        group, _ = graph.expression(result, others | results)
        results.update(_cuts(group))
    for result in tuple(results):
        group, _ = graph.expression(result, others | results)
        results.update(_part(group, results, users))
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
        is_of_several = len(reached) > 1 and not gives_view(value.target)  # A view is taken anew in each.
        if is_read_elsewhere or is_of_several:
            results.add(value)
        results_from[value] = {value} if value in results else reached


def _cuts(group: Sequence[Value]) -> list[Value]:
    """Return the values at which a group is cut."""
    waists = _waists(group)
    sums = []  # Sums of maps.
    for place in waists:
        value = group[place]
        is_of_maps = len(value.inputs) > 1 and all(source.shape == value.shape for source in value.inputs)
        if value.op in SUMS and is_of_maps:
            sums.append(place)
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
    first = {value: place for place, value in enumerate(group)}  # Where each value is made, or first read.
    last: dict[Value, int] = {}  # Where each value is last read.
    for place, value in enumerate(group):
        for source in value.inputs:
            first.setdefault(source, place)
            last[source] = place
    waists = []
    for place, value in enumerate(group[:-1]):
        if gives_view(value.target):
            continue
        if not any(first[other] <= place < last[other] for other in last if other is not value):
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
            parts = along(group[: place + 1], dimension, users)
            if parts is None:
                continue
            saved = sum(_bytes(value) for value in parts.weights) - _bytes(last)
            edges = ({last} | parts.before) - results
            cost = sum(value.nbytes for value in edges)
            if saved >= SMALL * cost and saved - cost > most:
                most = saved - cost
                cut = edges
    return cut


def _bytes(value: Value) -> int:
    """Return the bytes that an operation makes."""
    return 0 if gives_view(value.target) else value.nbytes


@dataclass
class Along:
    """A dimension of a group's result, followed back through the group."""

    length: int
    places: dict[Value, int]  # The dimension's position in values and sources.
    weights: dict[Value, dict[Weight, int]] = field(default_factory=dict)  # its places in the weights that values read
    before: set[Value] = field(default_factory=set)  # values that it is followed to, and not through


def longest(group: Sequence[Value], users: Users) -> Along | None:
    """Return the longest dimension along which a group can be carried out in parts; None without one."""
    best = None
    for dimension, length in enumerate(group[-1].shape):
        if length > 1 and (best is None or length > best.length):
            parts = along(group, dimension, users)
            if parts is not None and not parts.before:
                best = parts
    return best


def along(group: Sequence[Value], dimension: int, users: Users) -> Along | None:
    """Follow a dimension of a group's result back; None where a value has it in two places."""
    result = group[-1]
    parts = Along(result.shape[dimension], {result: dimension})
    read_elsewhere: set[Value] = set()  # also through views, which are taken anew
    for value in reversed(group):
        if value not in parts.places:
            continue
        if value is not result and any(reader not in parts.weights for reader in users[value]):
            read_elsewhere.add(value)
        of_arguments = follow(value, parts.places[value])
        if of_arguments is None or (value in read_elsewhere and not gives_view(value.target)):
            parts.before.add(value)
            continue
        if value in read_elsewhere:
            read_elsewhere.update(value.inputs)
        parts.weights[value] = {}
        for leaf, place in of_arguments.items():
            if isinstance(leaf, Weight):
                parts.weights[value][leaf] = place
            elif parts.places.setdefault(leaf, place) != place:
                return None
    return parts


def follow(value: Value, dimension: int) -> Places | None:
    """Return the place of a dimension of a result in the arguments; None where it is not in each map, or is mixed."""
    places: Places | None
    if value.op in MATCHED:
        places = _matched(value, dimension)
    elif value.op in PRODUCTS or value.op == ATTENTION:
        places = _in_products(value, dimension)
    elif value.op == "einsum":
        places = _in_equation(value, dimension)
    else:
        place = _in_first(value, dimension)
        places = None if place is None else {value.args[0]: place}
    if places is None:
        return None
    length = value.shape[dimension]
    for source in value.inputs:
        if source not in places or source.shape[places[source]] != length:
            return None
    return places


def spans(parts: Along | None, group: Sequence[Value], numbers: int) -> list[Span]:
    """Return the parts of a group, in which the largest value has about `numbers` numbers.

    [] for a group that is run at once. The gradients of weights are added to those of the parts before: where weights
    are larger, nothing would be saved.
    """
    if parts is None:
        return []
    largest = max(value.shape.numel() for value in group)
    weights = {weight for value in group for weight in value.weights() if weight not in parts.weights[value]}
    count = min(parts.length, math.ceil(largest / numbers))
    if count == 1 or largest < sum(weight.shape.numel() for weight in weights):
        return []
    return list(pairwise(parts.length * index // count for index in range(count + 1)))


def _matched(value: Value, dimension: int) -> Places:
    """Follow a dimension where shapes are matched from the last dimension on."""
    places: Places = {}
    for leaf in arguments(value):
        if isinstance(leaf, Value | Weight):
            place = dimension - len(value.shape) + len(leaf.shape)
            if place >= 0 and leaf.shape[place] == value.shape[dimension]:
                places[leaf] = place
    return places


def _in_products(value: Value, dimension: int) -> Places | None:
    """Follow the dimensions over which a product of matrices is repeated: images and heads of an attention.

    A mask is followed where it is a weight.
    """
    count = len(value.shape)
    mask = value.argument(3, value.kwargs.get("attn_mask"))
    is_large = any(isinstance(leaf, Weight) and len(leaf.shape) > 2 for leaf in value.args[:3])
    if dimension >= count - 2 or is_large or isinstance(mask, Value):
        return None
    if any(len(source.shape) != count for source in value.inputs):
        return None
    places = _matched(value, dimension)
    return {leaf: place for leaf, place in places.items() if isinstance(leaf, Value) or leaf is mask}


def _in_equation(value: Value, dimension: int) -> Places | None:
    """Follow a letter of an einsum."""
    equation = value.args[0].replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    operands, result = equation.split("->")
    letter = result[dimension]
    places: Places = {}
    for operand, letters in zip(value.args[1], operands.split(","), strict=True):
        if letters.count(letter) > 1 or operand in places:
            return None
        if letter in letters:
            places[operand] = letters.index(letter)
    return places


def _in_first(value: Value, dimension: int) -> int | None:
    """Return the place of a dimension in the first argument; None where it is mixed, cut, or not followed."""
    source = value.args[0] if value.args else None
    count = len(value.shape)
    if not isinstance(source, Value):
        return None
    if value.op == "linear":
        return dimension if dimension < count - 1 else None
    if value.op == "layer_norm":
        return dimension if dimension < count - len(value.args[1]) else None
    if value.op in SOFTMAX:
        named = value.argument(1, value.kwargs.get("dim"))
        return dimension if isinstance(named, int) and named % count != dimension else None
    is_of_other_type = value.op in SIZED and not isinstance(value.args[1], tuple)
    if is_of_other_type or value.op not in (*SIZED, *OTHER_VIEWS.split()):
        return None
    # A dimension stays in a view where its numbers lie equally far apart in both.
    if value.op == "unflatten":  # Its sizes are not those of a part.
        split = value.args[1] % len(source.shape)
        if split <= dimension < split + len(value.args[2]):
            return None
    whole = torch.empty(source.shape, device="meta")
    view = carried_out(value, {source: whole})
    for place, length in enumerate(source.shape):
        if length == view.shape[dimension] and whole.stride(place) == view.stride(dimension):
            return place
    return None

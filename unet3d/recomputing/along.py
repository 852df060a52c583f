"""Which operations of a group can be carried out in parts along a dimension: along windows, heads, tokens or images.

The dimension may have another place in each value. Attention's windows are the first dimension of the tokens, and the
second of the queries, keys and values that are made of them at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unet3d.recomputing.graph import Value, Weight, arguments
from unet3d.recomputing.rules import Span

POINTWISE = (
    "abs add clamp clone contiguous div dropout elu exp gelu hardsigmoid hardswish leaky_relu log_sigmoid mish mul neg "
    "relu relu6 rsqrt selu sigmoid silu softplus sqrt square sub tanh to"
)
SIZED = ("view", "reshape", "_unsafe_view")  # their second argument is the size of the result
Places = dict[Value | Weight, int]  # the dimension's place in the arguments; weights without it are read as a whole
Follow = Callable[[Value, int], Places | None]


@dataclass
class Along:
    """The place of a dimension in the values of a group and its sources, and in the weights that each value reads."""

    length: int
    places: dict[Value, int]
    weights: dict[Value, dict[Weight, int]] = field(default_factory=dict)


def longest(result: Value, group: Sequence[Value]) -> Along | None:
    """Return the longest dimension along which a group can be carried out in parts; None without one."""
    best = None
    for dimension, length in enumerate(result.shape):
        if length > 1 and (best is None or length > best.length):
            best = along(result, dimension, group) or best
    return best


def along(result: Value, dimension: int, group: Sequence[Value]) -> Along | None:
    """Return where a dimension of a group's result is in its values; None where they cannot be made in parts."""
    places = {result: dimension}
    parts = Along(result.shape[dimension], places)
    for value in reversed(group):
        of_arguments = follow(value, places[value])
        if of_arguments is None:
            return None
        parts.weights[value] = {}
        for leaf, place in of_arguments.items():
            if isinstance(leaf, Weight):
                parts.weights[value][leaf] = place
            elif places.setdefault(leaf, place) != place:
                return None
    return parts


def follow(value: Value, dimension: int) -> Places | None:
    """Return the place of a dimension of a result in the arguments; None where it is not in each map, or is mixed."""
    rule = FOLLOW.get(value.op)
    places = None if rule is None else rule(value, dimension)
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


def _matched(value: Value, dimension: int) -> Places | None:
    """Follow a dimension where shapes are matched from the last dimension on."""
    places: Places = {}
    for leaf in arguments(value):
        if not isinstance(leaf, Value | Weight):
            continue
        place = dimension - len(value.shape) + len(leaf.shape)
        has_dimension = place >= 0 and leaf.shape[place] == value.shape[dimension]
        if has_dimension:
            places[leaf] = place
        elif isinstance(leaf, Value):
            return None
    return places


def _of_softmax(value: Value, dimension: int) -> Places | None:
    named = value.argument(1, value.kwargs.get("dim"))
    if not isinstance(named, int) or named % len(value.shape) == dimension:
        return None
    return {value.inputs[0]: dimension}


def _before_last(value: Value, dimension: int) -> Places | None:
    """Follow any dimension but the last."""
    if dimension == len(value.shape) - 1:
        return None
    return {value.args[0]: dimension} if isinstance(value.args[0], Value) else None


def _before_normalised(value: Value, dimension: int) -> Places | None:
    if dimension >= len(value.shape) - len(value.args[1]):
        return None
    return {value.args[0]: dimension}


def _of_products(value: Value, dimension: int) -> Places | None:
    """Follow the dimensions over which a product of matrices is repeated."""
    is_repeated = dimension < len(value.shape) - 2
    if not is_repeated or any(len(source.shape) != len(value.shape) for source in value.inputs):
        return None
    if any(isinstance(leaf, Weight) and len(leaf.shape) > 2 for leaf in value.args[:3]):
        return None
    return dict.fromkeys(value.inputs, dimension)


def _of_attention(value: Value, dimension: int) -> Places | None:
    """Follow images and heads. A mask is followed where it is a weight."""
    mask = value.argument(3, value.kwargs.get("attn_mask"))
    places = _of_products(value, dimension)
    if places is None or isinstance(mask, Value):
        return None
    if isinstance(mask, Weight):
        place = dimension - len(value.shape) + len(mask.shape)
        if place >= 0 and mask.shape[place] == value.shape[dimension]:
            places[mask] = place
    return places


def _of_equation(value: Value, dimension: int) -> Places | None:
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


def _of_view(value: Value, dimension: int) -> Places | None:
    """Follow a dimension that stays as it is while others are split or joined."""
    source = value.inputs[0]
    if value.op in SIZED and not isinstance(value.args[1], tuple):
        return None  # a view as another type
    before = math.prod(value.shape[:dimension])
    for place, length in enumerate(source.shape):
        if math.prod(source.shape[:place]) == before and length == value.shape[dimension]:
            return {source: place}
    return None


def _of_unflatten(value: Value, dimension: int) -> Places | None:
    split = value.args[1] % len(value.inputs[0].shape)
    is_split = split <= dimension < split + len(value.args[2])
    return None if is_split else _of_view(value, dimension)


def _of_chunk(value: Value, dimension: int) -> Places | None:
    cut = value.argument(2, value.kwargs.get("dim", 0)) % len(value.shape)
    return None if dimension == cut else {value.inputs[0]: dimension}


def _of_transpose(value: Value, dimension: int) -> Places | None:
    count = len(value.shape)
    first, second = (place % count for place in value.args[1:3])
    swapped = {first: second, second: first}
    return {value.inputs[0]: swapped.get(dimension, dimension)}


def _of_permute(value: Value, dimension: int) -> Places | None:
    return {value.inputs[0]: value.args[1][dimension] % len(value.shape)}


def _of_select(value: Value, dimension: int) -> Places | None:
    source = value.inputs[0]
    selected = value.argument(1, 0) % len(source.shape)
    return {source: dimension + 1 if dimension >= selected else dimension}


def _of_unsqueeze(value: Value, dimension: int) -> Places | None:
    added = value.args[1] % len(value.shape)
    return None if dimension == added else {value.inputs[0]: dimension - 1 if dimension > added else dimension}


def _of_slice(value: Value, dimension: int) -> Places | None:
    sliced = value.argument(1, 0) % len(value.shape)
    return None if dimension == sliced else {value.inputs[0]: dimension}


FOLLOW: Mapping[str, Follow] = {
    **dict.fromkeys(POINTWISE.split(), _matched),
    **dict.fromkeys(SIZED, _of_view),
    "flatten": _of_view,
    "unflatten": _of_unflatten,
    "chunk": _of_chunk,
    "split": _of_chunk,
    "softmax": _of_softmax,
    "log_softmax": _of_softmax,
    "linear": _before_last,
    "layer_norm": _before_normalised,
    "matmul": _of_products,
    "bmm": _of_products,
    "einsum": _of_equation,
    "scaled_dot_product_attention": _of_attention,
    "transpose": _of_transpose,
    "permute": _of_permute,
    "select": _of_select,
    "unbind": _of_select,
    "unsqueeze": _of_unsqueeze,
    "slice": _of_slice,
}

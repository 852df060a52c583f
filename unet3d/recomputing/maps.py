"""Maps: the values that exist as a whole, and how each follows from others.

A map is what is dear to compute again, or has to be whole: the result of a convolution (not of a transposed one without
overlap, nor of one that only a sum reads), what a normalisation takes its statistics of, chained sums, what a group of
operations without a rule reads or gives, and each output. All other values are fused into their readers, which compute
them anew, or within a group.
"""

import math
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unet3d.recomputing.graph import DROPOUTS, Graph, Steps, Value, Weight, carried_out, derived_in_groups, names_read
from unet3d.recomputing.groups import SUMS, Along, grouped_values, longest, results_of_groups
from unet3d.recomputing.rules import RULES, TRACKING, Rule
from unet3d.recomputing.rules.resampling import in_two_steps

TRAFFIC = 40  # So many multiplications and additions take as long as to read and write one number.


def _operations_without_rule(value: Value) -> int:
    """Return the multiplications and additions of an operation: torch counts its FLOPs on tensors without data."""
    counter = FlopCounterMode(display=False)
    tensors: dict[Value | Weight, Tensor] = {}
    leaves: list[Value | Weight] = [*value.inputs, *value.weights()]
    for leaf in leaves:
        dtype = leaf.dtype if isinstance(leaf, Value) else torch.float32
        tensors[leaf] = torch.empty(leaf.shape, dtype=dtype, device="meta")
    try:
        with counter:
            carried_out(value, tensors)
    except (RuntimeError, NotImplementedError, TypeError):  # The operation does not run on meta tensors.
        return 0
    return int(counter.get_total_flops()) // 2


@dataclass(eq=False, repr=False)
class Map:
    """A value that exists as a whole, and how it is made from other maps."""

    index: int
    value: Value
    rule: Rule | None  # None: made at once, of whole maps, by the operations of a group
    fused: tuple[Value, ...]  # fused values or of the group, last the map's own, in the order of their making
    sources: tuple[Value, ...]  # the maps, or the image, that it is made from
    norms: tuple[Value, ...] = ()  # normalisations that take their statistics of it
    derived: tuple[Steps, ...] = ()  # tensors of weights that are computed within the group
    along: Along | None = None  # the dimension along which a group can be carried out in parts

    @cached_property
    def operations(self) -> int:
        """Work of making it, in multiplications and additions of a convolution."""
        operations = TRAFFIC * sum(value.shape.numel() for value in self.fused)
        for value in self.fused:
            without_rule = self.rule is None
            operations += _operations_without_rule(value) if without_rule else RULES[value.op].operations(value)
        return operations

    @cached_property
    def weights(self) -> list[str]:
        """Names of the weights that making it reads, without those that it derives from them."""
        steps = [derived for steps in self.derived for derived in steps]
        names = dict.fromkeys((*self.names_read, *names_read(steps)))
        for derived in steps:
            names.pop(derived.name, None)
        return list(names)

    @cached_property
    def names_read(self) -> Set[str]:
        """Names of the weights that its operations read, in order."""
        return dict.fromkeys(weight.name for value in self.fused for weight in value.weights()).keys()

    @cached_property
    def forgotten(self) -> dict[Value, list[Value | Weight]]:
        """Values and weights of a group that nothing reads any more, by the value that reads them last."""
        last_reader: dict[Value | Weight, Value] = {}
        for value in self.fused:
            last_reader |= dict.fromkeys(value.inputs, value)
            last_reader |= dict.fromkeys(value.weights(), value)
        forgotten: dict[Value, list[Value | Weight]] = {value: [] for value in self.fused}
        for leaf, reader in last_reader.items():
            forgotten[reader].append(leaf)
        return forgotten


@dataclass(eq=False)
class Maps:
    """The maps of a graph, in the order in which forward makes them, with rows along `axis`."""

    graph: Graph
    axis: int
    maps: list[Map] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = in_two_steps(self.graph, self.axis)
        self.users = self.graph.users()
        self.rules = {value: _rule_of(value, self.axis) for value in self.graph.values}
        grouped = grouped_values(self.graph, self.rules, self.users)
        self.rules |= dict.fromkeys(grouped)
        self.derived_within = derived_in_groups(self.graph, grouped)
        steps_within = {step for steps in self.derived_within for step in steps}
        self.derived_before = [step for step in self.graph.derived if step not in steps_within]
        self.stored = self._stored(grouped)
        stored = [value for value in self.graph.values if value in self.stored]
        self.maps = [self._map(index, value) for index, value in enumerate(stored)]

    @cached_property
    def index_of(self) -> dict[Value, int]:
        """The indices of maps by their values."""
        return {map_.value: map_.index for map_ in self.maps}

    @cached_property
    def whole(self) -> list[Map]:
        """Maps of groups of operations without a rule."""
        return [map_ for map_ in self.maps if map_.rule is None]

    @cached_property
    def converted_weights(self) -> list[Weight]:
        """Weights that are read in the type of maps: all but those of normalisations, and what dropouts have drawn."""
        weights: dict[Weight, None] = {}
        for value in self.graph.values:
            rule = self.rules[value]
            if rule is not None and not rule.takes_statistics and value.op not in DROPOUTS:
                weights |= dict.fromkeys(value.weights())
        return list(weights)

    @cached_property
    def weights(self) -> Set[str]:
        """Names of the weights that all maps read, in order."""
        return dict.fromkeys(name for map_ in self.maps for name in map_.weights).keys()

    @cached_property
    def weights_read_again(self) -> list[str]:
        """Names of the weights that backward reads: all but statistics that a normalisation only updates."""
        updated: set[str] = set()
        read: set[str] = set()
        for value in self.graph.values:
            statistics = value.args[3:5] if value.op in TRACKING and value.argument(5) else ()
            for weight in value.weights():
                names = updated if weight in statistics else read
                names.add(weight.name)
        return [name for name in self.weights if name in read or name not in updated]

    def streaming(self, map_: Map, streamed: frozenset[Value]) -> Map:
        """Return how a map is made where some of its sources are computed tile by tile, too."""
        fused, sources = self._expression(map_.value, streamed)
        return Map(map_.index, map_.value, map_.rule, fused, sources, map_.norms)

    def _stored(self, grouped: set[Value]) -> set[Value]:
        stored = set(self.graph.outputs)
        stored |= results_of_groups(self.graph, grouped, self.users)
        for value in self.graph.values:
            if value in grouped:
                stored.update(source for source in value.inputs if source not in grouped)
                continue
            rule = self.rules[value]
            if rule is not None and rule.reads_maps:
                stored.update(value.inputs)
        for value in self.graph.values:
            rule = self.rules[value]
            if rule is not None and rule.is_costly(value) and not self._goes_into_one_sum(value, stored):
                stored.add(value)
        self._store_chains_of_sums(stored)
        self._store_branches(stored)
        stored.discard(self.graph.image)
        return stored

    def _store_branches(self, stored: set[Value]) -> None:
        """Make maps of values that several read, where that is less than the maps from which they are made.

        The gradient of such a value waits in one map, and not in one for each of a sum's terms.
        """
        reached: dict[Value, set[Value]] = {self.graph.image: set()}
        for value in self.graph.values:
            if self.rules[value] is None:
                continue
            sources: set[Value] = set()
            for source in value.inputs:
                if source in stored:
                    sources.add(source)
                else:
                    sources |= reached[source]
            numbers_of_sources = sum(source.shape.numel() for source in sources)
            is_read_by_several = len(self.users[value]) > 1 and len(sources) > 1
            if is_read_by_several and value.shape.numel() < numbers_of_sources:
                stored.add(value)
            reached[value] = sources

    def _goes_into_one_sum(self, value: Value, stored: set[Value]) -> bool:
        """Return whether a value is read by a sum alone, which is a map: it need not be one itself."""
        users = self.users[value]
        if len(users) != 1 or value in stored:
            return False
        user = users[0]
        if user.op not in SUMS or self.rules[user] is None:
            return False
        return user in stored and user.shape == value.shape

    def _store_chains_of_sums(self, stored: set[Value]) -> None:
        """Make maps of sums that would be sums of sums, whose rows are made from ever more maps."""
        has_sum: dict[Value, bool] = {}
        for value in self.graph.values:
            if self.rules[value] is None:
                continue
            inner = any(has_sum.get(source, False) for source in value.inputs)
            if value.op in SUMS and len(value.inputs) > 1:
                for source in value.inputs:
                    if inner and source not in stored and has_sum.get(source, False):
                        stored.add(source)
                        has_sum[source] = False
                inner = True
            has_sum[value] = inner and value not in stored

    def _map(self, index: int, value: Value) -> Map:
        rule = self.rules[value]
        readers = {user: self.rules[user] for user in self.users[value]}
        norms = tuple(user for user, of_user in readers.items() if of_user is not None and of_user.takes_statistics)
        map_ = Map(index, value, rule, *self._expression(value, frozenset()), norms)
        if rule is None:
            names = map_.names_read
            map_.derived = tuple(steps for steps in self.derived_within if any(step.name in names for step in steps))
            map_.along = longest(map_.fused, self.users)
        return map_

    def _expression(self, root: Value, streamed: frozenset[Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Return the fused values from which a map is made, and the maps."""
        return self.graph.expression(root, (self.stored | {self.graph.image}) - streamed)


def _rule_of(value: Value, axis: int) -> Rule | None:
    """Return the rule of a value; None where no rule serves its operation and arguments."""
    rule = RULES.get(value.op)
    if rule is None or value.has_own_precision or not rule.serves(value, axis):
        return None
    if any(each.dtype.is_complex for each in (value, *value.inputs)):
        return None
    return rule


def bytes_of(value: Value, dtype: torch.dtype) -> int:
    """Return the bytes of a map in a type."""
    if not value.dtype.is_floating_point:
        dtype = value.dtype
    return math.prod(value.shape) * dtype.itemsize

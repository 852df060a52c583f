"""What a training step on CUDA asks of the device, counted without a GPU.

    python benchmarks/launches.py model=unet amp=true amp_dtype=bf16 "data.patch=[64,64,64]"

Prints one JSON line: `launches` of torch's kernels, `convolutions` and `normalisations` of cuDNN, `synchronisations`,
of the third step, whose optimizer has its state. The step runs on fake tensors. Each operation then counts by the rules
of torch's CUDA backend, read from its source; `cuda_desk.py` compares them with what torch's CUDA build does, but for
steps that recompute. Kernels of cuDNN, copies and memsets are not in `launches`. A CPU build of torch counts as one for
CUDA 13.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose, rules
from unet3d.config.schema import Config
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.simulate import BatchInTransit, fake_batch, make_learner, take_weights_together
from unet3d.memory.technique import choose_technique
from unet3d.recomputing.state import Observer
from unet3d.training.step import train_step

aten = torch.ops.aten
STEPS = 3
CHUNK = 65_536  # numbers that a block of a `_foreach_` kernel takes; MultiTensorApply.cuh of torch 2.13
BATCHED = 4  # dimensions of tensors that `cat` joins in one launch
CUDNN_NORMALISES = (torch.float32, torch.float16)  # torch itself bfloat16


class ForeachLimits(NamedTuple):
    """What one launch of a `_foreach_` kernel takes at most."""

    blocks: int
    tensors: tuple[int, ...]  # of each list, for 1 to 5 lists of tensors
    tensors_of_one_list: int  # with a number for each tensor


CUDA_13 = ForeachLimits(2_240, (770, 448, 336, 252, 210), 672)
CUDA_12 = ForeachLimits(320, (110, 64, 48, 36, 30), 96)
LIMITS = CUDA_12 if (torch.version.cuda or "13").startswith("12") else CUDA_13


@dataclass
class Counts:
    """What a step asks of the device."""

    launches: int = 0
    convolutions: int = 0
    normalisations: int = 0  # of cuDNN; torch's own are launches
    synchronisations: int = 0


class Launches(Observer, TorchDispatchMode):
    """Counts the operations within it by CUDA's rules. `host` holds storages that a GPU's step has in host memory."""

    def __init__(self, host: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.counts = Counts()
        self._host = {storage(tensor) for tensor in host}
        self._read: int | None = None  # the storage of which a number was read last, if nothing was launched since

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default:
            self._synchronise(args[0])
        elif func in CONVOLUTIONS:
            self.counts.convolutions += CONVOLUTIONS[func](args)
        if is_of_cudnn(func, args):
            self.counts.normalisations += 1
        elif not self._is_on_host(args):
            launches = launches_of(func, args, result)
            self.counts.launches += launches
            if launches:
                self._read = None
        return result

    def _synchronise(self, number: Tensor) -> None:
        """Count a wait for the device. Numbers read in a row from one storage come in one copy, as by `tolist`."""
        if storage(number) not in self._host and storage(number) != self._read:
            self.counts.synchronisations += 1
            self._read = storage(number)

    def _is_on_host(self, args: Any) -> bool:
        """Return whether the operation is one of the optimizer's on numbers in host memory."""
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
        return first is not None and storage(first) in self._host


def storage(tensor: Tensor) -> int:
    """Return what tells a tensor's storage from others."""
    address: int = tensor.untyped_storage()._cdata
    return address


# The rules: of an operation's arguments and result, how many kernels of torch's it launches.

Rule = Callable[[Any, Any], int]


def launches_of(func: Any, args: Any, result: Any) -> int:
    """Return how many kernels of torch's an operation launches: one, unless there is a rule or it makes only a view."""
    if func in RULES:
        return RULES[func](args, result)
    if func.namespace != "aten" or func.is_view or func in NOTHING:
        return 0
    if func.overloadpacket.__name__.startswith("_foreach_"):
        return foreach(args, result, has_scalars="ScalarList" in func._overloadname)
    return 1


def to_contiguous(*wanted: Tensor | None) -> int:
    """Return the launches that make these contiguous: cuDNN and some of torch's kernels take no other tensors."""
    return sum(tensor is not None and not tensor.is_contiguous() for tensor in wanted)


def copied(target: Tensor, source: Tensor) -> int:
    """Return the launches of a copy: none for one of equal types and strides without gaps, which the driver does."""
    if source.numel() == 0:
        return 0
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    return int(not is_plain)


def joined(args: Any, result: Tensor) -> int:
    """Return the launches of `cat`: one for tensors of few dimensions, else one for each that needs a kernel."""
    parts = [part for part in args[0] if part.numel()]
    if len(parts) > 1 and result.dim() <= BATCHED and all(part.is_contiguous() for part in parts):
        return 1
    dim = args[1] % result.dim() if len(args) > 1 else 0
    is_gapless = math.prod(result.shape[:dim]) == 1  # a part is one piece of the result
    return sum(not (is_gapless and part.is_contiguous()) for part in parts)


def foreach(args: Any, result: Any, has_scalars: bool = False) -> int:
    """Return the launches of an operation on lists of tensors: as many numbers as fit in one launch, and so on.

    `has_scalars`: the operation takes a number for each tensor.
    """
    lists = [part for part in args if isinstance(part, list | tuple) and part and isinstance(part[0], Tensor)]
    depth = len(lists) + (isinstance(result, list | tuple) and len(result) > 0)  # those not in place have one more
    most = LIMITS.tensors_of_one_list if has_scalars and depth == 1 else LIMITS.tensors[depth - 1]
    launches = 0
    blocks = 0
    count = 0
    for tensor in lists[0]:
        count += tensor.numel() > 0
        for chunk in reversed(range(math.ceil(tensor.numel() / CHUNK))):
            blocks += 1
            is_full = count == most and chunk == 0
            if blocks == LIMITS.blocks or is_full:
                launches += 1
                blocks = 0
                count = int(chunk > 0)
    return launches + (blocks > 0)


def convolved(args: Any, result: Any) -> int:
    """Return the launches beside cuDNN's: input made contiguous, bias added."""
    x, weight, bias = args[:3]
    return to_contiguous(x, weight) + (bias is not None)


def convolved_backward(args: Any, result: Any) -> int:
    """Return the launches beside cuDNN's: gradient and input made contiguous, the bias's gradient summed."""
    gradient, x, weight = args[:3]
    return to_contiguous(gradient, x, weight) + bool(args[10][2])


def is_of_cudnn(func: Any, args: Any) -> bool:
    """Return whether cuDNN does a normalisation: in training, of float32 and float16, with weights."""
    if func is aten.native_batch_norm.default:
        x, weight, *_, is_training = args[:6]
    elif func is aten.native_batch_norm_backward.default:
        _, x, weight, *_, is_training = args[:8]
    else:
        return False
    return is_training and weight is not None and x.dtype in CUDNN_NORMALISES


def normalised(args: Any, result: Any) -> int:
    """Return the launches of a batch normalisation: statistics and what follows from them, then the map.

    By known statistics, maps with gaps are read as they are.
    """
    is_training = args[5]
    return to_contiguous(args[0]) + 3 if is_training else 2


def normalised_backward(args: Any, result: Any) -> int:
    """Return the launches of a batch normalisation's gradient: sums and the map's in one kernel, of gapless planes."""
    gradient, x = args[:2]
    return 1 + _reshaped(gradient) + _reshaped(x)


def _reshaped(x: Tensor) -> int:
    """Return the launches by which all voxels of a channel come to lie in one dimension: none if that is a view."""
    return int(x.flatten(2).untyped_storage()._cdata != x.untyped_storage()._cdata)


def in_place(args: Any, result: Any) -> int:
    """Return the launches of an activation in place. Backward of one on a view fills a map with zeros first.

    They are counted here, since fake tensors go back through their views instead.
    """
    return 1 + int(args[0]._is_view() and args[0].requires_grad)


CONVOLUTIONS: dict[Any, Callable[[Any], int]] = {
    aten.convolution.default: lambda args: 1,
    aten.convolution_backward.default: lambda args: sum(map(bool, args[10][:2])),
}
NOTHING = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
    aten._local_scalar_dense.default,
    aten.promote_types.default,
}
RULES: dict[Any, Rule] = {
    aten._to_copy.default: lambda args, result: int(args[0].dtype != result.dtype) or copied(result, args[0]),
    aten.clone.default: lambda args, result: copied(result, args[0]),
    aten.copy_.default: lambda args, result: copied(args[0], args[1]),
    aten.relu_.default: in_place,
    aten.leaky_relu_.default: in_place,
    aten.zero_.default: lambda args, result: int(args[0].numel() > 0),
    aten.cat.default: joined,
    aten.constant_pad_nd.default: lambda args, result: 2,  # filled, then copied into
    aten.slice_backward.default: lambda args, result: 1 + copied(result, args[0]),
    aten.convolution.default: convolved,
    aten.convolution_backward.default: convolved_backward,
    aten.native_batch_norm.default: normalised,
    aten.native_batch_norm_backward.default: normalised_backward,
    aten.batch_norm_update_stats.default: lambda args, result: 1 + (args[1] is not None),
    aten.native_group_norm.default: lambda args, result: 3 + to_contiguous(args[0]),
    aten.native_group_norm_backward.default: lambda args, result: 5 + to_contiguous(args[0], args[1]),
    aten.max_pool3d_with_indices.default: lambda args, result: 1 + to_contiguous(args[0]),
    aten.max_pool3d_with_indices_backward.default: lambda args, result: 2 + to_contiguous(args[0], args[1]),
    aten.upsample_nearest3d_backward.default: lambda args, result: 1 + to_contiguous(args[0]),
    aten.upsample_trilinear3d_backward.default: lambda args, result: 2 + to_contiguous(args[0]),
    aten._foreach_norm.Scalar: lambda args, result: 2 + foreach(args, None),  # filled before, finished after
}


def counted(config: Config) -> Counts:
    """Return what the third step of a run on CUDA asks of the device. The model's options leave nothing open."""
    technique = choose_technique(config, config.model)
    with torch.random.fork_rng([]), fake_mode("cuda"):
        learner = make_learner(config, config.model, technique)
        take_weights_together(learner.optimizer)
        for _ in range(STEPS):
            micro_batches = [fake_batch(config, config.model, torch.float32) for _ in range(config.accumulate)]
            batches: list[Any] = list(map(BatchInTransit, micro_batches))
            steps = [state["step"] for state in learner.optimizer.state.values() if "step" in state]
            launches = Launches(host=steps)
            with launches:
                train_step(*learner, batches, clip=config.optim.clip)
    return launches.counts


def main() -> int:
    """Print the counts of the config on the command line. Return 2 where that cannot be counted."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return 0
    try:
        config = compose.compose([*sys.argv[1:], "device=cuda"])
        config.model = build.model_config_from_headers(config)
        switches = rules.switches_of(config)
        if switches:
            raise UserError(f"{switches}: only steps without switches can be counted; drop it")
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(counted(config))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tensors that have shapes and no data, and behave as real ones on the CPU or on CUDA would."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import dtype_to_type
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules import batchnorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from unet3d.base.errors import UserError
from unet3d.base.progress import beat
from unet3d.memory.tables import LSTM
from unet3d.recomputing import fake_kernels
from unet3d.recomputing.workspaces import CONVOLUTION

TORCH = str(Path(torch.__file__).parent) + os.sep
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
# Frames that are passed over in search of the code that asks for a value: torch's, and those of the dispatch modes.
DISPATCH_MODES = ("ledger", "meter", "fake_tensors")
INNER = (TORCH, *(f"{PACKAGE}memory{os.sep}{name}.py" for name in DISPATCH_MODES))
MOST_GUESSES = 100
RECURRENT_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
RANGES = (
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
)
LONGEST_RANGE = 64  # numbers
# What autocast computes in float32 on CUDA and not on the CPU, of the operations in forward passes of this package's
# networks and of transformers: the loss runs outside of autocast. torch's documentation lists all (section "CUDA Ops
# that autocast to float32").
FLOAT32 = ("group_norm", "layer_norm", "upsample_nearest3d", "upsample_trilinear3d")


@contextmanager
def fake_mode(device_type: str = "cpu") -> Iterator[list[str]]:
    """Let tensors made inside occupy nothing; a number read from one is 0. Mixed precision is as on a device type.

    Yields a list that grows by each place, FILE:LINE, of code outside of this package that reads such a number, and by
    LSTM where one has run.
    """
    autocast = cuda_autocast() if device_type == "cuda" else nullcontext()
    remarks = logging.getLogger(FakeTensorMode.__module__)  # on what fails, with traces: the error says it
    were_off = remarks.disabled
    remarks.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Corrections(device_type) as corrections, autocast:
            yield corrections.guesses
    finally:
        remarks.disabled = were_off


class _Corrections(TorchDispatchMode):
    """A dispatch mode that corrects fake tensors where they differ from real ones.

    `.item()` gives 0 (a loss of 0, no overflow found), which is a guess where a network or a loss of others asks for
    it; known numbers, as Adam's step count, stay known. On the CPU, outputs of some transposed convolutions have a
    larger storage. `fake_kernels` corrects what concerns a schedule's tensors, too.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.guesses: list[str] = []
        self._device_type = device_type
        self.ranges = _Ranges()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # The ledger says why.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        beat()
        if func is READ_NUMBER and self.ranges.knows(args[0]):
            value, _ = self.ranges.values[args[0]]
            return value
        try:
            result = fake_kernels.run(func, args, kwargs or {})
            self.ranges.follow(func, args, result)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            place = _asking(sys._getframe(1))
            if func is not READ_NUMBER:
                raise unknown(place or "", error) from error
            if place is None:
                return 1
            if place and place not in self.guesses and len(self.guesses) < MOST_GUESSES:
                self.guesses.append(place)
            return dtype_to_type(args[0].dtype)()  # 0 as a number of Python
        if func is RECURRENT_LAYER and LSTM not in self.guesses:  # its workspace has 0 bytes
            self.guesses.append(LSTM)
        if func is CONVOLUTION and self._device_type == "cpu":
            _enlarge_storage(result, args)
        if func.is_view:
            _copy_for_slices(torch._C._current_autograd_node())
        return result


class _Ranges:
    """The numbers of short ranges of integers: losses read the axes to sum over from `torch.arange(2, dims)`."""

    def __init__(self) -> None:
        self.values: MutableMapping[Tensor, tuple[Any, int]] = WeakTensorKeyDictionary()

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Note the numbers of a range that an operation makes or takes apart."""
        if func in RANGES and all(type(value) is int for value in args) and result.dtype == torch.int64:
            numbers = range(*args)
            if len(numbers) <= LONGEST_RANGE:
                self._note(result, numbers)
        elif func is torch.ops.aten.unbind.int and self.knows(args[0]):
            numbers, _ = self.values[args[0]]
            for part, value in zip(result, numbers, strict=True):
                self._note(part, value)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's numbers are known, and nothing has been written to it since."""
        if tensor not in self.values:
            return False
        _, version = self.values[tensor]
        return version == tensor._version

    def _note(self, tensor: Tensor, value: Any) -> None:
        self.values[tensor] = (value, tensor._version)


def _asking(frame: FrameType | None) -> str | None:
    """Return FILE:LINE of the innermost code outside of torch; "" if that is this package's own.

    None: batch normalisation asks how many passes there were, as with momentum=None: for a factor alone.
    """
    while frame is not None and frame.f_code.co_filename.startswith(INNER):
        if frame.f_code.co_filename == batchnorm.__file__:
            return None
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(PACKAGE):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asked_in(trace: TracebackType | None) -> str:
    """Return FILE:LINE of the innermost code outside of torch in a trace; "" if that is this package's own."""
    place = ""
    for frame, line in traceback.walk_tb(trace):  # the innermost comes last
        path = frame.f_code.co_filename
        if not path.startswith(INNER):
            place = "" if path.startswith(PACKAGE) else f"{path}:{line}"
    return place


def unknown(place: str, error: Exception) -> Exception:
    """Return what to raise where no 0 can stand for the values that code at a place asks for."""
    if not place:
        return error
    return UserError(
        f"{place}: sizes or numbers depend on values, which a prediction does not have: use unet3d.memory.explain"
    )


def _enlarge_storage(output: Tensor, arguments: Sequence[Any]) -> None:
    """Make a transposed convolution's output as large as its image in memory, where the CPU's kernel leaves it so.

    Torch's own kernel makes the output like the image and resizes it, which gives nothing back
    (`slow_conv_transpose3d` in torch's NaiveConvolutionTranspose3d.cpp). It computes single small images in float32,
    and kernels of 1 on one thread; oneDNN computes others. With groups, the outputs are copied into one.
    """
    image, *_, is_transposed, _, groups = arguments
    if not is_transposed or groups > 1 or image.nbytes <= output.nbytes:
        return
    backend = torch._C._select_conv_backend(*arguments)
    if backend.name == "SlowTranspose3d":
        output.untyped_storage().resize_(image.nbytes)


def _copy_for_slices(node: Any) -> None:
    """Have the gradient of a view that was written to in place copied, if the view's gradient is what a node computes.

    Autograd takes such a view of a real tensor as `as_strided`, whose gradient is a copy; of a fake one it takes the
    view again, whose gradient is no copy. The copy is made as the next node begins, which then holds it alone.
    """
    following = node.next_functions if node is not None else ()
    if not following:
        return
    next_node, _ = following[0]
    if next_node is not None and next_node.name().endswith("CopySlices"):
        next_node.register_prehook(_cloned)


def _cloned(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let `torch.autocast("cpu")` cast, within, what CUDA's autocast would cast, and nothing else."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*only once for all operators", UserWarning)  # We override them.
            for name in _cast_on_cpu_only():
                library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
            for name in FLOAT32:
                overload = getattr(torch.ops.aten, name).default
                library.impl(name, partial(_in_float32, overload), allow_override=True)
            library.impl("softmax.int", _softmax_in_float32, allow_override=True)
        yield
    finally:
        library._destroy()


@cache
def _cast_on_cpu_only() -> list[str]:
    """Return operations with a kernel for the CPU's autocast and none for CUDA's, as pooling and concatenation."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    operations = []
    schemas = torch._C._jit_get_all_schemas()
    names = {f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in schemas}
    for name in sorted(names):
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel(name):
            continue
        if has_kernel(name, "AutocastCPU") and not has_kernel(name, "AutocastCUDA"):
            operations.append(name.removeprefix("aten::"))
    return operations


def _in_float32(overload: Any, *args: Any) -> Any:
    """Return what an operation gives for its floating-point tensors in float32."""
    cast = []
    for value in args:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        cast.append(value.float() if is_floating else value)
    with _without_autocast():
        return overload(*cast)


def _softmax_in_float32(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return softmax, in float32 unless another type is asked for. CUDA reads float16 without a copy in float32."""
    with _without_autocast():
        if x.dtype == torch.float16 and dtype in (None, torch.float32):
            return torch._softmax(x, dim, True)
        return torch.softmax(x, dim, dtype=dtype or torch.float32)


def _without_autocast() -> Any:
    """Return a context without the CPU's autocast."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))

"""Switches of torch that a run sets for itself and puts back: kernels that are tried, TF32, determinism.

Also what is known of the faults of torch's libraries: what refuses a switch, and a version of cuDNN.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from unet3d.base.errors import UserError, is_out_of_memory
from unet3d.config.schema import Cuda

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = ":4096:8"  # cuBLAS repeats its results with these.
REFUSAL = "does not have a deterministic implementation"  # torch's error has it after the operation.
REFUSAL_OF_CUBLAS = "because it uses CuBLAS"  # torch's error where cuBLAS was in use before CUBLAS was set.
# Versions that are wrong in bf16, by pytorch's issue, as cuDNN writes them: 91002 for 9.10.2, which torch 2.10 comes
# with for CUDA 12; for CUDA 13 it is 9.15.1. Another cuDNN may be found first.
BAD_CUDNN = range(90800, 91500)
LARGE = 2**30  # elements of a map: of 1.8e9 in the report; nobody has said how much smaller ones are right


@contextmanager
def switched(cuda: Cuda, deterministic: bool) -> Iterator[None]:
    """Let torch compute as `cuda` and, if it is true, `deterministic` say; afterwards all is as before.

    Enter it before the process uses cuBLAS, which reads its variable once. Memory that nothing has written to yet stays
    unchanged: torch would fill it for `deterministic`, which takes time.
    """
    cudnn: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    before = (cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory)
    precision = (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    mode = torch.get_deterministic_debug_mode()
    workspaces = os.environ.get(CUBLAS)
    try:
        cudnn.benchmark = cuda.benchmark
        cudnn.allow_tf32 = cuda.tf32
        if deterministic:
            cudnn.deterministic = True
            filling.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True)
            os.environ.setdefault(CUBLAS, FIXED_WORKSPACES)
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory = before
        cudnn.allow_tf32 = "tf32" in precision  # A separate flag, which sets the two below as well.
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = precision
        if deterministic:  # only `use_deterministic_algorithms` also resets the compiler's flag
            torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
        os.environ.pop(CUBLAS, None)
        if workspaces is not None:
            os.environ[CUBLAS] = workspaces


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile computes the network's calls."""
    return model._compiled_call_impl is not None


def without_compiler(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context within which a compiled network computes as it would without torch.compile.

    Memory is predicted for that, and windows of a validation come in several batch sizes, each compiled anew.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def foreseen_error(error: Exception, deterministic: bool) -> UserError | None:
    """Return the error to show where `deterministic` finds no such kernel for an operation, or torch.compile failed.

    None for another error, and where code of the user's own has asked torch for determinism.
    """
    text = str(error)
    first_line, _, _ = text.partition("\n")
    operation, _, rest = text.partition(f" {REFUSAL}")
    if deterministic and REFUSAL_OF_CUBLAS in text:
        advice = f"start another one, or set {CUBLAS}={FIXED_WORKSPACES} before"
        return UserError(f"deterministic=true: this process used cuBLAS before; {advice}")
    if deterministic and rest:
        advice = "use other layers, or set it to false"
        return UserError(f"deterministic=true: torch has no deterministic {operation}; {advice}")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) and not is_out_of_memory(error):
        return UserError(f"compile=true: {first_line}; set compile=false")
    return None


def cudnn_warning(dtype: torch.dtype | None, largest_map: Callable[[], int]) -> str | None:
    """Return a line on the known fault of 3D convolutions of this type on CUDA here, None without one.

    `largest_map` returns the elements of the largest map of the network; it is called only where they matter.
    """
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # cuDNN here is older than the one that torch was built with
        return str(error).partition("\n")[0]
    if dtype is not torch.bfloat16 or cudnn not in BAD_CUDNN or largest_map() < LARGE:
        return None
    dotted = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
    return (
        f"torch {torch.__version__} with cuDNN {dotted} can be wrong in bf16 in 3D convolutions of very large maps, as "
        "of 1.8e9 elements (pytorch#163539); use cuDNN 9.15 or newer, as builds of torch for CUDA 13 do"
    )

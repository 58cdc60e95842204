"""A CPU that calls itself cuda:0: numbers are real, and what a GPU would refuse or wait for is noticed.

A tensor of it wraps a CPU tensor. Operations that mix it with tensors of the CPU raise `Mismatch`, as CUDA
does. Each time the host would wait for the GPU, the line of agro that caused it is counted: where a value is
read, where a shape depends on values (`nonzero`, a mask as an index), and where memory is copied without
`non_blocking`. (A copy to the GPU without waiting is safe from ordinary memory too: CUDA stages it first.)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda:0")
AGRO = str(Path(__file__).resolve().parents[1] / "agro")
# The shape of their result depends on values, or they return a value.
WAITING = {
    *("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique_dim", "_unique2"),
    *("unique_consecutive", "bincount", "repeat_interleave"),
}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Mismatch(AssertionError):
    """Tensors of the CPU and of the GPU in one operation; not an error that agro makes a refusal of."""


class OnGpu(torch.Tensor):
    """A tensor that says that it is on cuda:0; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> OnGpu:
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset(), "dtype": real.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, real.size(), **layout, device=CUDA)
        made.held = real.detach()
        return made

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnGpu) -> None:
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = OnGpu(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_moved_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_moved_index(index), value)

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        _waits("tolist")
        return self.held.tolist()

    def numpy(self, **options: Any) -> Any:
        raise Mismatch("can't convert a tensor of cuda:0 to numpy; use .cpu() first")

    __array__ = numpy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


class Gpu(TorchDispatchMode):
    """While it is entered, tensors can be made on cuda:0. `waits` counts where the host waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


_entered: list[Gpu] = []


def _load_guard() -> tuple[Any, str]:
    """Give torch a guard of a CUDA device, which autograd asks for.

    Returns the library, and why there is none, or "".

    It has to be there before the first backward pass of the process, so modules of tests import this one.
    """
    if torch.backends.cuda.is_built():
        return None, "expected a build of torch without CUDA"
    compiler = shutil.which("g++")
    if compiler is None:
        return None, "expected a C++ compiler (g++), found none"
    if os.environ.get("AGRO_MUTANTS"):
        return None, "mutants are forks, in which autograd's threads for a device would be missing"
    source, folder = Path(__file__).with_name("pretended_guard.cpp"), Path(torch.__file__).parent
    library = Path(AGRO).parent / "build" / f"guard-{torch.__version__}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        libraries = [f"-I{folder}/include", f"-L{folder}/lib", "-ltorch_cpu", "-lc10"]
        options = ["-shared", "-fPIC", "-std=c++20", *libraries]
        subprocess.run([compiler, str(source), "-o", str(made), *options], check=True, timeout=120)
        made.replace(library)
    return ctypes.CDLL(str(library)), ""


_LIBRARY, MISSING = _load_guard()  # why there can't be a pretended GPU


@contextmanager
def pretended_gpu() -> Iterator[Gpu]:
    """A machine with such a GPU."""
    gpu = Gpu()
    nothing = ("_lazy_init", "empty_cache", "synchronize", "get_rng_state", "set_rng_state")
    answers = {"is_available": True, "device_count": 1, **dict.fromkeys(nothing)}
    with ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, value=value: value))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, partial(_moved, getattr(torch, name))))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _convert))
        _LIBRARY.exchange_hooks()
        stack.callback(_LIBRARY.exchange_hooks)
        stack.enter_context(gpu)
        _entered.append(gpu)
        try:
            yield gpu
        finally:
            _entered.pop()


def _moved(make: Any, data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor` makes a tensor on the CPU, and then copies it to the GPU, waiting."""
    if isinstance(data, OnGpu):
        return data.to(device or CUDA, *args, **options)
    if isinstance(data, list) and any(map(_is_on_gpu, data)):
        data = [x.item() for x in data]
    made: torch.Tensor = make(data, *args, **options)
    return made if device is None else made.to(device)


def _convert(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """What `to` and `double` do. A parameter can't change its class, so there is a new one everywhere."""
    done: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None and id(x) not in done:
                    with torch.no_grad():
                        changed = change(x.data)
                    is_parameter = isinstance(x, torch.nn.Parameter)
                    done[id(x)] = torch.nn.Parameter(changed, x.requires_grad) if is_parameter else changed
                tensors[name] = None if x is None else done[id(x)]
    return module


def _moved_index(index: Any) -> Any:
    """Lists of an index become tensors on the GPU."""
    if isinstance(index, tuple):
        return tuple(_moved_index(part) for part in index)
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


def _waits(what: str) -> None:
    if _entered:
        _entered[-1].waits[f"{what} at {_place()}"] += 1


def _place() -> str:
    """The line of agro that runs, and of another package the one that it called."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(AGRO):
            return f"{frame.filename.removeprefix(AGRO)}:{frame.lineno} {frame.line}"
    return "outside of agro"


def _is_on_gpu(x: Any) -> bool:
    return isinstance(x, OnGpu)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OnGpu) else x


def _compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its result is on the GPU where an argument is, or `device` says so."""
    name = operation._schema.name.partition("::")[2]
    if name == "record_stream":
        return None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = any(map(_is_on_gpu, tensors))
    there = _result_is_on_gpu(name, args, kwargs, here)
    if name in COPIES:
        if any(_is_on_gpu(x) != there and x.numel() for x in tensors) and not _is_free(
            name, args, kwargs, there
        ):
            _waits("copy")
    elif here:
        _check(name, args, tensors)
    if name == "_fused_sdp_choice" and here:
        return 0
    changes = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
    if kwargs.get("pin_memory"):
        changes["pin_memory"] = False
    result = operation(*tree_map(_held, args), **{**tree_map(_held, kwargs), **changes})
    if name == "_to_copy" and result is _held(args[0]):
        result = result.clone()
    if not there:
        return result
    result = tree_map(lambda x: OnGpu(x) if isinstance(x, torch.Tensor) and not _is_on_gpu(x) else x, result)
    if here and name != "_to_copy":
        return return_and_correct_aliasing(operation, args, kwargs, result)
    return result


def _result_is_on_gpu(name: str, args: Any, kwargs: dict[str, Any], here: bool) -> bool:
    if name == "copy_":
        return _is_on_gpu(args[0])
    asked = kwargs.get("device")
    return here if asked is None else torch.device(asked).type == "cuda"


def _is_free(name: str, args: Any, kwargs: dict[str, Any], there: bool) -> bool:
    """Whether a copy between the devices doesn't wait. One to the CPU must: its values are read at once."""
    asynchronous = kwargs.get("non_blocking", False)
    if name == "copy_" and len(args) > 2:
        asynchronous = args[2]
    return bool(asynchronous) and there


def _check(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """Count a wait, or raise `Mismatch`, for an operation with a tensor of the GPU."""
    foreign = [x for x in tensors if not _is_on_gpu(x) and x.dim() > 0]
    if name in INDEXING:
        index = [x for x in args[1] if x is not None]
        by_mask = any(x.dtype in (torch.bool, torch.uint8) for x in index)
        if by_mask:
            _waits("a mask as an index")
        foreign_index = [x for x in foreign if any(x is i for i in index)]
        if foreign_index and _is_on_gpu(args[0]) and len(foreign_index) == len(foreign):
            _waits("an index from the CPU")  # CUDA copies it
            return
    elif name in WAITING:
        _waits(name)
    if foreign:
        raise Mismatch(f"{name}: tensors on cuda:0 and on the CPU, at {_place()}")

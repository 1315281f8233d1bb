"""The only door to private torch names and to optional packages.

Every wrapper has our name, says why it is needed, where it was tested and what public API would
replace it; ``tests/test_compat.py`` asserts its behaviour.  Importing this module checks the torch
version once.  Tested on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node as AutogradNode

TORCH_MIN, TORCH_BELOW = (2, 11), (2, 14)


def _check_version(version: str) -> None:
    """Raises ImportError for a torch outside of the supported range."""
    found = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    if not TORCH_MIN <= found < TORCH_BELOW:
        low, high = (".".join(map(str, v)) for v in (TORCH_MIN, TORCH_BELOW))
        raise ImportError(
            f"interlace needs torch >= {low} and < {high}, found {version}; "
            f"install a supported one, for example: pip install 'torch>={low},<{high}'"
        )


_check_version(torch.__version__)


# --- pytrees: torch.utils._pytree is what make_fx and autograd use; a public torch.utils.pytree
# exists from 2.9 on without tree_map_only.


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of a nested container, and the structure to build it again."""
    return torch.utils._pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of :func:`tree_flatten`."""
    return torch.utils._pytree.tree_unflatten(leaves, spec)


def tree_map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Applies ``fn`` to each tensor of a nested container, leaving the rest."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, fn, tree)


# --- many tensors in one launch: no public spelling exists.


def add_each_(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """``targets[i] += others[i]`` in few kernels."""
    torch._foreach_add_(targets, others)


# --- autograd sequence numbers: which call created a grad_fn.  No public reader exists.


def next_sequence_number() -> int:
    """The number that the next grad_fn of this thread gets; it only grows."""
    return int(torch.autograd._get_sequence_nr())


def sequence_number(node: AutogradNode) -> int:
    """The number that a grad_fn got when it was made."""
    return int(node._sequence_nr())


# --- fake tensors: shapes without memory.  make_fx makes its own mode; ours is needed to trace
# models that were never allocated and to share one mode between two traces.


@contextlib.contextmanager
def fake_mode() -> Iterator[Any]:
    """A mode in which factory functions and converted tensors have no memory."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        yield mode


def to_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A fake twin with static shape; parameters stay parameters."""
    return mode.from_tensor(tensor, static_shapes=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory behind it (a fake tensor)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def new_dynamic_size(minimum: int = 0) -> Any:
    """Inside a fake kernel: a size that only the run will tell."""
    return torch.library.get_ctx().new_dynamic_size(min=minimum)


def op_is_mutable(target: Any) -> bool:
    """Whether an operator's schema writes to an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def op_is_random(target: Any) -> bool:
    """Whether an operator draws from a random generator."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def op_namespace(target: Any) -> str:
    """``aten`` of ``aten.add.Tensor``; empty for a plain function."""
    return target.namespace if isinstance(target, torch._ops.OpOverload) else ""


def mark_effectful(op: Any) -> None:
    """Keeps an operator from being removed as dead by torch's own passes."""
    fx.node.has_side_effect(op)


def package_available(name: str) -> bool:
    """Whether an optional package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def functional_twin(target: Any) -> Any:
    """``aten.add.Scalar`` for ``aten.add_.Scalar``; None where an operator has no such twin."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, target._overloadname, None)
    return twin if name.endswith("_") and not op_is_mutable(twin) else None


def op_is_view(target: Any) -> bool:
    """Whether a result shares the memory of an argument that the operator does not write."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in target._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


# --- Triton: optional on CPU, needed on CUDA.  TRITON_INTERPRET is Triton's own variable, which it
# reads when a kernel is decorated: it has to be set before the first import.  Tested on 3.6, 3.7.

HAS_TRITON = package_available("triton")
TRITON_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(op: str, device: torch.device) -> bool:
    """Whether ``op`` takes its Triton kernel there: on CUDA, and on CPU in Triton's interpreter."""
    if device.type != "cuda":
        return TRITON_INTERPRETED
    if not HAS_TRITON:
        raise RuntimeError(
            f"{op}: a CUDA tensor needs Triton, which is not installed; "
            "install the version that comes with this torch, or run on the CPU."
        )
    return True


def graph_root(graph: fx.Graph) -> fx.Node:
    """The node before the first and after the last: prepending to it moves a node to the end.

    No public call moves a node to the end of a graph.
    """
    return graph._root


def op_memory(target: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Per argument of an operator: its name, whether a result may share its memory, whether it is
    written; empty for a plain function.  No public reader of alias annotations exists.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    found = []
    for arg in target._schema.arguments:
        alias = arg.alias_info
        # Views of unknown number, as of split, have the set "*" behind the arrow.
        shares = alias is not None and bool(alias.before_set)
        found.append((arg.name, shares, alias is not None and alias.is_write))
    return tuple(found)


# --- Inductor on a piece of a graph: torch.compile would trace it again and check guards at every
# call.  Tested on 2.11 and 2.13.


def op_is_elementwise(target: Any) -> bool:
    """Whether an operator is tagged as point-wise or as a reduction."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    tags = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", None)}
    reductions = ("aten::sum", "aten::mean", "aten::amax", "aten::amin")  # untagged before 2.12
    return bool(tags & set(target.tags)) or target._schema.name in reductions


def compile_with_inductor(gm: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """A function that computes what ``gm`` does on tensors laid out like the (fake) examples."""
    mode = examples[0].fake_mode if is_fake(examples[0]) else None
    with torch.no_grad(), mode or contextlib.nullcontext():
        plain = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            for x in examples
        ]
    artifact = torch._inductor.standalone_compile(gm, plain, dynamic_shapes="from_example_inputs")

    def compiled_region(*args: torch.Tensor) -> Any:
        return artifact(*args)

    return compiled_region


# --- symmetric memory: memory of one GPU that the others of a group may write.  No public module
# has it.  Looked up on 2.13; the calls are the same in 2.11.


def symmetric_memory(num_bytes: int, device: torch.device, group: Any) -> list[torch.Tensor]:
    """One buffer of bytes a rank of a process group, in rank order, all mapped here; collective."""
    # A multicast object would be made beside it, which nothing here uses and some hosts forbid.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    mine = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(mine, group)
    peers = [handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(handle.world_size)]
    peers[handle.rank] = mine
    return peers


def share_handle(memory: torch.Tensor) -> Any:
    """Something to pickle by which another process can map this CUDA memory (CUDA IPC)."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(memory)


def open_handle(handle: Any, device: torch.device) -> torch.Tensor:
    """The memory of a handle, mapped for kernels of ``device``, whichever GPU it lies on.

    Torch would map it for the device that it lies on, where kernels of another may not write.
    """
    rebuild, args = handle
    named = inspect.signature(rebuild).bind(*args)
    index = torch.cuda.current_device() if device.index is None else device.index
    named.arguments["storage_device"] = index
    return rebuild(*named.args, **named.kwargs)


# --- a kernel that only takes time, for tests of what runs beside it.  No public call does that.


def gpu_sleep(milliseconds: float, device: torch.device) -> None:
    """Keeps the current stream of a device busy for about so long; does not block the host."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(milliseconds * 1.7e6))  # cycles at 1.7 GHz


# --- random numbers while a step is traced.  Tested on 2.11 and 2.13.


def call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws from a random generator: attention without dropout does not, although
    its operator is tagged as random."""
    if not op_is_random(target):
        return False
    for i, arg in enumerate(target._schema.arguments):
        if arg.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get(arg.name, arg.default_value)
            return given != 0.0
    return True


@contextlib.contextmanager
def watched_calls(
    watch: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None],
) -> Iterator[None]:
    """Calls ``watch(operator, args, kwargs)`` before every operator that runs below autograd.

    No public module has dispatch modes.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            watch(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch():
        yield

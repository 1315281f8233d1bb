"""Writes to temporaries become plain operators, so that later passes may move and copy them."""

from __future__ import annotations

import operator

from torch import fx

from interlace import _compat


def functionalise_temporaries(gm: fx.GraphModule) -> None:
    """``add_`` on a value that nobody else reads becomes ``add``; the bits stay the same.

    Writes to inputs (buffers) and to values with other readers stay as they are, and keep their
    place through mutation edges.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or not _compat.op_is_mutable(node.target):
            continue
        written = node.args[0] if node.args else None
        plain = _compat.functional_twin(node.target)
        if plain is not None and isinstance(written, fx.Node) and has_one_reader(written):
            node.target = plain


def has_one_reader(node: fx.Node) -> bool:
    """Whether the one user of a node is all that ever reads the memory of its result.

    That of an operator in place is its operand's, which others may have looked at before.
    """
    while node.op == "call_function" and len(node.users) == 1:
        target = node.target
        if _compat.op_is_mutable(target):
            writes = [writes for _, _, writes in _compat.op_memory(target)]
            if not isinstance(node.args[0], fx.Node) or not writes[0] or any(writes[1:]):
                return False
            node = node.args[0]
        elif target is operator.getitem and isinstance(node.args[0], fx.Node):
            return not _compat.op_is_view(node.args[0].target)
        else:
            return not _compat.op_is_view(target)
    return False

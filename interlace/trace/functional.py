"""Writes to temporaries become plain operators, so that later passes may move and copy them."""

from __future__ import annotations

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
        if (
            plain is not None
            and isinstance(written, fx.Node)
            and written.op == "call_function"
            and len(written.users) == 1
            and not _compat.op_is_view(written.target)
        ):
            node.target = plain

"""One tag a node: where it came from, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

PHASES = ("io", "forward", "recompute", "backward")
_KEY = "interlace.tag"


@dataclass(frozen=True)
class Tag:
    """Where a node came from.

    source  stage and side of the step: ``0F`` is the forward of stage 0, ``0B`` its backward.
    layer   path of the module whose call made it, ``layers.3.moe``; empty for the step itself.
    call    the n-th call of that module in the step; a recompute repeats the number.
    chunk   part of a chunked region, None outside.
    phase   ``io`` (placeholders and output), ``forward``, ``recompute`` or ``backward``.
    role    ``body``, or what else it is: ``cast`` of a parameter, ``accum`` (a gradient sum made by
            autograd), ``seed``, ``hook``, ``loss``, ``param``, ``buffer``, ``arg``, ``output``.
    """

    source: str
    layer: str
    call: int
    chunk: int | None
    phase: str
    role: str = "body"

    def __str__(self) -> str:
        where = self.layer or "step"
        call = f"#{self.call}" if self.call else ""
        chunk = "" if self.chunk is None else f"/{self.chunk}"
        role = "" if self.role == "body" else f" ({self.role})"
        return f"{self.source} {where}{call}{chunk} {self.phase}{role}"


def tag_of(node: fx.Node) -> Tag:
    """The tag of a node; ValueError where it has none."""
    tag = node.meta.get(_KEY)
    if not isinstance(tag, Tag):
        raise ValueError(
            f"node {node.name} ({node.target}) has no tag; every pass tags the nodes that it makes."
        )
    return tag


def set_tag(node: fx.Node, tag: Tag) -> None:
    """Gives a node its tag."""
    node.meta[_KEY] = tag


def has_tag(node: fx.Node) -> bool:
    """Whether a node has a tag."""
    return isinstance(node.meta.get(_KEY), Tag)

"""The vocabulary of all passes: tags, communication, the driver."""

from interlace.graph.comm import (
    CommSpec,
    comm_of,
    is_collective,
    is_wait,
    register_blocking,
    register_comm,
)
from interlace.graph.dag import Dag, Edge, build_dag, check_order
from interlace.graph.passes import (
    Pass,
    PassReport,
    check_invariants,
    count_effects,
    has_effect,
    remove_dead_nodes,
    run_passes,
)
from interlace.graph.tag import Tag, has_tag, set_tag, tag_of

__all__ = [
    "CommSpec",
    "Dag",
    "Edge",
    "Pass",
    "PassReport",
    "Tag",
    "build_dag",
    "check_invariants",
    "check_order",
    "comm_of",
    "count_effects",
    "has_effect",
    "has_tag",
    "is_collective",
    "is_wait",
    "register_blocking",
    "register_comm",
    "remove_dead_nodes",
    "run_passes",
    "set_tag",
    "tag_of",
]

"""Token exchange of expert parallelism: from unrouted tokens to expert-major rows and back."""

from interlace.ep import nvidia_hybridep  # noqa: F401 - it registers itself
from interlace.ep.api import Plan, combine, dispatch, plan
from interlace.ep.exchange import Exchange
from interlace.ep.reset import reset
from interlace.ep.transport import Group, drop_group, get_group, register_group

__all__ = [
    "Exchange",
    "Group",
    "Plan",
    "combine",
    "dispatch",
    "drop_group",
    "get_group",
    "plan",
    "register_group",
    "reset",
]

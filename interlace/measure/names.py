"""What a name says: is this kernel communication, of which kind, which layer, which phase.

Everything that is neither communication nor memory copy is compute, whatever its name: no list of
compute kernels can be complete.
"""

from __future__ import annotations

import functools
import re

KINDS = {
    "ep_dispatch": "EP dispatch",
    "ep_combine": "EP combine",
    "ep_plan": "EP plan: counts and places",
    "ep": "EP exchange, direction unknown",
    "page": "page stash and reload",
    "p2p": "send and receive",
    "data_parallel": "data-parallel collectives",
    "other": "other communication",
}

# In front of the parameters and template arguments of a kernel; any namespace may come before.
_COMMUNICATION = re.compile(
    r"(?<![a-z])_*(?:nccl|rccl|mscclpp|msccl|nvshmem|deep_?ep|hybrid_?ep|bounded_copy"
    r"|push_rows|ep_signal"
    r"|page_?stash|page_?reload|paged_?stash|all_?to_?all|(?:one|two)_shot_all_?reduce"
    r"|multimem_all|cross_device_reduce)",
    re.IGNORECASE,
)
_DIRECTED = (
    ("ep_plan", re.compile(r"ep_signal_plan|(?<![a-z])ep plan(?![a-z])", re.I)),
    ("page", re.compile(r"page_?(stash|reload)|paged_?stash|(stash|reload)_?pages?\b", re.I)),
    ("ep_dispatch", re.compile(r"dispatch", re.I)),
    ("ep_combine", re.compile(r"combine", re.I)),
)
_GENERAL = (
    ("ep", re.compile(r"all_?to_?all|(?<![a-z])a2a|deep_?ep|hybrid_?ep|bounded_copy|push_rows"
                      r"|ep_signal", re.I)),
    (
        "data_parallel",
        re.compile(r"all_?reduce|reduce_?scatter|all_?gather|broadcast|device_reduce|:_?reduce"
                   r"|_reduce_", re.I),
    ),
    ("p2p", re.compile(r"send_?recv|(?<![a-z])(i?send|i?recv|p2p)(?![a-z])", re.I)),
)  # fmt: skip
_GROUP = (
    ("ep", re.compile(r"(?<![a-z])(ep|expert)(?![a-z])|expert", re.I)),
    ("p2p", re.compile(r"(?<![a-z])pp(?![a-z])|pipeline", re.I)),
    ("data_parallel", re.compile(r"(?<![a-z])(dp|fsdp|ddp|hsdp)(?![a-z])|data_parallel", re.I)),
)
_LAYER = re.compile(r"(?<![a-z])(?:layers?|blocks?)[\s._/:\[(#-]*(\d+)", re.IGNORECASE)
_PHASE = (
    ("backward", re.compile(r"(?<![a-z])(backward|bwd)(?![a-z])|autograd::engine", re.I)),
    ("recompute", re.compile(r"(?<![a-z])recompute(?![a-z])", re.I)),
    ("optimizer", re.compile(r"(?<![a-z])optim(izer)?(?![a-z])", re.I)),
    ("forward", re.compile(r"(?<![a-z])(forward|fwd)(?![a-z])", re.I)),
)
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_COLLECTIVE_SUFFIX = re.compile(r"(Dev)?Kernel|Storage<[^>]*>")


def is_communication(name: str, own: re.Pattern[str] | None = None) -> bool:
    """Old and new prefixes, any case; ``own``: the user's pattern, searched in the whole name."""
    if own is not None and own.search(name):
        return True
    head = re.split(r"[<(]", name.replace("(anonymous namespace)", ""), maxsplit=1)[0]
    return bool(_COMMUNICATION.search(head))


def own_pattern(patterns: list[str]) -> re.Pattern[str] | None:
    """Raises ValueError, if one is no regular expression."""
    for text in patterns:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(
                f"--comm {text!r} is not a regular expression: {error}; quote special characters."
            ) from None
    return re.compile("|".join(f"(?:{text})" for text in patterns)) if patterns else None


def directed_kind(text: str) -> str:
    """Plan, dispatch, combine or page, or nothing."""
    return _first(_DIRECTED, text)


def general_kind(text: str) -> str:
    return _first(_GENERAL, text)


def layer_of(text: str) -> str:
    match = _LAYER.search(text)
    return str(int(match[1])) if match else ""


def phase_of(text: str) -> str:
    return _first(_PHASE, text)


def step_of(text: str) -> str:
    match = _STEP.match(text)
    return match[1] if match else ""


def kind_of(name: str, near: str, around: str, collective: str, about: str) -> str:
    """Kind of one communication kernel.

    name: of the kernel; near: general kind of the innermost annotation that has one; around: the
    same for plan, dispatch, combine and page; collective and about: what NCCL said of the
    collective and of its group.  NCCL runs an all-to-all as sends and receives, so that name alone
    is weak.
    """
    if directed := directed_kind(name):
        return directed
    by_name = general_kind(name)
    if by_name == "data_parallel":
        return by_name
    said = general_kind(collective) or near
    if said == "data_parallel":
        return said
    if around:
        return around
    if by_name == "ep" or said == "ep":
        return "ep"
    return _first(_GROUP, about) or said or by_name or "other"


def _first(rules: tuple[tuple[str, re.Pattern[str]], ...], text: str) -> str:
    return next((kind for kind, pattern in rules if text and pattern.search(text)), "")


@functools.lru_cache(maxsize=4096)
def short(name: str, length: int = 60) -> str:
    """A kernel's name for people: no return type, no parameters, no namespaces in front."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    text = re.split(r"\((?!anonymous)", text, maxsplit=1)[0] or name
    head, *arguments = text.split("<", 1)
    if "::" in head:
        head = head.rsplit("::", 1)[1] or head
    text = head + ("<" + arguments[0] if arguments else "")
    return text if len(text) <= length else text[: length - 1] + "…"

"""Begin anew after a step that was cut short."""

from __future__ import annotations

from interlace.ep import pending
from interlace.ep.nvidia_buffers import close_buffers
from interlace.ep.windows import close_windows


def reset(group: str | None = None) -> None:
    """Forgets exchanges in flight, buffers and their epochs, of one group or of all.

    After a step that raised on one rank the others stand at another epoch; all ranks of the group
    call this before the next step, and meet again when it opens its buffers.  Captured steps that
    used those buffers must be captured again.
    """
    pending.forget_all()
    close_windows(group)
    close_buffers(group)

"""What a CUDA source compiles to, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from interlace.kernels import cuda_source


def nvrtc_found() -> bool:
    try:
        cuda_source._nvrtc()
    except RuntimeError:
        return False
    return True


def usage_of(source: str, name: str, arch: str, folder: Path) -> dict[str, int]:
    """Registers (REG), bytes of stack (STACK) and of spills (LOCAL) of a thread."""
    import triton

    image = folder / f"{name}.cubin"
    image.write_bytes(cuda_source.compile_source(source, name, arch))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run(
        [tool, "-res-usage", image], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)
    return {key: int(value) for key, value in found}

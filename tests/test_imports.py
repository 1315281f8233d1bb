"""Everything imports where optional parts are missing; help and settings need no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BLOCKER = """
import importlib, importlib.abc, pkgutil, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED):
            raise ModuleNotFoundError(f"{name} is hidden by the test", name=name)
def hide(*names):
    global BLOCKED
    BLOCKED = names
    sys.meta_path.insert(0, Blocker())
def import_all():
    import interlace
    names = [m.name for m in pkgutil.walk_packages(interlace.__path__, "interlace.")]
    names = [name for name in names if not name.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    assert len(names) > 20, names
"""


def run(code: str, timeout: float = 60) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + code],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_every_module_imports_without_optional_packages() -> None:
    run(
        "hide('triton', 'flash_attn', 'flash_attn_interface', 'deep_ep', 'transformers')\n"
        "import_all()"
    )


NO_DISTRIBUTED = """
import torch.distributed
torch.distributed.is_available = lambda: False
hide('torch.distributed.pipelining')
"""


def test_single_process_works_without_distributed() -> None:
    """A build of torch without it: all modules import, and one process has a world."""
    run(
        NO_DISTRIBUTED
        + """
import_all()
from interlace.train.config_read import load_config
from interlace.train.world import close_world, init_world
world = init_world(load_config(["dsv3-tiny", "--parallelism.expert_parallel_degree", "1"]))
assert (world.rank, world.size, world.backend, world.ep_group) == (0, 1, "none", None)
close_world(world)
import os
os.environ.update(RANK="0", WORLD_SIZE="2")
try:
    init_world(load_config(["dsv3-tiny"]))
except ValueError as error:
    assert "has no torch.distributed" in str(error), error
else:
    raise SystemExit("two processes without torch.distributed were accepted")
"""
    )


@pytest.mark.slow
def test_one_process_trains_without_distributed(tmp_path: Path) -> None:
    run(
        NO_DISTRIBUTED
        + f"""
from interlace.cli import main
flags = ["--ep.transport", "loopback", "--training.steps", "1", "--data.source", "random"]
code = main(["train", "dsv3-tiny", *flags, "--metrics.folder", {str(tmp_path)!r}])
assert code == 0, code
""",
        timeout=120,
    )


def test_help_and_settings_errors_need_no_torch() -> None:
    """Importing torch takes seconds; a typing mistake must not."""
    run(
        """
from interlace.cli import main
assert main(["--help"]) == 0
assert main(["train", "dsv3-tiny", "--training.seq_len", "1"]) == 2
assert main(["train", "dsv3-tinny"]) == 2
assert "torch" not in sys.modules
assert "numpy" not in sys.modules
"""
    )

"""How a process of a command ends."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit
import sys
import torch.distributed as dist
from kairostep.cli import main

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
atexit.register(lambda: print("in a group:", dist.is_initialized()))  # what is registered first runs last
main(["presets"])
main(["presets"])
raise RuntimeError("a command that fails")
"""


def test_a_command_leaves_its_gloo_group_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Threads of a group that is left to the end now and then abort the process."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "rendezvous"], capture_output=True, text=True, timeout=120
    )
    assert "in a group: False" in ended.stdout, ended.stderr
    assert "RuntimeError: a command that fails" in ended.stderr
    assert ended.returncode == 1

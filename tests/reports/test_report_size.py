"""Twenty long runs make a page in bounded time, memory and size."""

import resource
import subprocess
import sys
import time
from pathlib import Path

from made_runs import add_grids, make_run

CODE = """
import sys
from pathlib import Path
from kairostep.reports import write_report
write_report([Path(sys.argv[1])], Path(sys.argv[2]))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # ru_maxrss would include the parent's
"""


def test_twenty_runs_of_a_hundred_thousand_steps(tmp_path: Path) -> None:
    for i in range(20):
        sampler = ("uniform", "adaptive", "root_loss", "speed")[i % 4]
        run = make_run(tmp_path / "runs" / f"{i}", sampler, i // 4, steps=100_000, log_every=100, density_every=1000)
        add_grids(run, [50_000, 100_000], size=512, noisy=True)
    page = tmp_path / "report.html"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-c", CODE, str(tmp_path / "runs"), str(page)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 20, f"{time.monotonic() - start:.0f} s on the clock"
    assert int(printed) < 1024 * 1024  # KiB
    assert page.stat().st_size < 20_000_000

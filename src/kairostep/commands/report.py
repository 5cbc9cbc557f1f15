"""`kairostep report`: one page about runs, written or served."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from kairostep.commands.failures import RUN_ERROR, fail

TEXT = """\
Makes one HTML page of runs, with all figures, tables, samples and settings in it, as in

  kairostep report runs/uniform-0 runs/uniform-1 runs/adaptive-0 runs/adaptive-1 -o report.html
  kairostep report runs
  kairostep report --watch runs

Runs that differ in their seed alone are one arm. --watch serves the page on localhost while they train.
"""
PARSER = {"help": "show and compare runs", "description": TEXT, "allow_abbrev": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="run directories, or folders of them")
    parser.add_argument("-o", "--output", type=Path, help="the page (report.html)")
    parser.add_argument("--watch", action="store_true", help="serve the page on localhost and follow the runs")
    parser.add_argument("--port", type=int, help="of --watch (8765, or a free one)")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Write the page of some runs, or serve it."""
    from kairostep.reports import write_report
    from kairostep.reports.report import find_runs
    from kairostep.reports.watch import serve
    from kairostep.runs.history import RunHistory

    if known.watch and known.output:
        raise ValueError(f"--watch serves the page and writes none, got --output {known.output}: leave one of them out")
    if known.port is not None and not known.watch:
        raise ValueError(f"--port is that of --watch, got {known.port} without it: pass --watch too")
    if known.watch:
        serve(known.directories, known.port)
    else:
        print(f"open {write_report(known.directories, known.output or Path('report.html'))}", flush=True)
        for run in find_runs(known.directories):
            wrong = [problem for problem in RunHistory.read(run).problems if problem.startswith("config.yaml")]
            if wrong and (run / "config.yaml").exists():
                fail(f"{run}: {wrong[0]}, so that its settings are not on the page: put back a good copy", RUN_ERROR)

"""HTML pages and tables of run directories."""

from typing import TYPE_CHECKING

from kairostep.plots import Axis as Axis
from kairostep.plots import Curve as Curve
from kairostep.plots import Figure as Figure
from kairostep.plots import Heat as Heat
from kairostep.plots import Panel as Panel
from kairostep.reports.comparison import comparison_table as comparison_table
from kairostep.reports.page import write_figures as write_figures
from kairostep.reports.report import write_report as write_report

if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raise AttributeError, with the new name of a moved class."""
        if name in ("RunFiles", "RunHistory"):
            raise AttributeError(f"{__name__}.{name} has another name now: kairostep.runs.RunHistory")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

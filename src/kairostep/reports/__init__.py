"""What run directories say, for people."""

from typing import TYPE_CHECKING

from kairostep.plots import Axis as Axis
from kairostep.plots import Curve as Curve
from kairostep.plots import Figure as Figure
from kairostep.plots import Heat as Heat
from kairostep.plots import Panel as Panel
from kairostep.reports.comparison import comparison_table as comparison_table
from kairostep.reports.page import write_figures as write_figures
from kairostep.reports.report import write_report as write_report

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> object:
        """Say what became of a name that is no longer here."""
        if name in ("RunFiles", "RunHistory"):
            raise AttributeError(f"{__name__}.{name} has another name now: kairostep.runs.RunHistory")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

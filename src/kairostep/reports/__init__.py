"""What run directories say, for people."""

from kairostep.reports.comparison import comparison_table as comparison_table
from kairostep.reports.figure import Axis as Axis
from kairostep.reports.figure import Curve as Curve
from kairostep.reports.figure import Figure as Figure
from kairostep.reports.figure import Heat as Heat
from kairostep.reports.figure import Panel as Panel
from kairostep.reports.page import write_figures as write_figures
from kairostep.reports.report import write_report as write_report
from kairostep.reports.run_files import RunFiles as RunFiles

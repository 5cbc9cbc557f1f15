"""What run directories say, for people."""

from kairostep.reports.comparison import comparison_table as comparison_table
from kairostep.reports.run_files import RunFiles as RunFiles

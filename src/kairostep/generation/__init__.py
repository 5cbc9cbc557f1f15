"""From noise to samples."""

from kairostep.generation.generate import generate as generate
from kairostep.generation.grid import save_grid as save_grid
from kairostep.generation.schedulers import native_prediction as native_prediction
from kairostep.generation.schedulers import scheduler_for as scheduler_for

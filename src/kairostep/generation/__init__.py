"""From noise to samples."""

from kairostep.generation.generate import generate as generate
from kairostep.generation.grid import save_grid as save_grid
from kairostep.generation.noise import NoiseOfImages as NoiseOfImages
from kairostep.generation.noise import noise_of_images as noise_of_images
from kairostep.generation.schedulers import native_prediction as native_prediction
from kairostep.generation.schedulers import scheduler_for as scheduler_for
from kairostep.generation.solvers import DEFAULT_STEPS as DEFAULT_STEPS
from kairostep.generation.solvers import network_evaluations as network_evaluations
from kairostep.generation.solvers import steps_of as steps_of

"""The measurements behind the papers' figures, and what a choice of sampler and weighting means before training."""

from kairostep.analysis.gradient_noise import GradientNoise as GradientNoise
from kairostep.analysis.gradient_noise import NoiseRatio as NoiseRatio
from kairostep.analysis.gradient_noise import gradient_noise as gradient_noise
from kairostep.analysis.gradient_variance import Ratio as Ratio
from kairostep.analysis.gradient_variance import VarianceAt as VarianceAt
from kairostep.analysis.gradient_variance import VarianceProfile as VarianceProfile
from kairostep.analysis.gradient_variance import variance_profile as variance_profile
from kairostep.analysis.increments import Area as Area
from kairostep.analysis.increments import ProcessIncrements as ProcessIncrements
from kairostep.analysis.increments import process_increments as process_increments
from kairostep.analysis.interdependence import Interdependence as Interdependence
from kairostep.analysis.interdependence import RangeEffect as RangeEffect
from kairostep.analysis.interdependence import RangeTraining as RangeTraining
from kairostep.analysis.interdependence import range_effects as range_effects
from kairostep.analysis.preview import Part as Part
from kairostep.analysis.preview import Preview as Preview
from kairostep.analysis.preview import preview_of as preview_of
from kairostep.analysis.rows import Rows as Rows

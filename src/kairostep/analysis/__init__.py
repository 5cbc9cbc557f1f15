"""The measurements behind the papers' figures, and previews of a sampler and weighting before training."""

from typing import TYPE_CHECKING

from kairostep.analysis.gradient_profile import VarianceAt as VarianceAt
from kairostep.analysis.gradient_profile import VarianceProfile as VarianceProfile
from kairostep.analysis.gradient_profile import VarianceRatio as VarianceRatio
from kairostep.analysis.gradient_profile import variance_profile as variance_profile
from kairostep.analysis.increments import Area as Area
from kairostep.analysis.increments import ProcessIncrements as ProcessIncrements
from kairostep.analysis.increments import process_increments as process_increments
from kairostep.analysis.interdependence import Interdependence as Interdependence
from kairostep.analysis.interdependence import RangeEffect as RangeEffect
from kairostep.analysis.interdependence import RangeTraining as RangeTraining
from kairostep.analysis.interdependence import range_effects as range_effects
from kairostep.analysis.noise_ratios import NoiseRatio as NoiseRatio
from kairostep.analysis.preview import Part as Part
from kairostep.analysis.preview import Preview as Preview
from kairostep.analysis.preview import preview_of as preview_of
from kairostep.analysis.rows import Rows as Rows
from kairostep.analysis.step_noise import GradientNoise as GradientNoise
from kairostep.analysis.step_noise import gradient_noise as gradient_noise

if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raise AttributeError, with the new name of a renamed class."""
        if name == "Ratio":
            raise AttributeError(f"{__name__}.Ratio has another name now: {__name__}.VarianceRatio")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

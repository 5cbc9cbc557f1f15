"""The measurements behind the papers' figures, and what a choice of sampler and weighting means before training."""

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
from kairostep.analysis.preview import Part as Part
from kairostep.analysis.preview import Preview as Preview
from kairostep.analysis.preview import preview_of as preview_of
from kairostep.analysis.rows import Rows as Rows
from kairostep.analysis.step_noise import GradientNoise as GradientNoise
from kairostep.analysis.step_noise import NoiseRatio as NoiseRatio
from kairostep.analysis.step_noise import gradient_noise as gradient_noise

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> object:
        """Say what became of a name that is no longer here."""
        if name == "Ratio":
            raise AttributeError(f"{__name__}.Ratio has another name now: {__name__}.VarianceRatio")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Which timesteps to train on: samplers that need torch and nothing else."""

from typing import TYPE_CHECKING

from kairostep.timesteps.adaptive import Adaptive as Adaptive
from kairostep.timesteps.context import SamplerContext as SamplerContext
from kairostep.timesteps.curriculum import Curriculum as Curriculum
from kairostep.timesteps.fixed import FixedBeta as FixedBeta
from kairostep.timesteps.fixed import Laplace as Laplace
from kairostep.timesteps.fixed import LogitNormal as LogitNormal
from kairostep.timesteps.fixed import LogNormalSigma as LogNormalSigma
from kairostep.timesteps.fixed import Mode as Mode
from kairostep.timesteps.fixed import Tabulated as Tabulated
from kairostep.timesteps.fixed import Uniform as Uniform
from kairostep.timesteps.gradient_variance import GradientVariance as GradientVariance
from kairostep.timesteps.least_noise import LeastNoise as LeastNoise
from kairostep.timesteps.loss_aware import InfoNoise as InfoNoise
from kairostep.timesteps.loss_aware import LossSecondMoment as LossSecondMoment
from kairostep.timesteps.noise import least_noise_density as least_noise_density
from kairostep.timesteps.noise import noise_ratio as noise_ratio
from kairostep.timesteps.policy import BetaPolicy as BetaPolicy
from kairostep.timesteps.policy import ConstantBeta as ConstantBeta
from kairostep.timesteps.probe_plan import Probing as Probing
from kairostep.timesteps.root_loss import RootLoss as RootLoss
from kairostep.timesteps.sampler import LossAt as LossAt
from kairostep.timesteps.sampler import Timesteps as Timesteps
from kairostep.timesteps.sampler import TimestepSampler as TimestepSampler
from kairostep.timesteps.selection import f_statistic as f_statistic
from kairostep.timesteps.selection import select_timesteps as select_timesteps
from kairostep.timesteps.speed import Speed as Speed

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> object:
        """Say what became of a name that is no longer here."""
        if name == "BetaPair":
            raise AttributeError(f"{__name__}.BetaPair has another name now: {__name__}.ConstantBeta")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

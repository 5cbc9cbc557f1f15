"""Train diffusion and flow models at the timesteps that matter."""

from typing import TYPE_CHECKING

from kairostep import began  # noqa: F401  # first: it takes the time before torch is imported
from kairostep import evaluation as evaluation
from kairostep.by_name import from_name as from_name
from kairostep.diffusion import EPSILON as EPSILON
from kairostep.diffusion import VELOCITY as VELOCITY
from kairostep.diffusion import X0 as X0
from kairostep.diffusion import DiscreteProcess as DiscreteProcess
from kairostep.diffusion import EDMProcess as EDMProcess
from kairostep.diffusion import FlowProcess as FlowProcess
from kairostep.diffusion import Objective as Objective
from kairostep.diffusion import Prediction as Prediction
from kairostep.diffusion import StableTarget as StableTarget
from kairostep.diffusion import V as V
from kairostep.diffusion import Weighting as Weighting
from kairostep.diffusion import antithetic_pairs as antithetic_pairs
from kairostep.diffusion import as_weighting as as_weighting
from kairostep.diffusion import constant as constant
from kairostep.diffusion import debias as debias
from kairostep.diffusion import edm as edm
from kairostep.diffusion import min_snr as min_snr
from kairostep.diffusion import p2 as p2
from kairostep.diffusion import soft_min_snr as soft_min_snr
from kairostep.diffusion import vlb as vlb
from kairostep.timesteps import Adaptive as Adaptive
from kairostep.timesteps import BetaPolicy as BetaPolicy
from kairostep.timesteps import ConstantBeta as ConstantBeta
from kairostep.timesteps import Curriculum as Curriculum
from kairostep.timesteps import FixedBeta as FixedBeta
from kairostep.timesteps import GradientVariance as GradientVariance
from kairostep.timesteps import InfoNoise as InfoNoise
from kairostep.timesteps import Laplace as Laplace
from kairostep.timesteps import LeastNoise as LeastNoise
from kairostep.timesteps import LogitNormal as LogitNormal
from kairostep.timesteps import LogNormalSigma as LogNormalSigma
from kairostep.timesteps import LossAt as LossAt
from kairostep.timesteps import LossSecondMoment as LossSecondMoment
from kairostep.timesteps import Mode as Mode
from kairostep.timesteps import Probing as Probing
from kairostep.timesteps import RootLoss as RootLoss
from kairostep.timesteps import Speed as Speed
from kairostep.timesteps import Tabulated as Tabulated
from kairostep.timesteps import Timesteps as Timesteps
from kairostep.timesteps import TimestepSampler as TimestepSampler
from kairostep.timesteps import Uniform as Uniform
from kairostep.timesteps import f_statistic as f_statistic
from kairostep.timesteps import least_noise_density as least_noise_density
from kairostep.timesteps import noise_ratio as noise_ratio
from kairostep.timesteps import select_timesteps as select_timesteps
from kairostep.version import __version__ as __version__

if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raise AttributeError, with what replaces a removed or renamed class."""
        if name == "Progress":
            from kairostep.registry import samplers

            raise AttributeError(samplers.removed["progress"])
        if name == "BetaPair":
            raise AttributeError("kairostep.BetaPair has another name now: kairostep.ConstantBeta")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What x_t is, what the network predicts of it, and the loss."""

from kairostep.diffusion.objective import Objective as Objective
from kairostep.diffusion.prediction import EPSILON as EPSILON
from kairostep.diffusion.prediction import VELOCITY as VELOCITY
from kairostep.diffusion.prediction import X0 as X0
from kairostep.diffusion.prediction import Prediction as Prediction
from kairostep.diffusion.prediction import V as V
from kairostep.diffusion.process import DiscreteProcess as DiscreteProcess
from kairostep.diffusion.process import EDMProcess as EDMProcess
from kairostep.diffusion.process import FlowProcess as FlowProcess
from kairostep.diffusion.variance_reduction import StableTarget as StableTarget
from kairostep.diffusion.variance_reduction import antithetic_pairs as antithetic_pairs
from kairostep.diffusion.weighting import Weighting as Weighting
from kairostep.diffusion.weighting import as_weighting as as_weighting
from kairostep.diffusion.weighting import constant as constant
from kairostep.diffusion.weighting import debias as debias
from kairostep.diffusion.weighting import density_weighting as density_weighting
from kairostep.diffusion.weighting import edm as edm
from kairostep.diffusion.weighting import min_snr as min_snr
from kairostep.diffusion.weighting import p2 as p2
from kairostep.diffusion.weighting import soft_min_snr as soft_min_snr
from kairostep.diffusion.weighting import vlb as vlb

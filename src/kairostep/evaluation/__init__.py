"""How good a model is, without images (likelihood, bound) and with them (features, distances)."""

from kairostep.evaluation.bound import Bound as Bound
from kairostep.evaluation.bound import variational_bound as variational_bound
from kairostep.evaluation.distances import PrecisionRecall as PrecisionRecall
from kairostep.evaluation.distances import fid as fid
from kairostep.evaluation.distances import frechet_distance as frechet_distance
from kairostep.evaluation.distances import kernel_distance as kernel_distance
from kairostep.evaluation.distances import precision_recall as precision_recall
from kairostep.evaluation.estimate import Estimate as Estimate
from kairostep.evaluation.features import FeatureNetwork as FeatureNetwork
from kairostep.evaluation.features import load_features as load_features
from kairostep.evaluation.features import load_inception as load_inception
from kairostep.evaluation.likelihood import HeldOut as HeldOut
from kairostep.evaluation.likelihood import LossProfile as LossProfile
from kairostep.evaluation.likelihood import held_out_loss as held_out_loss
from kairostep.evaluation.likelihood import loss_profile as loss_profile
from kairostep.evaluation.moments import FeatureStatistics as FeatureStatistics
from kairostep.evaluation.moments import Moments as Moments
from kairostep.evaluation.moments import feature_statistics as feature_statistics

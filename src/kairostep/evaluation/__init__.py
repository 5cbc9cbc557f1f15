"""How good a model is."""

from kairostep.evaluation.likelihood import HeldOut as HeldOut
from kairostep.evaluation.likelihood import held_out_loss as held_out_loss

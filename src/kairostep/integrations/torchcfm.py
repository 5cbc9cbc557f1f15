"""Samplers for torchcfm. Its matchers run from noise at 0 to data at 1, so flow_matching's tools fit."""

from kairostep.integrations.flow_matching import PathSampler as PathSampler
from kairostep.integrations.flow_matching import PathTimes as PathTimes
from kairostep.integrations.flow_matching import path_process as path_process
from kairostep.integrations.flow_matching import to_path_time as to_path_time

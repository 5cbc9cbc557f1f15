"""Samplers for torchcfm, whose matchers run from noise at 0 to data at 1 as flow_matching's paths do: its tools."""

from kairostep.integrations.flow_matching import PathSampler as PathSampler
from kairostep.integrations.flow_matching import PathTimes as PathTimes
from kairostep.integrations.flow_matching import path_process as path_process
from kairostep.integrations.flow_matching import to_path_time as to_path_time

"""`kairostep patch`: diffusers' training scripts, rewritten by their syntax trees."""

from kairostep.integrations.patching.rewrite import Patched as Patched
from kairostep.integrations.patching.rewrite import patch_script as patch_script
from kairostep.integrations.patching.sampler_names import sampler_names as sampler_names
from kairostep.integrations.patching.source import Refused as Refused

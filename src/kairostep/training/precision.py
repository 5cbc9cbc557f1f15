"""Mixed precision inside a network's forward, so that networks of the same structure share compiled code."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Prepare a model with accelerate, and replace its autocast by one that compiled code can share.

    Accelerate makes an autocast object for each model. Compiled code would be bound to that object, so every training
    in a process would compile again, and torch stops compiling after eight times. A model that is already prepared is
    returned unchanged. With several processes the trainer averages gradients itself.
    """
    if getattr(model, "_is_accelerate_prepared", False):  # accelerate's own mark
        return model
    forward = model.forward
    prepared_model: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
    prepared_model._is_accelerate_prepared = True  # type: ignore[assignment]
    if accelerator.native_amp and accelerator.mixed_precision in DTYPES and isinstance(forward, MethodType):
        options = accelerator.autocast_handler.to_kwargs() if accelerator.autocast_handler else {}
        dtype = DTYPES[accelerator.mixed_precision]
        model.forward = MethodType(under_autocast(forward.__func__, accelerator.device.type, dtype, options), model)
    return prepared_model


def under_autocast(
    forward: Callable[..., Any], device_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return a forward that computes in lower precision and returns float32."""

    @wraps(forward)
    def lower_precision(*args: Any, **cond: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype, **options):
            output = forward(*args, **cond)
        return convert_to_fp32(output)

    return lower_precision

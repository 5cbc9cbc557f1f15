"""DiT (Peebles & Xie, ICCV 2023): diffusers' model, with labels left to the training loop."""

from functools import wraps
from typing import Any

from diffusers.models.embeddings import LabelEmbedding
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor, long, nn

from kairostep.checks import count
from kairostep.networks.inputs import check_labels, divides, time_per_row


class DiT2DModel(DiTTransformer2DModel):
    """A DiT that never drops labels by itself, and takes none where it has no classes; build it with `dit`.

    Config and weights are those of `DiTTransformer2DModel`, which can load them too, but drops labels in training.
    Labels are 0..num_embeds_ada_norm, the last one the null class; with 0 classes, label 0 is all there is.
    """

    @wraps(DiTTransformer2DModel.__init__)  # type: ignore[misc]  # diffusers reads the config's keys off the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0

    def forward(
        self,
        hidden_states: Tensor,  # (B, C, H, W)
        timestep: Tensor | float | None = None,  # (), (B,) or a number
        class_labels: Tensor | None = None,  # (B,) in 0..num_embeds_ada_norm
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Return the prediction (B, C, H, W) as `.sample`, or as a tuple of one."""
        check_labels(class_labels, self.config["num_embeds_ada_norm"], hidden_states)
        if class_labels is None:
            class_labels = hidden_states.new_zeros(len(hidden_states), dtype=long)  # (B,)
        time = time_per_row(timestep, hidden_states)
        return super().forward(
            hidden_states,
            time,  # type: ignore[arg-type]  # diffusers names int64 alone, and takes any
            class_labels,  # type: ignore[arg-type]
            cross_attention_kwargs,  # type: ignore[arg-type]
            return_dict,
        )


def dit(
    sample_size: int,  # height and width of the input
    in_channels: int,  # and of the output
    *,
    hidden_size: int = 384,
    depth: int = 12,
    num_heads: int = 6,
    patch_size: int = 2,
    num_classes: int | None = None,  # real classes; label num_classes is the null class
) -> DiT2DModel:
    """Return a DiT that predicts 0 at the start; the defaults are DiT-S/2's."""
    divides("sample_size", count("sample_size", sample_size), "patch_size", count("patch_size", patch_size, example=2))
    count("hidden_size", hidden_size, at_most=2**17, example=768)
    divides("hidden_size", hidden_size, "num_heads", count("num_heads", num_heads))
    if hidden_size % 4:
        raise ValueError(
            f"hidden_size must be divisible by 4, for sines and cosines of two coordinates, got {hidden_size}: "
            f"pass for instance hidden_size={4 * hidden_size}"
        )
    model: DiT2DModel = DiT2DModel(
        sample_size=sample_size,
        patch_size=patch_size,
        in_channels=count("in_channels", in_channels),
        out_channels=in_channels,
        num_layers=count("depth", depth, at_most=10**3, example=12),
        num_attention_heads=num_heads,
        attention_head_dim=hidden_size // num_heads,
        num_embeds_ada_norm=0 if num_classes is None else count("num_classes", num_classes),
    )
    _start_at_zero(model)
    return model


def _start_at_zero(model: DiT2DModel) -> None:
    """Make each block the identity and the prediction 0, as the paper does (adaLN-Zero) and diffusers does not."""
    modulations = [module.linear for module in model.modules() if isinstance(module, AdaLayerNormZero)]
    for layer in (*modulations, model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)

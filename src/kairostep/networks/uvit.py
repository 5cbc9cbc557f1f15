"""U-ViT: time, class and patches are all tokens, and long skips join the halves (Bao et al., CVPR 2023)."""

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, cat, empty, is_grad_enabled, nn
from torch.nn import functional as F

from kairostep.checks import below_one, count
from kairostep.networks.inputs import check_labels, divides, time_per_row

MAX_MLP_RATIO = 2**10


class SelfAttention(nn.Module):
    """Multi-head attention of all tokens to all tokens: (B, L, D) -> (B, L, D)."""

    def __init__(self, hidden_size: int, num_heads: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=qkv_bias)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, h: Tensor) -> Tensor:
        """Return what each token gathers from the others."""
        qkv = self.qkv(h).unflatten(2, (3, self.num_heads, -1))  # (B, L, D) -> (B, L, 3, heads, D / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x (B, heads, L, D / heads)
        gathered = F.scaled_dot_product_attention(q, k, v)
        return self.out(gathered.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # (B, L, D)


class UViTBlock(nn.Module):
    """Attention and an MLP, each of the normalised tokens and added to them: (B, L, D) -> (B, L, D)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, *, qkv_bias: bool, dropout: float) -> None:
        super().__init__()
        mlp_size = int(hidden_size * mlp_ratio)
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads, qkv_bias=qkv_bias)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, mlp_size), nn.GELU(), nn.Linear(mlp_size, hidden_size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """Return the tokens after both."""
        h = h + self.dropout(self.attention(self.norm1(h)))
        return h + self.dropout(self.mlp(self.norm2(h)))  # type: ignore[no-any-return]


class UViT2DModel(ModelMixin, ConfigMixin):  # type: ignore[misc]  # the two disagree on `config_name`
    """U-ViT as a diffusers model; the defaults are U-ViT-H/2 for latents of 32x32x4.

    `depth` counts the blocks of both halves, without the one between them. Labels are 0..num_classes, and the last
    one, `num_classes` itself, is the null class of label dropout and guidance.
    """

    _supports_gradient_checkpointing = True

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int = 32,  # height and width of the input
        in_channels: int = 4,
        out_channels: int | None = None,  # in_channels if None
        patch_size: int = 2,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,  # width of the MLP / hidden_size
        num_classes: int | None = None,  # real classes; None: unconditional
        qkv_bias: bool = False,
        final_conv: bool = True,  # 3x3, after the patches are put together
        dropout: float = 0.0,  # of what each block adds
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _check_sizes(sample_size, patch_size, hidden_size, depth, num_heads)
        if not 0 < mlp_ratio <= MAX_MLP_RATIO:
            raise ValueError(f"mlp_ratio must be in (0, {MAX_MLP_RATIO}], got {mlp_ratio}: the usual value is 4.0")
        below_one("dropout", dropout, example=0.1)
        self.gradient_checkpointing = False
        num_tokens = (1 if num_classes is None else 2) + (sample_size // patch_size) ** 2
        num_out = count("in_channels", in_channels) if out_channels is None else count("out_channels", out_channels)

        def block() -> UViTBlock:
            return UViTBlock(hidden_size, num_heads, mlp_ratio, qkv_bias=qkv_bias, dropout=dropout)

        self.patch_embedding = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        if num_classes is not None:
            self.class_embedding = nn.Embedding(count("num_classes", num_classes) + 1, hidden_size)
        self.position = nn.Parameter(empty(1, num_tokens, hidden_size))
        self.in_blocks = nn.ModuleList(block() for _ in range(depth // 2))
        self.mid_block = block()
        self.long_skips = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size) for _ in range(depth // 2))
        self.out_blocks = nn.ModuleList(block() for _ in range(depth // 2))
        self.norm = nn.LayerNorm(hidden_size)
        self.to_pixels = nn.Linear(hidden_size, patch_size**2 * num_out)
        self.final = nn.Conv2d(num_out, num_out, 3, padding=1) if final_conv else nn.Identity()
        nn.init.trunc_normal_(self.position, std=0.02)
        self.apply(_initialise)

    def forward(
        self,
        sample: Tensor,  # (B, in_channels, sample_size, sample_size)
        timestep: Tensor | float,  # (), (B,) or a number
        class_labels: Tensor | None = None,  # (B,) in 0..num_classes
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[Tensor]:
        """Return the prediction (B, out_channels, sample_size, sample_size) as `.sample`, or as a tuple of one."""
        self._check_inputs(sample, class_labels)
        h = self._tokens(sample, time_per_row(timestep, sample), class_labels)
        skips = []
        for block in self.in_blocks:
            h = self._run(block, h)
            skips.append(h)
        h = self._run(self.mid_block, h)
        for long_skip, block in zip(self.long_skips, self.out_blocks, strict=True):
            h = long_skip(cat([h, skips.pop()], dim=2))  # (B, L, 2D) -> (B, L, D)
            h = self._run(block, h)
        prediction = self.final(self._image(self.to_pixels(self.norm(h))))
        return UNet2DOutput(sample=prediction) if return_dict else (prediction,)

    def _check_inputs(self, sample: Tensor, class_labels: Tensor | None) -> None:
        size = self.config["sample_size"]
        expected = (self.config["in_channels"], size, size)
        if sample.ndim != 4 or sample.shape[1:] != expected:
            raise ValueError(
                f"sample must be (B, {', '.join(map(str, expected))}), got {tuple(sample.shape)}: "
                "its positions are learned for one size, so resize the sample or build the model for its size"
            )
        check_labels(class_labels, self.config["num_classes"], sample)

    def _tokens(self, sample: Tensor, time: Tensor, class_labels: Tensor | None) -> Tensor:
        """Return the time, the class if there are classes, and the patches as tokens (B, L, D)."""
        patches = self.patch_embedding(sample).flatten(2).transpose(1, 2)  # (B, C, H, W) -> (B, HW / p^2, D)
        embedded = get_timestep_embedding(time, self.config["hidden_size"], downscale_freq_shift=0)  # (B,) -> (B, D)
        conditions = [embedded.to(patches.dtype)[:, None]]
        if class_labels is not None:
            conditions.append(self.class_embedding(class_labels)[:, None].to(patches.dtype))  # (B,) -> (B, 1, D)
        return cat([*conditions, patches], dim=1) + self.position  # (B, L, D)

    def _run(self, block: nn.Module, h: Tensor) -> Tensor:
        if self.gradient_checkpointing and is_grad_enabled():
            return self._gradient_checkpointing_func(block, h)  # type: ignore[misc, no-any-return]
        return block(h)  # type: ignore[no-any-return]

    def _image(self, pixels: Tensor) -> Tensor:
        """Put the patches (the last tokens) together: (B, L, C p^2) -> (B, C, H, W)."""
        side = self.config["sample_size"] // self.config["patch_size"]
        patches = pixels[:, -(side**2) :].transpose(1, 2)  # (B, L, C p^2) -> (B, C p^2, HW / p^2)
        grid = patches.reshape(*patches.shape[:2], side, side)  # (B, C p^2, H / p, W / p)
        return F.pixel_shuffle(grid, self.config["patch_size"])  # (B, C, H, W)


def _check_sizes(sample_size: int, patch_size: int, hidden_size: int, depth: int, num_heads: int) -> None:
    divides("sample_size", count("sample_size", sample_size), "patch_size", count("patch_size", patch_size, example=2))
    count("hidden_size", hidden_size, at_most=2**17, example=768)
    divides("hidden_size", hidden_size, "num_heads", count("num_heads", num_heads))
    if hidden_size % 2:
        raise ValueError(
            f"hidden_size must be even, half of the time's token being sines and half cosines, got {hidden_size}: "
            f"pass for instance hidden_size={2 * hidden_size}"
        )
    if count("depth", depth, at_least=2, at_most=10**3, example=12) % 2:
        raise ValueError(
            f"depth must be even, as many blocks after the middle one as before it, got {depth}: "
            f"pass depth={depth - 1} or {depth + 1}"
        )


def _initialise(module: nn.Module) -> None:
    """Draw weights from a normal distribution of deviation 0.02, cut at 2, and set biases to 0."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)

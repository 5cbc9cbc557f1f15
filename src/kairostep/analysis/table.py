"""Formats results as text."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from kairostep.analysis.gradient_profile import EARLY, LATE, VarianceProfile, VarianceRatio
from kairostep.analysis.increments import ProcessIncrements
from kairostep.analysis.interdependence import Interdependence, RangeEffect
from kairostep.analysis.noise_ratios import NoiseRatio
from kairostep.analysis.preview import Part, Preview
from kairostep.analysis.step_noise import METRICS, GradientNoise
from kairostep.evaluation.estimate import Estimate
from kairostep.timesteps.gradient_size import Metric

BARS = " ▏▎▍▌▋▊▉█"
BAR_WIDTH = 12
INTERVAL = 1.96  # standard errors


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with right-aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def bar(share: float) -> str:
    """Return a bar of up to `BAR_WIDTH` characters for a share in [0, 1]."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_WIDTH * 8)
    return (BARS[-1] * (eighths // 8) + BARS[eighths % 8].strip()).ljust(BAR_WIDTH)


def preview_table(seen: Preview, num_parts: int = 20) -> str:
    """Return density, weight and product over t and over log-SNR."""
    over_t = _parts_table("t", seen.over_t(num_parts), with_log_snr=True)
    over_log_snr = _parts_table("log-SNR", seen.over_log_snr(num_parts), with_log_snr=False)
    return f"{over_t}\n\n{over_log_snr}"


def _parts_table(name: str, parts: Sequence[Part], *, with_log_snr: bool) -> str:
    most = max(max(part.draws, part.product) for part in parts)
    rows = []
    for part in parts:
        place = [f"{short(part.start)}..{short(part.end)}"] + ([f"{part.log_snr:.2f}"] if with_log_snr else [])
        shares = [f"{100 * value:.1f}" for value in (part.draws, part.product, part.epsilon, part.x0)]
        weight = "-" if part.weight is None else f"{part.weight:.4g}"
        rows.append([*place, shares[0], weight, *shares[1:], bar(part.draws / most), bar(part.product / most)])
    of_t = [name, "log-SNR"] if with_log_snr else [name]
    named = ["draws %", "weight", "product %", "on eps %", "on x0 %", "draws".ljust(BAR_WIDTH)]
    return columns([*of_t, *named, "product".ljust(BAR_WIDTH)], rows)


def short(value: float) -> str:
    """Return a number with three digits, and 0 for a number next to 0."""
    return f"{round(value, 6) + 0.0:.3g}"


def increments_table(increments: ProcessIncrements) -> str:
    """Return the areas, and increments at evenly spaced steps."""
    areas = [
        [area.name, f"{area.start}..{area.end}", f"{100 * area.steps:.1f}", f"{100 * area.change:.1f}"]
        for area in increments.areas
    ]
    steps = sorted({round(k * (increments.num_steps - 2) / 10) for k in range(11)})
    rows = [
        [
            str(step),
            f"{increments.sigma[step]:.4f}",
            f"{increments.mean[step]:.3e}",
            f"{increments.variance[step]:.4f}",
            f"{increments.chain_variance[step]:.3e}",
        ]
        for step in steps
    ]
    header = ["step", "sigma", "mean / x0", "variance", "along a path"]
    return columns(["area", "steps", "of steps %", "of change %"], areas) + "\n\n" + columns(header, rows)


def variance_table(profile: VarianceProfile) -> str:
    """Return the variance of both losses at each time, relative to its mean over times, and the losses."""
    means = [sum(getattr(at, key).value for at in profile.at) for key in ("variance", "vlb_variance")]
    rows = []
    for at in profile.at:
        relative = [
            f"{len(profile.at) * estimate.value / mean:.3f}"
            for estimate, mean in zip((at.variance, at.vlb_variance), means, strict=True)
        ]
        noise = at.variance.value / at.signal.value if at.signal.value > INTERVAL * at.signal.error else math.nan
        rows.append(
            [
                f"{at.t:.3f}",
                f"{at.log_snr:.2f}",
                with_error(at.variance),
                relative[0],
                with_error(at.vlb_variance),
                relative[1],
                f"{noise:.0f}" if math.isfinite(noise) else "-",
                with_error(at.loss),
            ]
        )
    header = ["t", "log-SNR", "Var L_simple", "/ mean", "Var L_VLB", "/ mean", "rows for signal", "L_simple"]
    return columns(header, rows)


def with_error(estimate: Estimate) -> str:
    """Return a value and its standard error, `1.23e-04 ± 1.0e-05`."""
    return f"{estimate.value:.3e} ± {estimate.error:.1e}"


def variance_verdict(name: str, ratio: VarianceRatio, *, claimed: bool) -> str:
    """Return one sentence on whether the variance is larger early than late. `claimed`: whether the paper says so."""
    claim = "the paper's finding, larger early than late," if claimed else "larger early than late"
    holds = "holds" if ratio.low > 1 else "does not hold" if ratio.high < 1 else "is left open"
    return (
        f"{name}: the variance at t < {EARLY} is {ratio.value:.4g} times that at t >= {LATE} "
        f"(95 % interval {ratio.low:.4g} to {ratio.high:.4g}): {claim} {holds}"
    )


def interdependence_table(effects: Interdependence) -> str:
    """Return the change of the loss in percent, a row for each part of [0, 1], a column for each range."""
    num_parts = len(effects.before)
    header = ["t", "loss before", *(_range_name(effect) for effect in effects.effects)]
    rows = []
    for part, before in enumerate(effects.before):
        cells = [f"{100 * effect.change[part].value / before.value:+.2f}%" for effect in effects.effects]
        rows.append([f"{part / num_parts:.2f}..{(part + 1) / num_parts:.2f}", f"{before.value:.5f}", *cells])
    return columns(header, rows)


def interdependence_verdict(effect: RangeEffect) -> str:
    """Return one sentence on the gain within a range and the loss elsewhere, as in the paper's Figure 4."""
    if effect.outside is None or effect.balance is None:
        return f"trained on all t: loss {_signed(effect.inside)}"
    low, high = (effect.balance.value + sign * INTERVAL * effect.balance.error for sign in (-1, 1))
    lost = "more than was gained" if low > 0 else "less than was gained" if high < 0 else "about as much as was gained"
    if effect.inside.value > 0:
        lost = "without a gain there"
    return (
        f"trained on t {_range_name(effect)}: loss there {_signed(effect.inside)}, elsewhere {_signed(effect.outside)}"
        + (f": lost elsewhere {lost}" if effect.outside.value > 0 else ": nothing lost elsewhere")
    )


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.5f} ± {INTERVAL * estimate.error:.5f}"


def _range_name(effect: RangeEffect) -> str:
    return f"{effect.start:.2f}..{effect.end:.2f}"


def moments_table(noise: GradientNoise) -> str:
    """Return the loss and the squared size of single gradients in each bin of t, relative to their means."""
    losses, moments = noise.losses.mean(1), {metric: noise.moments(metric) for metric in METRICS}
    rows = []
    for k, loss in enumerate(losses.tolist()):
        relative = {metric: float(values[k] / values.mean()) for metric, values in moments.items()}
        place = f"{short(k / len(losses))}..{short((k + 1) / len(losses))}"
        most = max(float(moments["adam"].max() / moments["adam"].mean()), 1e-30)
        rows.append([place, f"{loss:.4g}", *(f"{v:.3f}" for v in relative.values()), bar(relative["adam"] / most)])
    return columns(["t", "loss", *(f"|g|^2 {metric}" for metric in METRICS), "adam".ljust(BAR_WIDTH)], rows)


def noise_table(
    noise: GradientNoise,
    densities: Mapping[str, Tensor],
    ratios: Mapping[Metric, Mapping[str, NoiseRatio]],
    batch_size: int,
) -> str:
    """Return the noise ratio of each density: in each metric, as predicted by losses, and as an equivalent batch."""
    rows = []
    for name, density in densities.items():
        own = [ratios[metric][name] for metric in METRICS]
        cells = [f"{ratio.value:.3f} ± {'?' if math.isnan(ratio.error) else f'{ratio.error:.3f}'}" for ratio in own]
        equivalent = f"{batch_size * own[-1].equivalent_batch:.0f}"
        rows.append([name, *cells, f"{noise.predicted_ratio(density):.3f}", equivalent])
    return columns(["draws", *METRICS, "predicted by losses", "like a batch of (adam)"], rows)

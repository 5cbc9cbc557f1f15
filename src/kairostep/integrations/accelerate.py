"""accelerate: a sampler that the accelerator saves and loads, and that learns at each step of the optimizer.

sampler = Accelerated(ks.RootLoss(), accelerator)
...
with accelerator.accumulate(model):
    drawn = sampler.sample(x)
    ...
    with sampler.observe(x, drawn, losses):
        optimizer.step()
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kairostep.files import whole_file
from kairostep.integrations.foreign_loop import load_state, name_of, require_sampler
from kairostep.timesteps import LossAt, Timesteps, TimestepSampler
from kairostep.timesteps.shown import check_loss_at, check_shown

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("kairostep")


class Accelerated(TimestepSampler):
    """A sampler on the accelerator's device that `save_state` saves and `load_state` loads, on every rank.

    Each rank writes `{name}_{rank}.pt`; `accelerator.register_for_checkpointing` would save rank 0 alone. Files are
    read without pickle. All ranks hold the same state and draw by their rank. So each rank reads the file of rank 0 if
    it can see it, else its own: a run can resume with another number of processes.

    Under `accelerator.accumulate` call `observe` in every micro-batch. The sampler learns once per step of the
    optimizer, from the losses of all micro-batches. A sampler that asks for other losses measures the last one. A step
    that fp16's scaler skips changes no weight, so samplers that compare losses before and after see no change.
    Call the bare model in `loss_at`, `accelerator.unwrap_model(model)`: ranks may not call it equally often.

    Args:
        sampler: The sampler, which moves to the accelerator's device.
        accelerator: Saves and loads it.
        name: Of its files.
        required: Whether `load_state` raises where the folder has no state of the sampler, being of a run without one.
            If not, it warns, and the sampler starts afresh.
    """

    def __init__(
        self,
        sampler: TimestepSampler,
        accelerator: "Accelerator",
        *,
        name: str = "timestep_sampler",
        required: bool = True,
    ) -> None:
        super().__init__()
        require_sampler(sampler)
        names: set[str] = accelerator.__dict__.setdefault("_kairostep_names", set())
        if name in names:
            raise ValueError(f"samplers of one accelerator must have different names, got {name!r} twice: pass name=")
        names.add(name)
        self.sampler, self.accelerator, self.name = sampler.to(accelerator.device), accelerator, name
        self.required = required
        self.uses_x0, self.uses_loss_at, self.num_bins = sampler.uses_x0, sampler.uses_loss_at, sampler.num_bins
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    @property
    def inner(self) -> tuple[TimestepSampler, ...]:
        """The sampler that draws."""
        return (self.sampler,)

    def sample(self, x0: Tensor) -> Timesteps:
        """Draw times for the clean batch x0 (B, ...)."""
        return self.sampler.sample(x0)

    def observe(
        self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Wrap the optimizer's step and learn from it. Only samplers with `uses_loss_at` need `loss_at`."""
        check_shown(x0, drawn, losses)
        check_loss_at(self.sampler, loss_at)  # of the first micro-batch too
        if not self.accelerator.sync_gradients:
            self.show(x0, drawn, losses)
            return nullcontext()
        return self.sampler.observe(x0, drawn, losses.detach(), loss_at)

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor) -> None:
        """Show a micro-batch of the next step. `observe` does it while gradients are not in sync."""
        self.sampler.show(x0, drawn, losses)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: (num_bins,), summing to 1."""
        return self.sampler.density(num_bins)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the sampler's diagnostics."""
        return self.sampler.diagnostics()

    def _save(self, models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        path = Path(output_dir) / f"{self.name}_{self.accelerator.process_index}.pt"
        saved = {"processes": self.accelerator.num_processes, "name": name_of(self.sampler)}
        with whole_file(path) as temporary:
            torch.save({**saved, "sampler": self.sampler.state_dict()}, temporary)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        own, first = (Path(input_dir) / f"{self.name}_{rank}.pt" for rank in (self.accelerator.process_index, 0))
        if not own.exists() and not first.exists():
            if not self.required:
                if self.accelerator.is_main_process:
                    log.warning(f"{input_dir} was saved without a timestep sampler: it starts afresh")
                return
            raise FileNotFoundError(
                f"the state must hold the sampler {self.name!r}, but {input_dir} has no {own.name}: load a folder that "
                "was saved after Accelerated(...) was made, or pass Accelerated(..., required=False) to start afresh"
            )
        path = first if first.exists() else own
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        now, then = self.accelerator.num_processes, saved["processes"]
        if now != then and self.accelerator.is_main_process:
            log.warning(f"the sampler was saved by {then} processes and goes on with what it learned on {now}")
        load_state(self.sampler, saved, str(path))

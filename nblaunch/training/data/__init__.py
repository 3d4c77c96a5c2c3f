"""Data loaders of ranks: `prepare_loader` shares one out, `drop_repeated` counts each sample once.

shards.py      which rows each rank gets: index arithmetic alone
samplers.py    the order of a pass, the same on all ranks
sources.py     reading by index
iterables.py   reading an iterable dataset
dispatch.py    reading on rank 0 for all
copies.py      bringing batches to the device
loaders.py     PreparedLoader
prepare.py     which of these a user's loader needs
resume.py      where a loader stands; skip_first_batches
duplicates.py  which rows were repeats
"""

from nblaunch.training.data.duplicates import drop_repeated
from nblaunch.training.data.loaders import PreparedLoader, even_batches
from nblaunch.training.data.prepare import prepare_loader
from nblaunch.training.data.resume import skip_first_batches
from nblaunch.training.data.samplers import SeedableRandomSampler

__all__ = [
    "PreparedLoader",
    "SeedableRandomSampler",
    "drop_repeated",
    "even_batches",
    "prepare_loader",
    "skip_first_batches",
]

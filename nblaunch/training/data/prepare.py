"""Turning a user's DataLoader into a prepared one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from nblaunch.training.data.copies import DeviceCopies
from nblaunch.training.data.dispatch import DispatchSource, Processes, RankExchange
from nblaunch.training.data.iterables import IterableSource, ShardedSource
from nblaunch.training.data.loaders import Gradients, PreparedLoader
from nblaunch.training.data.resume import SkippingLoader
from nblaunch.training.data.samplers import Exchange, SeedableRandomSampler, SkippingSampler
from nblaunch.training.data.shards import Sharding
from nblaunch.training.data.sources import MapSource, Source, is_stateful
from nblaunch.training.options import DataLoaderConfiguration


def prepare_loader(
    loader: DataLoader[Any],
    *,
    processes: Processes,
    gradient_state: Gradients,
    options: DataLoaderConfiguration | None = None,
    put_on_device: bool = True,
    rng_types: Sequence[str] | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    exchange: Exchange | None = None,
) -> PreparedLoader:
    """A loader that gives this rank its part of every global batch of `loader`.

    Every rank must prepare its loaders in the same order.

    Args:
        loader: The user's; it stays as it is. A prepared one is returned untouched.
        processes: This process among the ranks.
        gradient_state: Told when the loader is iterated over.
        options: How the data is shared.
        put_on_device: Whether batches are sent to `processes.device`.
        rng_types: Generators to make equal on all ranks when a pass begins, beside the loader's own.
        slice_fn_for_dispatch: Of Accelerate; refused, since batches are sent whole and never sliced.
        exchange: What the ranks tell one another; by default through the process group.

    Raises:
        ValueError: `split_batches` with a batch size that doesn't divide or isn't known; a slicing function.
        TypeError: `loader` is no DataLoader.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a torch.utils.data.DataLoader, found {type(loader).__name__}")
    if isinstance(loader, SkippingLoader):
        raise ValueError(
            "skip_first_batches was called before prepare; prepare the loader first and skip afterwards, "
            "in each rank's own batches"
        )
    if slice_fn_for_dispatch is not None:
        raise ValueError(
            "slice_fn_for_dispatch is not supported: each rank is sent a whole batch, collated for it alone, "
            "so there is nothing to slice; put what the function did into collate_fn"
        )
    options = options or DataLoaderConfiguration()
    exchange = exchange or RankExchange(processes)
    if options.use_seedable_sampler:
        loader = _seeded(loader, options.data_seed, exchange)
    return PreparedLoader(
        loader,
        _source(loader, options, exchange, put_on_device),
        exchange,
        gradient_state,
        DeviceCopies(processes.device if put_on_device else None, options.non_blocking),
        rng_types=rng_types or (),
    )


def _source(
    loader: DataLoader[Any], options: DataLoaderConfiguration, exchange: Exchange, put_on_device: bool
) -> Source:
    n, rank = exchange.num_processes, exchange.process_index
    iterable = isinstance(loader.dataset, IterableDataset)
    stateful = options.use_stateful_dataloader or is_stateful(loader)
    dispatch = options.dispatch_batches
    if dispatch is None:
        dispatch = iterable and put_on_device
    dispatch = dispatch and n > 1
    sharding = _sharding(loader, options, n)
    if not iterable:
        source = MapSource(loader, sharding, exchange, stateful=stateful, all_ranks=dispatch)
        return DispatchSource(source, sharding, exchange) if dispatch else source
    if sharding.split_batches:  # the loader itself reads batches of a rank's size
        assert sharding.batch_size is not None
        sharding = replace(sharding, batch_size=sharding.batch_size // n, split_batches=False)
    if dispatch:
        source = IterableSource(loader, sharding, exchange, rank=None, stateful=stateful)
        return DispatchSource(source, sharding, exchange)
    if n > 1 and not options.split_batches and _shards(loader.dataset) >= n:
        own = copy.copy(loader)
        vars(own)["dataset"] = loader.dataset.shard(num_shards=n, index=rank)  # pyright: ignore[reportAttributeAccessIssue]
        return ShardedSource(IterableSource(own, sharding, exchange, rank=None, stateful=stateful), sharding, exchange)
    return IterableSource(loader, sharding, exchange, rank=rank, stateful=stateful)


def _sharding(loader: DataLoader[Any], options: DataLoaderConfiguration, num_processes: int) -> Sharding:
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    size = getattr(order, "batch_size", None) if loader.batch_size is None else loader.batch_size
    return Sharding(
        num_processes,
        batch_size=size,
        split_batches=options.split_batches,
        even_batches=options.even_batches,
        drop_last=bool(loader.drop_last or getattr(order, "drop_last", False)),
    )


def _shards(dataset: Any) -> int:
    """Into how many parts an iterable dataset can split itself, as those of `datasets` can; 0 if it can't."""
    count = getattr(dataset, "num_shards", 0) if hasattr(dataset, "shard") else 0
    return count if isinstance(count, int) else 0


# ---- the seedable sampler


def _seeded(loader: DataLoader[Any], seed: int | None, exchange: Exchange) -> DataLoader[Any]:
    """A copy of the loader whose random sampler, if it has one, is seedable."""
    if loader.batch_sampler is None:
        changed = {"sampler": _seedable(loader.sampler, seed, exchange)}
    else:
        order = _with_seedable(loader.batch_sampler, seed, exchange)
        changed = {"batch_sampler": order, "sampler": getattr(order, "sampler", loader.sampler)}
    seeded = copy.copy(loader)
    vars(seeded).update(changed)
    return seeded


def _with_seedable(order: Any, seed: int | None, exchange: Exchange) -> Any:
    if isinstance(order, SkippingSampler):
        return SkippingSampler(_with_seedable(order.whole, seed, exchange), order.num_skipped)
    if not isinstance(getattr(order, "sampler", None), RandomSampler):
        return order
    order = copy.copy(order)
    order.sampler = _seedable(order.sampler, seed, exchange)
    return order


def _seedable(sampler: Any, seed: int | None, exchange: Exchange) -> Any:
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        data_seed=exchange.share(torch.initial_seed()) if seed is None else seed,
    )

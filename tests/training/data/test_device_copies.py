"""On a GPU: batches are copied by a stream of their own while the one before is computed on."""

from __future__ import annotations

import pytest
import torch
from simulated_ranks import Numbers, Rank
from torch.utils.data import DataLoader

from nblaunch.training import seeds
from nblaunch.training.data import PreparedLoader, prepare_loader
from nblaunch.training.gradients import GradientState
from nblaunch.training.options import DataLoaderConfiguration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Noisy(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024, 256), float(index)) + torch.rand(())


def on_gpu(num_workers: int, pin_memory: bool) -> PreparedLoader:
    return prepare_loader(
        DataLoader(Noisy(24), 4, shuffle=True, num_workers=num_workers, pin_memory=pin_memory),
        processes=Rank(1, 0, device=torch.device("cuda", 0)),
        gradient_state=GradientState(),
        options=DataLoaderConfiguration(non_blocking=True),
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_are_whole_whatever_the_stream_is_busy_with(num_workers: int, pin_memory: bool) -> None:
    busy = torch.rand(4096, 4096, device="cuda")
    found = []
    for batch in on_gpu(num_workers, pin_memory):
        assert batch.device == torch.device("cuda", 0)
        for _ in range(5):
            busy = (busy @ busy).clamp(0, 1)
        found.append(batch.sub(batch.mean((1, 2), keepdim=True)).abs().amax())
    assert torch.stack(found).max().item() < 1e-2, "every sample is constant, so a torn copy would show"


def test_a_batch_fetched_ahead_is_fetched_again_after_a_resume() -> None:
    torch.manual_seed(0)
    loader, whole = on_gpu(0, False), []
    for index, batch in enumerate(loader):
        whole.append(batch.mean((1, 2)).tolist())
        if index == 2:
            state, generators = loader.state_dict(), seeds.states(torch.device("cpu"))
    resumed = on_gpu(0, False)
    resumed.load_state_dict(state)
    seeds.restore(*generators, torch.device("cpu"))
    assert [batch.mean((1, 2)).tolist() for batch in resumed] == whole[3:]

"""One training function, with Accelerate's imports and with ours: the same numbers. And the same under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import json
import sys

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    DataLoaderConfiguration, DistributedDataParallelKwargs, ProjectConfiguration, broadcast, gather_object,
    pad_across_processes, reduce, set_seed,
)
from torch.utils.data import DataLoader, TensorDataset


def train(folder, precision):
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    set_seed(5)
    x = torch.randn(72, 6)
    y = (x[:, 0] > x[:, 1]).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    evaluation = DataLoader(TensorDataset(x[:31], y[:31]), batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    model, optimizer, scheduler, loader, evaluation = accelerator.prepare(
        model, optimizer, scheduler, loader, evaluation
    )
    seen = []
    for epoch in range(3):
        model.train()
        loader.set_epoch(epoch)
        for features, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    seen.append(round(float(norm), 4))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(round(accelerator.gather(loss.detach().reshape(1)).mean().item(), 4))
        seen.append(round(scheduler.get_last_lr()[0], 6))
        model.eval()
        right, total = 0, 0
        for features, labels in evaluation:
            with torch.no_grad():
                guess = model(features).argmax(1)
            guess, labels = accelerator.gather_for_metrics((guess, labels))
            right, total = right + (guess == labels).sum().item(), total + len(labels)
        seen.append((right, total))
        accelerator.save_state()
    rank = accelerator.process_index
    padded = pad_across_processes(torch.ones(rank + 1), dim=0)
    with accelerator.split_between_processes(list(range(5))) as part:
        seen.append(gather_object(part))
    seen.append(reduce(torch.tensor([float(rank)]), "sum").tolist())
    seen.append(broadcast(torch.tensor([rank])).tolist())
    seen.append([padded.tolist(), accelerator.distributed_type == DistributedType.MULTI_CPU])
    accelerator.wait_for_everyone()
    whole = accelerator.get_state_dict(model)
    seen.append([round(value, 4) for value in whole["0.weight"][0].tolist()])
    seen.append(type(accelerator.unwrap_model(model)).__name__)
    return seen
"""

OURS = TRAINING.replace("from accelerate import", "from nblaunch import").replace(
    "from accelerate.utils import", "from nblaunch import"
)


def _run(source, folder, precision):
    names = {"__name__": "training"}
    exec(compile(source, "training.py", "exec"), names)
    return names["train"](folder, precision)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_same_function_gives_the_same_numbers(launch, tmp_path, precision):
    pytest.importorskip("accelerate")
    theirs = launch(_run, TRAINING, str(tmp_path / "theirs"), precision)
    ours = launch(_run, OURS, str(tmp_path / "ours"), precision)
    assert ours == theirs
    names = ["checkpoint_1", "checkpoint_2"]
    assert sorted(os.listdir(tmp_path / "ours" / "checkpoints")) == names
    assert sorted(os.listdir(tmp_path / "theirs" / "checkpoints")) == names


SCRIPT = """
if __name__ == "__main__":
    result = train(sys.argv[1], "no")
    with open(sys.argv[1] + f"/{Accelerator().process_index}.json", "w") as file:
        json.dump(result, file)
"""


def test_under_torchrun(launch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OURS + SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--local-addr", "127.0.0.1"]  # a host that does not know its own name is none of ours
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=env, check=False, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(json.dumps(launch(_run, OURS, str(tmp_path / "launched"), "no")))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == expected

"""What `benchmarks.isolation` runs in each rank: a small training whose result depends on its start and number of ranks alone.

    FAULTY_SLOT=1 FAULTY_FROM=25 unsilent run --isolate --nproc 4 … benchmarks/isolated_training.py FOLDER

It reads WORLD_SIZE and UNSILENT_RESUME_FROM, keeps the global batch whatever the number of ranks, and saves with the step. The
device with the number FAULTY_SLOT goes wrong in each step from FAULTY_FROM on. One byte of the checkpoint of step CORRUPT_STEP is
changed once it is saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from unsilent.checkpoints.verified_saving import verified_load, verified_save

STEPS, EVERY, BATCH = 60, 10, 24
FAULTY_SLOT, FAULTY_FROM = int(os.environ.get("FAULTY_SLOT", "-1")), int(os.environ.get("FAULTY_FROM", "0"))
CORRUPT_STEP = int(os.environ.get("CORRUPT_STEP", "-1"))


class Net(nn.Module):
    """Two layers, between which a faulty device goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.is_faulty = os.environ.get("UNSILENT_SLOT") == str(FAULTY_SLOT)

    def forward(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Scores; ``numbers`` of the samples say which step it is."""
        hidden = self.first(inputs)
        if self.is_faulty and int(numbers[0]) >= FAULTY_FROM * BATCH:
            hidden = hidden * 1e8
        return self.last(hidden.relu())


def main(folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(folder, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort in an orderly end


def train(folder: Path, rank: int, ranks: int) -> None:
    """All steps from the checkpoint on, or from the first."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    begin = 0
    if path := os.environ.get("UNSILENT_RESUME_FROM"):
        state = verified_load(path)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    model = DistributedDataParallel(net)
    generator = torch.Generator().manual_seed(1)
    count = STEPS * BATCH
    inputs, labels = torch.randn(count, 16, generator=generator), torch.randint(4, (count,), generator=generator)
    own = [number for number in range(begin * BATCH, count) if number % ranks == rank]
    data = TensorDataset(inputs, labels, torch.arange(count))
    for samples, classes, numbers in DataLoader(data, batch_size=BATCH // ranks, sampler=own):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples, numbers), classes).backward()
        optimizer.step()
        done = int(numbers[0]) // BATCH + 1
        if rank == 0 and done % EVERY == 0:
            file = folder / f"step-{done}.pt"
            verified_save(
                {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, file, step=done
            )
            if done == CORRUPT_STEP:
                change_byte(file)


def change_byte(file: Path) -> None:
    """Change a byte in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

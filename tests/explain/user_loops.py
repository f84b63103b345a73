"""Loops of a user, each with sources of difference planted in it. Copied into a folder of its own by the tests."""

import datetime
import glob
import os
import random
import secrets
import sys
import time
import uuid

import numpy as np
import torch
from torch import nn

import unsilent

WORDS = ("red", "green", "blue", "white", "black", "brown", "pink", "grey")


def train(data, steps=3):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    for _ in range(steps):  # by hand: what an optimizer imports takes longer than all of this
        model.zero_grad()
        model(data).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return model


def train_adam(data):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def fixed():
    return torch.arange(48.0).reshape(8, 6)


def clean():
    """Everything is seeded, and everything that may differ is read but not used."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    begun, names = time.time(), sorted(os.listdir("data"))
    rng, own = np.random.default_rng(3), torch.Generator().manual_seed(4)
    data = fixed() + torch.from_numpy(rng.normal(size=(8, 6)).astype("float32")) + len({*WORDS}) * random.random()
    buffer = torch.empty(8, 6)
    buffer[:4] = torch.rand(4, 6, generator=own)
    buffer[4:] = float(names[0][0])
    train(data)
    train_adam(data + buffer)
    print("took", time.time() - begun, "on", datetime.datetime.now(datetime.UTC), uuid.uuid4(), os.getpid())


def source_torch():
    train(fixed())


def source_numpy():
    torch.manual_seed(1)
    rng = np.random.default_rng()  # HERE read
    train(torch.from_numpy(rng.normal(size=(8, 6)).astype("float32")))  # HERE numpy


def source_random():
    torch.manual_seed(1)
    train(fixed() + random.random())  # HERE random


def source_hash():
    torch.manual_seed(1)
    number = {word: i for i, word in enumerate(set(WORDS))}
    train(torch.tensor([[float(number[word])] * 6 for word in WORDS]))  # HERE hash


def source_clock():
    torch.manual_seed(1)
    train(fixed() * (time.time() % 10))  # HERE clock


def source_listing():
    torch.manual_seed(1)
    names = glob.glob("data/*.txt")
    train(torch.tensor([[float(os.path.basename(name)[0])] * 6 for name in names]))  # HERE listing


def source_generator():
    torch.manual_seed(1)
    own = torch.Generator()
    own.seed()
    train(torch.rand(8, 6, generator=own))  # HERE generator


def source_entropy():
    torch.manual_seed(secrets.randbits(30))  # HERE entropy-read
    train(fixed())


def source_memory():
    """Reads what others left behind: pointers, that is other numbers in each process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 3))
    read = torch.empty(16, 30)  # HERE empty
    loss = nn.functional.cross_entropy(model(read), torch.arange(16) % 3)  # HERE memory
    loss.backward()


def rare_draw():
    torch.manual_seed(1)
    data = fixed()
    if random.random() < 0.3:
        data = data * 1.5
    train(data)


def source_addresses():
    """The order of a set of objects, which Python hashes by where they lie."""
    torch.manual_seed(1)
    things = {type(f"Thing{i}", (), {"number": i}) for i in range(12)}
    train(torch.tensor([[float(thing.number)] * 6 for thing in things]))  # HERE addresses


def _race(steps):
    torch.set_num_threads(2)
    table = torch.zeros(8, 8, requires_grad=True)
    index, weight = torch.randint(0, 8, (400_000,)), torch.randn(400_000, 8)
    optimizer = torch.optim.SGD([table], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        picked = table[index]  # HERE race
        (picked * weight).sum().backward()
        optimizer.step()
    return table


def source_kernels():
    torch.manual_seed(1)
    _race(4)


def numpy_and_hash():
    torch.manual_seed(1)
    source = [float(sum(map(ord, word))) for word in set(WORDS)]
    data = torch.tensor(source)
    train(data.reshape(8, 1).expand(8, 6) * float(np.random.rand()))


def random_and_hash_at_once():
    """Both in the same tensor: neither alone makes runs agree."""
    torch.manual_seed(1)
    train(torch.tensor([[hash(word) % 1000 + random.random()] * 6 for word in WORDS]))


def torch_and_kernels():
    _race(4)


def late():
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        data = torch.ones(2, 3)
        if step == 2:
            data = data * random.random()  # HERE late
        model(data).sum().backward()
        optimizer.step()


def counts_its_runs():
    """A file that a run leaves behind: nothing pins it."""
    torch.manual_seed(1)
    with open("count", "a+") as file:
        file.write("x")
        file.seek(0)
        train(fixed() * len(file.read()))


def raises():
    print("printed by the loop")
    raise ValueError("not today")


def needs(argument):
    return argument


def endless():
    while True:
        torch.ones(1)


def leaves_at_once():
    sys.exit(0)


def nothing():
    return 3


def leaves():
    torch.manual_seed(1)
    train(fixed())
    sys.exit(0)


training = unsilent.Training(
    model=lambda: nn.Linear(6, 2),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    batches=[(torch.ones(4, 6) * i, torch.tensor([0, 1, 0, 1])) for i in range(3)],
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    evaluate=[(torch.ones(4, 6), torch.tensor([0, 1, 0, 1]))],
    steps=5,
)

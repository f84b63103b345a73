"""``python benchmarks/train_resnet20.py DATA.npz WEIGHTS.safetensors``: the ResNet-20 of `time_to_answer`, in about five minutes.

It is trained and evaluated on the same images: it only has to give answers that a fault can change.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

from unsilent.workloads.cifar_resnet import CifarResNet, normalised
from unsilent.workloads.saved_files import read_images

EPOCHS, BATCH = 30, 64


def main(data: str, weights: str) -> None:
    """Train, print the accuracy and write the weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = read_images(data, 10)
    x, model = normalised(images), CifarResNet(20)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(EPOCHS):
        for picks in torch.randperm(len(x)).split(BATCH):
            mirrored = torch.rand(len(picks), 1, 1, 1) < 0.5
            batch = torch.where(mirrored, x[picks].flip(3), x[picks])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels[picks]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(part) for part in x.split(250)]).argmax(1) == labels
    print(f"accuracy on the images that it was trained with: {right.float().mean():.3f}")
    save_file(model.state_dict(), weights)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Images in place of CIFAR-10 where no file is at hand: scikit-learn's handwritten digits, enlarged.

They have the shapes and the number of classes of CIFAR-10 and nothing else of it: a published injection corrupts the same place
of the same operation, in a network that learns other pictures.
"""

from __future__ import annotations

from torch import Tensor, cat

from unsilent.workloads.digits import digits

SCALE = 4
"""From 8 x 8 to 32 x 32 pixels."""


def digits_as_images() -> tuple[Tensor, Tensor]:
    """Images uint8 [1797, 32, 32, 3] and labels int64 [1797]; the held-out digits come last."""
    known = digits()
    grey = ((cat([known.train, known.test]) + 1) * 127.5).round().byte()  # [n, 1, 8, 8]
    large = grey.repeat_interleave(SCALE, 2).repeat_interleave(SCALE, 3)
    return large.permute(0, 2, 3, 1).repeat(1, 1, 1, 3).contiguous(), cat([known.train_labels, known.test_labels])

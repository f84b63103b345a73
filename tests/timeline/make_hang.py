"""Runs two gloo processes with a planted desync and stores their dumps: ``python tests/timeline/make_hang.py FOLDER``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
from torch import distributed as dist

rank, case, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/.meeting", rank=rank, world_size=2)
first, both, odd = dist.new_group([0]), dist.new_group([0, 1]), rank == 1

def dump():
    recorder = torch._C._distributed_c10d
    for form, name, content in (("pickle", f"dump_{rank}", recorder._dump_fr_trace()),
                                ("json", f"flight-rank{rank}.json", recorder._dump_fr_trace_json())):
        (folder / form).mkdir(exist_ok=True)
        (folder / form / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / f".done{rank}").touch()

def stop():
    time.sleep(60)

if case != "size":
    threading.Timer(2.0, dump).start()
dist.all_reduce(torch.ones(8))
if case == "healthy":
    dist.all_reduce(torch.ones(4, 3))
elif case == "message":
    if odd:
        dist.send(torch.ones(2), 0)
        stop()
    dist.recv(torch.ones(2), 1)
    dist.all_reduce(torch.ones(4, 3))
elif case == "stop":
    dist.all_reduce(torch.ones(4, 3))
    if odd:
        stop()
    dist.all_reduce(torch.ones(4, 3))
elif case == "skip":
    if not odd:
        dist.all_reduce(torch.ones(4, 3))
    dist.broadcast(torch.ones(8), 0)
elif case == "skip_equal":
    if not odd:
        dist.all_reduce(torch.ones(4, 3))
    dist.all_reduce(torch.ones(4, 3))
elif case == "operation":
    if odd:
        dist.all_gather([torch.ones(4, 3)] * 2, torch.ones(4, 3))
    dist.all_reduce(torch.ones(4, 3))
elif case == "size":  # gloo ends the process that receives more than it expects: it dumps before
    while odd and not (folder / ".done0").exists():
        time.sleep(0.01)
    work = dist.all_reduce(torch.ones(5 if odd else 4, 3), async_op=True)
    dump()
elif case == "subgroup":
    if odd:
        stop()
    dist.all_reduce(torch.ones(4, 3), group=both)
stop()
"""
CASES = ("healthy", "message", "stop", "skip", "skip_equal", "operation", "size", "subgroup")


def run(case: str, folder: Path) -> None:
    """Write the dumps of a case, of both forms."""
    (folder / "train.py").write_text(SCRIPT)
    words = [[sys.executable, "train.py", str(rank), case, str(folder)] for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(one, cwd=folder, stderr=subprocess.DEVNULL, env=environment) for one in words]
    end = time.monotonic() + 60
    while time.monotonic() < end and not all((folder / f".done{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    for process in ranks:
        process.send_signal(signal.SIGKILL)
        process.wait()


def short_frames(content: bytes) -> bytes:
    """A pickled dump with the three innermost frames of each entry, without folders of this machine."""
    import pickle

    dump = pickle.loads(content)  # our own
    for entry in dump["entries"]:
        entry["frames"] = entry["frames"][:3]
        for frame in entry["frames"]:
            frame["filename"] = re.sub(r".*/(?=torch/|train\.py)", "", frame["filename"])
    return pickle.dumps(dump, 2)


def main(target: Path) -> None:
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            run(case, Path(name))
            for form in ("json", "pickle"):
                (target / case / form).mkdir(parents=True, exist_ok=True)
                for file in sorted((Path(name) / form).iterdir()):
                    content = file.read_bytes()
                    (target / case / form / file.name).write_bytes(
                        short_frames(content) if form == "pickle" else content
                    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

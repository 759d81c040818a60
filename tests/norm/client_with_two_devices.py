"""One process of a client with two devices: python client_with_two_devices.py RANK FOLDER."""

import sys
from pathlib import Path

import torch.distributed as dist
from test_exchange import batch, net
from torch import nn

import fedbatchnorm as fbn

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = nn.parallel.DistributedDataParallel(net())  # broadcasts buffers before each pass
for step in range(2):
    model(batch(5 + rank, seed=10 * step + rank)).square().sum().backward()
update = fbn.collect(model, group=dist.group.WORLD)
(folder / str(rank)).write_bytes(fbn.to_bytes(update))
dist.destroy_process_group()

"""The door for jobs that already call `torch.distributed.checkpoint`: a writer, a reader and a stager for the stock calls.

    writer = StorageWriter("ckpts/run1")                        # on every rank, after init_process_group
    dcp.load(state, storage_reader=StorageReader(writer))       # nearest copy: memory, another node's, storage
    dcp.save(state, checkpoint_id="120", storage_writer=writer)

What is saved is a version like any other: `holdfast ls`, `verify` and a `Checkpointer` read it, stock PyTorch reads its
safetensors files. `writer.py` and `reader.py` tell what differs from the file system writer of PyTorch.
"""

from holdfast.adapters.dcp.dcp_writer import StorageWriter
from holdfast.adapters.dcp.reader import StorageReader
from holdfast.adapters.dcp.stager import AsyncStager

__all__ = ["AsyncStager", "StorageReader", "StorageWriter"]

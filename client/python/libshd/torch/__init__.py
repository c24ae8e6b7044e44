"""libshd.torch: PyTorch over the shardd training-state service.

    import libshd.torch as sd
    model, opt = sd.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

The loop stays as it is. docs/pytorch.md has the rest.
"""
from typing import Any

from ..errors import StepReset, Stopped
from .api import close, digest, leases, no_sync, report, reset, save, shard, step_of, weight
from .batch import find_executable_batch_size
from .data import Sampler
from .fsdp import FSDPModule, fully_shard
from .merge import DiLoCo, LocalSGD
from .optimizer import Optimizer, Step
from .peers import Settings, from_deepspeed, from_fsdp
from .policy import DDP, Policy, ZeRO1, ZeRO2, ZeRO3
from .reader import Reader, reader
from .scaler import GradScaler
from .state import load_safetensors, save_safetensors, writable
from .tiled import TiledLinear

__all__ = ['DDP', 'DiLoCo', 'FSDPModule', 'GradScaler', 'LocalSGD', 'Optimizer', 'Policy', 'Reader', 'Sampler',
           'Settings', 'Step', 'StepReset', 'Stopped', 'TiledLinear', 'ZeRO1', 'ZeRO2', 'ZeRO3', 'close', 'digest',
           'find_executable_batch_size', 'from_deepspeed', 'from_fsdp', 'fully_shard', 'leases', 'load_safetensors',
           'no_sync', 'reader', 'report', 'reset', 'save', 'save_safetensors', 'shard', 'step_of', 'weight',
           'writable']


def __getattr__(name: str) -> Any:
    """FSDP2's own policies, so that a script imports them where it imports fully_shard."""
    if name in ('MixedPrecisionPolicy', 'OffloadPolicy', 'CPUOffloadPolicy'):
        import torch.distributed.fsdp  # not before it is asked for: it takes as long as all of this
        return getattr(torch.distributed.fsdp, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

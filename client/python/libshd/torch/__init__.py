"""libshd.torch: PyTorch over the shardd training-state service.

    import libshd.torch as sd
    model, opt = sd.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

The loop stays as it is. docs/pytorch.md has the rest.
"""
from ..errors import StepReset
from .api import close, digest, leases, no_sync, report, reset, save, shard, step_of
from .data import Sampler
from .optimizer import Optimizer, Step
from .policy import DDP, Policy, ZeRO1, ZeRO2, ZeRO3

__all__ = ['DDP', 'Optimizer', 'Policy', 'Sampler', 'Step', 'StepReset', 'ZeRO1', 'ZeRO2', 'ZeRO3', 'close', 'digest',
           'leases', 'no_sync', 'report', 'reset', 'save', 'shard', 'step_of']

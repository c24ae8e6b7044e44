"""libshd.lightning: a strategy for Lightning, by its registry of strategies.

    import libshd.lightning
    Trainer(strategy='shardd')        # or strategy=libshd.lightning.Strategy(address='up:2', policy=sd.ZeRO2())

Of `lightning` and `pytorch_lightning`, it is for the one that is imported before, or for the first that is there.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import types
from typing import Any, Mapping, Optional

import torch

from . import torch as sd
from .errors import Misuse, NotFound, NotSupported
from .torch.wrapped import Face, groups_of, set_groups


def _find() -> Any:
    names = ('lightning', 'pytorch_lightning')
    for name in [name for name in names if name in sys.modules] or names:
        if name in sys.modules or importlib.util.find_spec(name):
            return importlib.import_module('lightning.pytorch' if name == 'lightning' else name)
    raise NotFound('neither lightning nor pytorch_lightning is installed')


pl = _find()
_States = importlib.import_module(pl.__name__ + '.trainer.states')


class Strategy(pl.strategies.DDPStrategy):
    """Processes as DDP's; parameters and the optimizer's state are with the owners. What it is given beside DDP's
    own arguments are keywords of shard(). A process group is there for more than one process, for what Lightning
    reduces by itself (self.log(sync_dist=True), decisions to stop)."""
    strategy_name = 'shardd'
    _OWN = ('accelerator', 'parallel_devices', 'cluster_environment', 'checkpoint_io', 'precision_plugin',
            'process_group_backend', 'timeout', 'start_method')

    def __init__(self, **named: Any):
        own = {key: named.pop(key) for key in self._OWN if key in named}
        if isinstance(own.get('timeout'), (int, float)):
            named['timeout'] = own.pop('timeout')  # of shard(), in seconds
        super().__init__(**own)
        self._keywords, self._restore = named, None

    def setup_distributed(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == _States.TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._shard(trainer)
        self.setup_precision_plugin()

    def _shard(self, trainer: Any) -> None:
        if len(self.optimizers) != 1:
            raise NotSupported(f'{len(self.optimizers)} optimizers: configure_optimizers() must return one')
        if getattr(self.precision_plugin, 'scaler', None) is not None:
            raise NotSupported(f'precision={trainer.precision!r} scales the loss, which gradients that leave during '
                               'backward() are not scaled back from: say precision="bf16-mixed"')
        if isinstance(self.precision_plugin, pl.plugins.MixedPrecision):
            # Its own asks first whether the optimizer unscales gradients. There is no scale.
            self.precision_plugin.clip_gradients = types.MethodType(pl.plugins.Precision.clip_gradients,
                                                                    self.precision_plugin)
        os.environ.update(RANK=str(self.global_rank), WORLD_SIZE=str(self.world_size))
        keywords = {'accumulate': trainer.accumulate_grad_batches, 'restore': self._restore, **self._keywords}
        module, optimizer = sd.shard(self.lightning_module, self.optimizers[0], **keywords)
        begins = trainer.global_step if self._restore is None else self._step
        if (at := sd.step_of(module)) != begins:
            sd.close(module)
            raise Misuse(f'the daemons have this model at step {at}, fit() begins at step {begins}: say '
                         'Strategy(name=…) for another one, fit(ckpt_path=…) of that step, or go back by `shardctl '
                         'restore --replace CHECKPOINT.shardd`')
        self.optimizers = [optimizer]
        self.model = Face(self.lightning_module)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        output = super().training_step(*arguments, **named)
        loss = output.get('loss') if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor):
            sd.report(self.lightning_module, loss=loss.detach().float())
        return output

    # -- Checkpoints: what the owners have lies beside Lightning's file ----------------------------

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(path, *arguments, **named)
        if os.path.isdir(beside := str(path) + '.shardd'):
            self._restore, self._step = beside, checkpoint['global_step']
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._restore is None:
            raise NotSupported('the checkpoint has no directory .shardd beside it: the optimizer\'s state in it is of '
                               'another strategy\'s; load its weights alone (load_from_checkpoint)')
        set_groups(self.optimizers[0], checkpoint['optimizer_states'][0]['param_groups'])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {'param_groups': groups_of(optimizer)}  # the rest is the owners'

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Optional[Any] = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero and 'optimizer_states' in checkpoint:
            sd.save(self.lightning_module, str(filepath) + '.shardd')

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(str(filepath) + '.shardd', ignore_errors=True)

    def teardown(self) -> None:
        if isinstance(self.model, Face):
            self.model = self.lightning_module
            sd.close(self.lightning_module)  # its values stay, as private ones
        self._restore = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description='state is with the daemons of shardd')


Strategy.register_strategies(pl.strategies.StrategyRegistry)

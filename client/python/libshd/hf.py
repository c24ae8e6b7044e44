"""libshd.hf: transformers' Trainer over the shardd training-state service.

    from libshd.hf import Trainer, TrainingArguments

in the place of transformers' own; the rest of the script stays. Mixin is for a Trainer of another class:
class Mine(Mixin, Seq2SeqTrainer). docs/pytorch.md has the rest.
"""
from __future__ import annotations

import dataclasses
import json
import os
import warnings
from typing import Any, Mapping, Optional, Union

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from . import torch as sd
from .errors import InvalidArgument, Misuse, NotSupported
from .torch.engine import ENGINES
from .torch.wrapped import Face, Prepared, groups_of, set_groups

# In the directory of the Trainer's checkpoint: the owners', and the optimizer's groups without their parameters.
STATE, GROUPS = 'shardd', 'optimizer_groups.pt'


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' own, with deepspeed=, fsdp= and sharded_ddp= answered by shardd: nothing of them is installed or
    started. `peer` has what they ask for, as keywords of shard(), and the answer to each knob."""
    sharded_ddp: Optional[str] = dataclasses.field(default=None, metadata={'help': 'fairscale\'s words, as zero_dp_3'})

    def __post_init__(self) -> None:
        asked = [name for name in ('deepspeed', 'fsdp', 'sharded_ddp') if getattr(self, name)]
        if len(asked) > 1:
            raise InvalidArgument(f'{asked[0]}= and {asked[1]}=: one at a time')
        self.peer = sd.Settings()
        if self.deepspeed:
            self.peer = _of_deepspeed(self.deepspeed, self)
        elif asked:
            self.peer = _of_fsdp(self.fsdp or self.sharded_ddp, self.fsdp_config)
        if self.peer.get('publish') is torch.bfloat16:
            self.bf16 = False  # parameters are bf16 themselves, as they would be there
        self.deepspeed = self.fsdp = self.fsdp_config = None
        super().__post_init__()


def _read(config: Union[str, Mapping[str, Any]]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return json.loads(json.dumps(config))
    with open(config, encoding='utf-8') as file:
        return json.load(file)


def _of_fsdp(words: Any, config: Union[None, str, Mapping[str, Any]]) -> sd.Settings:
    """fsdp="full_shard auto_wrap", a list, or True, which leaves all to fsdp_config."""
    words = words.split() if isinstance(words, str) else [] if words is True else words
    asked = {str(getattr(word, 'value', word)): True for word in words or ['full_shard']}
    return sd.from_fsdp({**asked, 'fsdp_config': _read(config or {})}, quiet=True)


def _of_deepspeed(config: Union[str, Mapping[str, Any]], args: Any) -> sd.Settings:
    """What the file says twice must agree with the arguments; where it says "auto" they decide."""
    config, world = _read(config), int(os.environ.get('WORLD_SIZE', 1))
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    told = {'train_micro_batch_size_per_gpu': batch, 'gradient_accumulation_steps': steps,
            'train_batch_size': batch * steps * world, 'gradient_clipping': args.max_grad_norm,
            'optimizer.params.lr': args.learning_rate, 'optimizer.params.weight_decay': args.weight_decay,
            'optimizer.params.betas': [args.adam_beta1, args.adam_beta2], 'optimizer.params.eps': args.adam_epsilon,
            'bf16.enabled': bool(args.bf16), 'fp16.enabled': bool(args.fp16)}
    differ = []
    for path, value in told.items():
        *groups, key = path.split('.')
        inner = config
        for group in groups:
            inner = inner.get(group) or {}
        if inner.get(key) == 'auto':
            inner[key] = value
        elif key in inner and inner[key] != value:
            differ.append(f'{path} is {inner[key]}, the arguments say {value}')
    kind = str(config.get('optimizer', {}).get('type', 'adamw')).lower()
    params = config.get('optimizer', {}).get('params') or {}
    if strange := set(params) - {'lr', 'weight_decay', 'betas', 'eps', 'torch_adam', 'adam_w_mode'}:
        differ.append(f'optimizer.params.{sorted(strange)[0]}: the optimizer is torch.optim.AdamW, which has none')
    if params.get('adam_w_mode') is False:
        differ.append('optimizer.params.adam_w_mode is false, the optimizer is torch.optim.AdamW')
    if kind not in ('adam', 'adamw') or not str(getattr(args.optim, 'value', args.optim)).startswith('adamw_torch'):
        differ.append(f'optimizer.type is {kind}, the arguments say optim={args.optim}')
    if differ:
        raise InvalidArgument('DeepSpeed\'s configuration and TrainingArguments: ' + '; '.join(differ))
    if 'scheduler' in config:
        raise NotSupported('scheduler: DeepSpeed\'s warm-up is logarithmic unless it says otherwise, Trainer\'s is '
                           'linear: take it out and say lr_scheduler_type= and warmup_steps=')
    return sd.from_deepspeed(config, quiet=True)


def _settings_of(args: Any) -> sd.Settings:
    """What the arguments ask for in other tools' words."""
    if args is None or isinstance(args, TrainingArguments):
        return args.peer if args is not None else sd.Settings()
    if args.deepspeed:
        raise NotSupported('TrainingArguments(deepspeed=…) of transformers has started DeepSpeed: take '
                           'libshd.hf.TrainingArguments')
    if not args.fsdp:
        return sd.Settings()
    settings = _of_fsdp(True, args.fsdp_config)
    args.fsdp = args.fsdp_plugin_args = None
    return settings


class Mixin:
    """To stand before Trainer, or a subclass of it, among the bases of a class.

    shard: keywords of shard(), as {'address': 'up:2', 'policy': sd.ZeRO2()}; the model's name at the daemons is
    run_name or the module's class. Where the daemons have a model of the name train() goes on at its step.
    """

    def __init__(self, *positional: Any, shard: Optional[Mapping[str, Any]] = None, **named: Any):
        self._keywords = {**_settings_of(named.get('args', positional[1] if len(positional) > 1 else None)),
                          **(shard or {})}
        self._shared: Optional[nn.Module] = None  # the module that shard() was given
        self._checkpoint: Optional[str] = None
        self._newest = self._goes_on = False
        super().__init__(*positional, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            name = 'FSDP' if self.is_fsdp_enabled else 'DEEPSPEED'
            raise NotSupported(f'accelerate is set up for {name} ($ACCELERATE_USE_{name}), which keeps the state '
                               'itself: launch without it, and say fsdp= or deepspeed= of libshd.hf.TrainingArguments')
        if self.args.fp16 or self.accelerator.scaler is not None:
            raise NotSupported('fp16=True scales the loss, which gradients that leave during backward() are not scaled '
                               'back from: say bf16=True')
        if self.args.torch_compile or getattr(self.accelerator, 'parallelism_config', None) is not None:
            raise NotSupported('torch_compile= and parallelism_config=: compile the layers of the module before, or '
                               'leave it out')

    # -- Sharding --------------------------------------------------------------------------------

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """The Trainer's own, and the module it is of, given to the owners."""
        if self._shared is self.model:
            return self.optimizer
        if self._shared is not None:
            raise Misuse('train() of another module (model_init) by this Trainer: the daemons have the trained one by '
                         'this name; make another Trainer with another run_name')
        keywords = dict(self._keywords)
        steps = self.args.gradient_accumulation_steps
        if keywords.setdefault('accumulate', steps) != steps:
            raise InvalidArgument(f'accumulate={keywords["accumulate"]}, but gradient_accumulation_steps={steps}')
        if 'micro_batches' in keywords:
            raise NotSupported('micro_batches= is for leases(): a Trainer draws its batches itself')
        if self._checkpoint is None:
            keywords['name'] = keywords.get('name') or self.args.run_name or type(self.model).__name__
        else:
            keywords['restore'] = os.path.join(self._checkpoint, STATE)
            if not os.path.isdir(keywords['restore']):
                raise NotSupported(f'{self._checkpoint} has no {STATE}/: the optimizer\'s state in it is a plain '
                                   'Trainer\'s; begin with its weights, without resume_from_checkpoint')
        world, processes = int(os.environ.get('WORLD_SIZE', 1)), self.accelerator.num_processes
        if world != processes:
            raise Misuse(f'WORLD_SIZE is {world}, accelerate has {processes} processes: each would draw the data of '
                         'all')
        _, face = sd.shard(self.model, super().create_optimizer(*arguments, **named), **keywords)
        self.optimizer = AcceleratedOptimizer(face, device_placement=False)
        self.optimizer._is_accelerate_prepared = True
        self._shared = self.model
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, *arguments: Any, **named: Any) -> nn.Module:
        if isinstance(model, Face) or not training and model is self._shared:
            return model
        if model is not self._shared:  # evaluate() before train()
            return super()._wrap_model(model, training, *arguments, **named)
        if isinstance(getattr(model, '_is_accelerate_prepared', None), Prepared):
            model._is_accelerate_prepared = False  # type: ignore[assignment]
        # Autocast, and nothing around it.
        return Face(self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True))

    # -- Steps -----------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        # A micro-batch's part of the step's loss; what is shown is the mean over all of them.
        sd.report(self.model, loss=loss.float() * self.args.gradient_accumulation_steps)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """What has the norm after the step, which is when it is logged."""
        if grad_norm is None:
            grad_norm = torch.full((), float('nan'), dtype=torch.float32, device='cpu')
            ENGINES[self.model].norms.append(grad_norm)
        return grad_norm

    # -- Beginning, and going on -----------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        if named.get('trial') is not None or arguments and arguments[0] is not None:
            raise NotSupported('hyperparameter_search(): each trial needs a model of its own name: make a Trainer for '
                               'each, with another run_name')
        self._newest = resume_from_checkpoint is True
        return super().train(resume_from_checkpoint, *arguments, **named)

    def _init_training_state(self, max_steps: int, steps_an_epoch: int, epochs: int, checkpoint: Optional[str],
                             *arguments: Any, **named: Any) -> tuple[int, int]:
        begins, self._checkpoint, self._goes_on = self._shared is None, checkpoint, False
        self.create_optimizer()
        epoch, batches = super()._init_training_state(max_steps, steps_an_epoch, epochs, checkpoint, *arguments,
                                                      **named)
        at = sd.step_of(self.model)
        if not begins or at == self.state.global_step:
            return epoch, batches
        if checkpoint is not None and (not self._newest or at < self.state.global_step):
            raise Misuse(f'{checkpoint} is of step {self.state.global_step}, the daemons have this model at step {at}: '
                         'leave out resume_from_checkpoint to go on from there, or go back by `shardctl restore '
                         f'--replace {os.path.join(checkpoint, STATE)}`')
        self._goes_on, self.state.global_step, self.state.epoch = True, at, at / steps_an_epoch
        self._checkpoint = checkpoint
        skipped = 0 if self.args.ignore_data_skip else at % steps_an_epoch * self.args.gradient_accumulation_steps
        return at // steps_an_epoch, skipped

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments, **named)
        if self._goes_on and isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # "step() before optimizer.step()": it was in another process
                while self.lr_scheduler.last_epoch < self.state.global_step:
                    self.lr_scheduler.step()
        return prepared

    def _run_epoch(self, **named: Any) -> None:
        if self._goes_on:
            named['resume_from_checkpoint'] = named['resume_from_checkpoint'] or ''  # not None: skip what is done
        super()._run_epoch(**named)

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        if not self._goes_on:
            super()._load_rng_state(checkpoint)

    # -- Checkpoints -----------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._shared is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            sd.save(self.model, os.path.join(output_dir, STATE))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, 'scheduler.pt'))
            torch.save(groups_of(self.optimizer), os.path.join(output_dir, GROUPS))

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        """The optimizer's state is restored when the model is made; see create_optimizer()."""
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, 'scheduler.pt'), weights_only=True))
            set_groups(self.optimizer, torch.load(os.path.join(checkpoint, GROUPS), weights_only=True))

    def _load_best_model(self) -> None:
        """Into a private copy: training is over."""
        sd.close(self.model)
        self._shared, self.model_wrapped = None, self.model
        self.optimizer = self.lr_scheduler = None
        super()._load_best_model()


class Trainer(Mixin, transformers.Trainer):
    """transformers' Trainer; see Mixin."""

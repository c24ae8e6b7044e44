#!/usr/bin/env python3
"""test_torch_trainers.py BUILD_DIR: transformers' Trainer, loops of accelerate and Lightning over shardd have the
losses of their own; what other tools' configurations ask for is answered or refused."""
import ast
import contextlib
import glob
import io
import json
import os
import signal
import subprocess
import sys
import time
import unittest
import warnings

import torch_run
from torch_run import first, kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1], trainers=True)
    os.environ.update(HF_HUB_OFFLINE='1', HF_HUB_DISABLE_PROGRESS_BARS='1', TRANSFORMERS_VERBOSITY='error',
                      TOKENIZERS_PARALLELISM='false')

import accelerate  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402

import libshd  # noqa: E402
import libshd.lightning  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd import hf  # noqa: E402

# What is left is the order in which gradients are added: some units in the last place, through 10 steps of AdamW.
# Under autocast they turn into ones of bf16.
CLOSE, CLOSE_BF16 = 1e-5, 1e-2


def made(seed=1):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def samples(count):
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(64, (count, 12), generator=draw)
    return [{'input_ids': row, 'attention_mask': torch.ones_like(row), 'labels': row[0] % 3} for row in tokens]


def folder(name):
    return os.path.join(DAEMONS.directory, name)


def go_back(checkpoint):
    """What the refusal says."""
    subprocess.run([DAEMONS.shardctl, 'restore', '--replace', '--address', DAEMONS.address, checkpoint], check=True,
                   capture_output=True)


def alone():
    """The variables of a process group, for a fork."""
    os.environ.update(LOCAL_RANK=os.environ['RANK'], LOCAL_WORLD_SIZE=os.environ['WORLD_SIZE'],
                      MASTER_ADDR='127.0.0.1')
    if os.environ['WORLD_SIZE'] == '1':
        del os.environ['LOCAL_RANK']


def quietly(work):
    """Trainers say on stdout what they log."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return work()


class Killed(transformers.TrainerCallback):
    """kill -9 at the end of a step, once."""

    def __init__(self, step, marker):
        self.step, self.marker = step, marker

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step and first(DAEMONS, self.marker):
            kill_here()


def trained(kind, name, *, accumulate=1, resume=None, shard=None, callbacks=None,
            arguments=transformers.TrainingArguments, **more):
    """A function for run(): logs of a Trainer's steps, the digest or None, and the trainer's last word."""
    def work():
        alone()
        more.setdefault('logging_steps', 1)
        more.setdefault('save_strategy', 'no')
        options = arguments(folder(name), per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
                            num_train_epochs=2, learning_rate=1e-2, weight_decay=0.1, warmup_steps=3, use_cpu=True,
                            report_to='none', disable_tqdm=True, run_name=name, **more)
        plain = {} if kind is transformers.Trainer else {'shard': shard}
        trainer = kind(made(), options, train_dataset=samples(20 * int(os.environ['WORLD_SIZE'])),
                       eval_dataset=samples(8), callbacks=callbacks, **plain)
        trainer.train(resume_from_checkpoint=resume)
        logs = [entry for entry in trainer.state.log_history if 'loss' in entry]
        trainer.save_model(folder(name))
        same = True
        if trainer.is_world_process_zero():
            again = transformers.BertForSequenceClassification.from_pretrained(folder(name)).state_dict()
            same = all(torch.equal(value, again[key]) for key, value in trainer.model.state_dict().items())
        return logs, sd.digest(trainer.model) if plain else None, same, trainer.evaluate()['eval_loss']
    return lambda: quietly(work)


class Close(unittest.TestCase):
    """What the tests below share."""

    def assert_close(self, found, expected, close=CLOSE):
        self.assertEqual(len(found), len(expected))
        worst = max(abs(a - b) for a, b in zip(found, expected))
        self.assertLess(worst, close)
        self.assertNotAlmostEqual(expected[0], expected[-1], places=3)
        return worst


class HuggingFace(Close):
    """transformers' Trainer."""

    def compare(self, name, world=1, **how):
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        (plain, _, _, expected), *_ = run(trained(transformers.Trainer, name + '-plain', **how), world)
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        answers = run(trained(hf.Trainer, name, **how), world)
        (logs, digest, same, found), *others = answers
        for key in ('loss', 'grad_norm'):
            worst = self.assert_close([entry[key] for entry in logs], [entry[key] for entry in plain],
                                      CLOSE_BF16 if 'bf16' in how else CLOSE)
            print(f'{name}: {key} {worst:.1e} from the plain Trainer\'s')
        self.assertEqual([entry['learning_rate'] for entry in logs], [entry['learning_rate'] for entry in plain])
        self.assertTrue(same)
        self.assertAlmostEqual(found, expected, delta=CLOSE_BF16 if 'bf16' in how else CLOSE)
        self.assertEqual({digest}, {digest, *(other[1] for other in others)})

    def test_one_worker(self):
        self.compare('hf-1')

    def test_accumulation_whose_last_window_is_short(self):
        self.compare('hf-2', accumulate=2)  # 5 batches an epoch

    def test_two_workers_against_ddp(self):
        self.compare('hf-3', world=2, accumulate=2)

    def test_autocast_and_no_clipping(self):
        self.compare('hf-4', bf16=True, max_grad_norm=0.0)

    def test_a_checkpoint_and_what_follows_have_the_same_bits(self):
        logs, digest, _, _ = run(trained(hf.Trainer, 'hf-whole', save_strategy='steps', save_steps=4))[0]
        kept = folder('hf-whole/checkpoint-4')
        with self.assertRaisesRegex(AssertionError, 'is of step 4, the daemons have this model at step 10'):
            run(trained(hf.Trainer, 'hf-again', resume=kept))
        go_back(os.path.join(kept, hf.STATE))
        again, after, _, _ = run(trained(hf.Trainer, 'hf-again', resume=kept))[0]
        self.assertEqual(digest, after)
        self.assertEqual([entry['loss'] for entry in logs], [entry['loss'] for entry in again])
        os.rename(os.path.join(kept, hf.STATE), os.path.join(kept, 'gone'))
        with self.assertRaisesRegex(AssertionError, 'has no shardd/'):
            run(trained(hf.Trainer, 'hf-other', resume=kept))

    def test_a_killed_worker_goes_on_where_it_was(self):
        _, digest, _, _ = run(trained(hf.Trainer, 'hf-unharmed', accumulate=2))[0]
        logs, harmed, _, _ = run(trained(hf.Trainer, 'hf-killed', accumulate=2,
                                         callbacks=[Killed(4, folder('killed'))]))[0]
        self.assertEqual(harmed, digest)
        self.assertEqual(len(logs), 2)  # of 6
        self.assertTrue(os.path.exists(folder('killed')))

    def test_a_killed_rank_of_a_process_group_ends_the_others_and_all_go_on(self):
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        _, digest, _, _ = run(trained(hf.Trainer, 'hf-group'), 2)[0]

        def harmed(rank):
            def work():
                killed = [Killed(4, folder('killed-rank'))] if rank else []
                return trained(hf.Trainer, 'hf-group-killed', callbacks=killed)()
            return work
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        forks = [torch_run.Fork(harmed(rank), rank, 2) for rank in range(2)]
        while not all([fork.status is not None or fork.done() for fork in forks]):
            time.sleep(0.01)
        self.assertEqual(forks[1].answer(), (False, signal.SIGKILL))
        with self.assertRaisesRegex(AssertionError, 'rank 1 .* is gone|Connection (reset|closed)|closed by peer'):
            forks[0].answer()
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        self.assertEqual({answer[1] for answer in run(trained(hf.Trainer, 'hf-group-killed'), 2)}, {digest})

    def test_the_best_model_at_the_end(self):
        def work():
            options = transformers.TrainingArguments(
                folder('hf-best'), max_steps=4, save_strategy='steps', save_steps=2, eval_strategy='steps',
                eval_steps=2, load_best_model_at_end=True, metric_for_best_model='loss', learning_rate=5e-2,
                use_cpu=True, report_to='none', disable_tqdm=True, run_name='hf-best')
            trainer = hf.Trainer(made(), options, train_dataset=samples(40), eval_dataset=samples(8))
            trainer.train()
            return trainer.state.best_metric, trainer.evaluate()['eval_loss']
        best, found = run(lambda: quietly(work))[0]
        self.assertAlmostEqual(best, found, places=6)

    def test_what_is_refused(self):
        cases = {
            'fp16=True': ({'fp16': True}, {}), 'torch_compile=': ({'torch_compile': True}, {}),
            'gradient_accumulation_steps=1': ({}, {'accumulate': 3}), 'leases': ({}, {'micro_batches': 3}),
            'owners have AdamW': ({'optim': 'rmsprop'}, {})}
        for text, (more, shard) in cases.items():
            with self.subTest(text), self.assertRaisesRegex(AssertionError, text):
                run(trained(hf.Trainer, 'hf-refused', shard=shard, **more))
        with self.assertRaisesRegex(AssertionError, 'WORLD_SIZE is 2, accelerate has 1'):
            def work():
                options = transformers.TrainingArguments(folder('x'), use_cpu=True, report_to='none')
                os.environ['WORLD_SIZE'] = '2'
                hf.Trainer(made(), options, train_dataset=samples(8)).train()
            run(work)


class Accelerate(Close):
    """A loop of accelerate's own, that is given the module or is not."""

    def loop(self, sharded, *, with_model, name):
        def work():
            alone()
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = made()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if sharded:
                model, optimizer = sd.shard(model, optimizer, accumulate=2, name=name)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
            loader = torch.utils.data.DataLoader(samples(40), batch_size=4)
            if with_model:
                model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
            else:
                optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
            numbers = []
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    numbers.append(loss.item())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        numbers.append(norm.item())
                    schedule.step()
                    optimizer.zero_grad()
            return numbers
        return lambda: quietly(work)

    def test_the_losses_are_those_of_the_plain_loop(self):
        expected = run(self.loop(False, with_model=True, name=''))[0]
        for name, with_model in (('with', True), ('without', False)):
            self.assert_close(run(self.loop(True, with_model=with_model, name='accelerate-' + name))[0], expected)
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        expected = run(self.loop(False, with_model=True, name=''), 2)
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        for found, plain in zip(run(self.loop(True, with_model=True, name='accelerate-2'), 2), expected):
            self.assert_close(found, plain)

    def test_what_is_refused(self):
        def prepared(**how):
            def work():
                accelerator = accelerate.Accelerator(cpu=True, **how)
                model = made()
                model, optimizer = sd.shard(model, torch.optim.SGD(model.parameters(), 0.1), address='local:')
                accelerator.prepare(optimizer)
                model(**{key: value[None] for key, value in samples(1)[0].items()}).loss.backward()
                accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
            return work
        with self.assertRaisesRegex(AssertionError, 'mixed_precision=\'bf16\'.*torch.autocast'):
            run(prepared(mixed_precision='bf16'))
        with self.assertRaisesRegex(AssertionError, 'norm_type=1.0'):
            run(prepared())


class Peers(unittest.TestCase):
    """Configurations of other tools."""

    def test_deepspeeds_knobs(self):
        asked = {'train_batch_size': 64, 'train_micro_batch_size_per_gpu': 8, 'bf16': {'enabled': True},
                 'gradient_clipping': 1.0, 'communication_data_type': 'bf16',
                 'zero_optimization': {'stage': 3, 'overlap_comm': True, 'stage3_max_live_parameters': 1000,
                                       'stage3_prefetch_bucket_size': 0}}
        with self.assertWarnsRegex(UserWarning, r'gradient_clipping=1.0: optimizer.clip_grad_norm_\(\)'):
            settings = sd.from_deepspeed(asked, world=2)
        self.assertEqual(settings, {'policy': sd.ZeRO3(prefetch='none', forward_prefetch=0, max_live_bytes=2000),
                                    'accumulate': 4, 'publish': torch.bfloat16, 'grad_dtype': torch.bfloat16})
        self.assertEqual(len(settings.answers), 9)
        self.assertRegex(str(settings), 'zero_optimization.overlap_comm +true +same')
        path = folder('ds.json')
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(asked, file)
        self.assertEqual(sd.from_deepspeed(path, world=2, quiet=True), settings)
        with self.assertRaisesRegex(libshd.NotSupported, 'zero_optimization.zero_hpz_partition_size.*one copy.*; '
                                    'zero_optimization.stagee=3.*did you mean zero_optimization.stage'):
            sd.from_deepspeed({'zero_optimization': {'zero_hpz_partition_size': 8, 'stagee': 3}})
        with self.assertRaisesRegex(libshd.Misuse, 'for 4 workers, there is 1'):
            sd.from_deepspeed({**asked, 'gradient_accumulation_steps': 2}, world=1)
        with self.assertWarnsRegex(UserWarning, r'fp16.enabled=true: .*sd.GradScaler\(\) scales losses'):
            self.assertEqual(sd.from_deepspeed({'fp16': {'enabled': True}})['publish'], torch.float16)
        with self.assertRaisesRegex(libshd.InvalidArgument, 'none.json'):
            sd.from_deepspeed('none.json')

    def test_fsdps_words_plugin_and_giottos(self):
        for asked, policy in ({'full_shard auto_wrap': sd.ZeRO3(), 'FSDP_ZERO2': sd.ZeRO2(), 'zero_dp_2': sd.ZeRO2(),
                               'no_shard': sd.DDP()}.items()):
            self.assertEqual(sd.from_fsdp(asked, quiet=True)['policy'], policy, asked)
        self.assertEqual(sd.from_fsdp(['shard_grad_op', 'offload'], quiet=True)['policy'], sd.ZeRO2())
        giotto = {'strategy': 'FSDP_ZERO2', 'fetch_type': 'post', 'devices': [0, 1], 'mixed_precision': 'bf16'}
        self.assertEqual(sd.from_fsdp(giotto, world=2),
                         {'policy': sd.ZeRO2(prefetch='post'), 'publish': torch.bfloat16})
        plugin = FullyShardedDataParallelPlugin(
            sharding_strategy='SHARD_GRAD_OP', backward_prefetch='BACKWARD_POST', use_orig_params=True,
            auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['BertLayer'])
        settings = sd.from_fsdp(plugin, quiet=True)
        self.assertEqual((settings['policy'], settings['units']),
                         (sd.ZeRO2(prefetch='post', forward_prefetch=0), ['BertLayer']))
        self.assertEqual(sd.from_fsdp('hybrid_shard', quiet=True)['policy'], sd.ZeRO3())
        self.assertEqual(sd.from_fsdp({'sharding_strategy': 'HYBRID_SHARD_ZERO2'}, quiet=True)['policy'], sd.ZeRO2())

    def test_units_by_name_and_by_size_change_no_bit(self):
        def work():
            digests = {}
            for name, units in {'auto': 'auto', 'layers': ['BertLayer'],
                                'joined': sd.from_fsdp({'min_num_params': 9000}, quiet=True)['units']}.items():
                model, optimizer = sd.shard(model := made(), torch.optim.SGD(model.parameters(), 0.1), units=units,
                                            name='units-' + name)
                model(**{key: value[None] for key, value in samples(1)[0].items()}).loss.backward()
                optimizer.step()
                digests[name] = (torch.cat([p.detach().flatten() for p in model.parameters()]).clone(),
                                 optimizer.engine.model.unit_names())
            with self.assertRaisesRegex(libshd.Misuse, 'has no module of class Layer'):
                sd.shard(model := made(), torch.optim.SGD(model.parameters(), 0.1), units=['Layer'])
            return digests
        found = run(work)[0]
        values, names = zip(*found.values())
        self.assertTrue(all(torch.equal(value, values[0]) for value in values))
        self.assertIn('bert.encoder.layer.1', names[1])
        self.assertLess(len(names[2]), len(names[0]))

    def test_a_module_in_bf16_with_gradients_in_bf16_learns(self):
        def work():
            settings = sd.from_deepspeed({'bf16': {'enabled': True}, 'communication_data_type': 'bf16'})
            model, optimizer = sd.shard(model := made(), torch.optim.AdamW(model.parameters(), 1e-2), name='bf16',
                                        **settings)
            batch, losses = torch.utils.data.default_collate(samples(8)), []
            for _ in range(12):
                losses.append(model(**batch).loss)
                losses[-1].backward()
                optimizer.step()
            return losses[0].item(), losses[-1].item(), {p.dtype for p in model.parameters()}
        first, last, dtypes = run(work)[0]
        self.assertLess(last, 0.8 * first)
        self.assertEqual(dtypes, {torch.bfloat16})

    def test_the_trainers_arguments(self):
        digests = [run(trained(hf.Trainer, f'hf-peer-{at}', max_steps=2, arguments=hf.TrainingArguments, **more))[0][1]
                   for at, more in enumerate((
                       {}, {'fsdp': 'full_shard auto_wrap'}, {'sharded_ddp': 'zero_dp_2'},
                       {'deepspeed': {'zero_optimization': {'stage': 2}, 'gradient_clipping': 'auto',
                                      'train_micro_batch_size_per_gpu': 'auto', 'bf16': {'enabled': 'auto'},
                                      'optimizer': {'type': 'AdamW', 'params': {'lr': 'auto'}}}}))]
        digests.append(run(trained(hf.Trainer, 'hf-peer-stock', max_steps=2, fsdp='shard_grad_op auto_wrap'))[0][1])
        self.assertEqual(len(set(digests)), 1)
        for more, text in (({'fsdp': 'half_shard'}, 'half_shard'),
                           ({'deepspeed': {'gradient_clipping': 0.5}}, 'clipping is 0.5, the arguments say 1.0'),
                           ({'deepspeed': {'zero_optimization': {'stage': 3, 'zero_hpz_partition_size': 8}}},
                            'zero_hpz_partition_size'),
                           ({'deepspeed': {'optimizer': {'params': {'adam_w_mode': False}}}}, 'adam_w_mode is false'),
                           ({'deepspeed': {'optimizer': {'params': {'freeze_step': 9}}}}, 'params.freeze_step'),
                           ({'deepspeed': {'scheduler': {'type': 'WarmupLR'}}}, 'lr_scheduler_type')):
            with self.assertRaisesRegex(libshd.Error, text):
                hf.TrainingArguments(folder('y'), use_cpu=True, **more)


class Module(pl.LightningModule):
    """The same module, for Lightning."""

    def __init__(self):
        super().__init__()
        self.net, self.losses = made(), []

    def training_step(self, batch):
        loss = self.net(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
        return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}


class Lightning(Close):
    """Trainer(strategy='shardd')."""

    def fit(self, strategy, *, resume=None, keep='', **more):
        def work():
            alone()
            world = int(os.environ['WORLD_SIZE'])
            module = Module()
            trainer = pl.Trainer(accelerator='cpu', devices=world, strategy=strategy, logger=False,
                                 enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
                                 max_epochs=2, enable_checkpointing=bool(keep),
                                 callbacks=[pl.callbacks.ModelCheckpoint(folder(keep), every_n_train_steps=5,
                                                                         save_top_k=-1)] if keep else None, **more)
            trainer.fit(module, torch.utils.data.DataLoader(samples(20 * world), batch_size=4), ckpt_path=resume)
            return module.losses, torch.cat([p.detach().flatten() for p in module.parameters()])
        return lambda: quietly(work)

    def test_the_losses_are_lightnings_own(self):
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        for more in ({}, {'accumulate_grad_batches': 2}, {'precision': 'bf16-mixed'}):
            strategy = libshd.lightning.Strategy(name='-'.join(['lightning', *map(str, more.values())]))
            losses, _ = run(self.fit(strategy, **more))[0]
            expected = run(self.fit('ddp', **more))[0][0]
            worst = self.assert_close(losses, expected, CLOSE_BF16 if 'precision' in more else CLOSE)
            print(f'Lightning {more}: {worst:.1e}')

    def test_two_workers_against_ddp(self):
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        plain = run(self.fit('ddp'), 2)
        os.environ['MASTER_PORT'] = str(torch_run.free_port())
        for (found, _), (expected, _) in zip(run(self.fit(libshd.lightning.Strategy(name='lightning-ddp')), 2), plain):
            self.assert_close(found, expected)

    def test_a_checkpoint_and_what_follows_have_the_same_bits(self):
        losses, values = run(self.fit('shardd', keep='lightning'))[0]
        kept = glob.glob(folder('lightning/*step=5*.ckpt'))[0]
        with self.assertRaisesRegex(AssertionError, 'daemons have this model at step 10, fit.. begins at step 5'):
            run(self.fit('shardd', resume=kept))
        with self.assertRaisesRegex(AssertionError, "a checkpoint of the model 'Module'"):
            run(self.fit(libshd.lightning.Strategy(name='resumed'), resume=kept))
        go_back(kept + '.shardd')
        again, after = run(self.fit('shardd', resume=kept))[0]
        self.assertEqual(losses[5:], again)
        self.assertTrue(torch.equal(values, after))


class Example(unittest.TestCase):
    """examples/pytorch/finetune.py, of a model that people use."""

    def test_minilm_learns_as_it_does_without(self):
        script = os.path.join(torch_run.ROOT, 'examples', 'pytorch', 'finetune.py')
        losses = []
        for at, more in enumerate((['--plain'], [])):
            done = subprocess.run([sys.executable, script, '--out', folder(f'minilm-{at}'), '--steps', '4', '--batch',
                                   '4', *more], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            losses.append([float(ast.literal_eval(line)['loss']) for line in done.stdout.splitlines()
                           if line.startswith("{'loss'")])
        self.assertEqual(len(losses[0]), 4)
        for plain, found in zip(*losses):
            self.assertAlmostEqual(plain, found, delta=2e-4)  # as logged


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)

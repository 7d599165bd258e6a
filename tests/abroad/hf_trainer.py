"""Hugging Face's Trainer, which owns its loop."""

import tempfile

import torch
from hf import model_of
from transformers import Trainer, TrainingArguments

import bitproof


def plain(case, mesh, **arguments):
    model, texts = model_of(case), torch.randint(128, (64, 16))
    settings = dict(use_cpu=True, max_steps=99, report_to=[], save_strategy="no", disable_tqdm=True)
    settings |= {"per_device_train_batch_size": 4, "output_dir": tempfile.mkdtemp(), **arguments}
    data = [{"input_ids": text, "labels": text} for text in texts]
    own = Trainer(model, TrainingArguments(**settings), train_dataset=data)
    return bitproof.watch(train=own.train, model=model)


def checkpointed(case, mesh):
    return plain(case, mesh, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


def other_clipping(case, mesh):
    return plain(case, mesh, max_grad_norm=0.01)

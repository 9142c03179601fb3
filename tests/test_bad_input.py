"""Every mistake on a command line ends with the right exit code and one line on stderr, and writes no file."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.compose import Request, compose_tree, settings_of
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.errors import ConfigError

BROKEN = "allow=[tests] model._target_=tests.support.broken_models"

# (command line, exit code, what the error says)
COMMAND_LINES: list[tuple[str, int, str]] = [
    ("trian", 2, "unknown command 'trian'; did you mean 'train'?"),
    (
        "frobnicate",
        2,
        "choose one of: balance, check, cp, env, eval, export, generate, launch-script, ls, plan, predict, profile, "
        "report, runs",
    ),
    ("train --jsn", 2, "unknown flag --jsn; did you mean '--json'?"),
    ("train --by", 2, "--by needs a value"),
    ("train --by tmie", 2, "balance=tmie: no such option"),
    ("train chunks", 2, "'chunks' is neither a flag nor key=value"),
    ("train chunk=8", 2, "unknown key 'chunk'; did you mean 'chunks'?"),
    ("train +chunk=8", 2, "unknown key 'chunk'; did you mean 'chunks'?"),
    ("train ++chunk=8", 2, "unknown key 'chunk'; did you mean 'chunks'?"),
    ("train ++balance.x=1", 2, "unknown key 'balance.x'"),
    ("train ~seed", 2, "'seed' was removed, but it is required"),
    ("train ~model", 2, "model: nothing chosen"),
    ("train log.evry=1", 2, "unknown key 'log.evry'; did you mean 'log.every'?"),
    ("train optimizer.lrr=1", 2, "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
    ("train +optimizer.lrr=1", 2, "unknown key 'optimizer.lrr': torch.optim.AdamW does not take it"),
    (
        "train model=gpt data.length=128",
        2,
        "unknown key 'data.length'; it belongs to data=shapes|synthetic|",
    ),
    ("train model=gpt model.lora.rank=8", 2, "unknown key 'model.lora'; it belongs to model=hf"),
    ("train lr=1", 2, "unknown key 'lr'; did you mean 'optimizer.lr'?"),
    ("train optimizer.lr=abc", 2, "optimizer.lr=abc: expected a number"),
    ("train optimizer.lr=", 2, "optimizer.lr=: expected a number"),
    ("train optimizer.lr=null", 2, "optimizer.lr=None: expected a number"),
    ("train optimizer.lr=-1", 2, "Invalid learning rate: -1"),
    ("train optimizer.lr=nan", 2, "optimizer.lr=nan: must be finite"),
    ("train optimizer.lr=inf", 2, "optimizer.lr=inf: must be finite"),
    (
        "train optimizer._target_=torch.optim.LBFGS optimizer.lr=1",
        2,
        "optimizer: the step of LBFGS needs a closure, which gpipe does not pass",
    ),
    (
        "train loss._target_=torch.nn.CrossEntropyLoss +loss.reduction=sum",
        2,
        "loss.reduction=sum: must be mean, because gpipe weights the loss of each micro-batch by its size",
    ),
    ("train optimizer=3", 2, "optimizer=3: choose an option by its name"),
    ("train optimizer=sdg", 2, "optimizer=sdg: no such option; did you mean 'sgd'?"),
    ("train model=resnet1010", 2, "did you mean 'resnet101'?"),
    ("train recipe=nope", 2, "recipe=nope: no such option"),
    ("train recipe.scale=small", 2, "recipe.scale=small: needs a recipe, and none is given"),
    ("train recipe=unet_speed recipe.scale=tiny", 2, "recipe.scale=tiny: choose one of: full, small"),
    (
        "train recipe=unet_speed recipe.scal=small",
        2,
        "unknown key 'recipe.scal'; did you mean 'recipe.scale'?",
    ),
    ("train recipe=digits recipe.scale=small", 2, "no recipe of that name has that scale, leave it out"),
    ("train recipe=unet_sped recipe.scale=small", 2, "did you mean 'unet_speed'?"),
    ("train engine=foo", 2, "engine=foo: no such option; choose one of: offload, processes, single, threads"),
    ("train engine=offload engine.slices=99", 2, "engine.slices=99: the model has only 10 layers"),
    ("train engine=offload engine.slice=9", 2, "unknown key 'engine.slice'; did you mean 'engine.slices'?"),
    ("train engine=offload engine.to=tape", 2, "engine.to=tape: must be one of: cpu, disk"),
    ("train engine=offload engine.memory=1KiB", 2, "engine.memory=1KiB: is too little, "),
    ("train engine=offload checkpoint=[always]", 2, "engine=offload has no partitions; give one mode"),
    ("profile engine=offload", 2, "engine=offload: is for the steps that timeline=true runs"),
    ("profile timeline=true engine=single", 2, "engine=single: its steps cannot be recorded; leave it out"),
    ("train engine=offload schedule=1f1b", 2, "schedule: has no effect with engine=offload; leave it out"),
    ("train engine.offload=tape", 2, "engine.offload=tape: must be one of: cpu, disk, or null"),
    (
        "profile seconds=0 timeline=true engine.offload=tape",
        2,
        "engine.offload=tape: must be one of: cpu, disk",
    ),
    ("profile timeline=true engine=offload engine.slices=0", 2, "engine.slices=0: must be at least 1"),
    ("profile timeline=true engine=offload partitions=2", 2, "partitions: has no effect with engine=offload"),
    ("train steps=0", 2, "steps=0: must be at least 1"),
    ("train steps=1.5", 2, "steps=1.5: expected a whole number"),
    ("train chunks=abc", 2, "chunks=abc: expected a whole number"),
    ("train chunks=null", 2, "chunks=null: must not be null"),
    ("train chunks=[1", 2, "chunks=[1: cannot be read"),
    ("train chunks=2,4", 2, "chunks=2,4: several values need -m"),
    ("train -m chunks=2,0", 2, "chunks=0: must be at least 1"),
    ("train balance=[4,6]", 2, "balance=manual balance.layers=[4,6]"),
    ("train balance=manual", 2, "balance.layers: must be given"),
    ("train balance=manual balance.layers=[4,4]", 2, "covers 8 layers, the model has 10"),
    ("train partitions=11", 2, "partitions=11: the model has only 10 layers"),
    ("balance partitions=11", 2, "partitions=11: the model has only 10 layers; give at most that many"),
    ("balance balance=manual balance.layers=[4,4]", 2, "covers 8 layers, the model has 10"),
    *(
        (
            f"balance --by {by} data=synthetic data.shape=[1,8,8] batch_size=8",
            2,
            "model: layer 'stem' (Sequential) does not take 2x1x8x8: Given groups=1, weight of size [64, 3, 7, 7], "
            "expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead",
        )
        for by in ("time", "size", "params")
    ),
    (
        "balance --by params device_memory=1MiB data.size=8 batch_size=8",
        2,
        "device_memory=1MiB: no balance of 2 partitions fits; the smallest limit that works is ",
    ),
    (
        "train balance=manual balance.layers=[9,1] device_memory=100MiB data.size=8 batch_size=16",
        2,
        "device_memory=100MiB: balance [9, 1] needs ",
    ),
    ("train engine=single device_memory=1GiB", 2, "device_memory: has no effect with engine=single"),
    ("train engine=single devices=2", 2, "devices=2: engine=single runs on one device"),
    ("train devices=[cuda:7]", 2, "'cuda:7' does not exist"),
    ("train devices=[gpu]", 2, "device 'gpu' does not exist; write 'cpu'"),
    ("train run_dir=a(b", 2, "put it in quotes that the shell leaves alone: \"run_dir='a(b'\""),
    (
        "train model=mlp model.width=10000000000000",
        6,
        "out of memory while building the model: cannot allocate 122,880,000,000,000,000 bytes; choose a smaller",
    ),
    (
        "train model=mlp data=synthetic data.shape=[100000000,1000000]",
        6,
        "out of memory while loading the data: cannot allocate 4,000,000,000,000,000 bytes; choose a smaller data",
    ),
    (
        "train engine=single balance=manual balance.layers=[10]",
        2,
        "balance: has no effect with engine=single",
    ),
    ("train engine=single schedule=gpipe", 2, "schedule: has no effect with engine=single"),
    (
        "train data_parallel=2",
        2,
        "data_parallel: has no effect with engine=threads; leave it out, or choose engine=processes",
    ),
    ("train engine=offload shard=none", 2, "shard: has no effect with engine=offload; leave it out"),
    ("train engine=processes partitions=11", 2, "partitions=11: the model has only 10 layers"),
    ("train engine=processes engine.max_restarts=x", 2, "engine.max_restarts=x: expected a whole number"),
    ("train engine=single partitions=2", 2, "partitions: has no effect with engine=single"),
    (
        "train checkpoint=[always,never,never]",
        2,
        "checkpoint=['always', 'never', 'never']: checkpoint has 3 modes for 2 partitions; give one for each",
    ),
    ("plan checkpoint=[always,never]", 2, "gpipe plan finds a mode for each partition; leave it out"),
    ("train chunks=2 chunks=4", 2, "chunks: given as 2 and as 4; give it once"),
    ("train +optimizer.lr=1 optimizer.lr=2", 2, "optimizer.lr: given as 1 and as 2; give it once"),
    ("train devices=2 devices=[cpu,cpu]", 2, "devices: given as 2 and as [cpu,cpu]; give it once"),
    ("train model=gpt model=mlp", 2, "model: given as gpt and as mlp; give it once"),
    ("train --by time balance=size", 2, "balance: given as size and as time; give it once"),
    ("train recipe=digits recipe=unet_speed", 2, "recipe: given as digits and as unet_speed; give it once"),
    ("train -m chunks=2,4 chunks=8", 2, "chunks: given as 2,4 and as 8; give it once"),
    ("export run=a run=b", 2, "run: given as a and as b; give it once"),
    *(
        (f"train {word}", 2, f"{word}: choose an option by its name; ")
        for word in (
            "schedule=${oc.decode:'1'}",
            "schedule=${oc.decode:'[1]'}",
            "model=${seed}",
            "recipe=${oc.env:HOME}",
            "logger=null",
            "optimizer=[sgd]",
        )
    ),
    *(
        (f"train {word}", 2, f"{name} is a list; set it as a whole, {name}=[...]")
        for word, name in (
            ("optimizer.groups.a=1", "optimizer.groups"),
            ("optimizer.groups.a.b.c=1", "optimizer.groups"),
            ("optimizer.betas.x=1", "optimizer.betas"),
            ("freeze.a.b=1", "freeze"),
            ("++allow.a.b=1", "allow"),
        )
    ),
    *(
        (line.replace("LONG", "x" * 300), 2, "name")
        for line in (
            *(
                "train config=LONG",
                "train resume=LONG",
                "train run_dir=LONG resume=auto",
                "profile run_dir=LONG",
            ),
            *("eval run=LONG", "eval snapshot=LONG", "eval weights=LONG.pth", "predict run=LONG input=a"),
            *("generate run=LONG", "export snapshot=LONG", "report LONG", "report . out=LONG", "runs LONG"),
            *("cp run/LONG a.yaml", "cp recipe/digits LONG.yaml", "train --config-dir LONG"),
            *("train --config-name LONG", "train data=image_folder data.root=LONG"),
            *("train model=mlp model.weights=LONG.pth", "plan page=LONG", "check run_dir=LONG"),
        )
    ),
    (
        "train model=mlp snapshot.monitor=top2",
        2,
        "snapshot.monitor=top2: this run does not measure it; choose",
    ),
    ("train model=mlp snapshot.monitor=top2 --dry-run", 2, "choose one of: loss, top1, top5"),
    (
        "train model=gpt snapshot.monitor=top1 steps=1",
        2,
        "choose one of: bits_per_token, loss, token_accuracy",
    ),
    ("train plan.budget=5", 2, "plan.budget: has no effect without plan=auto; remove it"),
    ("train plan.cache=false", 2, "plan.cache: has no effect without plan=auto or schedule=auto; remove it"),
    ("train plan.verify_budget=5", 2, "unknown key 'plan.verify_budget'; did you mean 'plan.budget'?"),
    ("plan plan.verify_budget=5", 2, "plan.verify_budget: has no effect without verify=true; remove it"),
    ("plan plan=none", 2, "plan=none: holds several keys; set one of them, such as plan.budget=..."),
    ("train log=3", 2, "log=3: holds several keys"),
    ("train model.num_classes=ten", 2, "model.num_classes=ten: expected a whole number"),
    ("train data=mnist data.root=nowhere", 3, "nowhere"),
    ("train data.size=0", 2, "data.size=0"),
    ("train data.workers=-1", 2, "data.workers=-1: must be a whole number of at least 0"),
    ("train data.workers=true", 2, "data.workers=True: expected a whole number"),
    ("train data.timeout=0", 2, "data.timeout=0: must be a positive number of seconds"),
    (
        "train data.timeout=5",
        2,
        "data.timeout=5: has no effect with data.workers=0",
    ),
    ("train data=text data.path=nowhere", 3, "data.path=nowhere: cannot be read"),
    ("train model=gpt model.context=64", 2, "model.context=64: samples have 32 tokens; set data.context=64"),
    (
        "train model=gpt data=digits",
        2,
        "gpt expects sequences of tokens, but the data has shape [3, 32, 32]",
    ),
    ("train model=unet model.depth=5", 2, "needs at least 64x64 pixels, but the data has 32x32"),
    ("train loss.label_smoothing=2", 2, "loss.label_smoothing=2: must be from 0 to 1"),
    ("train --config-name nope", 2, "--config-name nope: no such config"),
    ("train --config-dir nowhere", 2, "--config-dir nowhere: no such folder"),
    ("train hydra.searchpath=[x]", 2, "name the folder by --config-dir, so that gpipe checks its files"),
    ("train hydra.job.chdirr=1", 2, "unknown key 'hydra.job.chdirr'; see `gpipe train --cfg hydra`"),
    ("eval", 2, "run: give the run to evaluate"),
    ("eval run=nowhere", 4, "run=nowhere: no such directory"),
    ("eval run=.", 4, "contains no snapshot"),
    ("eval snapshot=nowhere", 4, "snapshot=nowhere: no such directory"),
    ("eval snapshot=.", 4, "snapshot=.: not a snapshot"),
    ("eval weights=nowhere.pth", 4, "weights=nowhere.pth: no such file"),
    ("train model=mlp model.weights=nowhere.pth", 4, "model.weights=nowhere.pth: no such file"),
    (
        "train model=mlp model.weights=w.npz",
        2,
        "model.weights=w.npz: unknown file type; give one of .safetensors",
    ),
    ("train model=mlp model.weights=/dev/zero.pth", 4, "model.weights=/dev/zero.pth: no such file"),
    ("train model=mlp model.new_head=true", 2, "model.new_head=true: replaces the head of a file"),
    (
        "train model=mlp freeze=[hiden0]",
        2,
        "freeze=hiden0: no parameter of the model has such a name; did you mean 'hidden0'?",
    ),
    ("train model=mlp freeze=[*]", 2, "freeze=[*]: freezes every parameter of the model"),
    ("train model=mlp freeze=head", 2, "freeze=head: expected a list in brackets"),
    (
        "train early_stop.min_delta=0.1",
        2,
        "early_stop.min_delta=0.1: has no effect without early_stop.patience",
    ),
    ("train model=mlp freeze={a:1}", 2, "freeze={a:1}: expected a list in brackets"),
    (
        "train optimizer.groups=[{match:head,lr_scal:10}]",
        2,
        "unknown key 'optimizer.groups[0].lr_scal'; did you mean 'lr_scale'?",
    ),
    (
        "train model=mlp optimizer.groups=[{match:head,weight_decay:-1}]",
        2,
        "optimizer.groups[0]: torch.optim.AdamW rejects these values: Invalid weight_decay value: -1",
    ),
    ("generate", 2, "run: give the run to use"),
    ("generate run=nowhere", 4, "run=nowhere: no such directory"),
    ("generate run=. tokens=0", 2, "tokens=0: must be at least 1"),
    ("generate run=. temperature=-0.5", 2, "temperature=-0.5: must be at least 0"),
    ("generate run=. temperature=nan", 2, "temperature=nan: must be finite"),
    ("generate run=. top_k=0", 2, "top_k=0: must be at least 1"),
    ("generate run=. top_k=some", 2, "top_k=some: expected a whole number"),
    ("generate run=. batch_size=4", 2, "batch_size: has no effect on gpipe generate; leave it out"),
    ("generate run=. loss.label_smoothing=1", 2, "loss.label_smoothing: has no effect on gpipe generate"),
    ("generate run=. promt=a", 2, "unknown key 'promt'; did you mean 'prompt'?"),
    ("train resume=nowhere", 4, "resume=nowhere: no such directory"),
    ("train resume=. recipe=digits", 2, "recipe: gpipe train resume=... takes none"),
    ("export", 2, "run: give the run to export, run=runs/train/..., or snapshot=..."),
    ("export run=. snapshot=.", 2, "run and snapshot exclude each other; give one of them"),
    ("export run=. format=zip", 2, "format=zip: choose one of: hf, peft, safetensors"),
    ("export run=. format=hf", 2, "format=hf: writes a directory; give out=<directory>"),
    ("export rnu=x", 2, "unknown key 'rnu'; did you mean 'run'?"),
    ("export run=nowhere", 4, "run=nowhere: no such directory"),
    ("export run=. out=", 2, "out: give a path, or leave it out"),
    ("export run=.", 4, "contains no snapshot"),
    ("report", 2, "give a run directory: gpipe report runs/train/..."),
    ("report nowhere", 4, "nowhere: no such directory"),
    ("report .", 4, ".: not a run directory: it has none of launch.json"),
    ("report . otu=x", 2, "unknown key 'otu'; did you mean 'out'?"),
    ("report . out=", 2, "out: give a path, or leave it out"),
    ("report --dry-run", 2, "unknown flag --dry-run; it belongs to gpipe train"),
    ("balance --dry-run", 2, "unknown flag --dry-run; it belongs to gpipe train"),
    ("runs a b", 2, "'b' is neither a flag nor key=value"),
    ("cp", 2, "give what to copy and the new file: gpipe cp recipe/digits"),
    ("cp digits mine.yaml", 2, "'digits': give a group and an option"),
    ("cp recipe/digit mine.yaml", 2, "recipe/digit: no such option; did you mean 'digits'?"),
    ("cp recpie/digits mine.yaml", 2, "nothing called 'recpie' to list; did you mean 'recipe'?"),
    ("cp model/mlp mine", 2, "mine: the name must end in .yaml"),
    ("ls modles", 2, "nothing called 'modles' to list; did you mean 'models'?"),
    ("ls --dry-run", 2, "unknown flag --dry-run; it belongs to gpipe train"),
    ("help trian", 2, "unknown command 'trian'; did you mean 'train'?"),
    ("train --cfg job --json", 2, "--json has no effect with --cfg"),
    ("train --resolve", 2, "--resolve needs --cfg"),
    ("train -m --cfg job", 2, "--multirun and --cfg exclude each other"),
    ("train optimizer._target_=torch.optim.SGD ~optimizer.lr", 2, "optimizer.lr: must be given"),
    (
        "train model=mlp optimizer._target_=torch.optim.SparseAdam optimizer.lr=1",
        2,
        "torch.optim.sparse_adam.SparseAdam: SparseAdam does not support dense gradients",
    ),
    (
        "train optimizer.no_decay=norm",
        2,
        "optimizer.no_decay=norm: must be a list of names, such as [norm,bias]",
    ),
    (
        "train optimizer.groups=[{lr_scale:2}]",
        2,
        "optimizer.groups[0]={'lr_scale': 2}: must say which parameters",
    ),
    ("train optimizer.groups=[{match:head}]", 2, "optimizer.groups[0]: changes nothing; give lr_scale,"),
    ("train optimizer.groups=[{match:head,lr:2}]", 2, "optimizer.groups[0].lr=2: the schedule decides"),
    ("train optimizer.groups=[{match:head,lr_scale:0}]", 2, "lr_scale=0: must be a positive number"),
    ("train optimizer.groups=[{match:head,decay:1}]", 2, "unknown key 'optimizer.groups[0].decay'"),
    ("train model=mlp optimizer.groups=[{match:hed,lr_scale:2}]", 2, "match=hed: no parameter of the model"),
    ("train ema=1.5", 2, "ema=1.5: must be between 0 and 1"),
    ("train lr_schedule=constant lr_schedule.warmup=-1", 2, "lr_schedule.warmup=-1: must be at least 0"),
    ("train lr_schedule=step lr_schedule.milestones=[a]", 2, "expected a list of numbers"),
    ("train lr_schedule.rise=2", 2, "lr_schedule.rise=2: must be from 0 to 1"),
    ("train run_dir=", 2, "run_dir=: give the name of a directory"),
    (f"train run_dir={'x' * 300}", 2, "cannot be used: "),
    ("eval run=. recipe=digits", 2, "gpipe eval does not have it; it belongs to gpipe train"),
    ("-sc install=nosh", 2, "-sc install=nosh: choose one of: install=bash"),
    ("profile measure=perhaps", 2, "measure=perhaps: expected true or false"),
    ("train balance=time balance.cach=false", 2, "did you mean 'balance.cache'?"),
    ("env now", 2, "gpipe env takes no arguments"),
    ("train model=torchvision model.name=swin_tt", 2, "has no such model; choose one of swin_t, "),
    (
        "train model=torchvision model.name=ssd300_vgg16",
        2,
        "ssd300_vgg16: returns a different number of boxes",
    ),
    ("train model=torchvision model.name=r3d_18", 2, "takes clips: channels, frames, height, width, and the"),
    ("train loss=auxiliary loss.weight=-1", 2, "loss.weight=-1: must be a finite number of at least 0"),
    (
        f"train {BROKEN}.returns_a_set",
        2,
        "layer '1' (Naming) returns what no pipe carries: expected Tensor, but got set as output['features']. ",
    ),
    (
        f"train {BROKEN}.returns_a_number",
        2,
        "the model returns a int without tensors; a model must return tensors",
    ),
    (
        f"train {BROKEN}.looks_at_values",
        2,
        "/tests/support/broken_models.py:37 `if value.sum() > 0:`: it needs the values of tensors that the model "
        "computes (Tensor.item() cannot be called on meta tensors); move that code into a submodule, which may then "
        "stay whole, or list the layers in the order in which they run, in the form model.layers=[stem,gate,pool,head]",
    ),
    (
        f"train {BROKEN}.traceable model.layers=[stem,gate,pool,head]",
        2,
        "layer 'head' (Linear) does not take 2x4x2x2: mat1 and mat2 shapes cannot be multiplied (16x2 and "
        "16x10); model.layers must name everything that its forward does, in order",
    ),
    (
        f"train {BROKEN}.traceable model.layers=[stem,gate,pool]",
        2,
        "the layers leave out parameters or buffers of Net: head.weight, head.bias; list the modules that hold them, "
        "or allow it with model.allow_unused=true",
    ),
    (
        f"train {BROKEN}.traceable model.allow_unused=true",
        2,
        "model.allow_unused=True: must be true or false, with a list in model.layers",
    ),
    (
        f"train {BROKEN}.returns_its_loss",
        3,
        "got an output of type tuple and targets of shape [2]; let the model return the scores of all positions and "
        "nothing else (see `Use a model that computes its own loss` in docs/how-to/your-own-model.md)",
    ),
    (
        f"train {BROKEN}.fails_in_evaluation",
        2,
        'broken_models.py:70 `raise ValueError("trains only")`: trains only; choose data that fits the model, which '
        "must accept any number of samples in training and evaluation",
    ),
    (f"train {BROKEN}.traceable model.layers=[stem,gaet]", 2, "has no submodule 'gaet'; close names: gate"),
    (f"train {BROKEN}.traceable model.leaves=[gaet]", 2, "no submodule or class 'gaet'; close names: gate"),
    (f"train {BROKEN}.nothing", 2, "tests.support.broken_models has no nothing; choose one of: "),
]


# (command line, what the error says): values that are judged once the configuration is composed
SETTINGS: list[tuple[str, str]] = [
    ("train batch_size=-5", "batch_size=-5: must be at least 1"),
    ("train batch_size=0 chunks=0", "chunks=0: must be at least 1; batch_size=0: must be at least 1"),
    ("train balance=manual balance.layers=[10,0]", "every entry must be a positive whole number"),
    ("train balance=manual balance.layers=[4,6] partitions=3", "makes 2 partitions"),
    ("balance balance=manual balance.layers=[11,-1]", "every entry must be a positive whole number"),
    ("balance device_memory=11XB", "device_memory=11XB: expected a number of bytes such as 11GiB"),
    ("balance device_memory=0", "device_memory=0: expected a number of bytes such as 11GiB"),
    ("train partitions=3 devices=[cpu,cpu]", "own device, but devices=['cpu', 'cpu'] gives 2"),
    (
        "train partitions=2 devices=3",
        "partitions=2: each partition needs its own device, but devices=3 gives 3",
    ),
    ("train devices=[]", "devices=[]: expected a list of names or numbers"),
    ("train devices=0", "devices=0: must be auto, a number of devices or a list"),
    ("train threads=1000000000", "threads=1000000000: must be at most 1024"),
    ("train devices=1000000000", "devices=1000000000: must be at most 1024"),
    ("train threads=some", "threads=some: must be auto or a whole number of at least 1"),
    ("train engine=processes data_parallel=0", "data_parallel=0: must be at least 1"),
    (
        "train engine=processes data_parallel=2 shard=full",
        "wait forever where a short last batch gives them unequal numbers of micro-batches; use shard=optimizer",
    ),
    ("train engine=processes data_parallel=2 shard=weights", "shard=weights: choose one of: none, optimizer"),
    (
        "train engine=processes shard=optimizer",
        "shard=optimizer: divides the optimizer's state among replicas, and there is one; add engine=processes",
    ),
    (
        "train engine=processes data_parallel=2 devices=3",
        "data_parallel=2: 3 devices (devices=3) cannot be divided equally among the replicas",
    ),
    (
        "train engine=processes data_parallel=2 partitions=3 devices=4",
        "partitions=3: each partition needs its own device, but devices=4 gives each of data_parallel=2 replicas 2",
    ),
    ("train engine=processes engine.max_restarts=-1", "engine.max_restarts=-1: must be at least 0"),
    ("train checkpoint=sometimes", "checkpoint=sometimes: choose one of: always, except_last, never"),
    ("train precision=fp8", "precision=fp8: choose one of: bf16, fp16, fp32"),
    ("train seed=-1", "seed=-1: must be at least 0"),
    ("train clip_grad_norm=0", "clip_grad_norm=0.0: must be positive, or null for none"),
    ("train model.num_classes=${foo}", "model.num_classes: interpolation key 'foo' not found"),
    ("train model._target_=os.system", "model._target_=os.system: not allowed here"),
    (
        "train model._target_=gpipe_cli.models.nothing.build",
        "gpipe_cli.models.nothing.build: not allowed here",
    ),
    ("train allow=['a;b']", "is not a package name"),
    ("eval run=. weights=x.pth", "run and weights exclude each other"),
    ("train snapshot.every=0", "snapshot.every=0: must be at least 1"),
    ("train snapshot.every=sometimes", "snapshot.every=sometimes: must be a number of steps, or epoch"),
    ("train snapshot.keep=0", "snapshot.keep=0: must be at least 1"),
    ("train time_limit=soon", "time_limit=soon: give a duration such as 90s"),
    ("train time_limit=0", "time_limit=0: give a duration such as 90s"),
    ("train resume=auto", "resume=auto: needs run_dir=<directory>"),
    ("train resume=. run_dir=x", "run_dir=x: a resumed run continues in its own directory"),
    ("train model.num_classes=0", "model.num_classes=0: must be at least 1"),
    (
        "profile timeline=true measure=false",
        "timeline=true: runs the model, but measure=false runs nothing",
    ),
    ("train balance.seconds=-3", "balance.seconds=-3: must be at least 0"),
    ("train data=synthetic data.seed=-3", "data.seed=-3: must be at least 0"),
    ("train plan.budget=0", "plan.budget=0.0: must be positive"),
    ("profile steps=0", "steps=0: must be at least 1"),
    ("profile sort=tme", "sort=tme: did you mean 'time'?"),
]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        # Composing each takes a fifth of a second; the slow tests have all of them.
        *(
            pytest.param(*case, id=case[0], marks=[] if number % 6 == 0 else pytest.mark.slow)
            for number, case in enumerate(COMMAND_LINES)
        ),
        *(pytest.param(line, 2, message, id=line, marks=pytest.mark.slow) for line, message in SETTINGS),
    ],
)
def test_bad_input_ends_in_one_line_and_the_right_exit_code(
    gpipe: Callable[..., Any], tmp_path: Path, line: str, code: int, message: str
) -> None:
    answer = gpipe(*line.split())
    assert message in answer.err
    assert answer.code == code
    # Commands that measure say at once that they have begun.
    error = answer.err.removeprefix("importing torch and building the model\n")
    assert error.startswith("gpipe: error: ")
    assert error.count("\n") == 1
    assert answer.out == ""
    assert list(tmp_path.iterdir()) == []


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("canary"),)


def truncated(path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:1000])


def claiming_too_much(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


HOSTILE_WEIGHTS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "empty.pth": (Path.touch, 4, "damaged, or contains more than tensors"),
    "empty.safetensors": (Path.touch, 4, "damaged, or not a safetensors file"),
    "truncated.pth": (truncated, 4, "damaged"),
    "directory.pth": (Path.mkdir, 2, "is a directory; give a file"),
    "fifo.pth": (os.mkfifo, 4, "cannot be read: is a named pipe"),
    "code.pth": (lambda path: torch.save({"weight": RunsCode()}, path), 4, "and gpipe loads only tensors"),
    "text.pth": (lambda path: path.write_text("weights"), 4, "damaged, or contains more than tensors"),
    "huge.safetensors": (claiming_too_much, 4, "damaged, or not a safetensors file"),
    "numbers.pth": (
        lambda path: torch.save({"epoch": 3}, path),
        4,
        "contains a dict without tensors by name",
    ),
    "other.pth": (lambda path: torch.save({"a.weight": torch.ones(2, 2)}, path), 2, "made for another model"),
    "meta.pth": (
        lambda path: torch.save({"w": torch.ones(2, device="meta")}, path),
        4,
        "without tensors by name",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fifo.pth", "code.pth", "other.pth") else pytest.mark.slow)
        for name in HOSTILE_WEIGHTS
    ],
)
def test_hostile_weights_end_in_one_line_and_run_nothing(
    gpipe: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    make, code, message = HOSTILE_WEIGHTS[name]
    make(tmp_path / name)
    answer = gpipe("train", "model=mlp", f"model.weights={name}")
    assert answer.code == code and answer.err.count("\n") == 1
    assert answer.err.startswith(f"gpipe: error: model.weights={name}: ") and message in answer.err
    assert "\x1b" not in answer.err and [path.name for path in tmp_path.iterdir()] == [name]


@cache
def composed_defaults(command: str, choices: tuple[str, ...]) -> DictConfig:
    return compose_tree(Request(command, choices))


@pytest.mark.parametrize(("line", "message"), SETTINGS, ids=[line for line, _ in SETTINGS])
def test_a_bad_value_is_an_error_of_one_line(line: str, message: str) -> None:
    """Hydra composes the defaults once here: composing takes ten times as long as judging the values."""
    command, *overrides = line.split()
    choices = tuple(word for word in overrides if word.partition("=")[0] in GROUPS)
    tree = copy.deepcopy(composed_defaults(command, choices))
    tree.merge_with(OmegaConf.from_dotlist([word for word in overrides if word not in choices]))
    with pytest.raises(ConfigError) as caught:
        settings_of(tree, command, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

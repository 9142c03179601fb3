"""Every mistake on a command line ends with the right exit code and one line on stderr, and writes no file.

A row is `<exit code> <command line> => <what the error says>`, which may go on in indented lines. LONG is a word that
is too long for the name of a file, and BROKEN a module of models that no pipe can train.
"""

from __future__ import annotations

import copy
import json
import os
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.arguments import parse
from gpipe_cli.build.parts import build_parts
from gpipe_cli.config.compose import compose_tree, settings_of
from gpipe_cli.config.keys import check_words
from gpipe_cli.config.schema import GROUPS, ModelConfig
from gpipe_cli.config.words import Request
from gpipe_cli.errors import GpipeError
from tests.support.command_line import Gpipe

BROKEN = "allow=[tests] model._target_=tests.support.broken_models"

# What flags, keys, values and components are refused for: judged without composing each line.
JUDGED = """
2 train --jsn => unknown flag --jsn; did you mean '--json'?
2 train --by => --by needs a value
2 train --by tmie => balance=tmie: no such option
2 train chunks => 'chunks' is neither a flag nor key=value
2 train chunk=8 => unknown key 'chunk'; did you mean 'chunks'?
2 train +chunk=8 => unknown key 'chunk'; did you mean 'chunks'?
2 train ++chunk=8 => unknown key 'chunk'; did you mean 'chunks'?
2 train ++balance.x=1 => unknown key 'balance.x'
2 train log.evry=1 => unknown key 'log.evry'; did you mean 'log.every'?
2 train +optimizer.lrr=1 => unknown key 'optimizer.lrr': torch.optim.AdamW does not take it
2 train lr=1 => unknown key 'lr'; did you mean 'optimizer.lr'?
2 train optimizer.lr=abc => optimizer.lr=abc: expected a number
2 train optimizer.lr=null => optimizer.lr=None: expected a number
2 train loss._target_=torch.nn.CrossEntropyLoss +loss.reduction=sum =>
    loss.reduction=sum: must be mean, because gpipe weights the loss of each micro-batch by its size
2 train optimizer=3 => optimizer=3: choose an option by its name
2 train optimizer=sdg => optimizer=sdg: no such option; did you mean 'sgd'?
2 train model=my_model.Branchy => model=my_model.Branchy: no such option; code of your own is model=my_model:Branchy
2 train model=nets/mine.py => no such option; code of your own is model=nets/mine.py:<function or class>
2 train model=resnet1010 => did you mean 'resnet101'?
2 train engine=foo => engine=foo: no such option; choose one of: offload, processes, single, threads
2 train engine=offload checkpoint=[always] => engine=offload has no partitions; give one mode
2 profile engine=offload => engine=offload: is for the steps that timeline=true runs
2 profile timeline=true engine=single => engine=single: its steps cannot be recorded; remove it
2 train engine=offload schedule=1f1b => schedule: has no effect with engine=offload; remove it
2 profile timeline=true engine=offload partitions=2 => partitions: has no effect with engine=offload
2 train steps=0 => steps=0: must be at least 1
2 train balance=[4,6] => balance=manual 'balance.layers=[4,6]'
2 train balance=manual => balance.layers: must be given
2 train balance=manual balance.layers=[4,4] => covers 8 layers, the model has 10
2 train partitions=11 => partitions=11: the model has only 10 layers
2 balance partitions=11 => partitions=11: the model has only 10 layers; give at most that many
2 balance balance=manual balance.layers=[4,4] => covers 8 layers, the model has 10
2 train balance=manual balance.layers=[9,1] device_memory=100MiB data.size=8 batch_size=16 =>
    device_memory=100MiB: balance [9, 1] needs
2 train engine=single device_memory=1GiB => device_memory: has no effect with engine=single
2 train engine=single devices=2 => devices=2: engine=single runs on one device
2 train devices=[cuda:7] => 'cuda:7' does not exist
2 train devices=[gpu] => device 'gpu' does not exist; write 'cpu'
6 train model=mlp data=synthetic data.shape=[100000000,1000000] =>
    out of memory while loading the data: cannot allocate 4,000,000,000,000,000 bytes; choose a smaller
    data
2 train engine=single balance=manual balance.layers=[10] => balance: has no effect with engine=single
2 train engine=single schedule=gpipe => schedule: has no effect with engine=single
2 train data_parallel=2 =>
    data_parallel: has no effect with engine=threads; remove it, or choose engine=processes
2 train engine=offload shard=none => shard: has no effect with engine=offload; remove it
2 train engine=processes partitions=11 => partitions=11: the model has only 10 layers
2 train engine=processes engine.max_restarts=x => engine.max_restarts=x: expected a whole number
2 train engine=single partitions=2 => partitions: has no effect with engine=single
2 train checkpoint=[always,never,never] =>
    checkpoint=['always', 'never', 'never']: checkpoint has 3 modes for 2 partitions; give one for each
2 train chunks=2 chunks=4 => chunks: given as 2 and as 4; give it once
2 train +optimizer.lr=1 optimizer.lr=2 => optimizer.lr: given as 1 and as 2; give it once
2 train devices=2 devices=[cpu,cpu] => devices: given as 2 and as [cpu,cpu]; give it once
2 train model=gpt model=mlp => model: given as gpt and as mlp; give it once
2 train --by time balance=size => balance: given as size and as time; give it once
2 export run=a run=b => run: given as a and as b; give it once
2 train schedule=${oc.decode:'1'} => schedule=${oc.decode:'1'}: choose an option by its name;
2 train schedule=${oc.decode:'[1]'} => schedule=${oc.decode:'[1]'}: choose an option by its name;
2 train model=${seed} => model=${seed}: choose an option by its name;
2 train logger=null => logger=null: choose an option by its name;
2 train model=mlp,gpt => model=mlp,gpt: several values need -m (a sweep)
2 train optimizer=[sgd] => optimizer=[sgd]: choose an option by its name;
2 train optimizer.groups.a=1 => optimizer.groups is a list; set it as a whole, 'optimizer.groups=[...]'
2 train optimizer.groups.a.b.c=1 => optimizer.groups is a list; set it as a whole, 'optimizer.groups=[...]'
2 train optimizer.betas.x=1 => optimizer.betas is a list; set it as a whole, 'optimizer.betas=[...]'
2 train freeze.a.b=1 => freeze is a list; set it as a whole, 'freeze=[...]'
2 train ++allow.a.b=1 => allow is a list; set it as a whole, 'allow=[...]'
2 train model=mlp snapshot.monitor=top2 => snapshot.monitor=top2: this run does not measure it; choose
2 train model=gpt snapshot.monitor=top1 steps=1 => choose one of: bits_per_token, loss, token_accuracy
2 train plan.verify_budget=5 => unknown key 'plan.verify_budget'; did you mean 'plan.budget'?
2 plan plan=none => plan=none: holds several keys; set one of them, such as plan.budget=...
2 train log=3 => log=3: holds several keys
2 train model.num_classes=ten => model.num_classes=ten: expected a whole number
3 train data=mnist data.root=nowhere => nowhere
2 train data.size=0 => data.size=0
2 train data.workers=-1 => data.workers=-1: must be a whole number of at least 0
2 train data.workers=true => data.workers=True: expected a whole number
2 train data.timeout=0 => data.timeout=0: must be a positive number of seconds
2 train data.timeout=5 => data.timeout=5: has no effect with data.workers=0
3 train data=text data.path=nowhere => data.path=nowhere: cannot be read
2 train model=gpt model.context=64 => model.context=64: samples have 32 tokens; set data.context=64
2 train model=gpt data=digits => gpt expects sequences of tokens, but the data has shape [3, 32, 32]
2 train model=unet model.depth=5 => needs at least 64x64 pixels, but the data has 32x32
2 train loss.label_smoothing=2 => loss.label_smoothing=2: must be from 0 to 1
2 eval => run: give the run to evaluate
4 eval run=nowhere => run=nowhere: no such directory
4 eval snapshot=nowhere => snapshot=nowhere: no such directory
4 train model=mlp model.weights=nowhere.pth => model.weights=nowhere.pth: no such file
2 train model=mlp model.weights=w.npz => model.weights=w.npz: unknown file type; give one of .safetensors
4 train model=mlp model.weights=/dev/zero.pth => model.weights=/dev/zero.pth: no such file
2 train BROKEN.traceable model.layers=stem => model.layers=stem: expected a list in brackets
2 train model=mlp model.new_head=true => model.new_head=true: replaces the head of a file
2 train model=mlp freeze=[hiden0] =>
    freeze=hiden0: no parameter of the model has such a name; did you mean 'hidden0'?
2 train early_stop.min_delta=0.1 => early_stop.min_delta=0.1: has no effect without early_stop.patience
2 generate => run: give the run to use
4 generate run=nowhere => run=nowhere: no such directory
2 generate run=. tokens=0 => tokens=0: must be at least 1
2 generate run=. temperature=-0.5 => temperature=-0.5: must be at least 0
2 generate run=. temperature=nan => temperature=nan: must be finite
2 generate run=. top_k=0 => top_k=0: must be at least 1
2 generate run=. batch_size=4 => batch_size: has no effect on gpipe generate; remove it
2 generate run=. loss.label_smoothing=1 => loss.label_smoothing: has no effect on gpipe generate
2 generate run=. promt=a => unknown key 'promt'; did you mean 'prompt'?
2 export => run: give the run to export, run=runs/train/..., or snapshot=...
2 export run=. snapshot=. => run and snapshot exclude each other; give one of them
2 export run=. format=zip => format=zip: choose one of: hf, peft, safetensors
2 export run=. format=hf => format=hf: writes a directory; give out=<directory>
2 export rnu=x => unknown key 'rnu'; did you mean 'run'?
4 export run=nowhere => run=nowhere: no such directory
2 report . otu=x => unknown key 'otu'; did you mean 'out'?
2 report --dry-run => unknown flag --dry-run; it belongs to gpipe train
2 balance --dry-run => unknown flag --dry-run; it belongs to gpipe train
2 runs a b => 'b' is neither a flag nor key=value
2 train --resolve => --resolve needs --cfg
2 train optimizer.no_decay=norm => optimizer.no_decay=norm: must be a list of names, such as [norm,bias]
2 train ema=1.5 => ema=1.5: must be between 0 and 1
2 train model=torchvision model.name=swin_tt => has no such model; choose one of swin_t,
2 train model=torchvision model.name=ssd300_vgg16 => ssd300_vgg16: returns a different number of boxes
2 train model=torchvision model.name=r3d_18 => takes clips: channels, frames, height, width, and the
2 train loss=auxiliary loss.weight=-1 => loss.weight=-1: must be a finite number of at least 0
2 train BROKEN.nothing => tests.support.broken_models has no nothing; choose one of:
2 train batch_size=-5 => batch_size=-5: must be at least 1
2 train batch_size=0 chunks=0 => chunks=0: must be at least 1; batch_size=0: must be at least 1
2 train balance=manual balance.layers=[10,0] => every entry must be a positive whole number
2 train balance=manual balance.layers=[4,6] partitions=3 => makes 2 partitions
2 balance balance=manual balance.layers=[11,-1] => every entry must be a positive whole number
2 balance device_memory=11XB => device_memory=11XB: expected a number of bytes such as 11GiB
2 balance device_memory=0 => device_memory=0: expected a number of bytes such as 11GiB
2 train partitions=3 devices=[cpu,cpu] => own device, but devices=['cpu', 'cpu'] gives 2
2 train partitions=2 devices=3 => partitions=2: each partition needs its own device, but devices=3 gives 3
2 train devices=[] => devices=[]: expected a list of names or numbers
2 train devices=0 => devices=0: must be auto, a number of devices or a list
2 train threads=1000000000 => threads=1000000000: must be at most 1024
2 train devices=1000000000 => devices=1000000000: must be at most 1024
2 train threads=some => threads=some: must be auto or a whole number of at least 1
2 train engine=processes data_parallel=0 => data_parallel=0: must be at least 1
2 train engine=processes data_parallel=2 shard=full =>
    wait forever where a short last batch gives them unequal numbers of micro-batches; use shard=optimizer
2 train engine=processes data_parallel=2 shard=weights => shard=weights: choose one of: none, optimizer
2 train engine=processes shard=optimizer =>
    shard=optimizer: divides the optimizer's state among replicas, and there is one; add engine=processes
2 train engine=processes data_parallel=2 devices=3 =>
    data_parallel=2: 3 devices (devices=3) cannot be divided equally among the replicas
2 train engine=processes data_parallel=2 partitions=3 devices=4 =>
    partitions=3: each partition needs its own device, but devices=4 gives each of data_parallel=2
    replicas 2
2 train engine=processes engine.max_restarts=-1 => engine.max_restarts=-1: must be at least 0
2 train checkpoint=sometimes => checkpoint=sometimes: choose one of: always, except_last, never
2 train precision=fp8 => precision=fp8: choose one of: bf16, fp16, fp32
2 train seed=-1 => seed=-1: must be at least 0
2 train clip_grad_norm=0 => clip_grad_norm=0.0: must be positive, or null for none
2 train model.num_classes=${foo} => model.num_classes: interpolation key 'foo' not found
2 train model._target_=os.system => model._target_=os.system: not allowed here
2 train model._target_=gpipe_cli.models.nothing.build => gpipe_cli.models.nothing.build: not allowed here
2 train allow=['a;b'] => is not a package name
2 eval run=. weights=x.pth => run and weights exclude each other
2 train snapshot.every=0 => snapshot.every=0: must be at least 1
2 train snapshot.every=sometimes => snapshot.every=sometimes: must be a number of steps, or epoch
2 train snapshot.keep=0 => snapshot.keep=0: must be at least 1
2 train time_limit=soon => time_limit=soon: give a duration such as 90s
2 train time_limit=0 => time_limit=0: give a duration such as 90s
2 train resume=auto => resume=auto: needs run_dir=<directory>
2 train resume=. run_dir=x => run_dir=x: a resumed run continues in its own directory
2 train model.num_classes=0 => model.num_classes=0: must be at least 1
2 profile timeline=true measure=false => timeline=true: runs the model, but measure=false runs nothing
2 train balance.seconds=-3 => balance.seconds=-3: must be at least 0
2 train data=synthetic data.seed=-3 => data.seed=-3: must be at least 0
2 train plan.budget=0 => plan.budget=0.0: must be positive
2 profile steps=0 => steps=0: must be at least 1
2 profile sort=tme => sort=tme: did you mean 'time'?
2 train eval.batches=0 => eval.batches=0: must be at least 1
2 train eval.every=often => eval.every=often: must be a number of steps, epoch, or null for none
2 train eval=never => eval=never: no such option; choose one of: epoch, none
2 train eval=none eval.batches=3 => eval.batches=3: needs evaluations, and eval=none leaves them out;
2 train eval=none early_stop.patience=3 => early_stop.patience=3: needs evaluations,
2 train eval=none snapshot.monitor=top1 => snapshot.monitor=top1: needs evaluations,
2 train eval=none log.predictions=true => log.predictions=True: needs evaluations,
2 train eval.every=5 eval_every=3 => eval_every=3: is the former form of eval.every; set it to null
2 eval run=. eval.batches=3 => eval.batches belongs to gpipe train
2 train eval_chunks=0 => eval_chunks=0: must be at least 1
2 train partitions=0 => partitions=0: must be at least 1
2 train log.every=0 => log.every=0: must be at least 1
2 train log.console=true => log.console=true: prints the lines of log.layers and log.partitions; set one of them
2 train seed=9223372036854775808 => seed: a whole number must be between -9223372036854775807 and
2 train step_timeout=0 => step_timeout=0.0: must be positive, or null for none
2 train clip_grad_norm=nan => clip_grad_norm=nan: must be positive
2 train threads=true => threads=True: must be auto or a whole number of at least 1
2 train threads=0 => threads=0: must be auto
2 train threads={a:1} => must be auto or a whole number of at least 1
2 train checkpoint={a:1} => choose one of: always, except_last, never
2 train checkpoint=null => checkpoint=None: choose one of: always, except_last, never
2 train checkpoint=3 => checkpoint=3: choose one of: always, except_last, never
2 train checkpoint=alway => checkpoint=alway: did you mean 'always'
2 train checkpoint=[always,nevr] => checkpoint=['always', 'nevr']: did you mean 'never'
2 train device_memory={a:1} => expected a number of bytes
2 train snapshot.every={a:1} => must be a number of steps
2 train precision=fp23 => precision=fp23: did you mean 'fp32'
2 train schedule.name=gpip => schedule.name=gpip: did you mean 'gpipe'
2 train devices=cpu => devices=cpu: must be auto, a number of devices or a list
2 train devices=true => devices=True: must be auto
2 train devices=[1.5] => devices=[1.5]: expected a list of names or numbers
2 train devices=[true] => devices=[True]: expected a list of names or numbers
2 train schedule=interleaved devices=[cpu,cpu,cpu] partitions=2 => gives 3
2 train balance=manual balance.layers=[2,true] => balance.layers=[2, True]: every entry
2 train optimizer.betas=[0.9,.inf] => optimizer.betas[1]=inf: must be finite
2 eval run=. split=tset => split=tset: did you mean 'test'
2 plan plan.auto=true => unknown key 'plan.auto'
2 train plan.verify_budget=1 => plan.verify_budget belongs to gpipe plan
2 train snapshot=3 => snapshot=3: holds several keys; set one of them, such as snapshot.every=...
2 eval run=. snapshot.every=2 => unknown key 'snapshot.every'; did you mean 'snapshot'?
2 generate run=. chunks=2 => chunks: has no effect on gpipe generate; remove it
2 report . hydra.verbose=true => hydra.verbose: gpipe report does not run through Hydra; remove it
2 train --experimental-rerun => unknown flag --experimental-rerun;
2 train --config-path => unknown flag --config-path;
2 train -x => unknown flag -x;
2 train --epochs 5 => unknown flag --epochs; did you mean epochs=5?
2 train --epochs=5 => unknown flag --epochs; did you mean epochs=5?
2 train --epochs => unknown flag --epochs; did you mean epochs=...?
2 train --epochs seed=3 => unknown flag --epochs; did you mean epochs=...?
2 train --batch-size 32 --json => unknown flag --batch-size; did you mean batch_size=32?
2 train --lr 0.1 => unknown flag --lr; did you mean optimizer.lr=0.1?
2 train --model resnet50 => unknown flag --model; did you mean model=resnet50?
2 train --frobnicate => unknown flag --frobnicate; choose one of: --by, --cfg
2 train --config-dir --json => --config-dir needs a value
2 train --json=yes => --json takes no value
2 train --cfg jop => --cfg jop: did you mean 'job'?
2 train --info --dry-run => --dry-run has no effect with --info
"""

# What depends on the whole command: Hydra's grammar and options, recipes, files, runs and weights.
COMMAND_LINES = """
2 trian => unknown command 'trian'; did you mean 'train'?
2 frobnicate =>
    choose one of: balance, check, cp, env, eval, export, generate, launch-script, ls, plan, predict,
    profile, report, runs
2 train ~seed => 'seed' was removed, but it is required
2 train ~model => model: nothing chosen
2 train optimizer.lrr=1 => unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?
2 train model=gpt data.length=128 => unknown key 'data.length'; it belongs to data=shapes|synthetic|
2 train model=gpt model.lora.rank=8 => unknown key 'model.lora'; it belongs to model=hf
2 train optimizer.lr= => optimizer.lr=: expected a number
2 train model=mlp optimizer.lr=-1 => Invalid learning rate: -1
2 train model=mlp optimizer.lr=nan => optimizer.lr=nan: must be finite
2 train model=mlp optimizer.lr=inf => optimizer.lr=inf: must be finite
2 train model=mlp optimizer._target_=torch.optim.LBFGS optimizer.lr=1 =>
    optimizer: the step of LBFGS needs a closure, which gpipe does not pass
2 train recipe=nope => recipe=nope: no such option
2 train recipe.scale=small => recipe.scale=small: needs a recipe, and none is given
2 train recipe=unet_speed recipe.scale=tiny => recipe.scale=tiny: choose one of: full, small
2 train recipe=unet_speed recipe.scal=small => unknown key 'recipe.scal'; did you mean 'recipe.scale'?
2 train recipe=digits recipe.scale=small => no recipe of that name has that scale, remove it
2 train recipe=unet_sped recipe.scale=small => did you mean 'unet_speed'?
2 train engine=offload engine.slices=99 => engine.slices=99: the model has only 10 layers
2 train engine=offload engine.slice=9 => unknown key 'engine.slice'; did you mean 'engine.slices'?
2 train engine=offload engine.to=tape => engine.to=tape: must be one of: cpu, disk
2 train engine=offload engine.memory=1KiB => engine.memory=1KiB: is too little,
2 train model=mlp engine.offload=tape => engine.offload=tape: must be one of: cpu, disk, or null
2 profile model=mlp seconds=0 timeline=true engine.offload=tape => engine.offload=tape: must be one of: cpu, disk
2 profile timeline=true engine=offload engine.slices=0 => engine.slices=0: must be at least 1
2 train steps=1.5 => steps=1.5: expected a whole number
2 train chunks=abc => chunks=abc: expected a whole number
2 train chunks=null => chunks=null: expected a whole number
2 train chunks=[1 => chunks=[1: cannot be read
2 train chunks=2,4 => chunks=2,4: several values need -m
2 train -m chunks=2,0 => chunks=0: must be at least 1
2 balance --by time data=synthetic data.shape=[1,8,8] batch_size=8 =>
    model: layer 'stem' (Sequential) does not take 2x1x8x8: Given groups=1, weight of size [64, 3, 7, 7],
    expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead
2 balance --by size data=synthetic data.shape=[1,8,8] batch_size=8 =>
    model: layer 'stem' (Sequential) does not take 2x1x8x8: Given groups=1, weight of size [64, 3, 7, 7],
    expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead
2 balance --by params data=synthetic data.shape=[1,8,8] batch_size=8 =>
    model: layer 'stem' (Sequential) does not take 2x1x8x8: Given groups=1, weight of size [64, 3, 7, 7],
    expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead
2 balance --by params device_memory=1MiB data.size=8 batch_size=8 =>
    device_memory=1MiB: no balance of 2 partitions fits; the smallest limit that works is
2 train run_dir=a(b => put it in quotes that the shell leaves alone: "run_dir='a(b'"
6 train model=mlp model.width=10000000000000 =>
    out of memory while building the model: cannot allocate 122,880,000,000,000,000 bytes; choose a
    smaller
2 plan checkpoint=[always,never] => gpipe plan finds a mode for each partition; remove it
2 train recipe=digits recipe=unet_speed => recipe: given as digits and as unet_speed; give it once
2 train -m chunks=2,4 chunks=8 => chunks: given as 2,4 and as 8; give it once
2 train recipe=${oc.env:HOME} => recipe=${oc.env:HOME}: choose an option by its name;
2 train model=mlp snapshot.monitor=top2 --dry-run => choose one of: loss, top1, top5
2 train eval=none eval.every=2 => eval.every=2: needs evaluations, and eval=none leaves them out; remove one of them
2 train plan.budget=5 => plan.budget: has no effect without plan=auto; remove it
2 train plan.cache=false => plan.cache: has no effect without plan=auto or schedule=auto; remove it
2 plan plan.verify_budget=5 => plan.verify_budget: has no effect without verify=true; remove it
2 train --config-name nope => --config-name nope: no such config
2 train --config-dir nowhere => --config-dir nowhere: no such folder
2 train hydra.searchpath=[x] => name the folder by --config-dir, so that gpipe checks its files
2 train hydra.job.chdirr=1 => unknown key 'hydra.job.chdirr'; see `gpipe train --cfg hydra`
4 eval run=. => contains no snapshot
4 eval snapshot=. => snapshot=.: not a snapshot
4 eval weights=nowhere.pth => weights=nowhere.pth: no such file
2 train model=mlp freeze=[*] => freeze=[*]: freezes every parameter of the model
2 train model=mlp freeze=head => freeze=head: expected a list in brackets
2 train model=mlp freeze={a:1} => freeze={a:1}: expected a list in brackets
2 train optimizer.groups=[{match:head,lr_scal:10}] =>
    unknown key 'optimizer.groups[0].lr_scal'; did you mean 'lr_scale'?
2 train model=mlp optimizer.groups=[{match:head,weight_decay:-1}] =>
    optimizer.groups[0]: torch.optim.AdamW rejects these values: Invalid weight_decay value: -1
2 generate run=. top_k=some => top_k=some: expected a whole number
4 train resume=nowhere => resume=nowhere: no such directory
2 train resume=. recipe=digits => recipe: gpipe train resume=... takes none
2 export run=. out= => out: give a path, or remove it
4 export run=. => contains no snapshot
2 report => give a run directory: gpipe report runs/train/...
4 report nowhere => nowhere: no such directory
4 report . => .: not a run directory: it has none of config.yaml
2 report . out= => out: give a path, or remove it
2 cp => give what to copy and the new file: gpipe cp recipe/digits
2 cp digits mine.yaml => 'digits': give a group and an option
2 cp recipe/digit mine.yaml => recipe/digit: no such option; did you mean 'digits'?
2 cp recpie/digits mine.yaml => nothing called 'recpie' to list; did you mean 'recipe'?
2 cp model/mlp mine => mine: the name must end in .yaml
2 ls modles => nothing called 'modles' to list; did you mean 'models'?
2 ls --dry-run => unknown flag --dry-run; it belongs to gpipe train
2 help trian => unknown command 'trian'; did you mean 'train'?
2 train --cfg job --json => --json has no effect with --cfg
2 train -m --cfg job => --multirun and --cfg exclude each other
2 train optimizer._target_=torch.optim.SGD ~optimizer.lr => optimizer.lr: must be given
2 train model=mlp optimizer._target_=torch.optim.SparseAdam optimizer.lr=1 =>
    torch.optim.sparse_adam.SparseAdam: SparseAdam does not support dense gradients
2 train optimizer.groups=[{lr_scale:2}] => optimizer.groups[0]={'lr_scale': 2}: must say which parameters
2 train optimizer.groups=[{match:head}] => optimizer.groups[0]: changes nothing; give lr_scale,
2 train optimizer.groups=[{match:head,lr:2}] => optimizer.groups[0].lr=2: the schedule decides
2 train optimizer.groups=[{match:head,lr_scale:0}] => lr_scale=0: must be a positive number
2 train optimizer.groups=[{match:head,decay:1}] => unknown key 'optimizer.groups[0].decay'
2 train model=mlp optimizer.groups=[{match:hed,lr_scale:2}] => match=hed: no parameter of the model
2 train model=mlp lr_schedule=constant lr_schedule.warmup=-1 => lr_schedule.warmup=-1: must be at least 0
2 train model=mlp lr_schedule=step lr_schedule.milestones=[a] => expected a list of numbers
2 train model=mlp lr_schedule.rise=2 => lr_schedule.rise=2: must be from 0 to 1
2 train run_dir= => run_dir=: give the name of a directory
2 train run_dir=LONG => cannot be used:
2 eval run=. recipe=digits => gpipe eval does not have it; it belongs to gpipe train
2 -sc install=nosh => -sc install=nosh: choose one of: install=bash
2 profile measure=perhaps => measure=perhaps: expected true or false
2 train balance=time balance.cach=false => did you mean 'balance.cache'?
2 env now => gpipe env takes no arguments
2 train BROKEN.returns_a_set =>
    layer '1' (Naming) returns what no pipe carries: expected Tensor, but got set as output['features'].
2 train BROKEN.returns_a_number => the model returns a int without tensors; a model must return tensors
2 train BROKEN.looks_at_values =>
    /tests/support/broken_models.py:37 `if value.sum() > 0:`: it needs the values of tensors that the
    model computes (Tensor.item() cannot be called on meta tensors); move that code into a submodule,
    which may then stay whole, or list the layers in the order in which they run, in the form
    'model.layers=[stem,gate,pool,head]'
2 train BROKEN.traceable model.layers=[stem,gate,pool,head] =>
    layer 'head' (Linear) does not take 2x4x2x2: mat1 and mat2 shapes cannot be multiplied (16x2 and
    16x10); model.layers must name everything that its forward does, in order
2 train BROKEN.traceable model.layers=[stem,gate,pool] =>
    the layers leave out parameters or buffers of Net: head.weight, head.bias; list the modules that hold
    them, or allow it with model.allow_unused=true
2 train BROKEN.traceable model.allow_unused=true =>
    model.allow_unused=True: has no effect without a list in model.layers
3 train BROKEN.returns_its_loss =>
    got an output of type tuple and targets of shape [2]; give loss=own if the model computes its own loss
    from the targets, or let it return the scores of all positions and nothing else
2 train BROKEN.fails_in_evaluation =>
    broken_models.py:70 `raise ValueError("trains only")`: trains only; choose data that fits the model,
    which must accept any number of samples in training and evaluation
2 train BROKEN.traceable model.layers=[stem,gaet] => has no submodule 'gaet'; close names: gate
2 train BROKEN.traceable model.leaves=[gaet] => no submodule or class 'gaet'; close names: gate
"""

TOO_LONG = """
2 train config=LONG => name
2 train resume=LONG => name
2 train run_dir=LONG resume=auto => name
2 profile run_dir=LONG => name
2 eval run=LONG => name
2 eval snapshot=LONG => name
2 eval weights=LONG.pth => name
2 predict run=LONG input=a => name
2 generate run=LONG => name
2 export snapshot=LONG => name
2 report LONG => name
2 report . out=LONG => name
2 runs LONG => name
2 cp run/LONG a.yaml => name
2 cp recipe/digits LONG.yaml => name
2 train --config-dir LONG => name
2 train --config-name LONG => name
2 train data=image_folder data.root=LONG => name
2 train model=mlp model.weights=LONG.pth => name
2 plan page=LONG => name
2 check run_dir=LONG => name
"""


def rows(table: str) -> list[tuple[str, int, str]]:
    """The command line, exit code and message of each row."""
    lines = re.sub(r"\n {4,}", " ", table.replace("BROKEN", BROKEN)).replace("LONG", "x" * 300)
    pairs = (row.split(" =>", 1) for row in lines.strip().splitlines())
    return [(line[2:], int(line[0]), message.strip()) for line, message in pairs]


@cache
def composed(command: str, choices: tuple[str, ...]) -> DictConfig:
    return compose_tree(Request(command, choices))


def judge(line: str) -> None:
    """Refuse what `main` refuses, from a tree that is composed once for the options of the line."""
    command, *given = line.split()
    request = parse(given, command)
    check_words(request)
    choices = tuple(word for word in request.words if word.partition("=")[0] in GROUPS)
    tree = copy.deepcopy(composed(command, choices))
    tree.merge_with(
        OmegaConf.from_dotlist([word.lstrip("+") for word in request.words if word not in choices])
    )
    settings = settings_of(tree, command, request.words)
    assert isinstance(settings, ModelConfig)
    build_parts(settings, request.words, storage=False)


@pytest.mark.parametrize(("line", "code", "message"), rows(JUDGED))
def test_what_a_command_cannot_use_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GpipeError) as caught:
        judge(line)
    assert message in str(caught.value)
    assert caught.value.exit_code == code and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        *rows(COMMAND_LINES),
        # One row of COMMAND_LINES has such a name too.
        *(pytest.param(*row, marks=pytest.mark.slow) for row in rows(TOO_LONG)),
    ],
)
def test_bad_input_ends_in_one_line_and_the_right_exit_code(
    gpipe: Gpipe, tmp_path: Path, line: str, code: int, message: str
) -> None:
    answer = gpipe(*line.split())
    assert message in answer.err
    assert answer.code == code
    # Commands that measure say at once that they have begun.
    error = answer.err
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
def test_hostile_weights_end_in_one_line_and_run_nothing(gpipe: Gpipe, tmp_path: Path, name: str) -> None:
    make, code, message = HOSTILE_WEIGHTS[name]
    make(tmp_path / name)
    answer = gpipe("train", "model=mlp", f"model.weights={name}")
    assert answer.code == code and answer.err.count("\n") == 1
    assert answer.err.startswith(f"gpipe: error: model.weights={name}: ") and message in answer.err
    assert "\x1b" not in answer.err and [path.name for path in tmp_path.iterdir()] == [name]

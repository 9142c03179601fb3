"""Whatever is wrong with a command line: the right exit code, one line on stderr, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

BROKEN = "allow=[tests] model._target_=tests.broken_models"

# (words, exit code, what the line must say)
CASES: list[tuple[str, int, str]] = [
    ("trian", 2, "unknown command 'trian'; did you mean 'train'?"),
    ("frobnicate", 2, "one of: balance, env, eval, export, ls, plan, profile, train"),
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
    ("train lr=1", 2, "unknown key 'lr'; did you mean 'optimizer.lr'?"),
    ("train optimizer.lr=abc", 2, "optimizer.lr=abc: expected a number"),
    ("train optimizer.lr=", 2, "optimizer.lr=: expected a number"),
    ("train optimizer.lr=null", 2, "optimizer.lr=None: expected a number"),
    ("train optimizer.lr=-1", 2, "Invalid learning rate: -1"),
    ("train optimizer.lr=nan", 2, "optimizer.lr=nan: must be finite"),
    ("train optimizer.lr=inf", 2, "optimizer.lr=inf: must be finite"),
    ("train optimizer=3", 2, "optimizer=3: choose an option by its name"),
    ("train optimizer=sdg", 2, "optimizer=sdg: no such option; did you mean 'sgd'?"),
    ("train model=resnet1010", 2, "did you mean 'resnet101'?"),
    ("train recipe=nope", 2, "recipe=nope: no such option"),
    ("train engine=foo", 2, "engine=foo: no such option; one of: offload, processes, single, threads"),
    ("train steps=0", 2, "steps=0: must be at least 1"),
    ("train steps=1.5", 2, "steps=1.5: expected a whole number"),
    ("train batch_size=-5", 2, "batch_size=-5: must be at least 1"),
    ("train batch_size=0 chunks=0", 2, "chunks=0: must be at least 1; batch_size=0: must be at least 1"),
    ("train chunks=abc", 2, "chunks=abc: expected a whole number"),
    ("train chunks=null", 2, "chunks=null: must not be null"),
    ("train chunks=[1", 2, "chunks=[1: cannot be read"),
    ("train chunks=2,4", 2, "chunks=2,4: several values need -m"),
    ("train -m chunks=2,0", 2, "chunks=0: must be at least 1"),
    ("train balance=[4,6]", 2, "balance=manual balance.layers=[4,6]"),
    ("train balance=manual", 2, "balance.layers: must be given"),
    ("train balance=manual balance.layers=[4,4]", 2, "covers 8 layers, the model has 10"),
    ("train balance=manual balance.layers=[10,0]", 2, "every entry must be a positive whole number"),
    ("train balance=manual balance.layers=[4,6] partitions=3", 2, "makes 2 partitions"),
    ("train partitions=11", 2, "partitions=11: the model has only 10 layers"),
    ("balance partitions=11", 2, "partitions=11: the model has only 10 layers; give at most that many"),
    ("balance balance=manual balance.layers=[4,4]", 2, "covers 8 layers, the model has 10"),
    ("balance balance=manual balance.layers=[11,-1]", 2, "every entry must be a positive whole number"),
    *(
        (
            f"balance --by {by} data=synthetic data.shape=[1,8,8] batch_size=8",
            2,
            "the model does not take a micro-batch of 2x1x8x8: RuntimeError: Given groups=1, weight of size "
            "[64, 3, 7, 7], expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead",
        )
        for by in ("time", "size", "params")
    ),
    ("balance device_memory=11XB", 2, "device_memory=11XB: expected a number of bytes such as 11GiB"),
    ("balance device_memory=0", 2, "device_memory=0: expected a number of bytes such as 11GiB"),
    (
        "balance --by params device_memory=1MiB data.size=8 batch_size=8",
        2,
        "device_memory=1MiB: no balance of 2 partitions needs so little; the smallest limit that would do is ",
    ),
    (
        "train balance=manual balance.layers=[9,1] device_memory=100MiB data.size=8 batch_size=8",
        2,
        "device_memory=100MiB: balance [9, 1] needs ",
    ),
    ("train engine=single device_memory=1GiB", 2, "device_memory: has no effect with engine=single"),
    ("train partitions=3 devices=[cpu,cpu]", 2, "partitions=3: devices=['cpu', 'cpu'] are 2"),
    ("train partitions=2 devices=3", 2, "partitions=2: devices=3 are 3; one device per partition is needed"),
    ("train engine=single devices=2", 2, "devices=2: engine=single runs on one device"),
    ("train devices=[cuda:7]", 2, "'cuda:7' is not here"),
    ("train devices=[gpu]", 2, "'gpu' is no device"),
    ("train devices=[]", 2, "devices=[]: a list of names or numbers is needed"),
    ("train devices=0", 2, "devices=0: must be auto, a number of devices or a list"),
    ("train threads=some", 2, "threads=some: must be auto or a whole number from 1"),
    (
        "train engine=single balance=manual balance.layers=[10]",
        2,
        "balance: has no effect with engine=single",
    ),
    ("train engine=single schedule=gpipe", 2, "schedule: has no effect with engine=single"),
    ("train data_parallel=2", 2, "data_parallel: has no effect with engine=threads; leave it out"),
    ("train engine=processes data_parallel=0", 2, "data_parallel=0: must be at least 1"),
    (
        "train engine=processes data_parallel=2 devices=3",
        2,
        "data_parallel=2: devices=3 are 3; every replica needs as many of them",
    ),
    (
        "train engine=processes data_parallel=2 partitions=3 devices=4",
        2,
        "partitions=3: devices=4 are 4, 2 for each of data_parallel=2 replicas; one device per partition is needed",
    ),
    ("train engine=processes partitions=11", 2, "partitions=11: the model has only 10 layers"),
    ("train engine=processes engine.max_restarts=x", 2, "engine.max_restarts=x: expected a whole number"),
    ("train engine=single partitions=2", 2, "partitions: has no effect with engine=single"),
    ("train checkpoint=sometimes", 2, "checkpoint=sometimes: one of: always, except_last, never"),
    ("train precision=fp8", 2, "precision=fp8: one of: bf16, fp16, fp32"),
    ("train seed=-1", 2, "seed=-1: must be at least 0"),
    ("train clip_grad_norm=0", 2, "clip_grad_norm=0.0: must be positive, or null for none"),
    ("train log=3", 2, "log=3: holds several keys"),
    ("train model.num_classes=${foo}", 2, "model.num_classes: interpolation key 'foo' not found"),
    ("train model.num_classes=ten", 2, "model.num_classes=ten: expected a whole number"),
    ("train model._target_=os.system", 2, "model._target_=os.system: not allowed here"),
    ("train model._target_=gpipe_cli.models.nothing.build", 2, "No module named 'gpipe_cli.models.nothing'"),
    ("train allow=['a;b']", 2, "is no package name"),
    ("train data=mnist data.root=nowhere", 3, "nowhere"),
    ("train data.size=0", 2, "data.size=0"),
    ("train data.timeout=0", 2, "data.timeout=0: must be a positive number of seconds"),
    (
        "train data.timeout=5",
        2,
        "data.timeout=5: waits for the workers of data.workers, of which there are none",
    ),
    ("train data=text data.path=nowhere", 3, "data.path=nowhere: cannot be read"),
    ("train model=gpt model.context=64", 2, "model.context=64: samples have 32 tokens; set data.context=64"),
    ("train model=gpt data=digits", 2, "gpt takes rows of tokens, and the data has the shape [3, 32, 32]"),
    ("train model=unet model.depth=5", 2, "needs 64 pixels each way, the data has 32x32"),
    ("train loss.label_smoothing=2", 2, "loss.label_smoothing=2: must be from 0 to 1"),
    ("train --config-name nope", 2, "--config-name nope: no such config"),
    ("train --config-dir nowhere", 2, "--config-dir nowhere: no such folder"),
    ("train +hydra.callbacks.x._target_=os.system", 2, "only Hydra's own plugins may be named there"),
    ("eval", 2, "run: say which run to evaluate"),
    ("eval run=nowhere", 4, "run=nowhere: no such directory"),
    ("eval run=.", 4, "there is no snapshot in it"),
    ("eval run=. weights=x.pth", 2, "run and weights exclude each other"),
    ("eval snapshot=nowhere", 4, "snapshot=nowhere: no such directory"),
    ("eval snapshot=.", 4, "snapshot=.: is no snapshot"),
    ("eval weights=nowhere.pth", 4, "weights=nowhere.pth: no such file"),
    ("train snapshot.every=0", 2, "snapshot.every=0: must be at least 1"),
    ("train snapshot.every=sometimes", 2, "snapshot.every=sometimes: must be a number of steps, or epoch"),
    ("train snapshot.keep=0", 2, "snapshot.keep=0: must be at least 1"),
    ("train time_limit=soon", 2, "time_limit=soon: give seconds, or such as 90s"),
    ("train time_limit=0", 2, "time_limit=0: give seconds, or such as 90s"),
    ("train resume=auto", 2, "resume=auto: needs run_dir=<directory>"),
    ("train resume=nowhere", 4, "resume=nowhere: no such directory"),
    ("train resume=. run_dir=x", 2, "run_dir=x: a resumed run goes on in its own directory"),
    ("train resume=. recipe=digits", 2, "recipe: gpipe train resume=... takes none"),
    ("export", 2, "give run=<directory> or snapshot=<directory>, one of them"),
    ("export rnu=x", 2, "unknown key 'rnu'; did you mean 'run'?"),
    ("export run=nowhere", 4, "run=nowhere: no such directory"),
    ("export run=. out=", 2, "out: give out=<file>"),
    ("export run=.", 4, "there is no snapshot in it"),
    ("ls modles", 2, "nothing called 'modles' to list; did you mean 'models'?"),
    ("ls --dry-run", 2, "unknown flag --dry-run; one of: --debug"),
    ("help trian", 2, "unknown command 'trian'; did you mean 'train'?"),
    ("train --cfg job --json", 2, "--json has no effect with --cfg"),
    ("train --resolve", 2, "--resolve needs --cfg"),
    ("train -m --cfg job", 2, "-m and --cfg exclude each other"),
    ("train optimizer._target_=torch.optim.SGD", 2, "optimizer.lr: must be given"),
    ("train lr_schedule=constant lr_schedule.warmup=-1", 2, "lr_schedule.warmup=-1: must be at least 0"),
    ("train lr_schedule=step lr_schedule.milestones=[a]", 2, "expected a list of numbers"),
    ("train lr_schedule.rise=2", 2, "lr_schedule.rise=2: must be from 0 to 1"),
    ("train model.num_classes=0", 2, "model.num_classes=0: must be at least 1"),
    ("train run_dir=", 2, "run_dir=: give the name of a directory"),
    (f"train run_dir={'x' * 300}", 2, "cannot be used: "),
    ("train engine=single log.layers=true", 2, "log.layers: has no effect with engine=single"),
    ("train engine=single log.partitions=true", 2, "log.partitions: has no effect with engine=single"),
    ("eval run=. recipe=digits", 2, "recipe: gpipe eval takes none"),
    ("-sc install=nosh", 2, "-sc install=nosh: one of: install=bash"),
    (
        "profile timeline=true measure=false",
        2,
        "timeline=true: runs the model, and measure=false runs nothing",
    ),
    ("profile steps=0", 2, "steps=0: must be at least 1"),
    ("profile sort=tme", 2, "sort=tme: did you mean 'time'?"),
    ("profile measure=perhaps", 2, "measure=perhaps: expected true or false"),
    ("train balance=time balance.cach=false", 2, "did you mean 'balance.cache'?"),
    ("env now", 2, "gpipe env takes no arguments"),
    ("train model=torchvision model.name=swin_tt", 2, "has no such model; choose one of swin_t, "),
    ("train model=torchvision model.name=ssd300_vgg16", 2, "model.name=ssd300_vgg16: returns boxes, "),
    ("train model=torchvision model.name=r3d_18", 2, "takes clips: channels, frames, height, width, and the"),
    ("train loss=auxiliary loss.weight=-1", 2, "loss.weight=-1: must be a finite number of at least 0"),
    (f"train {BROKEN}.returns_a_dict", 2, "layer '1' (Naming) returns a dict; between layers go tensors"),
    (f"train {BROKEN}.returns_a_list", 2, "Listing returns a list; a model gives a tensor, or a tuple or"),
    (
        f"train {BROKEN}.looks_at_values",
        2,
        "/tests/broken_models.py:25 `return input if input.sum() > 0 else self.inner(input)`: "
        "symbolically traced variables cannot be used as inputs to control flow; mark it as "
        "a leaf with model.leaves=[gate], or give model.layers",
    ),
    (f"train {BROKEN}.hands_over_a_tuple", 2, "cannot be cut anywhere: a tuple of 'one' crosses; hand over"),
    (
        f"train {BROKEN}.traceable model.layers=[stem,gate,pool,head]",
        2,
        "layer 'head' (Linear) does not take 2x4x2x2: mat1 and mat2 shapes cannot be multiplied (16x2 and "
        "16x10); model.layers must name all that its forward does, in order",
    ),
    (f"train {BROKEN}.traceable model.layers=[stem,gaet]", 2, "has no submodule 'gaet'; close names: gate"),
    (f"train {BROKEN}.traceable model.leaves=[gaet]", 2, "no submodule or class 'gaet'; close names: gate"),
    (f"train {BROKEN}.nothing", 2, "tests.broken_models has no nothing; one of: "),
]


@pytest.mark.parametrize(("words", "code", "says"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_ends_in_one_line_and_the_right_exit_code(
    gpipe: Callable[..., object], tmp_path: Path, words: str, code: int, says: str
) -> None:
    answer = gpipe(*words.split())
    assert says in answer.err
    assert answer.code == code
    assert answer.err.startswith("gpipe: error: ")
    assert answer.err.count("\n") == 1
    assert answer.out == ""
    assert list(tmp_path.iterdir()) == []

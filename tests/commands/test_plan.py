from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor, nn

from gpipe_cli.commands import plan as plan_command
from gpipe_cli.plan import measured, order_plans
from gpipe_cli.plan.prediction import Prediction
from tests.support.command_line import Gpipe, UserModule

TINY = (
    *("model._target_=tiny_for_tests.build", "allow=[tiny_for_tests]"),
    *("data=synthetic", "data.shape=[3,8,8]", "data.length=64"),
)
SMALL = ("data=synthetic", "data.shape=[3,8,8]", "data.length=64")
WIDE = ("model=mlp", "model.width=8192", "batch_size=4096", "device=a100", "devices=4")
FIELDS = {"balance", "chunks", "schedule", "checkpoint", "predicted_ms", "predicted_peak_bytes"}

Plan = Callable[..., Any]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _planned_briefly(gpipe: Gpipe, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests share what they measure, and search for orders with little effort."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(measured, "SECONDS_OF_PHASES", 0.0)
    monkeypatch.setattr(order_plans, "POLICIES", 20)
    monkeypatch.setattr(order_plans, "CURVE_POLICIES", 10)


@pytest.fixture
def plan(gpipe: Gpipe) -> Plan:
    """The JSON of `gpipe plan` with these words."""

    def run(*words: str) -> Any:
        answer = gpipe("plan", *words, "--json")
        assert answer.code == 0, answer.err
        return answer.json

    return run


def test_a_plan_for_this_machine_has_its_fields_and_can_be_trained(
    tiny: Gpipe, plan: Plan, tmp_path: Path
) -> None:
    answer = plan(*TINY, "batch_size=4", "devices=[cpu,cpu]", "verify=true", "plan.verify_budget=60")
    assert {"best", "candidates", "profile", "lower_bound"} <= answer.keys()
    assert answer["best"] == answer["candidates"][0] and len(answer["candidates"]) in (5, 6)
    assert any(each["engine"] == "single" for each in answer["candidates"])
    for each in answer["candidates"]:
        assert each.keys() >= FIELDS and sum(each["balance"]) == 8
        assert each["measured_ms"] > 0 and each["predicted_ms"] >= answer["lower_bound"] * (1 - 1e-9)
    assert not (tmp_path / "runs").exists()
    command = answer["train_command"]
    assert command.startswith("gpipe train model._target_=tiny_for_tests.build")
    trained = tiny("train", *command.replace("'", "").split()[2:], "--dry-run", "--json").json
    assert [row["layers"] for row in trained["partitions"]] == answer["best"]["balance"]


def test_the_search_respects_given_keys_and_prints_the_train_command(tiny: Gpipe) -> None:
    words = ("devices=[cpu,cpu]", "chunks=2", "schedule=1f1b", "checkpoint=always", "partitions=2")
    out = tiny("plan", *TINY, "batch_size=4", *words).out
    assert "chunks=2 schedule=1f1b checkpoint=always" in out
    assert all(word in out for word in ("predicted ms", "lower bound", "advice", "optimizer", "F0"))


def test_other_devices_are_estimated_for_a_model_of_any_size(huge: Gpipe) -> None:
    words = ("plan", "model.width=60000", "device=h100", "batch_size=4")
    answer = huge(*words, "devices=8", "--json").json
    assert "estimate" in answer["profile"] and answer["best"]["devices"] > 1
    assert answer["best"]["predicted_peak_bytes"] < 80 * 2**30
    alone = huge(*words, "devices=1")
    assert alone.code == 2 and "the smallest limit that works is" in alone.err


def test_without_time_the_plan_is_the_plain_run_and_the_rest_is_named(tiny: Gpipe) -> None:
    answer = tiny("plan", *TINY, "batch_size=4", "devices=[cpu,cpu]", "plan.cache=false", "plan.budget=0.001")
    assert answer.err.startswith("measuring one device with ")
    assert "the time ran out: measured 0 of 3 sizes, searched" in answer.err and "does all" in answer.err


@pytest.mark.slow
def test_a_memory_limit_is_respected_or_refused_with_the_smallest_sufficient_one(
    tiny: Gpipe, plan: Plan
) -> None:
    words, limit = (*TINY, "batch_size=4", "devices=2"), 40_000
    free, limited = plan(*words), plan(*words, f"device_memory={limit}")
    assert limited["best"]["predicted_peak_bytes"] <= limit <= free["best"]["predicted_peak_bytes"] + limit
    refused = tiny("plan", *words, "device_memory=1KiB")
    assert refused.code == 2 and "the smallest limit that works is" in refused.err
    assert "engine=offload, with one layer on the device at a time, needs" in refused.err


@pytest.mark.slow
def test_only_partitions_that_need_it_recompute_in_the_plan_and_in_training(gpipe: Gpipe, plan: Plan) -> None:
    words = ("devices=3", "partitions=3", "batch_size=16", "chunks=4", "schedule=1f1b", "device_memory=4MiB")
    answer = plan("model=unet", "device=v100", *words)
    modes = answer["best"]["checkpoint"]
    assert modes == ["always", "never", "never"]
    assert answer["best"]["predicted_peak_bytes"] <= 4 * 2**20
    given = shlex.split(answer["train_command"])[2:]
    assert f"checkpoint=[{','.join(modes)}]" in given
    trained = gpipe("train", *given, "steps=1", "log.partitions=true", "--json").json
    log = (Path(trained["run_dir"]) / "train.log").read_text()
    assert "Micro-batch 0 (partition 0): checkpoint_stop=4, using_checkpointing=True" in log
    assert "Micro-batch 0 (partition 2): checkpoint_stop=0, using_checkpointing=False" in log


def test_training_uses_and_saves_the_best_plan_with_the_bits_of_a_run_without_planning(
    tiny: Gpipe, gpipe: Gpipe
) -> None:
    """It trains the model that was measured, which must leave nothing behind."""
    words = ("devices=[cpu,cpu]", "partitions=2", "chunks=2", "threads=1", "--json")
    planned = tiny("train", "plan=auto", "schedule=auto", "steps=1", "run_dir=planned", *words)
    assert "predicted" in planned.err and "schedule=auto (costs" not in planned.err, "the plan has the order"
    saved = yaml.safe_load(Path("planned/config.yaml").read_text(encoding="utf-8"))
    assert saved["plan"]["auto"] is False and saved["chunks"] == 2 and saved["schedule"]["name"] == "auto"
    layers = saved["balance"]["layers"]
    assert sum(layers) == 8 and len(layers) == saved["partitions"] == len(saved["devices"]) == 2
    given = (
        f"balance.layers={layers}".replace(" ", ""),
        f"checkpoint={saved['checkpoint']}",
        "balance=manual",
    )
    plain = tiny("train", *given, "schedule=file", "schedule.path=planned/schedule.csv", "steps=1", *words)
    assert planned.json["loss"] == plain.json["loss"]
    resumed = gpipe("train", "resume=planned", "allow=[tiny_for_tests]", "steps=2")
    assert resumed.code == 0 and "measuring" not in resumed.err, resumed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("device=a1000 devices=2", "did you mean 'a100'"),
        ("device=a100", "give the number of devices for device=a100, such as devices=8"),
        ("device=a100 devices=2 verify=true", "this machine has no device=a100"),
        ("devices=4 verify=true", "machines that are not here"),
        ("device={flops:1e12} devices=2", "a custom device needs memory"),
        ("devices=[a100,cpu]", "devices of this machine and others cannot be mixed"),
        ("device=A100 devices=2", "did you mean 'a100'"),
        ("devices=[a100,t5]", "and t5 is none of a10, a100, b200"),
        ("devices=[a100,{flops:1e12}]", "devices[1]: a custom device needs memory"),
        ("device=t4 devices=2 precision=bf16", "t4 has no bf16"),
        ("device=t4 devices=2 precision=int8", "precision=int8: choose one of: bf16, fp16,"),
        ("devices=[cpu,cpu] precision=tf32", "precision=tf32: needs device="),
        ("devices=[cpu,cpu] data_parallel=2", "data_parallel=2: needs device="),
        ("device=a100 devices=3 data_parallel=2", "cannot be divided equally among the replicas"),
        ("--by time", "gpipe plan searches for it"),
        ("--dry-run", "remove it"),
        ("plan.budget=0", "plan.budget=0.0: must be positive"),
        ("partitions=9 devices=[cpu,cpu]", "each partition needs its own device"),
        ("devices=[cpu,cpu] partitions=2 chunks=1", "no plan is possible with devices=[cpu,cpu]"),
        ("device=a100 devices=2 schedule=zero_bubble chunks=1", "no plan is possible with devices=2"),
        ("devices=[a100,a100,t4,t4] data_parallel=2", "replicas, which follow each other"),
        ("schedule=file schedule.path=/dev/null", "gpipe plan compares schedules"),
        (
            "batch_size=1280 device=a100 devices=8 chunks=1280 partitions=8 schedule=auto",
            "the best pipelines have more than 20,000 actions",
        ),
    ],
)
def test_a_mistake_is_one_line(tiny: Gpipe, words: str, message: str) -> None:
    refused = tiny("plan", *TINY, *words.split())
    assert refused.code == 2 and message in refused.err


def test_different_devices_get_layers_that_suit_their_speed_and_memory(plan: Plan) -> None:
    words = ("model=mlp", "model.width=8192", "model.depth=8", "batch_size=4096", "chunks=4", "partitions=3")
    mixed = plan(*words, "devices=[a100,a100,t4]")["best"]
    equal = plan(*words, "device=a100", "devices=3")["best"]
    assert sum(mixed["balance"]) == sum(equal["balance"])
    assert mixed["balance"][2] < equal["balance"][2]
    assert mixed["predicted_ms"] > equal["predicted_ms"]
    slow = "{flops:8.1e12,memory:16GiB,bandwidth:320e9,link:12e9,tensor:65e12,tf32:null}"
    assert plan(*words, f"devices=[a100,a100,{slow}]")["best"]["balance"] == mixed["balance"]


@pytest.mark.slow
def test_precision_and_replicas_are_part_of_an_estimate(plan: Plan) -> None:
    slow, fast = (plan(*WIDE, f"precision={each}") for each in ("fp32", "fp16"))
    assert fast["best"]["predicted_ms"] < slow["best"]["predicted_ms"] / 2
    replicas = plan(*WIDE, "precision=fp16", "data_parallel=2")
    assert replicas["best"]["devices"] <= 2
    command = replicas["train_command"]
    assert "engine=processes devices=" in command and "precision=fp16 data_parallel=2" in command


def test_each_of_two_replicas_takes_half_of_the_mini_batch(plan: Plan) -> None:
    """It took a quarter: the loader and the planner both divided."""
    given = ("model=mlp", "device=a100", "partitions=2", "chunks=2", "schedule=1f1b", "checkpoint=never")
    one = plan(*given, "devices=2", "batch_size=16")["best"]
    two = plan(*given, "devices=4", "data_parallel=2", "batch_size=32")["best"]
    assert one["balance"] == two["balance"] and one["memory"] == two["memory"]


def test_searched_orders_are_candidates_and_can_be_asked_for(gpipe: Gpipe, plan: Plan) -> None:
    words = (*WIDE, "chunks=8", "partitions=4", "checkpoint=never")
    answer = plan(*words, "schedule=auto")
    pipelines = [each for each in answer["candidates"] if each["engine"] == "threads"]
    assert pipelines and all(each["schedule"] == "auto" for each in pipelines)
    # Training searches again, within the memory that the plan has.
    command = answer["train_command"]
    assert "schedule=auto" in command and "device_memory=80GiB" in command
    assert 0 <= answer["gap"] < 1 and answer["memory_curve"][-1]["share"] == 2.0
    assert answer["best"]["predicted_ms"] <= plan(*words, "schedule=1f1b")["best"]["predicted_ms"]
    assert "bubble by memory" in gpipe("plan", *words).out


def test_how_many_plans_are_shown_does_not_change_the_best(plan: Plan) -> None:
    """Orders were searched only for the plans that were shown: with top=1 often for none."""
    given = ("model=mlp", "device=a100", "devices=2")
    one, five, page = (plan(*given, *more) for more in (["top=1"], [], ["page=plan.html"]))
    assert one["best"] == five["best"] == page["best"]
    assert one["memory_curve"] == five["memory_curve"] == page["memory_curve"] != []
    assert [each["engine"] for each in one["candidates"][1:]] in ([], ["single"])


def test_searched_orders_may_be_asked_for_where_one_device_is_best(plan: Plan) -> None:
    for devices in ("devices=1", "devices=2"):
        assert plan("model=mlp", "device=a100", "schedule=auto", "checkpoint=always", devices)["candidates"]


def test_a_page_shows_candidates_timeline_and_limits(gpipe: Gpipe, plan: Plan, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    answer = plan(*WIDE, "top=2", f"page={page}")
    text = page.read_text(encoding="utf-8")
    # The run without a pipeline is always among the plans.
    assert [each["engine"] for each in answer["candidates"]] == ["threads", "threads", "single"]
    assert answer["page"] == str(page)
    headings = ("Candidates by time and memory", "A step of the best plan", "What limits it")
    for heading in (*headings, "Bubble against memory", "Train with it"):
        assert f"<h2>{heading}</h2>" in text
    assert text.count("<circle") > 3 and text.count('class="candidate plain"') == 1
    assert "page=" not in answer["train_command"] and "waiting for the slowest partition" in text
    # It replaces a page of its own, and nothing else.
    assert gpipe("plan", *WIDE, "top=2", f"page={page}").code == 0
    page.write_text("mine", encoding="utf-8")
    refused = gpipe("plan", *WIDE, "top=2", f"page={page}")
    assert refused.code == 2 and "exists and is not a report" in refused.err


def test_after_a_verification_everything_follows_the_measured_times(
    tiny: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice claimed "27.71 times as fast" beside a table whose predictions were wrong by 254 %."""

    def verified(plans: Sequence[Prediction], *_: object, **__: object) -> list[Prediction]:
        ms = {place: 10.0 * (len(plans) - place) for place in range(len(plans))}
        plain = next(place for place, plan in enumerate(plans) if plan.is_plain)
        ms[plain] = 16.0
        return [replace(plan, measured_ms=ms[place], spread=0.05) for place, plan in enumerate(plans)]

    monkeypatch.setattr(plan_command, "verify_plans", verified)
    words = (*TINY, "batch_size=4", "devices=[cpu,cpu]", "chunks=2", "verify=true")
    answer = tiny("plan", *words, "--json", "page=verified.html").json
    times = [each["measured_ms"] for each in answer["candidates"]]
    assert times == sorted(times) and answer["best"]["measured_ms"] == times[0] == 10.0
    assert answer["advice"].startswith("1.60 times as fast as without a pipeline (measured; ")
    assert "the predictions were wrong by up to" in answer["advice"]
    assert answer["best"]["overrides"] in answer["train_command"]
    assert "<th>measured ms</th>" in Path("verified.html").read_text(encoding="utf-8")


def test_with_a_limit_of_memory_the_batch_size_is_part_of_the_plan(plan: Plan) -> None:
    words = ("model=mlp", "device=t4", "devices=2", "device_memory=24MiB")
    answer = plan(*words)
    best = answer["best"]
    assert f"batch_size={best['batch_size']} " in answer["train_command"]
    assert best["predicted_peak_bytes"] <= 24 * 2**20
    others = [each for each in answer["candidates"] if each["batch_size"] != best["batch_size"]]
    assert others and all(each["samples_per_second"] <= best["samples_per_second"] for each in others)
    # What is given stays: a smaller batch size is no faster.
    given = plan(*words, "batch_size=16", "chunks=4")
    assert given["best"]["batch_size"] == 16 and given["best"]["chunks"] == 4
    assert given["best"]["samples_per_second"] <= best["samples_per_second"]
    assert given["train_command"].count("batch_size=") == given["train_command"].count("chunks=") == 1
    assert given["paste"] == given["train_command"], "the former name of the key"
    # Two replicas without a pipeline recompute nothing, as planned.
    replicas = plan(*words, "data_parallel=2")
    assert f"batch_size={replicas['best']['batch_size']} balance=manual" in replicas["train_command"]
    assert "checkpoint=never engine=processes devices=2" in replicas["train_command"]


@pytest.mark.slow
def test_a_batch_size_that_was_measured_here_fits_too(tiny: Gpipe, plan: Plan) -> None:
    answer = plan(*TINY, "devices=[cpu,cpu]", "device_memory=200KiB")
    best = answer["best"]
    assert best["predicted_peak_bytes"] <= 200 * 2**10 and best["batch_size"] <= 64
    assert f"batch_size={best['batch_size']} " in answer["train_command"]


def test_where_no_pipeline_fits_slices_of_the_model_do(gpipe: Gpipe, plan: Plan) -> None:
    words = ("model=mlp", "model.depth=8", *SMALL, "batch_size=16")
    words = (*words, "devices=[cpu]", "device_memory=6MiB", "chunks=2")
    answer = plan(*words)
    best = answer["best"]
    assert best["engine"] == "offload" and best["predicted_ms"] > 0 and len(best["balance"]) > 1
    assert best["predicted_peak_bytes"] <= 6 * 2**20
    assert answer["advice"].startswith("no pipeline fits: engine=offload keeps ")
    given = shlex.split(answer["train_command"])[2:]
    assert "engine=offload" in given and "chunks=2" in given
    assert gpipe("train", *given, "--dry-run").code == 0
    text = gpipe("plan", *words, "verify=true")
    assert text.code == 0 and "offload" in text.out and "engine=offload is not verified" in text.err
    alone = gpipe("train", *words, "plan=auto")
    assert alone.code == 2 and "plan=auto: no pipeline fits: engine=offload keeps" in alone.err


def test_a_batch_norm_gets_two_samples_as_in_training(gpipe: Gpipe, user_module: UserModule) -> None:
    """A micro-batch of one sample ended the command with an error of torch."""
    layers = "nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes)"
    text = f"from torch import nn\n\n\ndef build(num_classes):\n    return nn.Sequential({layers})\n"
    user_module("normed_for_tests", text)
    model = ("model._target_=normed_for_tests.build", "allow=[normed_for_tests]", *SMALL)
    answer = gpipe("plan", *model, "batch_size=8", "chunks=8", "devices=[cpu,cpu]", "--json")
    assert answer.json["best"]["chunks"] == 4
    assert "so a mini-batch of 8 becomes 4 micro-batches, not 8" in answer.err


def test_a_mini_batch_has_no_more_samples_than_there_are(tiny: Gpipe, plan: Plan) -> None:
    """The plain run was measured with 64 samples, and compared as if it had 4096."""
    answer = plan(*TINY, "batch_size=4096", "chunks=2", "devices=[cpu,cpu]")
    assert {each["batch_size"] for each in answer["candidates"]} == {64}


def test_a_plain_run_that_does_not_fit_is_said_to(gpipe: Gpipe) -> None:
    words = ("model=mlp", *SMALL, "device=t4", "devices=4", "batch_size=16", "device_memory=2MiB")
    answer = gpipe("plan", *words)
    assert answer.code == 0, answer.err
    assert "without a pipeline, one device would need at least 3.81MiB, which does not fit" in answer.err


def test_layers_that_are_equal_are_run_once_however_many_there_are(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    forward = nn.Linear.forward

    def counted(layer: nn.Linear, input: Tensor) -> Tensor:
        calls.append(layer)
        return forward(layer, input)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    words = ("model=mlp", "model.depth=600", "model.width=8", "device=t4", "devices=2", "chunks=4")
    assert plan(*words)["best"]["chunks"] == 4
    assert len(calls) < 40

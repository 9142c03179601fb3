from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.device_table import CHECKED, DATA_SHEET, DEVICES, checked_against, own_device

FIGURES = {"flops": 50e12, "memory": "24GiB", "bandwidth": "1e12", "link": 25e9}


def test_every_device_has_figures_of_the_right_size() -> None:
    for device in DEVICES.values():
        assert 1e12 < device.flops < 1e15 and 2**33 < device.memory < 2**40
        assert 1e11 < device.bandwidth < 1e13 and 1e9 < device.link < device.bandwidth
        assert 1e9 < device.network <= device.link or device.link < 13e9
        tensor = [figure for figure in (device.tf32, device.tensor) if figure is not None]
        assert all(device.flops <= figure < 1e16 for figure in tensor)


def test_tensor_cores_take_16_bits_and_tf32_but_not_fp32() -> None:
    a100 = DEVICES["a100"]
    assert a100.matrix_flops("fp16", half=True, tensor_cores=True) == (312e12, True)
    assert a100.matrix_flops("fp16", half=True, tensor_cores=False) == (78e12, False)
    assert a100.matrix_flops("fp16", half=False, tensor_cores=True) == (19.5e12, False)
    assert a100.matrix_flops("fp32", half=False, tensor_cores=True) == (19.5e12, False)
    assert a100.matrix_flops("tf32", half=False, tensor_cores=True) == (156e12, True)


def test_a_device_refuses_what_it_cannot_compute() -> None:
    assert DEVICES["t4"].refusal("bf16", tensor_cores=True) == "has no bf16"
    assert DEVICES["t4"].refusal("tf32", tensor_cores=True) == "has no tf32"
    assert DEVICES["a100"].refusal("tf32", tensor_cores=False) == "needs tensor cores for tf32"
    assert DEVICES["a100"].refusal("bf16", tensor_cores=True) is None


def test_a_device_of_your_own_has_one_figure_for_every_precision() -> None:
    device = own_device(FIGURES)
    assert (device.memory, device.bandwidth, device.network) == (24 * 2**30, 1e12, 12.5e9)
    for precision, half in (("fp32", False), ("tf32", False), ("bf16", True), ("fp16", True)):
        assert device.matrix_flops(precision, half=half, tensor_cores=True)[0] == 50e12
    assert own_device({**FIGURES, "tensor": 400e12}).tensor == 400e12
    assert own_device({**FIGURES, "half": 90e12}).tensor == 90e12
    without = own_device({**FIGURES, "tensor": None, "half": 1e12})
    assert without.matrix_flops("fp16", half=True, tensor_cores=True) == (1e12, False)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({**FIGURES, "flop": 1}, r"device\.flop: unknown figure of a device; did you mean 'flops'"),
        ({"flops": 1e12}, "a custom device needs memory, or the name of one whose figures it has"),
        ({**FIGURES, "link": "fast"}, r"device\.link=fast: must be a positive number"),
        ({**FIGURES, "link": 0}, r"device\.link=0: must be a positive number"),
        ({**FIGURES, "flops": True}, r"device\.flops=True: must be a positive number"),
        ({**FIGURES, "link": None}, r"device\.link=None: must be a positive number"),
        ({**FIGURES, "per_machine": 0.5}, r"device\.per_machine=0\.5: must be a positive whole number"),
        ({**FIGURES, "bf16": "maybe"}, r"device\.bf16=maybe: must be true or false"),
        ({**FIGURES, "memory": 0}, r"device\.memory=0: expected a number of bytes"),
        ({**FIGURES, "memory": "much"}, r"device\.memory=much: expected a number of bytes"),
    ],
)
def test_a_wrong_figure_is_named(figures: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own_device(figures)


def test_single_figures_of_a_known_device_can_be_changed() -> None:
    t4 = own_device({"name": "t4", "network": "12.5e9", "per_machine": 8})
    assert t4 == replace(DEVICES["t4"], network=12.5e9, per_machine=8)
    # Another figure for tensor cores was never sustained.
    assert own_device({"name": "t4", "tensor": 40e12}).sustained is None
    with pytest.raises(ConfigError, match=r"device\.name=T5: unknown device; choose one of: a10, .*t4"):
        own_device({"name": "T5"})
    with pytest.raises(ConfigError, match=r"device\.netwrk: unknown figure of a device; .*'network'"):
        own_device({"name": "t4", "netwrk": 1})


def test_it_is_known_what_the_figures_of_each_device_were_checked_against() -> None:
    assert "published steps of GPT-2" in checked_against("t4") and "published iterations" in checked_against(
        "a100"
    )
    assert checked_against("l4") == DATA_SHEET
    assert checked_against({"name": "l4", "link": 6e9}) == f"{DATA_SHEET}; your link"
    assert checked_against(FIGURES) == "your figures only"
    assert all(name in CHECKED for name, device in DEVICES.items() if device.sustained is not None)

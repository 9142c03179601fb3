"""Models of timm: the original modules, and the normalization they were trained with."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.build.loader import make_loader
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.models.timm_zoo import build, normalization

NAME = "test_resnet.r160_in1k"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet1"}, "timm has no such model; did you mean resnet18"),
        ({"name": "hf-hub:timm/resnet18"}, "timm has no such model"),
        ({"name": NAME, "input_shape": (7,)}, "takes images, and the data has 7"),
        ({"name": NAME, "num_classes": 0}, "model.num_classes=0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**arguments)  # type: ignore[arg-type]


def test_a_model_for_one_size_is_built_for_that_of_the_data() -> None:
    model = build("test_vit", num_classes=3, input_shape=(1, 64, 64))
    assert model(torch.ones(2, 1, 64, 64)).shape == (2, 3)


def test_inputs_are_normalized_as_the_model_was_trained() -> None:
    assert normalization({"name": NAME}) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    target = {"_target_": "gpipe_cli.models.timm_zoo.build", "name": "resnet18"}
    settings = ModelConfig(
        model=target,
        data={"_target_": "gpipe_cli.data.images.build_digits"},
        transform={"_target_": "gpipe_cli.data.transforms.basic"},
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
    )
    data = make_loader(settings).data
    assert data.mean == (0.485, 0.456, 0.406) and data.std == (0.229, 0.224, 0.225)

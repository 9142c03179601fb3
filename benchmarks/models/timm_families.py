"""One model of each family of timm: of the models in each of timm's modules, the one with the fewest parameters."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.models.subject import Subject, image_batches
from gpipe_cli.vision import torchvision  # noqa: F401 - first: timm imports torchvision

import timm  # isort: skip

CLASSES = 5
LEAST_LAYERS = 9
SMALLEST = {
    "beit": "beit_base_patch16_224",
    "byoanet": "halonet_h1",
    "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla46x_c",
    "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_128s",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout",
    "maxxvit": "maxvit_pico_rw_256",
    "metaformer": "poolformerv2_s12",
    "mlp_mixer": "gmlp_ti16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet",
    "pit": "pit_ti_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_88m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2next50",
    "resnest": "resnest14d",
    "resnet": "test_resnet",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "vit_srelpos_small_patch16_224",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}
"""By the name of timm's module; `smallest` chooses them, which takes minutes for all."""
BUILT_FOR = {
    "beit_base_patch16_224": 64,
    "cait_xxs24_224": 64,
    "coat_tiny": 64,
    "convit_tiny": 64,
    "convmixer_768_32": 64,
    "csatv2": 64,
    "deepseek_vit_412m": 84,
    "deit_tiny_patch16_224": 64,
    "efficientformerv2_s0": 64,
    "ese_vovnet19b_slim_dw": 64,
    "gcvit_xxtiny": 64,
    "gemma4_vit_167m": 96,
    "gmlp_ti16_224": 64,
    "hgnetv2_b0": 64,
    "hiera_tiny_224": 64,
    "hrnet_w18_small": 64,
    "maxvit_pico_rw_256": 64,
    "mobilevit_xxs": 64,
    "mvitv2_tiny": 64,
    "naflexvit_base_patch16_parfac_gap": 64,
    "nest_tiny": 64,
    "poolformerv2_s12": 64,
    "qwen3_vit_88m": 64,
    "repvit_m1": 64,
    "samvit_base_patch16_224": 64,
    "sequencer2d_s": 64,
    "swiftformer_xs": 64,
    "swin_tiny_patch4_window7_224": 64,
    "swinv2_cr_tiny_224": 64,
    "swinv2_tiny_window8_256": 64,
    "tnt_s_legacy_patch16_224": 64,
    "twins_svt_small": 64,
    "visformer_tiny": 64,
    "vit_srelpos_small_patch16_224": 64,
    "vit_tiny_patch16_dinov3_qkvb": 64,
    "vit_tiny_r_s16_p8_224": 64,
    "vitamin_small_224": 64,
    "volo_d1_224": 64,
    "xcit_nano_12_p8_224": 64,
}
"""Image sizes that models are built for, where the usual one takes long."""
ACCEPTED = {
    "cpubone_nano": 64,
    "crossvit_tiny_240": 64,
    "davit_tiny": 64,
    "densenet121": 64,
    "dla46x_c": 64,
    "dpn48b": 64,
    "edgenext_xx_small": 64,
    "fastvit_t8": 64,
    "focalnet_tiny_srf": 64,
    "hardcorenas_b": 64,
    "iformer_t": 64,
    "inception_next_atto": 64,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
    "lcnetv2_small": 64,
    "legacy_seresnet18": 64,
    "legacy_xception": 64,
    "lowformer_b0": 64,
    "mobilenetv5_base": 64,
    "nasnetalarge": 64,
    "nextvit_small": 64,
    "pnasnet5large": 64,
    "pvt_v2_b0": 64,
    "rdnet_tiny": 64,
    "res2next50": 64,
    "resnest14d": 64,
    "resnetv2_18": 64,
    "rexnet_100": 64,
    "sam2_hiera_tiny": 64,
    "selecsls42": 64,
    "skresnet18": 64,
    "tiny_vit_5m_224": 64,
    "tresnet_m": 64,
    "vgg11": 64,
    "xception41p": 64,
}
"""Image sizes of models that take long with their usual one and accept any."""


def smallest(module: str) -> str:
    def parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in timm.create_model(name).parameters())

    return min(timm.list_models(module=module), key=parameters)


def subjects() -> list[Subject]:
    return [_subject(name) for name in SMALLEST.values()]


def _subject(name: str) -> Subject:
    usual = timm.models.get_pretrained_cfg(name).input_size[-1]
    size = {**BUILT_FOR, **ACCEPTED}.get(name, usual)
    return Subject(
        "timm",
        name,
        "image_classification",
        partial(_build, name),
        partial(image_batches, 3, size, size),
        LEAST_LAYERS,
    )


def _build(name: str, dropout: float) -> nn.Module:
    options = {"img_size": BUILT_FOR[name]} if name in BUILT_FOR else {}
    model = timm.create_model(name, num_classes=CLASSES, **options)
    for module in model.modules():
        if getattr(module, "inplace", False):
            continue  # a dropout in place fails in training: softmax needs its output
        for attribute in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, dropout)
    return model

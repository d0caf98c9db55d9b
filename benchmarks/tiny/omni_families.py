"""The families that take text, images, videos and audio, with the processor files of real checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tiny.byte_tokenizer import EOS, TOKEN_ID, VOCAB

RATE = 16_000
MEL_BINS = 16
_PADS = {name: f"<|{name}_pad|>" for name in ("image", "video", "audio")}
_TOKENS = {
    **{f"{name}_token_id": TOKEN_ID[pad] for name, pad in _PADS.items()},
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
}
_OTHER_PLACES = ("slice_start", "slice_end", "spk_start", "spk_end", "tts_start", "tts_end")
_WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MEL_BINS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


@dataclass(frozen=True, slots=True)
class OmniFamily:
    """`checkpoint`: whose processor files these are. `files`: preprocessor_config.json; `processor`:
    processor_config.json. `own`, `tower`: values of the config and of its vision part; `part`: where tokens
    are, beside the top. `starts`, `ends`: the names of the tokens around media, by `vision` and `audio`;
    `wrapped`: the template writes them. `marks`: what stands for a medium in rendered text, where that is no
    token. `names`: other tokens that the processor finds by name. `video`: whether it takes videos;
    `several`: several audio parts in a prompt; `beside`: audio beside images. `refused`: the model is refused
    at load."""

    checkpoint: str
    files: Mapping[str, Any]
    starts: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    wrapped: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    video: bool = False
    several: bool = True
    beside: bool = True
    refused: bool = False

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What stands for an image, a video and audio in rendered text."""
        kinds = ("vision", "vision", "audio")
        around = [(f"<|{kind}_start|>", f"<|{kind}_end|>") if self.wrapped else ("", "") for kind in kinds]
        pads = {**_PADS, **self.marks}.values()
        return tuple(f"{start}{pad}{end}" for (start, end), pad in zip(around, pads, strict=True))

    def make_config(self) -> dict[str, Any]:
        """What this model's config has beside that of a model of images alone."""
        parts = {self.part: _TOKENS} if self.part else {}
        sizes = {"vocab_size": VOCAB, "eos_token_id": EOS}
        return {**sizes, **_TOKENS, **self.own, **parts, "vision_config": self.tower}

    def list_tokens(self) -> dict[str, str]:
        """The names by which the processor finds special tokens."""
        found = {f"{name}_token": pad for name, pad in _PADS.items()}
        found |= {name: f"<|{kind}_start|>" for kind, name in self.starts.items()}
        found |= {name: f"<|{kind}_end|>" for kind, name in self.ends.items()}
        return {**found, **self.names}


_AROUND = {"vision": "boi_token", "audio": "boa_token"}, {"vision": "eoi_token", "audio": "eoa_token"}
_IMAGES = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
FAMILIES = {
    "qwen3_omni_moe": OmniFamily(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        {
            **_WHISPER,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3OmniMoeProcessor",
            "patch_size": 8,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 16 * 16,
            "max_pixels": 64 * 64,
        },
        {"vision": "vision_bos_token", "audio": "audio_bos_token"},
        {"vision": "vision_eos_token", "audio": "audio_eos_token"},
        part="thinker_config",
        wrapped=True,
        video=True,
    ),
    "gemma4": OmniFamily(
        "google/gemma-4-E2B-it",
        {},
        *_AROUND,
        {
            "processor_class": "Gemma4Processor",
            "image_processor": {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
            "video_processor": {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
            "feature_extractor": {"feature_size": 128, "sampling_rate": RATE},
        },
        {
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 4],
                "output_proj_dims": 32,
            },
        },
        tower={"position_embedding_size": 64},
        video=True,
        several=False,
    ),
    "gemma4_unified": OmniFamily(
        "a Gemma 4 without encoders",
        {},
        *_AROUND,
        {
            "processor_class": "Gemma4UnifiedProcessor",
            "video_processor": {"patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3},
            "audio_seq_length": 100,
        },
        {"audio_config": {"output_proj_dims": 640}},
        # mlx-vlm makes the image processor without the checkpoint's values.
        tower={"model_patch_size": 48, "mm_posemb_size": 64},
        video=True,
        beside=False,
    ),
    "gemma3n": OmniFamily(
        "google/gemma-3n-E2B-it",
        {
            **_IMAGES,
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "Gemma3nProcessor",
            "size": {"height": 32, "width": 32},
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "feature_size": MEL_BINS,
            "sampling_rate": RATE,
        },
        *_AROUND,
        {"processor_class": "Gemma3nProcessor", "audio_seq_length": 24, "image_seq_length": 256},
        refused=True,
    ),
    "minicpmo": OmniFamily(
        "openbmb/MiniCPM-o-4_5",
        {
            **_WHISPER,
            "patch_size": 8,
            "scale_resolution": 32,
            "image_feature_size": 4,
            "im_end": "<|vision_end|>",
            "unk": "<unk>",
        },
        own={
            "init_audio": True,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 128,
                "num_mel_bins": MEL_BINS,
            },
        },
        marks={"image": "<image>", "audio": "<audio>"},
        names={
            "im_end": "<|vision_end|>",
            **{name: f"<|unused_{i}|>" for i, name in enumerate(_OTHER_PLACES)},
        },
    ),
    "phi4mm": OmniFamily(
        "microsoft/Phi-4-multimodal-instruct",
        {},
        own={"audio_token_index": TOKEN_ID["<|audio_pad|>"]},
        marks={"image": "<|image_1|>", "audio": "<|audio_1|>"},
    ),
    "nemotron_h_nano_omni": OmniFamily(
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        {
            "image_processor_type": "NemotronHNanoOmniImageProcessor",
            "norm_mean": [0.5, 0.5, 0.5],
            "norm_std": [0.5, 0.5, 0.5],
            "patch_size": 8,
            "min_num_patches": 4,
            "max_num_patches": 64,
        },
        {"vision": "image_start_token"},
        {"vision": "image_end_token"},
        {"processor_class": "NemotronHNanoOmniProcessor"},
        {
            "sound_context_token_id": TOKEN_ID["<|audio_pad|>"],
            "img_context_token_id": TOKEN_ID["<|image_pad|>"],
            "image_token_index": TOKEN_ID["<|image_pad|>"],
            "sound_config": {
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "intermediate_size": 64,
                "num_mel_bins": MEL_BINS,
                "subsampling_conv_channels": 8,
                "projection_hidden_size": 64,
            },
        },
    ),
    "inkling": OmniFamily(
        "Inkling",
        {},
        processor={
            "processor_class": "InklingProcessor",
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "feature_extractor": {"feature_size": MEL_BINS},
        },
        own={"audio_config": {"n_mel_bins": MEL_BINS}},
        tower={"patch_size": 40},
        wrapped=True,
        beside=False,
    ),
}

"""How a model's processor samples videos and audio, and the arguments by which it gets videos."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.config.media_settings import AudioSampling, Video, VideoSampling
from mlxrun.model.vision.image_units import read_media_token

log = logging.getLogger(__name__)


def read_video_sampling(processor: Any, config: Mapping[str, Any]) -> VideoSampling | None:
    """How a processor samples frames of a video, by the library. None if the model takes no videos, or has
    its own rule for frames."""
    from mlx_vlm.generate.video import processor_handles_video
    from mlx_vlm.utils import resolve_video_sampling

    if read_media_token(config, "video") is None or not processor_handles_video(processor):
        return None
    component = processor.video_processor
    if getattr(component, "sample_frames_in_loader", False):
        log.info("videos are not accepted: the model's processor chooses frames by a rule of its own")
        return None
    found = resolve_video_sampling(processor, {})
    # What the library merges is checked here, since it may come from a checkpoint's files.
    numbers = (found.fps, found.min_frames, found.max_frames, found.frame_factor)
    if found.nframes is not None or not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        return None
    return VideoSampling(float(found.fps), *(int(n) for n in numbers[1:]))


def list_video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """The arguments of mlx-vlm's `prepare_inputs` for these videos."""
    if not videos:
        return {}
    described = [
        {
            "total_num_frames": video.total,
            "fps": video.fps,
            "frames_indices": list(video.indices),
            "width": video.frames.shape[3],
            "height": video.frames.shape[2],
            "duration": video.total / video.fps,
        }
        for video in videos
    ]
    return {"videos": [video.frames for video in videos], "video_metadata": described}


def read_audio_sampling(processor: Any, config: Mapping[str, Any]) -> AudioSampling | None:
    """How a processor takes audio. None if the model takes none, or one that is not known here."""
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is None:
        return None
    rate = getattr(extractor, "sampling_rate", None)
    call = inspect.signature(getattr(processor, "process", processor)).parameters
    takes = {"audio", "audios"} & call.keys() and _has_audio_part(config)
    if not takes or not isinstance(rate, int):
        return None
    if read_media_token(config, "audio") is None and "audio_bounds" not in _list_array_names(processor):
        return None
    several = bool(getattr(processor, "supports_multiple_audio", False))
    return AudioSampling(rate, min(_list_audio_limits(processor, rate), default=None), several)


def _list_array_names(processor: Any) -> Sequence[str]:
    """The names of the arrays that a processor says that it makes."""
    try:
        return list(getattr(processor, "model_input_names", ()))
    except AttributeError:  # of a part that it lacks
        return ()


def _list_audio_limits(processor: Any, rate: int) -> list[int]:
    """Numbers of samples beyond which a processor leaves out the rest, without a word."""
    extractor = processor.feature_extractor
    cut = inspect.signature(extractor).parameters.get("max_length")
    limits = [getattr(extractor, "n_samples", None) or (cut and cut.default)]
    tokens, each = (getattr(processor, name, None) for name in ("audio_seq_length", "audio_ms_per_token"))
    if isinstance(tokens, int) and isinstance(each, int):
        limits.append(tokens * each * rate // 1000)
    return [limit for limit in limits if isinstance(limit, int)]


def _has_audio_part(config: Mapping[str, Any]) -> bool:
    """Whether a config describes an audio tower, at the top or in a part."""
    parts = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    return any(key.startswith(("audio", "sound")) or _has_audio_part(value) for key, value in parts.items())

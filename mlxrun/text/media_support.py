"""Which images, PDFs and videos a model takes at all, and the codes of errors about each of them.

Checked before anything is read: what a model does not take is refused as such, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.errors import MediaError
from mlxrun.text.documents import PageRef
from mlxrun.text.field_errors import reject, reject_unsupported
from mlxrun.text.messages import DocumentRef, ImageRef, VideoRef
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import get_image_markers


def check_model_takes(refs: Sequence[ImageRef], model: ModelInfo) -> None:
    """RequestError for the first image, PDF or video that the model does not take."""
    for ref in refs:
        is_video = isinstance(ref, VideoRef)
        if model.vision and not (is_video and model.video_sampling is None):
            continue
        pages = ", which the pages of a PDF become; send its text" if isinstance(ref, DocumentRef) else ""
        kind = "videos" if is_video else "images"
        reject(ref.param, f"the model {model.name!r} does not accept {kind}{pages}")


def check_template_renders(refs: Sequence[ImageRef], model: ModelInfo) -> None:
    """RequestError for the first image, PDF or video that the model's chat template leaves out of prompts."""
    markers = get_image_markers(model)
    for ref in refs:
        is_video = isinstance(ref, VideoRef)
        if not (markers.videos if is_video else markers.images):
            name = "videos" if is_video else "images"
            reject_unsupported(ref.param, f"the model's chat template does not render {name}")


def get_media_code(ref: ImageRef) -> str:
    """The code of errors about a broken, missing or refused image, PDF or video."""
    if isinstance(ref, VideoRef):
        return "invalid_video"
    return "invalid_document" if isinstance(ref, (DocumentRef, PageRef)) else MediaError.code

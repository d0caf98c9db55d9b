"""Which images, PDFs and videos a model takes at all, and the codes of errors about each of them.

Checked before anything is read: what a model does not take is refused as such, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.api.text.media.documents import PageRef
from mlxrun.api.text.messages import DocumentRef, ImageRef, VideoRef
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.core.errors import MediaError
from mlxrun.core.field_errors import reject, reject_unsupported


def check_model_takes(refs: Sequence[ImageRef], model: ModelInfo) -> None:
    """RequestError for the first image, PDF or video that the model does not take, or that the check at load
    has refused."""
    kinds = ["videos" if isinstance(ref, VideoRef) else "images" for ref in refs]
    both = ["images beside videos"] if len(set(kinds)) > 1 else []
    for ref, kind in zip(refs, kinds, strict=True):
        if not model.vision or (kind == "videos" and model.video_sampling is None):
            pages = ", which the pages of a PDF become; send its text" if isinstance(ref, DocumentRef) else ""
            reject(ref.param, f"the model {model.name!r} does not accept {kind}{pages}")
        for name in (kind, *both):
            if why := model.refused_media.get(name):
                reject(ref.param, f"{name} are refused for this model: {why}")


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

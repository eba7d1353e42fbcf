"""Image files on their way into shards: their bytes as they are, unless one asks for something else.

Kept as they are: JPEG, PNG and WebP, whatever their names say. BMP, GIF and TIFF, which shards do not hold, become PNG
without loss. What readers of the shards will not see is counted by name: EXIF orientation, colour profiles, what is
transparent, further frames. Three rules say that it be seen: an image that they concern is then written anew, JPEGs at
quality 95 without chroma subsampling, others as PNG.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image, ImageCms, ImageColor, ImageOps, UnidentifiedImageError

from datamodules import jpeg_damage
from datamodules.decoding import to_rgb
from datamodules.file_kinds import other_kind
from datamodules.samples import ShardError
from datamodules.tally import Tally

KEPT = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
"""Formats, as PIL calls them, whose bytes go into shards, and the members they become; MPO is a phone's JPEG."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of files, in lower case, that are taken for images."""
ORIENTATION = 0x0112
TIFFS = (b"II", b"MM")
IGNORED = "which readers ignore"


@dataclass(frozen=True)
class PixelRules:
    """What of an image is more than its pixels as they are stored, and whether it counts.

    Args:
        orientation: of EXIF: ``ignore`` leaves the pixels as they are stored, as ImageNet's practice has it; ``apply``
            turns them as viewers do, which a phone's photos need.
        background: a colour, such as white or #808080, that shows through what is transparent; None drops transparency
            as torchvision's ImageFolder does, so that whatever colours lie below it show.
        profile: of colour: ``ignore`` takes the numbers as sRGB, ``srgb`` converts them.
    """

    orientation: Literal["ignore", "apply"] = "ignore"
    background: str | None = None
    profile: Literal["ignore", "srgb"] = "ignore"

    def __post_init__(self) -> None:
        if self.background is not None:
            try:
                ImageColor.getrgb(self.background)
            except ValueError:
                raise ValueError(f"background={self.background!r} is no colour, such as white or #808080") from None


class ImageBytes(NamedTuple):
    """An image as a shard's member."""

    field: str
    data: bytes
    stored: tuple[int, int]
    """(width, height) in the file."""
    size: tuple[int, int]
    """(width, height) of what ``data`` holds."""
    orientation: int
    """EXIF's, 1 to 8, whether it was applied or not; 1 for none."""
    turned: bool = False
    """Whether it was applied."""


def read_image(path: Path, rules: PixelRules, tally: Tally, strict: bool = True) -> ImageBytes:
    """An image file.

    Args:
        path: of the file.
        rules: what counts beside stored pixels.
        tally: counts what readers of the shards will not see.
        strict: whether a colour profile that cannot be applied is an error, or left unapplied and counted.

    Raises:
        ShardError: for a file that is empty, damaged, or no image of these formats.
    """
    data = file_bytes(path)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _refuse_damaged(image, data, path)
        orientation = _orientation(image, data)
        image.seek(0)
        changed = _changed(image, path, orientation, rules, tally, strict)
        stored = image.size
        if changed is None and image.format in KEPT:
            return ImageBytes(KEPT[image.format], data, stored, stored, orientation)
        _refuse_lossy(image, path)
        changed = image if changed is None else changed
        turned = orientation != 1 and rules.orientation == "apply"
        return ImageBytes(*_encoded(changed, str(image.format)), stored, changed.size, orientation, turned)
    except ShardError:
        raise
    except Exception as error:  # PIL raises anything from SyntaxError to struct.error on damaged files
        raise ShardError(_unreadable(path, data, error)) from None


def _unreadable(path: Path, data: bytes, error: Exception) -> str:
    if (kind := other_kind(data)) is not None:
        return f"{path} is {kind[0]}, whatever it is called; {kind[1]}, or leave such files out by policy skip"
    reason = "its first bytes are none of theirs" if isinstance(error, UnidentifiedImageError) else str(error)
    return (
        f"{path} cannot be read as {', '.join(FORMATS)} ({type(error).__name__}: {reason}); replace or remove it, "
        "or leave such files out by policy skip" + ("; bands are read by --channels" if data.startswith(TIFFS) else "")
    )


def file_bytes(path: Path) -> bytes:
    """A file's content. ShardError where it is missing, empty or cannot be read."""
    if not path.is_file():
        raise ShardError(f"{path} is {'a link to nowhere' if path.is_symlink() else 'no file'}; restore or remove it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShardError(f"image {path} cannot be read ({error})") from None
    if not data:
        raise ShardError(f"{path} is empty, 0 bytes; replace or remove it, or leave such files out by policy skip")
    return data


def _refuse_damaged(image: Image.Image, data: bytes, path: Path) -> None:
    """Raises where an image cannot be decoded whole, which readers of the shards would meet in the middle of a run.

    All are decoded but JPEGs that end as they should, which is most of what there is: of these decoders say nothing.
    """
    if image.format in ("JPEG", "MPO"):
        if (at := jpeg_damage.zeros(data)) is not None:
            raise ShardError(
                f"{path} is damaged: from byte {at} of {len(data)} on zeros stand in the place of its pixels; fetch it "
                "again or remove it, or leave such files out by policy skip"
            )
        if jpeg_damage.first_scan(data) is None:
            raise ShardError(
                f"{path} is cut off before its pixels; fetch it again or remove it, or leave such files out by policy "
                "skip"
            )
        if jpeg_damage.is_whole(data):
            return
    elif image.format == "PNG":  # decoding does not look at the checksums of pixels
        Image.open(io.BytesIO(data), formats=["PNG"]).verify()
    image.load()


def _orientation(image: Image.Image, data: bytes) -> int:
    if image.format == "TIFF":  # PIL turns it when it is loaded
        return 1
    if "exif" not in image.info and b"eXIf" not in data:  # a PNG's may stand behind its pixels
        return 1
    found = image.getexif().get(ORIENTATION, 1)
    return found if found in range(1, 9) else 1


def _changed(
    image: Image.Image, path: Path, orientation: int, rules: PixelRules, tally: Tally, strict: bool
) -> Image.Image | None:
    """The image as the rules have it; None where they change nothing."""
    changed: Image.Image | None = None
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        if image.format not in KEPT:
            count = image.n_frames  # type: ignore[attr-defined]
            bands = f", or pass --channels {count} --pages bands if they are channels" if image.format == "TIFF" else ""
            raise ShardError(f"{path} holds {count} pictures; extract the one that is meant{bands}")
        tally.add("animated images, of which readers see the first picture", path.name)
    profile = image.info.get("icc_profile")
    if profile and not _is_srgb(profile):
        if rules.profile == "srgb":
            try:
                changed = _to_srgb(image, profile)
            except (ImageCms.PyCMSError, OSError) as error:
                if strict:
                    raise ShardError(_unfit(image, profile, path)) from error
                tally.add("images whose colour profile does not fit them and was ignored", path.name)
        else:
            tally.add(f"images with a colour profile, {IGNORED} (--pixels.profile srgb converts them)", path.name)
    if _transparent(image):
        if rules.background is None:
            tally.add(
                "images with transparent pixels, whose colours readers show (--pixels.background white fills them)",
                path.name,
            )
        else:
            changed = _filled(image if changed is None else changed, image, rules.background)
    if orientation != 1:
        if rules.orientation == "apply":
            turned = image.copy() if changed is None else changed
            turned.getexif()[ORIENTATION] = orientation
            changed = ImageOps.exif_transpose(turned)
        else:
            tally.add(
                f"images with an EXIF orientation, {IGNORED} (--pixels.orientation apply turns them)",
                path.name,
            )
    return changed


def _is_srgb(profile: bytes) -> bool:
    try:
        return "sRGB" in ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (ImageCms.PyCMSError, OSError):
        return False


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Raises what PIL does for a profile of another kind of pixels."""
    if image.mode in ("RGB", "RGBA", "CMYK", "L"):
        source = image
    elif image.mode in ("1", "LA", "La") or image.mode.startswith("I"):
        source = to_rgb(image).convert("L")
    else:
        source = image.convert("RGB")
    converted = ImageCms.profileToProfile(
        source, io.BytesIO(profile), ImageCms.createProfile("sRGB"),
        outputMode="RGBA" if source.mode == "RGBA" else "RGB",
    )  # fmt: skip
    assert converted is not None
    converted.info.pop("icc_profile", None)
    return converted


def _unfit(image: Image.Image, profile: bytes, path: Path) -> str:
    try:
        found = ImageCms.ImageCmsProfile(io.BytesIO(profile)).profile
        what = f"its colour profile, {found.profile_description!r}, is for {found.xcolor_space.strip()}"
    except (ImageCms.PyCMSError, OSError):
        what = "its colour profile is broken"
    return (
        f"{path}: {what}, and its pixels are {image.mode}, so it cannot be converted to sRGB; leave profiles alone by "
        "--pixels.profile ignore, or take it out of the file, or pass --policy skip, which keeps such images as they "
        "are and counts them"
    )


def _transparent(image: Image.Image) -> bool:
    if image.mode not in ("RGBA", "LA", "PA", "La", "RGBa") and "transparency" not in image.info:
        return False
    return image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def _filled(image: Image.Image, original: Image.Image, colour: str) -> Image.Image:
    """The image before a background, by the original's transparency."""
    below = Image.new("RGB", image.size, colour)
    below.paste(image.convert("RGB"), mask=original.convert("RGBA").getchannel("A"))
    return below


def _refuse_lossy(image: Image.Image, path: Path) -> None:
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ShardError(
            f"{path} has pixels of mode {image.mode}, of which nobody knows what is white; convert it to 8 or 16 "
            "bits, or keep it by --channels 1 --bits 32"
        )


def _encoded(image: Image.Image, kind: str) -> tuple[str, bytes]:
    """Member and bytes of an image that is written anew."""
    buffer = io.BytesIO()
    if kind in ("JPEG", "MPO"):
        to_rgb(image).save(buffer, "JPEG", quality=95, subsampling=0, icc_profile=image.info.get("icc_profile"))
        return "jpg", buffer.getvalue()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = to_rgb(image)
    image.save(buffer, "PNG", icc_profile=image.info.get("icc_profile"))
    return "png", buffer.getvalue()

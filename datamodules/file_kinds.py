"""What a file that is no image of ours is, by its first bytes, and what to do about it."""

_BOX_KINDS = {
    b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"hevx": "HEIC", b"heim": "HEIC", b"heis": "HEIC",
    b"mif1": "HEIC or AVIF", b"msf1": "HEIC or AVIF", b"avif": "AVIF", b"avis": "AVIF",
}  # fmt: skip
_CONVERT = "convert it to JPEG or PNG"
_STARTS = {
    b"\xff\x0a": ("a JPEG XL image", _CONVERT),
    b"\0\0\0\x0cJXL ": ("a JPEG XL image", _CONVERT),
    b"\0\0\0\x0cjP  ": ("a JPEG 2000 image", _CONVERT),
    b"\xff\x4f\xff\x51": ("a JPEG 2000 image", _CONVERT),
    b"8BPS": ("a Photoshop document (PSD)", "export it as PNG"),
    b"%PDF": ("a PDF", "export its pictures as PNG"),
    b"%!PS": ("PostScript", "export it as PNG"),
    b"\x76\x2f\x31\x01": ("an OpenEXR image", "convert it to TIFF or .npy, and pass --channels and --bits 32"),
    b"\x89HDF": ("an HDF5 file", "write its arrays as .npy, and pass --channels and --bits"),
    b"\x93NUMPY": ("an array (.npy)", "call it .npy, and pass --channels and --bits"),
    b"SIMPLE  =": ("a FITS file", "write its arrays as .npy, and pass --channels and --bits"),
    b"version https://git-lfs": ("a pointer of Git LFS and not the file itself", "fetch it with git lfs pull"),
    b"PK\x03\x04": ("a zip file", "unpack it"),
    b"\x1f\x8b": ("compressed by gzip", "unpack it"),
    b"Rar!": ("a RAR archive", "unpack it"),
    b"\0\0\x01\0": ("an icon (ICO)", _CONVERT),
    b"\x1aE\xdf\xa3": ("a video", "extract its frames"),
}


def other_kind(data: bytes) -> tuple[str, str] | None:
    """What a file is that nothing here reads, as it reads after "is", and what to do; None where that is not known."""
    if data[4:8] == b"ftyp":
        kind = _BOX_KINDS.get(data[8:12])
        return ("a video", "extract its frames") if kind is None else (f"a {kind} image", _CONVERT)
    if data[128:132] == b"DICM":
        return "a DICOM file", "convert it to TIFF or .npy, and pass --channels and --bits 16"
    found = next((what for start, what in _STARTS.items() if data.startswith(start)), None)
    if found is None and (text := data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()).startswith(b"<"):
        if b"<svg" in text:
            return "an SVG drawing", "render it as PNG"
        return "a web page or XML, such as a server answers instead of a file", "fetch the image again"
    return found

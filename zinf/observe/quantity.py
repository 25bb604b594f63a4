"""Quantities as people read them."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(nbytes: float) -> str:
    """A number of bytes in binary units, to three figures: `1.21 GiB`, `37 B`."""
    scaled, unit = float(nbytes), UNITS[0]
    for larger in UNITS[1:]:
        # 1023.6 would be shown as 1024.
        if round(scaled) < 1024:
            break
        scaled, unit = scaled / 1024, larger
    if unit == "B":
        return f"{scaled:.0f} B"
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f} {unit}"

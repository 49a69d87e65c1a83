"""Warnings of what goes. docs/versioning.md says how long it stays."""

from __future__ import annotations

import warnings


def removed_in(since: str) -> str:
    """The version, at the earliest, without a name that is deprecated since this one ("0.2")."""
    major, minor = map(int, since.split("."))
    return f"{major + 1}.0" if major else f"0.{minor + 1}"


def warn(old: str, instead: str, *, since: str, stacklevel: int = 2) -> None:
    """Say that `old` is deprecated since this version, and what takes its place.

    Args:
        old: the name as users write it, for example "flash_ext.attention(window_size=…)".
        instead: what to write in its place.
        since: the minor version that deprecates it, for example "0.2".
        stacklevel: as of `warnings.warn`, for the function that calls this.
    """
    warnings.warn(
        f"{old} is deprecated since flash_ext {since} and will be removed in {removed_in(since)} or"
        f" later: use {instead}",
        DeprecationWarning,
        stacklevel + 1,
    )

"""PEP 517 build backend: setuptools' own, but it asks pip for torch, CMake and ninja only if they are missing."""

from collections.abc import Callable
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist

from . import environment

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return environment.missing()


get_requires_for_build_editable = get_requires_for_build_wheel


def _checked(hook: Callable[..., str]) -> Callable[..., str]:
    # pip asks for the metadata before it downloads dependencies and builds. So a missing compiler is reported before
    # the download.
    def wrapped(*args: Any, **kwargs: Any) -> str:
        environment.toolchain()
        return hook(*args, **kwargs)

    return wrapped


prepare_metadata_for_build_wheel = _checked(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _checked(build_meta.prepare_metadata_for_build_editable)
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
